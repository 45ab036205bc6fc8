// Rotary embedding into the blocks, and back out of them. A warp does one head of one row.
#include <math.h>

#include "kernels/cuda/device.h"
#include "kernels/cuda/kernels.h"

namespace carryover::CARRYOVER_DEVICE {
namespace {

constexpr int kWarps = 4;      // of a block
constexpr int kMostPairs = 4;  // a lane's pairs of values of a head: head_dim is at most 256

// A lane holds the pairs (i, i + head_dim / 2) for i = lane, lane + 32, ...
struct Pairs {
  float a[kMostPairs];
  float b[kMostPairs];
};

// Calls body(j, i) for the pairs of this lane.
template <typename Body>
__device__ inline void ForPairs(int half, const Body& body) {
#pragma unroll
  for (int j = 0; j < kMostPairs; ++j) {
    const int i = LaneId() + j * kWarpSize;
    if (i < half) body(j, i);
  }
}

template <typename T>
__device__ inline Pairs ReadHead(const T* head, int half) {
  Pairs x = {};
  ForPairs(half, [&](int j, int i) {
    x.a[j] = ToFloat(head[i]);
    x.b[j] = ToFloat(head[half + i]);
  });
  return x;
}
template <typename T>
__device__ inline void WriteHead(const Pairs& x, int half, T* head) {
  ForPairs(half, [&](int j, int i) {
    head[i] = FromFloat<T>(x.a[j]);
    head[half + i] = FromFloat<T>(x.b[j]);
  });
}

__device__ inline void Normalise(const float* weight, float eps, int half, Pairs* x) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kMostPairs; ++j) sum += x->a[j] * x->a[j] + x->b[j] * x->b[j];
  sum = WarpSum(sum);
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(2 * half) + eps);
  ForPairs(half, [&](int j, int i) {
    x->a[j] = x->a[j] * scale * weight[i];
    x->b[j] = x->b[j] * scale * weight[half + i];
  });
}

// By the angles of a position, or back where `sign` is -1.
__device__ inline void Rotate(const float* cos_sin, float sign, int half, Pairs* x) {
  ForPairs(half, [&](int j, int i) {
    const float c = cos_sin[i], s = sign * cos_sin[half + i];
    const float a = x->a[j], b = x->b[j];
    x->a[j] = a * c - b * s;
    x->b[j] = b * c + a * s;
  });
}

// Where K of a row's token and head begins.
__device__ inline int64_t KvAt(const DeviceKv& kv, const int32_t* block_table,
                               const RowPlace& place, int kv_head) {
  const int32_t block = block_table[place.table_begin + place.token / kv.block_tokens];
  return kv.At(block, kv_head, place.token % kv.block_tokens);
}

// Heads of a row in order: queries, keys, values. The grid is (rows, heads of all three / kWarps).
template <typename T>
__global__ void __launch_bounds__(kWarps* kWarpSize) RopeWrite(RopeLaunch args) {
  const int64_t row = blockIdx.x;
  const int head = static_cast<int>(blockIdx.y) * kWarps + WarpId();
  const int kv_heads = args.kv.kv_heads, all = args.heads + 2 * kv_heads;
  if (head >= all) return;
  const int dim = args.kv.head_dim, half = dim / 2;
  float* const at = args.qkv + (row * all + head) * dim;
  const RowPlace place = args.places[row];
  Pairs x = ReadHead(at, half);
  if (head >= args.heads + kv_heads) {  // a value
    T* const v = static_cast<T*>(args.kv_base) + args.kv.v_offset;
    WriteHead(x, half, v + KvAt(args.kv, args.block_table, place, head - args.heads - kv_heads));
    return;
  }
  const bool query = head < args.heads;
  const float* const norm = query ? args.q_norm : args.k_norm;
  if (norm != nullptr) Normalise(norm, args.norm_eps, half, &x);
  Rotate(args.cos_sin + static_cast<int64_t>(place.position) * dim, 1, half, &x);
  if (query) {
    WriteHead(x, half, at);
  } else {
    WriteHead(
        x, half,
        static_cast<T*>(args.kv_base) + KvAt(args.kv, args.block_table, place, head - args.heads));
  }
}

// Keys, then values. The grid is (rows, 2 kv_heads / kWarps).
template <typename T>
__global__ void __launch_bounds__(kWarps* kWarpSize) ReadKv(ReadKvLaunch args) {
  const int64_t row = blockIdx.x;
  const int head = static_cast<int>(blockIdx.y) * kWarps + WarpId();
  const int kv_heads = args.kv.kv_heads;
  if (head >= 2 * kv_heads) return;
  const int dim = args.kv.head_dim, half = dim / 2;
  const bool key = head < kv_heads;
  const RowPlace place = args.places[row];
  const T* const kv = static_cast<const T*>(args.kv_base) + (key ? 0 : args.kv.v_offset);
  Pairs x = ReadHead(kv + KvAt(args.kv, args.block_table, place, head % kv_heads), half);
  if (key) Rotate(args.cos_sin + static_cast<int64_t>(place.position) * dim, -1, half, &x);
  const int64_t at = (row * 2 * kv_heads + head) * dim;
  WriteHead(x, half, args.out + at);
  if (args.copy == nullptr) return;
  if (args.copy_type == DType::kBF16) {
    WriteHead(x, half, static_cast<Bf16*>(args.copy) + at);
  } else {
    WriteHead(x, half, static_cast<float*>(args.copy) + at);
  }
}

Grid HeadGrid(int rows, int heads) {
  return {static_cast<unsigned>(rows), static_cast<unsigned>((heads + kWarps - 1) / kWarps)};
}

}  // namespace

void LaunchRopeWrite(const RopeLaunch& args, DType kv_type, cudaStream_t stream) {
  if (args.rows <= 0) return;
  Launch(kv_type == DType::kBF16 ? RopeWrite<Bf16> : RopeWrite<float>,
         HeadGrid(args.rows, args.heads + 2 * args.kv.kv_heads), kWarps * kWarpSize, 0, stream,
         args);
}

void LaunchReadKv(const ReadKvLaunch& args, DType kv_type, cudaStream_t stream) {
  if (args.rows <= 0) return;
  Launch(kv_type == DType::kBF16 ? ReadKv<Bf16> : ReadKv<float>,
         HeadGrid(args.rows, 2 * args.kv.kv_heads), kWarps * kWarpSize, 0, stream, args);
}

}  // namespace carryover::CARRYOVER_DEVICE
