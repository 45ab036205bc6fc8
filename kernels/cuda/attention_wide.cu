// Attention of many queries on tensor cores (after Dao et al. 2022 and 2023): prefill, and whatever
// has more queries of a KV head than the narrow kernel takes.
//
// A block has up to 128 queries, rows times the heads that share a KV head, so that K and V are
// read once for all of them. Each warp has 16 and walks all tokens by itself but for the copies:
// while it works on one tile, the block's next tile is on its way.
//
// For T tokens and q queries of head size d: 4 q T d operations on tensor cores (half of that in a
// causal square), 4 T d bytes of K and V a block.
#include "kernels/cuda/attention_tensor.h"

namespace carryover::CARRYOVER_DEVICE {
namespace {

constexpr int kThreads = kWideWarps * kWarpSize;

// At the end of a split: merges with the splits before, and keeps the state or writes the result.
// All lanes of a warp call.
template <int kCount>
__device__ void EndSplit(const AttentionParams& p, const AttentionItem& item, int kv_head,
                         int first_query, bool merge, bool finish, const LaneQueries& queries,
                         float (&values)[kCount][4]) {
  // All four lanes of a query read what one of them writes further down.
  Vector<float, 2> stats[2] = {};
  if (merge) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = first_query + LaneId() / 4 + 8 * r;
      if (query < item.query_count) stats[r] = p.state_stats[StateAt(p, item, kv_head, query)];
    }
    WarpSync();
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = first_query + LaneId() / 4 + 8 * r;
    if (query >= item.query_count) continue;
    float max = queries.max[r], sum = queries.sum[r];
    const int64_t state = StateAt(p, item, kv_head, query);
    float* const kept = p.state_values + state * p.layout.head_dim + LaneId() % 4 * 2;
    if (merge) {
      const Merging merging = MergingOf(stats[r].at[0], max);
      max = merging.max;
      sum = Merged(merging, stats[r].at[1], sum);
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        const Vector<float, 2> before = Load<2>(kept + 8 * n);
        values[n][2 * r] = Merged(merging, before.at[0], values[n][2 * r]);
        values[n][2 * r + 1] = Merged(merging, before.at[1], values[n][2 * r + 1]);
      }
    }
    if (finish) {
      const float scale = 1.0f / sum;
      const int64_t at = OutAt(p, item, kv_head, query) + LaneId() % 4 * 2;
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        StoreOut(p, at + 8 * n, values[n][2 * r] * scale, values[n][2 * r + 1] * scale);
      }
    } else {
      if (LaneId() % 4 == 0) p.state_stats[state] = {max, sum};
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        Store(kept + 8 * n, Vector<float, 2>{values[n][2 * r], values[n][2 * r + 1]});
      }
    }
  }
}

template <int kDim>
__global__ void __launch_bounds__(kThreads, 1) Wide(const AttentionParams p) {
  using Tiles = TokenTiles<kDim>;
  constexpr int kSteps = kDim / 16;
  constexpr int kScores = Tiles::kTokens / 8;
  constexpr bool kInRegisters = Tiles::kQueriesInRegisters;
  const AttentionItem item = p.items[blockIdx.x];
  if (item.query_count == 0) return;
  const int kv_head = static_cast<int>(blockIdx.y);
  const ItemSpan span = SpanOf<Tiles::kTokens>(p, item);
  char* const shared = DynamicShared<char>();
  const Tiles tiles = Tiles::In(shared);

  tiles.Begin(p, item, span, kv_head);

  const int first_query = WarpId() * kWarpQueries;
  const bool idle = first_query >= item.query_count;  // a warp without queries helps to copy
  uint32_t in_registers[kInRegisters ? kSteps : 1][4];
  auto* const in_shared = reinterpret_cast<Vector<uint32_t, 4>*>(shared + Tiles::kBytes) +
                          (WarpId() * kSteps * kWarpSize + LaneId());
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    if constexpr (kInRegisters) {
      LoadQuery<kDim>(p, item, kv_head, first_query, k, in_registers[k]);
    } else {
      uint32_t a[4];
      LoadQuery<kDim>(p, item, kv_head, first_query, k, a);
      in_shared[k * kWarpSize] = {a[0], a[1], a[2], a[3]};
    }
  }
  LaneQueries queries = LaneQueriesOf(p, item, span, first_query);
  // What the warp's first and last query see.
  const int last = Position(p, item, Min(first_query + kWarpQueries - 1, span.last_query));
  const int first_last = Position(p, item, Min(first_query, span.last_query));
  const int first = FirstToken(p, first_last), last_first = FirstToken(p, last);

  float values[2 * kSteps][4] = {};
  int split = item.split_begin;
  for (int tile = span.tile_begin; tile < span.tile_end; ++tile) {
    WaitForCopies<0>();
    SyncThreads();  // all have this tile, and are done with the one before
    if (tile + 1 < span.tile_end) tiles.Copy(p, span, tile + 1);
    const int64_t place = Tiles::PlaceOf(p, item, span, kv_head, tile + 2);

    const int token = tile * Tiles::kTokens;
    if (!idle && token <= last && token + Tiles::kTokens > first) {
      const Bf16* const keys = tiles.Keys(tile);
      float scores[kScores][4] = {};
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        uint32_t a[4];
        if constexpr (kInRegisters) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = in_registers[k][i];
        } else {
          const Vector<uint32_t, 4> kept = in_shared[k * kWarpSize];
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = kept.at[i];
        }
#pragma unroll
        for (int n = 0; n < kScores / 2; ++n) {
          AddScores<kDim>(keys, n, k, a, scores[2 * n], scores[2 * n + 1]);
        }
      }
      float scale[2];
      const bool masked = token + Tiles::kTokens > first_last + 1 || token < last_first;
      Weigh(scores, token, masked, &queries, scale);
      ScaleValues(values, scale);
#pragma unroll
      for (int n = 0; n < kScores / 2; ++n) {
        uint32_t a[4];
        PackWeights(scores, n, a);
#pragma unroll
        for (int d = 0; d < kSteps; ++d) {
          AddValues<kDim>(tiles.Values(tile), n, d, a, values[2 * d], values[2 * d + 1]);
        }
      }
    }
    if (tile + 1 == span.tile_end || (token + Tiles::kTokens) % kAttentionSplit == 0) {
      queries.AddLanes();
      EndSplit(p, item, kv_head, first_query, split > item.split_begin,
               split + 1 == item.split_end && span.whole, queries, values);
      ++split;
      queries.Clear();
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[n][i] = 0;
      }
    }
    tiles.KeepPlace(tile + 2, place);
  }
}

}  // namespace

void LaunchWide(const AttentionParams& params, int queries, int items, cudaStream_t stream) {
  const int warps = (queries + kWarpQueries - 1) / kWarpQueries;
  const Grid grid = {static_cast<unsigned>(items), static_cast<unsigned>(params.layout.kv_heads)};
  ForHeadDim(params.layout.head_dim, [&](auto dim) {
    Launch(Wide<dim()>, grid, warps * kWarpSize, WideSharedBytes(dim(), warps), stream, params);
  });
}

}  // namespace carryover::CARRYOVER_DEVICE
