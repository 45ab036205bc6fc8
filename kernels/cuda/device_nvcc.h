// device.h for nvcc.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/float_types.h"

namespace carryover::cuda {

struct Grid {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

// Where something is called from. Only the emulation wants to know.
struct Site {
  __host__ __device__ static constexpr Site current() { return {}; }
};

// What goes wrong is the device's last error, which sync() reports.
template <typename... P, typename... A>
void Launch(void (*kernel)(P...), Grid grid, int threads, size_t shared_bytes, cudaStream_t stream,
            A&&... args) {
  constexpr size_t kWithoutAsking = size_t{48} << 10;
  if (shared_bytes > kWithoutAsking) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         static_cast<int>(shared_bytes));
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid.x, grid.y, grid.z);
  config.blockDim = dim3(static_cast<unsigned>(threads), 1, 1);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...);
}

#if defined(__CUDACC__)

template <typename T>
__device__ inline T* DynamicShared() {
  extern __shared__ __align__(128) unsigned char carryover_shared_memory[];
  return reinterpret_cast<T*>(carryover_shared_memory);
}

__device__ inline void SyncThreads(Site = {}) { __syncthreads(); }
__device__ inline void WarpSync(Site = {}) { __syncwarp(); }
__device__ inline void ThreadFence() { __threadfence(); }
__device__ inline int AtomicAdd(int* p, int value) { return atomicAdd(p, value); }

inline constexpr unsigned kAllLanes = 0xffffffffu;
template <typename T>
__device__ inline T ShuffleXor(T value, int mask, Site = {}) {
  return __shfl_xor_sync(kAllLanes, value, mask);
}
template <typename T>
__device__ inline T ShuffleDown(T value, int delta, Site = {}) {
  return __shfl_down_sync(kAllLanes, value, delta);
}
template <typename T>
__device__ inline T Shuffle(T value, int lane, Site = {}) {
  return __shfl_sync(kAllLanes, value, lane);
}
__device__ inline unsigned Ballot(bool p, Site = {}) { return __ballot_sync(kAllLanes, p); }
__device__ inline bool Any(bool p, Site = {}) { return __any_sync(kAllLanes, p); }
__device__ inline bool All(bool p, Site = {}) { return __all_sync(kAllLanes, p); }

template <typename T>
__device__ inline T WarpSum(T value, Site = {}) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(kAllLanes, value, mask);
  return value;
}
template <typename T>
__device__ inline T WarpMax(T value, Site = {}) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const T other = __shfl_xor_sync(kAllLanes, value, mask);
    value = value < other ? other : value;
  }
  return value;
}

__device__ inline float FastExp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float FastDivide(float a, float b) { return __fdividef(a, b); }

__device__ inline float ToFloat(Bf16 value) {
  return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}
__device__ inline Bf16 ToBf16(float value) {
  Bf16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
  return out;
}
__device__ inline float ToFloat(F16 value) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value.bits));
  return out;
}

__device__ inline void CheckAligned(const void*, size_t, Site) {}

#endif  // __CUDACC__

}  // namespace carryover::cuda
