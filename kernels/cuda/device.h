// What a kernel may use: the one header that a .cu file includes. nvcc compiles it for a device;
// g++ with CARRYOVER_EMULATED for the emulated one (docs/cuda.md), in another namespace, so that
// both live in one program. No Abseil in .cu files, no static __shared__ memory, no device globals.
//
// Blocks are one-dimensional, of whole warps. A barrier is met by all threads of a block, a warp
// operation by all 32 lanes. PTX stands here, in device_nvcc.h and in tensor_core.h, and nowhere
// else, each instruction with an emulated twin.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/runtime.h"

#if defined(CARRYOVER_EMULATED)
#include "kernels/cuda/emulation/device_emulated.h"
#else
#include "kernels/cuda/device_nvcc.h"
#endif

// From either of these:
//   Launch(kernel, Grid{x, y, z}, threads, shared bytes, stream, arguments...)   host
//   DynamicShared<T>()          the block's shared memory, 128-byte aligned
//   threadIdx.x blockIdx blockDim.x gridDim
//   SyncThreads() WarpSync() ThreadFence() AtomicAdd(int*, int)
//   ShuffleXor(v, mask) ShuffleDown(v, delta) Shuffle(v, lane)      of 4 or 8 bytes
//   Ballot(p) Any(p) All(p)
//   WarpSum(v) WarpMax(v)       the same value in all lanes
//   FastExp2(x)                 2^x, to about 2 ulp; 0 for -inf
//   FastDivide(a, b)            a / b, to about 2 ulp, for b from 2^-126 to 2^126
//   ToFloat(Bf16), ToBf16(float) rounds to nearest even; a NaN stays one

namespace carryover::CARRYOVER_DEVICE {

inline constexpr int kWarpSize = 32;

__device__ inline int LaneId() { return static_cast<int>(threadIdx.x) % kWarpSize; }
__device__ inline int WarpId() { return static_cast<int>(threadIdx.x) / kWarpSize; }
__device__ inline int Warps() { return static_cast<int>(blockDim.x) / kWarpSize; }

template <typename T>
__host__ __device__ inline T Max(T a, T b) {
  return a < b ? b : a;
}
template <typename T>
__host__ __device__ inline T Min(T a, T b) {
  return b < a ? b : a;
}

// Sum over the block, the same in all threads and whatever their number of blocks. `scratch` is
// shared memory for 32 values that nobody else uses between the barriers in here.
template <typename T>
__device__ inline T BlockSum(T value, T* scratch, Site site = Site::current()) {
  value = WarpSum(value, site);
  if (LaneId() == 0) scratch[WarpId()] = value;
  SyncThreads(site);
  T sum = scratch[0];
  for (int i = 1; i < Warps(); ++i) sum += scratch[i];
  SyncThreads(site);
  return sum;
}
template <typename T>
__device__ inline T BlockMax(T value, T* scratch, Site site = Site::current()) {
  value = WarpMax(value, site);
  if (LaneId() == 0) scratch[WarpId()] = value;
  SyncThreads(site);
  T most = scratch[0];
  for (int i = 1; i < Warps(); ++i) most = Max(most, scratch[i]);
  SyncThreads(site);
  return most;
}

// N values that move as one, in a single instruction up to 16 bytes. Addresses are multiples of its
// size.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
  T at[N];
};
template <int N, typename T>
__device__ inline Vector<T, N> Load(const T* p, Site site = Site::current()) {
  static_assert(sizeof(T) * N <= 16);
  CheckAligned(p, sizeof(T) * N, site);
  return *reinterpret_cast<const Vector<T, N>*>(p);
}
template <int N, typename T>
__device__ inline void Store(T* p, const Vector<T, N>& value, Site site = Site::current()) {
  static_assert(sizeof(T) * N <= 16);
  CheckAligned(p, sizeof(T) * N, site);
  *reinterpret_cast<Vector<T, N>*>(p) = value;
}

// Values of f32, bf16 and f16 memory as floats.
__device__ inline float ToFloat(float value) { return value; }
template <typename T>
__device__ inline T FromFloat(float value);
template <>
__device__ inline float FromFloat<float>(float value) {
  return value;
}
template <>
__device__ inline Bf16 FromFloat<Bf16>(float value) {
  return ToBf16(value);
}

}  // namespace carryover::CARRYOVER_DEVICE
