// Attention in f32 without tensor cores: the path of f32 KV, which is a control and not fast, and
// of bf16 KV whose head size the other kernels were not built for.
//
// A warp has four queries of the block's 16; of a tile of 32 tokens a lane scores one for each of
// them, and adds up the values of every 32nd column.
#include "kernels/cuda/attention_device.h"

namespace carryover::CARRYOVER_DEVICE {
namespace {

constexpr int kThreads = kPlainWarps * kWarpSize;
constexpr int kMine = kPlainQueries / kPlainWarps;  // queries of a warp
constexpr int kColumns = kMaxHeadDim / kWarpSize;   // of a lane, at most

template <typename T>
__global__ void __launch_bounds__(kThreads) Plain(const AttentionParams p) {
  const AttentionItem item = p.items[blockIdx.x];
  if (item.query_count == 0) return;
  const int kv_head = static_cast<int>(blockIdx.y);
  const ItemSpan span = SpanOf<kPlainTile>(p, item);
  const int dim = p.layout.head_dim, lane = LaneId();
  const int key_stride = dim + 1;  // odd, since dim is even: lanes read different banks
  float* const queries = DynamicShared<float>();         // (kPlainQueries, dim), scaled
  float* const keys = queries + kPlainQueries * dim;     // (kPlainTile, key_stride)
  float* const values = keys + kPlainTile * key_stride;  // (kPlainTile, dim)
  float* const weights = values + kPlainTile * dim + WarpId() * kMine * kPlainTile;

  for (int q = WarpId(); q < kPlainQueries; q += kPlainWarps) {
    const bool there = q < item.query_count;
    const float* const from = QueryValues(p, item, kv_head, there ? q : 0);
    for (int d = lane; d < dim; d += kWarpSize)
      queries[q * dim + d] = there ? from[d] * p.scale : 0;
  }

  const int mine = WarpId() * kMine;  // first query
  int first[kMine], last[kMine];
  float max[kMine], sum[kMine], total_max[kMine], total_sum[kMine];
  float out[kMine][kColumns], total[kMine][kColumns];
#pragma unroll
  for (int q = 0; q < kMine; ++q) {
    last[q] = Position(p, item, Min(mine + q, span.last_query));
    first[q] = FirstToken(p, last[q]);
    max[q] = total_max[q] = kNoScore;
    sum[q] = total_sum[q] = 0;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) out[q][c] = total[q][c] = 0;
  }

  for (int tile = span.tile_begin; tile < span.tile_end; ++tile) {
    const int begin = tile * kPlainTile;
    SyncThreads();  // the queries are there, and all are done with the tile before
    for (int t = WarpId(); t < kPlainTile; t += kPlainWarps) {
      // Tokens that nobody sees become zeros: in memory they may be anything.
      const int token = begin + t;
      const bool valid = token < span.end_token;
      const T* from = static_cast<const T*>(p.kv);
      if (valid) {
        const int32_t block = p.block_table[item.table_begin + token / p.layout.block_tokens];
        from += p.layout.At(block, kv_head, token % p.layout.block_tokens);
      }
      for (int d = lane; d < dim; d += kWarpSize) {
        keys[t * key_stride + d] = valid ? ToFloat(from[d]) : 0;
        values[t * dim + d] = valid ? ToFloat(from[p.layout.v_offset + d]) : 0;
      }
    }
    SyncThreads();

    float scores[kMine] = {};
    for (int d = 0; d < dim; ++d) {
      const float key = keys[lane * key_stride + d];
#pragma unroll
      for (int q = 0; q < kMine; ++q)
        scores[q] = fmaf(queries[(mine + q) * dim + d], key, scores[q]);
    }
#pragma unroll
    for (int q = 0; q < kMine; ++q) {
      const bool seen = begin + lane >= first[q] && begin + lane <= last[q];
      const float score = seen ? scores[q] : kNoScore;
      const float new_max = fmaxf(max[q], WarpMax(score));
      const float base = new_max == kNoScore ? 0.0f : new_max;
      const float weight = exp2f(score - base);
      const float scale = exp2f(max[q] - base);
      weights[q * kPlainTile + lane] = weight;
      sum[q] = fmaf(sum[q], scale, WarpSum(weight));
      max[q] = new_max;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) out[q][c] *= scale;
    }
    WarpSync();
    for (int t = 0; t < kPlainTile; ++t) {
      float weight[kMine];
#pragma unroll
      for (int q = 0; q < kMine; ++q) weight[q] = weights[q * kPlainTile + t];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int column = lane + c * kWarpSize;
        if (column >= dim) continue;
        const float value = values[t * dim + column];
#pragma unroll
        for (int q = 0; q < kMine; ++q) out[q][c] = fmaf(weight[q], value, out[q][c]);
      }
    }

    if (tile + 1 == span.tile_end || (begin + kPlainTile) % kAttentionSplit == 0) {
#pragma unroll
      for (int q = 0; q < kMine; ++q) {
        const Merging merging = MergingOf(total_max[q], max[q]);
        total_max[q] = merging.max;
        total_sum[q] = Merged(merging, total_sum[q], sum[q]);
        max[q] = kNoScore;
        sum[q] = 0;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          total[q][c] = Merged(merging, total[q][c], out[q][c]);
          out[q][c] = 0;
        }
      }
    }
  }

#pragma unroll
  for (int q = 0; q < kMine; ++q) {
    if (mine + q >= item.query_count) continue;
    const int64_t at = OutAt(p, item, kv_head, mine + q);
    const int64_t state = StateAt(p, item, kv_head, mine + q);
    const float scale = 1.0f / total_sum[q];
    if (!span.whole && lane == 0) p.state_stats[state] = {total_max[q], total_sum[q]};
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = lane + c * kWarpSize;
      if (column >= dim) continue;
      if (!span.whole) {
        p.state_values[state * dim + column] = total[q][c];
      } else if (p.out_bf16) {
        static_cast<Bf16*>(p.out)[at + column] = ToBf16(total[q][c] * scale);
      } else {
        static_cast<float*>(p.out)[at + column] = total[q][c] * scale;
      }
    }
  }
}

}  // namespace

void LaunchPlain(const AttentionParams& params, bool kv_bf16, int items, cudaStream_t stream) {
  Launch(kv_bf16 ? Plain<Bf16> : Plain<float>,
         {static_cast<unsigned>(items), static_cast<unsigned>(params.layout.kv_heads)}, kThreads,
         PlainSharedBytes(params.layout.head_dim), stream, params);
}

}  // namespace carryover::CARRYOVER_DEVICE
