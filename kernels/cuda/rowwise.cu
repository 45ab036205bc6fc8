// Kernels that move every byte once: embedding, RMS norm, SiLU, gather, block copies.
#include <math.h>

#include "kernels/cuda/device.h"
#include "kernels/cuda/kernels.h"

namespace carryover::CARRYOVER_DEVICE {
namespace {

constexpr int kThreads = 256;

unsigned Blocks(int64_t items, int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

// Four values from memory of any type. The address is a multiple of their size.
template <typename T>
__device__ inline Vector<float, 4> LoadFloats(const T* p) {
  const Vector<T, 4> in = Load<4>(p);
  Vector<float, 4> out;
  for (int i = 0; i < 4; ++i) out.at[i] = ToFloat(in.at[i]);
  return out;
}
template <typename T>
__device__ inline void StoreFloats(T* p, const Vector<float, 4>& values) {
  Vector<T, 4> out;
  for (int i = 0; i < 4; ++i) out.at[i] = FromFloat<T>(values.at[i]);
  Store(p, out);
}

// Row blockIdx.x of out = row ids[blockIdx.x] of table. Whole: dim is a multiple of 4.
template <typename T, bool kWhole>
__global__ void CopyRows(const T* table, const int32_t* ids, int dim, float* out) {
  const T* const from = table + static_cast<int64_t>(ids[blockIdx.x]) * dim;
  float* const to = out + static_cast<int64_t>(blockIdx.x) * dim;
  constexpr int kStep = kWhole ? 4 : 1;
  const int stride = static_cast<int>(blockDim.x) * kStep;
  for (int i = static_cast<int>(threadIdx.x) * kStep; i < dim; i += stride) {
    if constexpr (kWhole) {
      Store(to + i, LoadFloats(from + i));
    } else {
      to[i] = ToFloat(from[i]);
    }
  }
}

template <typename T>
void LaunchCopyRows(const void* table, const int32_t* ids, int rows, int dim, float* out,
                    cudaStream_t stream) {
  if (rows <= 0) return;
  Launch(dim % 4 == 0 ? CopyRows<T, true> : CopyRows<T, false>, {static_cast<unsigned>(rows)},
         kThreads, 0, stream, static_cast<const T*>(table), ids, dim, out);
}

// A block a row; the second read of x comes from a cache.
template <typename T, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    RmsNorm(const float* x, const float* weight, int dim, float eps, T* out) {
  const float* const row = x + static_cast<int64_t>(blockIdx.x) * dim;
  T* const to = out + static_cast<int64_t>(blockIdx.x) * dim;
  constexpr int kStep = kWhole ? 4 : 1;
  const int first = static_cast<int>(threadIdx.x) * kStep, stride = kThreads * kStep;
  float sum = 0;
  for (int i = first; i < dim; i += stride) {
    if constexpr (kWhole) {
      const Vector<float, 4> v = Load<4>(row + i);
      for (int j = 0; j < 4; ++j) sum += v.at[j] * v.at[j];
    } else {
      sum += row[i] * row[i];
    }
  }
  sum = BlockSum(sum, DynamicShared<float>());
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(dim) + eps);
  for (int i = first; i < dim; i += stride) {
    if constexpr (kWhole) {
      Vector<float, 4> v = Load<4>(row + i);
      const Vector<float, 4> w = Load<4>(weight + i);
      for (int j = 0; j < 4; ++j) v.at[j] = v.at[j] * scale * w.at[j];
      StoreFloats(to + i, v);
    } else {
      to[i] = FromFloat<T>(row[i] * scale * weight[i]);
    }
  }
}

__device__ inline float Silu(float x) { return x / (1.0f + expf(-x)); }

// blockIdx.y is the row.
template <typename T, bool kWhole>
__global__ void SiluMul(const float* gate_up, int dim, T* out) {
  const int64_t row = blockIdx.y;
  constexpr int kStep = kWhole ? 4 : 1;
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * kStep;
  if (i >= dim) return;
  const float* const gate = gate_up + row * 2 * dim + i;
  if constexpr (kWhole) {
    Vector<float, 4> g = Load<4>(gate);
    const Vector<float, 4> u = Load<4>(gate + dim);
    for (int j = 0; j < 4; ++j) g.at[j] = Silu(g.at[j]) * u.at[j];
    StoreFloats(out + row * dim + i, g);
  } else {
    out[row * dim + i] = FromFloat<T>(Silu(gate[0]) * gate[dim]);
  }
}

// blockIdx.y is the pair of blocks; a thread moves kUnits times 16 bytes.
constexpr int kUnits = 4;
__global__ void CopyBlocks(CopyKvLaunch args) {
  const char* const from = args.kv_base + args.from[blockIdx.y] * args.block_bytes + args.first;
  char* const to = args.kv_base + args.to[blockIdx.y] * args.block_bytes + args.first;
  const int64_t units = args.run_bytes / 16, all = units * args.runs;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kThreads * kUnits + threadIdx.x;
  Vector<uint32_t, 4> values[kUnits];
  for (int i = 0; i < kUnits; ++i) {
    const int64_t unit = begin + i * kThreads;
    if (unit >= all) break;
    const int64_t at = unit / units * args.stride + unit % units * 16;
    values[i] = Load<4>(reinterpret_cast<const uint32_t*>(from + at));
  }
  for (int i = 0; i < kUnits; ++i) {
    const int64_t unit = begin + i * kThreads;
    if (unit >= all) break;
    const int64_t at = unit / units * args.stride + unit % units * 16;
    Store(reinterpret_cast<uint32_t*>(to + at), values[i]);
  }
}

template <typename T>
void LaunchRmsNormAs(const float* x, const float* weight, int rows, int dim, float eps, void* out,
                     cudaStream_t stream) {
  Launch(dim % 4 == 0 ? RmsNorm<T, true> : RmsNorm<T, false>, {static_cast<unsigned>(rows)},
         kThreads, 32 * sizeof(float), stream, x, weight, dim, eps, static_cast<T*>(out));
}

template <typename T>
void LaunchSiluMulAs(const float* gate_up, int rows, int dim, void* out, cudaStream_t stream) {
  const bool whole = dim % 4 == 0;
  constexpr int kMostRows = 65535;  // of a grid
  for (int row = 0; row < rows; row += kMostRows) {
    Launch(whole ? SiluMul<T, true> : SiluMul<T, false>,
           {Blocks(dim, kThreads * (whole ? 4 : 1)),
            static_cast<unsigned>(Min(rows - row, kMostRows))},
           kThreads, 0, stream, gate_up + static_cast<int64_t>(row) * 2 * dim, dim,
           static_cast<T*>(out) + static_cast<int64_t>(row) * dim);
  }
}

}  // namespace

void LaunchEmbed(const void* table, DType type, const int32_t* tokens, int rows, int dim, float* x,
                 cudaStream_t stream) {
  switch (type) {
    case DType::kF32:
      return LaunchCopyRows<float>(table, tokens, rows, dim, x, stream);
    case DType::kBF16:
      return LaunchCopyRows<Bf16>(table, tokens, rows, dim, x, stream);
    case DType::kF16:
      return LaunchCopyRows<F16>(table, tokens, rows, dim, x, stream);
    case DType::kI8:  // no table has it
      return;
  }
}

void LaunchGatherRows(const float* x, const int32_t* rows, int count, int dim, float* out,
                      cudaStream_t stream) {
  LaunchCopyRows<float>(x, rows, count, dim, out, stream);
}

void LaunchRmsNorm(const float* x, const float* weight, int rows, int dim, float eps, void* out,
                   DType out_type, cudaStream_t stream) {
  if (rows <= 0) return;
  if (out_type == DType::kBF16) {
    LaunchRmsNormAs<Bf16>(x, weight, rows, dim, eps, out, stream);
  } else {
    LaunchRmsNormAs<float>(x, weight, rows, dim, eps, out, stream);
  }
}

void LaunchSiluMul(const float* gate_up, int rows, int dim, void* out, DType out_type,
                   cudaStream_t stream) {
  if (out_type == DType::kBF16) {
    LaunchSiluMulAs<Bf16>(gate_up, rows, dim, out, stream);
  } else {
    LaunchSiluMulAs<float>(gate_up, rows, dim, out, stream);
  }
}

void LaunchCopyKv(const CopyKvLaunch& args, cudaStream_t stream) {
  const int64_t units = args.run_bytes / 16 * args.runs;
  constexpr int kMostPairs = 65535;
  for (int i = 0; i < args.blocks && units > 0; i += kMostPairs) {
    CopyKvLaunch part = args;
    part.from += i;
    part.to += i;
    Launch(
        CopyBlocks,
        {Blocks(units, kThreads * kUnits), static_cast<unsigned>(Min(args.blocks - i, kMostPairs))},
        kThreads, 0, stream, part);
  }
}

}  // namespace carryover::CARRYOVER_DEVICE
