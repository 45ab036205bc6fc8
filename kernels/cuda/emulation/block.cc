#include "kernels/cuda/emulation/block.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/cuda/emulation/fiber.h"

namespace carryover::emulation {
namespace {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr size_t kSharedGuard = 1024;

std::atomic<Order>& OrderNow() {
  static std::atomic<Order> order = [] {
    const char* const given = std::getenv("CARRYOVER_LANE_ORDER");
    return given != nullptr && std::strcmp(given, "reverse") == 0 ? Order::kReverse
                                                                  : Order::kForward;
  }();
  return order;
}

bool SameSite(const std::source_location& a, const std::source_location& b) {
  return a.line() == b.line() && std::strcmp(a.file_name(), b.file_name()) == 0;
}
std::string SiteName(const std::source_location& site) {
  return std::string(site.file_name()) + ":" + std::to_string(site.line());
}

enum class Wait : uint8_t { kNone, kBarrier, kWarp, kDone };

struct Slot {
  const void* key;
  std::unique_ptr<void, void (*)(void*)> value;
};

struct Thread {
  Wait wait = Wait::kNone;
  std::source_location site;  // of what it waits for
  std::vector<Slot> slots;
};

struct Warp {
  uint32_t ready = 0;    // lanes that can go on
  uint32_t arrived = 0;  // lanes in the warp operation under way
  unsigned operation = 0;
  size_t bytes = 0;  // of its values
  // Of this operation and the one before: a lane may go ahead while others still read.
  alignas(16) char values[2][kWarp * kMaxLaneBytes];
};

// The threads of the block that this system thread runs.
class Machine {
 public:
  Machine() : shared_(kMaxShared + kSharedGuard + 128) {}

  std::string Run(const Shape& shape, const std::function<void()>& body);

  void Barrier(const std::source_location& site);
  const void* Exchange(const void* value, size_t bytes, const std::source_location& site);
  void* ThreadSlot(const void* key, void* (*make)(), void (*destroy)(void*));
  [[noreturn]] void Fail(const char* what, const std::source_location& site);

  static Machine& Get() {
    thread_local Machine machine;
    return machine;
  }

 private:
  static void Loop() { Get().RunThreads(); }
  [[noreturn]] void RunThreads();
  void RunBlock(const Shape& shape);
  void Pause();         // the running thread waits; another one goes on
  void Go(int thread);  // switches to it
  int Next() const;     // the next thread that can go on, or -1
  std::string Deadlock() const;
  std::string Here(const std::source_location& site) const;
  [[noreturn]] void Leave();  // the launch, whose report is written

  Fiber main_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<char> shared_;
  const std::function<void()>* body_ = nullptr;
  int count_ = 0;    // threads of the block
  int running_ = 0;  // -1: the main fiber
  int done_ = 0;
  int at_barrier_ = 0;
  std::source_location barrier_;
  int barrier_thread_ = 0;  // the first to arrive
  bool reverse_ = false;
  std::string report_;
};

std::string Machine::Run(const Shape& shape, const std::function<void()>& body) {
  if (shape.threads <= 0 || shape.threads > kMaxThreads || shape.threads % kWarp != 0) {
    return "a block of " + std::to_string(shape.threads) + " threads: not 1 to 32 whole warps";
  }
  if (shape.shared_bytes > kMaxShared) {
    return "a block with " + std::to_string(shape.shared_bytes) + " bytes of shared memory: over " +
           std::to_string(kMaxShared);
  }
  const Index3 grid = shape.grid;
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535 || grid.x == 0 || grid.y == 0 ||
      grid.z == 0) {
    return "a grid of (" + std::to_string(grid.x) + ", " + std::to_string(grid.y) + ", " +
           std::to_string(grid.z) + ") blocks: outside of what a device takes";
  }
  body_ = &body;
  count_ = shape.threads;
  reverse_ = GetOrder() == Order::kReverse;
  report_.clear();
  while (static_cast<int>(fibers_.size()) < count_) {
    fibers_.push_back(std::make_unique<Fiber>(&Machine::Loop));
  }
  threads_.resize(std::max(threads_.size(), static_cast<size_t>(count_)));
  warps_.resize(std::max(warps_.size(), static_cast<size_t>(count_ / kWarp)));
  place.block_dim = {static_cast<unsigned>(count_), 1, 1};
  place.grid_dim = grid;
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  for (uint64_t i = 0; i < blocks && report_.empty(); ++i) {
    const uint64_t at = reverse_ ? blocks - 1 - i : i;
    place.block = {static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
                   static_cast<unsigned>(at / grid.x / grid.y)};
    RunBlock(shape);
  }
  if (!report_.empty()) fibers_.clear();  // they stand somewhere in the kernel: new ones next time
  return report_;
}

void Machine::RunBlock(const Shape& shape) {
  auto* const shared = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(shared_.data()) + 127) &
                                               ~uintptr_t{127});
  std::memset(shared, 0xff, shape.shared_bytes + kSharedGuard);
  shared_memory = shared;
  for (int i = 0; i < count_; ++i) threads_[i].wait = Wait::kNone;
  for (int i = 0; i < count_ / kWarp; ++i) {
    warps_[i].ready = kAllLanes;
    warps_[i].arrived = 0;
    warps_[i].operation = 0;
  }
  done_ = 0;
  at_barrier_ = 0;
  running_ = -1;
  Go(Next());
  // Back when all are done, or something failed.
  for (int i = 0; i < count_; ++i) threads_[i].slots.clear();
  if (report_.empty()) {
    for (size_t i = 0; i < kSharedGuard; ++i) {
      if (static_cast<unsigned char>(shared[shape.shared_bytes + i]) != 0xff) {
        report_ = "block (" + std::to_string(place.block.x) + ", " + std::to_string(place.block.y) +
                  ", " + std::to_string(place.block.z) + ") wrote beyond its " +
                  std::to_string(shape.shared_bytes) + " bytes of shared memory, at " +
                  std::to_string(shape.shared_bytes + i);
        return;
      }
    }
  }
}

int Machine::Next() const {
  // The warp that ran last goes on as long as it can, so that warps run apart as far as they may.
  const int warps = count_ / kWarp;
  const auto lane = [&](int warp) {
    const uint32_t ready = warps_[warp].ready;
    return warp * kWarp + (reverse_ ? 31 - __builtin_clz(ready) : __builtin_ctz(ready));
  };
  if (running_ >= 0 && warps_[running_ / kWarp].ready != 0) return lane(running_ / kWarp);
  for (int i = 0; i < warps; ++i) {
    const int warp = reverse_ ? warps - 1 - i : i;
    if (warps_[warp].ready != 0) return lane(warp);
  }
  return -1;
}

void Machine::Go(int thread) {
  const int from = running_;
  running_ = thread;
  if (from == thread) return;
  if (thread >= 0) place.thread.x = static_cast<unsigned>(thread);
  Fiber::Switch(from < 0 ? main_ : *fibers_[from], thread < 0 ? main_ : *fibers_[thread]);
}

void Machine::Pause() {
  const int next = Next();
  if (next < 0 && done_ < count_) report_ = Deadlock();
  Go(next);
}

void Machine::RunThreads() {
  for (;;) {
    (*body_)();
    Warp& warp = warps_[running_ / kWarp];
    warp.ready &= ~(1u << running_ % kWarp);
    threads_[running_].wait = Wait::kDone;
    ++done_;
    Pause();
  }
}

void Machine::Barrier(const std::source_location& site) {
  Thread& self = threads_[running_];
  if (at_barrier_ == 0) {
    barrier_ = site;
    barrier_thread_ = running_;
  } else if (!SameSite(barrier_, site)) {
    report_ = Here(site) + "reached this barrier while thread " + std::to_string(barrier_thread_) +
              " waits at the barrier of " + SiteName(barrier_);
    Leave();
  }
  self.wait = Wait::kBarrier;
  self.site = site;
  warps_[running_ / kWarp].ready &= ~(1u << running_ % kWarp);
  if (++at_barrier_ == count_) {
    at_barrier_ = 0;
    for (int i = 0; i < count_; ++i) threads_[i].wait = Wait::kNone;
    for (int i = 0; i < count_ / kWarp; ++i) warps_[i].ready = kAllLanes;
    Go(reverse_ ? count_ - 1 : 0);  // from the first one again
    return;
  }
  Pause();
}

const void* Machine::Exchange(const void* value, size_t bytes, const std::source_location& site) {
  const int thread = running_;
  Warp& warp = warps_[thread / kWarp];
  const int lane = thread % kWarp;
  if (warp.arrived == 0) {
    warp.bytes = bytes;
  } else {
    const int other = thread / kWarp * kWarp + __builtin_ctz(warp.arrived);
    if (!SameSite(threads_[other].site, site) || warp.bytes != bytes) {
      report_ = Here(site) + "reached this warp operation while thread " + std::to_string(other) +
                " of its warp is in the one of " + SiteName(threads_[other].site);
      Leave();
    }
  }
  char* const values = warp.values[warp.operation % 2];
  std::memcpy(values + lane * bytes, value, bytes);
  warp.arrived |= 1u << lane;
  threads_[thread].wait = Wait::kWarp;
  threads_[thread].site = site;
  if (warp.arrived == kAllLanes) {
    warp.arrived = 0;
    ++warp.operation;
    warp.ready = kAllLanes;
    for (int i = 0; i < kWarp; ++i) threads_[thread - lane + i].wait = Wait::kNone;
  } else {
    warp.ready &= ~(1u << lane);
  }
  Pause();
  return values;
}

void* Machine::ThreadSlot(const void* key, void* (*make)(), void (*destroy)(void*)) {
  std::vector<Slot>& slots = threads_[running_].slots;
  for (const Slot& slot : slots) {
    if (slot.key == key) return slot.value.get();
  }
  slots.push_back({key, {make(), destroy}});
  return slots.back().value.get();
}

std::string Machine::Deadlock() const {
  // Threads in the same plight, as runs.
  std::string text = "block (" + std::to_string(place.block.x) + ", " +
                     std::to_string(place.block.y) + ", " + std::to_string(place.block.z) +
                     ") cannot go on:";
  for (int begin = 0; begin < count_;) {
    const Thread& first = threads_[begin];
    int end = begin + 1;
    while (end < count_ && threads_[end].wait == first.wait &&
           (first.wait == Wait::kDone || SameSite(threads_[end].site, first.site))) {
      ++end;
    }
    text += begin == 0 ? " threads " : "; threads ";
    text += std::to_string(begin) + " to " + std::to_string(end - 1);
    text += first.wait == Wait::kDone ? " have ended"
            : first.wait == Wait::kBarrier
                ? " wait at the barrier of " + SiteName(first.site)
                : " wait in the warp operation of " + SiteName(first.site);
    begin = end;
  }
  return text;
}

std::string Machine::Here(const std::source_location& site) const {
  return SiteName(site) + ": thread " + std::to_string(running_) + " of block (" +
         std::to_string(place.block.x) + ", " + std::to_string(place.block.y) + ", " +
         std::to_string(place.block.z) + ") ";
}

void Machine::Fail(const char* what, const std::source_location& site) {
  report_ = Here(site) + what;
  Leave();
}

// Nothing on the stacks of a failed launch is destroyed, so nothing there may own memory.
void Machine::Leave() {
  Go(-1);
  std::abort();  // nobody comes back
}

}  // namespace

void SetOrder(Order order) { OrderNow() = order; }
Order GetOrder() { return OrderNow(); }

std::string RunKernel(const Shape& shape, const std::function<void()>& body) {
  return Machine::Get().Run(shape, body);
}

void BlockBarrier(const std::source_location& site) { Machine::Get().Barrier(site); }

const void* WarpExchange(const void* value, size_t bytes, const std::source_location& site) {
  return Machine::Get().Exchange(value, bytes, site);
}

void* ThreadSlot(const void* key, void* (*make)(), void (*destroy)(void*)) {
  return Machine::Get().ThreadSlot(key, make, destroy);
}

void FailThread(const char* what, const std::source_location& site) {
  Machine::Get().Fail(what, site);
}

}  // namespace carryover::emulation
