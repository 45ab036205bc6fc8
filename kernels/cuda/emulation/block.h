// Runs the thread blocks of an emulated kernel, one after another on the calling thread. Threads of
// a block are fibers that run until they meet a barrier or a warp operation.
//
// What breaks CUDA's rules ends the launch with a report that names the lines: a barrier that not
// all threads reach, or reach at different lines; a warp operation without all 32 lanes; shared
// memory written beyond its end. Shared memory starts as NaN. A result that changes with the lane
// order is a race.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <string>

namespace carryover::emulation {

inline constexpr int kWarp = 32;
inline constexpr int kMaxThreads = 1024;
inline constexpr size_t kMaxShared = size_t{227} << 10;
inline constexpr size_t kMaxLaneBytes = 128;  // of a value that a warp operation exchanges

struct Index3 {
  unsigned x = 0;
  unsigned y = 0;
  unsigned z = 0;
};

// What a kernel sees as threadIdx, blockIdx, blockDim and gridDim.
struct ThreadPlace {
  Index3 thread;
  Index3 block;
  Index3 block_dim{1, 1, 1};
  Index3 grid_dim{1, 1, 1};
};
inline thread_local constinit ThreadPlace place;
inline thread_local constinit char* shared_memory = nullptr;

enum class Order : uint8_t { kForward, kReverse };  // of blocks, warps and lanes
// Of all launches from now on, in all threads. CARRYOVER_LANE_ORDER=reverse sets the first one.
void SetOrder(Order order);
Order GetOrder();

struct Shape {
  Index3 grid{1, 1, 1};
  int threads = kWarp;  // a multiple of 32
  size_t shared_bytes = 0;
};

// Calls body() in every thread of every block. Empty, or what went wrong: then threads were
// abandoned where they stood.
std::string RunKernel(const Shape& shape, const std::function<void()>& body);

// What follows is called by kernels.

void BlockBarrier(const std::source_location& site);

// Every lane gives `bytes` of a value and gets those of all 32 lanes, one behind the other. They
// are valid until the lane's next warp operation.
const void* WarpExchange(const void* value, size_t bytes, const std::source_location& site);

// What twins keep for a thread from one call to the next: a T of its own in each thread of each
// block, made when first asked for, destroyed when the block ends.
void* ThreadSlot(const void* key, void* (*make)(), void (*destroy)(void*));
template <typename T>
T& PerThread() {
  static constexpr char kKey = 0;
  return *static_cast<T*>(ThreadSlot(
      &kKey, [] { return static_cast<void*>(new T()); },
      [](void* p) { delete static_cast<T*>(p); }));
}

// Ends the launch with a report: "FILE:LINE: thread T of block (X, Y, Z): WHAT".
[[noreturn]] void FailThread(const char* what, const std::source_location& site);

// A value of each of the warp's 32 lanes, lane 0 first, valid until the lane's next warp operation.
// What the twins of tensor-core instructions are made of.
template <typename T>
const T* WarpGather(const T& value, std::source_location site = std::source_location::current()) {
  static_assert(__is_trivially_copyable(T) && sizeof(T) <= kMaxLaneBytes && alignof(T) <= 16);
  return static_cast<const T*>(WarpExchange(&value, sizeof(T), site));
}

}  // namespace carryover::emulation
