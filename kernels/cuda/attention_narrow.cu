// Attention of at most 16 queries of a KV head on tensor cores, over one split of the tokens:
// decode. What the splits leave is merged by attention_merge.cu, unless there was only one.
//
// The warps share the work on a tile: each scores some of its tokens, shows the scores to the
// others, and adds up some columns of the values. What happens to a query is the wide kernel's
// arithmetic, operation by operation, so that both give the same bits.
//
// K and V are read once: 4 d bytes a token and KV head of size d, and 8 more for each query at a
// split's end. That traffic is the floor; of the tensor cores it takes 64 d operations a token.
#include "kernels/cuda/attention_tensor.h"

namespace carryover::CARRYOVER_DEVICE {
namespace {

constexpr int kThreads = kNarrowWarps * kWarpSize;

template <int kDim>
__global__ void __launch_bounds__(kThreads, kDim <= 128 ? 3 : 2) Narrow(const AttentionParams p) {
  using Tiles = TokenTiles<kDim>;
  constexpr int kSteps = kDim / 16;
  constexpr int kScores = Tiles::kTokens / 8;
  constexpr int kMine = (kSteps + kNarrowWarps - 1) / kNarrowWarps;  // of the column steps, at most
  const AttentionItem item = p.items[blockIdx.x];
  if (item.query_count == 0) return;
  const int kv_head = static_cast<int>(blockIdx.y);
  const ItemSpan span = SpanOf<Tiles::kTokens>(p, item);
  char* const shared = DynamicShared<char>();
  const Tiles tiles = Tiles::In(shared);
  // (kScores, 32 lanes): score fragments.
  auto* const shown = reinterpret_cast<Vector<float, 4>*>(shared + Tiles::kBytes) + LaneId();

  tiles.Begin(p, item, span, kv_head);

  uint32_t query[kSteps][4];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) LoadQuery<kDim>(p, item, kv_head, 0, k, query[k]);
  LaneQueries queries = LaneQueriesOf(p, item, span, 0);
  const int first_last = Position(p, item, 0);
  const int last_first = FirstToken(p, Position(p, item, span.last_query));

  float values[2 * kMine][4] = {};
  for (int tile = span.tile_begin; tile < span.tile_end; ++tile) {
    WaitForCopies<0>();
    SyncThreads();  // all have this tile, and are done with the one before and its scores
    if (tile + 1 < span.tile_end) tiles.Copy(p, span, tile + 1);
    const int64_t place = Tiles::PlaceOf(p, item, span, kv_head, tile + 2);

    for (int n = WarpId(); n < kScores / 2; n += kNarrowWarps) {
      float low[4] = {}, high[4] = {};
#pragma unroll
      for (int k = 0; k < kSteps; ++k) AddScores<kDim>(tiles.Keys(tile), n, k, query[k], low, high);
      shown[2 * n * kWarpSize] = {low[0], low[1], low[2], low[3]};
      shown[(2 * n + 1) * kWarpSize] = {high[0], high[1], high[2], high[3]};
    }
    SyncThreads();
    float scores[kScores][4];
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
      const Vector<float, 4> four = shown[n * kWarpSize];
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = four.at[i];
    }
    const int token = tile * Tiles::kTokens;
    float scale[2];
    const bool masked = token + Tiles::kTokens > first_last + 1 || token < last_first;
    Weigh(scores, token, masked, &queries, scale);
    ScaleValues(values, scale);
#pragma unroll
    for (int n = 0; n < kScores / 2; ++n) {
      uint32_t a[4];
      PackWeights(scores, n, a);
#pragma unroll
      for (int m = 0; m < kMine; ++m) {
        const int d = WarpId() + m * kNarrowWarps;
        if (d < kSteps) {
          AddValues<kDim>(tiles.Values(tile), n, d, a, values[2 * m], values[2 * m + 1]);
        }
      }
    }
    tiles.KeepPlace(tile + 2, place);
  }

  queries.AddLanes();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int q = LaneId() / 4 + 8 * r;
    if (q >= item.query_count) continue;
    const int64_t state = StateAt(p, item, kv_head, q);
    const int64_t out = OutAt(p, item, kv_head, q);
    const float scale = 1.0f / queries.sum[r];
    if (!span.whole && WarpId() == 0 && LaneId() % 4 == 0) {
      p.state_stats[state] = {queries.max[r], queries.sum[r]};
    }
#pragma unroll
    for (int m = 0; m < 2 * kMine; ++m) {
      const int column = 16 * (WarpId() + m / 2 * kNarrowWarps) + m % 2 * 8 + LaneId() % 4 * 2;
      if (column >= kDim) continue;
      const float a = values[m][2 * r], b = values[m][2 * r + 1];
      if (span.whole) {
        StoreOut(p, out + column, a * scale, b * scale);
      } else {
        Store(p.state_values + state * kDim + column, Vector<float, 2>{a, b});
      }
    }
  }
}

}  // namespace

void LaunchNarrow(const AttentionParams& params, int items, cudaStream_t stream) {
  const Grid grid = {static_cast<unsigned>(items), static_cast<unsigned>(params.layout.kv_heads)};
  ForHeadDim(params.layout.head_dim, [&](auto dim) {
    Launch(Narrow<dim()>, grid, kThreads, NarrowSharedBytes(dim()), stream, params);
  });
}

}  // namespace carryover::CARRYOVER_DEVICE
