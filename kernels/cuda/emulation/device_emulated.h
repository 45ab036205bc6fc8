// device.h for the emulated device.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <tuple>

#include "kernels/cuda/emulation/block.h"
#include "kernels/cuda/emulation/runtime.h"
#include "kernels/cuda/float_types.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define threadIdx (::carryover::emulation::place.thread)
#define blockIdx (::carryover::emulation::place.block)
#define blockDim (::carryover::emulation::place.block_dim)
#define gridDim (::carryover::emulation::place.grid_dim)

namespace carryover::emulated {

using Site = std::source_location;

struct Grid {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
  Site site = Site::current();  // of the launch, for reports
};

template <typename... P, typename... A>
void Launch(void (*kernel)(P...), Grid grid, int threads, size_t shared_bytes, cudaStream_t stream,
            A&&... args) {
  emulation::EnqueueKernel(
      stream, {{grid.x, grid.y, grid.z}, threads, shared_bytes}, grid.site,
      [kernel, values = std::tuple<P...>(static_cast<P>(args)...)] { std::apply(kernel, values); });
}

template <typename T>
T* DynamicShared() {
  return reinterpret_cast<T*>(emulation::shared_memory);
}

inline void SyncThreads(Site site = Site::current()) { emulation::BlockBarrier(site); }
inline void WarpSync(Site site = Site::current()) { emulation::WarpGather(char{0}, site); }
inline void ThreadFence() {}
inline int AtomicAdd(int* p, int value) {
  const int before = *p;
  *p += value;
  return before;
}

template <typename T>
T ShuffleXor(T value, int mask, Site site = Site::current()) {
  return emulation::WarpGather(value, site)[(threadIdx.x % 32) ^ static_cast<unsigned>(mask)];
}
template <typename T>
T ShuffleDown(T value, int delta, Site site = Site::current()) {
  const unsigned lane = threadIdx.x % 32, from = lane + static_cast<unsigned>(delta);
  return emulation::WarpGather(value, site)[from < 32 ? from : lane];
}
template <typename T>
T Shuffle(T value, int lane, Site site = Site::current()) {
  return emulation::WarpGather(value, site)[static_cast<unsigned>(lane) % 32];
}
inline unsigned Ballot(bool p, Site site = Site::current()) {
  const bool* const lanes = emulation::WarpGather(p, site);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(lanes[i]) << i;
  return bits;
}
inline bool Any(bool p, Site site = Site::current()) { return Ballot(p, site) != 0; }
inline bool All(bool p, Site site = Site::current()) { return Ballot(p, site) == 0xffffffffu; }

// As the device does, lanes 16, 8, 4, 2 and 1 apart: addition commutes, so all lanes get what
// lane 0 gets.
template <typename T>
T WarpSum(T value, Site site = Site::current()) {
  T lanes[32];
  std::memcpy(lanes, emulation::WarpGather(value, site), sizeof(lanes));
  for (int step = 16; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  }
  return lanes[0];
}
template <typename T>
T WarpMax(T value, Site site = Site::current()) {
  T lanes[32];
  std::memcpy(lanes, emulation::WarpGather(value, site), sizeof(lanes));
  for (int step = 16; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i)
      lanes[i] = lanes[i] < lanes[i + step] ? lanes[i + step] : lanes[i];
  }
  return lanes[0];
}

inline float FastExp2(float x) { return std::exp2(x); }
inline float FastDivide(float a, float b) { return a / b; }

inline float ToFloat(Bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}
inline Bf16 ToBf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};  // as the device has it
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
inline float ToFloat(F16 value) {
  const float sign = (value.bits & 0x8000) != 0 ? -1.0f : 1.0f;
  const int exponent = (value.bits >> 10) & 0x1f;
  const float mantissa = static_cast<float>(value.bits & 0x3ff);
  if (exponent == 31) return mantissa == 0 ? sign * INFINITY : NAN;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(mantissa + 1024, exponent - 25);
}

inline void CheckAligned(const void* p, size_t bytes, Site site) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) {
    emulation::FailThread("moved a vector at an address that is no multiple of its size", site);
  }
}

}  // namespace carryover::emulated
