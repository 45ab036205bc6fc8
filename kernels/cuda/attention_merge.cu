// Merges the states that a query's splits left, in order, and writes the result; and starts the
// kernels of a pass.
//
// A warp has a query. Per split and query 4 d + 8 bytes are read once.
#include "kernels/cuda/attention_device.h"

namespace carryover::CARRYOVER_DEVICE {
namespace {

constexpr int kThreads = 128;
constexpr int kPairs = kMaxHeadDim / 2 / kWarpSize;  // of values that a lane has, at most
constexpr int kAhead = 8;                            // splits whose loads are under way together

__global__ void __launch_bounds__(kThreads) Merge(const AttentionParams p) {
  const AttentionItem item = p.items[blockIdx.x];
  const int kv_head = static_cast<int>(blockIdx.y);
  const int query = static_cast<int>(blockIdx.z) * Warps() + WarpId();
  if (query >= item.query_count) return;
  const int lane = LaneId(), dim = p.layout.head_dim;
  const int splits = item.split_end - item.split_begin;
  const int64_t first = StateAt(p, item, kv_head, query);
  const int64_t step = static_cast<int64_t>(item.query_count) * p.layout.kv_heads;

  float max = kNoScore, sum = 0;
  Vector<float, 2> values[kPairs] = {};
  for (int begin = 0; begin < splits; begin += kAhead) {
    Vector<float, 2> stats[kAhead], parts[kAhead][kPairs];
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      if (begin + s >= splits) continue;
      const int64_t state = first + (begin + s) * step;
      stats[s] = p.state_stats[state];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int column = 2 * (lane + i * kWarpSize);
        if (column < dim) parts[s][i] = Load<2>(p.state_values + state * dim + column);
      }
    }
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      if (begin + s >= splits) continue;
      if (begin + s == 0) {
        max = stats[s].at[0];
        sum = stats[s].at[1];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) values[i] = parts[s][i];
        continue;
      }
      const Merging merging = MergingOf(max, stats[s].at[0]);
      max = merging.max;
      sum = Merged(merging, sum, stats[s].at[1]);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        values[i].at[0] = Merged(merging, values[i].at[0], parts[s][i].at[0]);
        values[i].at[1] = Merged(merging, values[i].at[1], parts[s][i].at[1]);
      }
    }
  }
  const float scale = 1.0f / sum;
  const int64_t out = OutAt(p, item, kv_head, query);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int column = 2 * (lane + i * kWarpSize);
    if (column < dim) StoreOut(p, out + column, values[i].at[0] * scale, values[i].at[1] * scale);
  }
}

}  // namespace

void LaunchMerge(const AttentionParams& params, int queries, int items, cudaStream_t stream) {
  constexpr int kQueries = kThreads / kWarpSize;
  Launch(Merge,
         {static_cast<unsigned>(items), static_cast<unsigned>(params.layout.kv_heads),
          static_cast<unsigned>((queries + kQueries - 1) / kQueries)},
         kThreads, 0, stream, params);
}

void LaunchAttention(const AttentionLaunch& launch, const AttentionCounts& plan,
                     cudaStream_t stream) {
  const KvGeometry& g = launch.geometry;
  AttentionParams params = {};
  params.qkv = launch.qkv;
  params.out = launch.out;
  params.kv = launch.kv_base;
  params.block_table = launch.block_table;
  params.items = launch.items;
  // Values first: they need not begin at more than a multiple of 8.
  params.state_values = static_cast<float*>(launch.scratch);
  params.state_stats = reinterpret_cast<Vector<float, 2>*>(
      params.state_values + plan.state_slots * g.kv_heads * g.head_dim);
  params.layout = MakeDeviceKv(g, launch.layer);
  params.heads = launch.heads;
  params.group = launch.heads / g.kv_heads;
  params.window = launch.window;
  params.scale = launch.scale * 1.44269504088896341f;
  params.out_bf16 = launch.out_type == DType::kBF16;
  if (plan.wide > 0) {
    if (HasTensorCoreAttention(g)) {
      LaunchWide(params, plan.wide_queries, plan.wide, stream);
    } else {
      LaunchPlain(params, g.dtype == DType::kBF16, plan.wide, stream);
    }
  }
  params.items += plan.wide;
  if (plan.narrow > 0) LaunchNarrow(params, plan.narrow, stream);
  params.items += plan.narrow;
  if (plan.merges > 0) LaunchMerge(params, plan.merge_queries, plan.merges, stream);
}

}  // namespace carryover::CARRYOVER_DEVICE
