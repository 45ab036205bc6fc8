// What the tensor-core attention kernels share: K and V of a tile of tokens brought into shared
// memory, scores and weights of 16 queries as mma fragments, and values added up. bf16 queries,
// keys, weights and values; f32 scores and sums.
//
// Of the 16 queries a lane has the two of its fragment rows, lane / 4 and lane / 4 + 8.
#pragma once

#include <type_traits>

#include "kernels/cuda/attention_device.h"
#include "kernels/cuda/tensor_core.h"

namespace carryover::CARRYOVER_DEVICE {

// Tiles of K and V in shared memory, where `stage` tile % kStages is. All threads of the block
// call.
template <int kDim>
struct TokenTiles {
  static constexpr int kTokens = TileTokens(kDim);
  static constexpr int kStride = TileStride(kDim);
  static constexpr int kPlane = kTokens * kStride;
  static constexpr int kGroups = kTokens / 16;        // of tokens, which never cross a block's end
  static constexpr size_t kBytes = TilesBytes(kDim);  // of shared memory, in all
  static constexpr bool kQueriesInRegisters = QueriesInRegisters(kDim);

  Bf16* tiles;      // (kStages, 2, kTokens, kStride)
  int64_t* places;  // (2, kGroups): where K of a group begins, of a tile and of the next one

  __device__ static TokenTiles In(char* shared) {
    return {reinterpret_cast<Bf16*>(shared),
            reinterpret_cast<int64_t*>(shared + 2 * kStages * kPlane * sizeof(Bf16))};
  }

  __device__ const Bf16* Keys(int tile) const { return tiles + tile % kStages * 2 * kPlane; }
  __device__ const Bf16* Values(int tile) const { return Keys(tile) + kPlane; }

  // The place of this thread's group of a tile; threads from kGroups on have none. Kept for later
  // by KeepPlace, so that nobody waits for the block table.
  __device__ static int64_t PlaceOf(const AttentionParams& p, const AttentionItem& item,
                                    const ItemSpan& span, int kv_head, int tile) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread >= kGroups) return 0;
    const int group = Min(tile * kGroups + thread, (span.end_token - 1) / 16);
    const int per_block = p.layout.block_tokens / 16;
    const int32_t block = p.block_table[item.table_begin + group / per_block];
    return p.layout.At(block, kv_head, group % per_block * 16);
  }
  __device__ void KeepPlace(int tile, int64_t place) const {
    if (static_cast<int>(threadIdx.x) < kGroups) places[tile % 2 * kGroups + threadIdx.x] = place;
  }

  // Brings the first tile on its way, and the places of the second.
  __device__ void Begin(const AttentionParams& p, const AttentionItem& item, const ItemSpan& span,
                        int kv_head) const {
    const int first = span.tile_begin;
    KeepPlace(first, PlaceOf(p, item, span, kv_head, first));
    KeepPlace(first + 1, PlaceOf(p, item, span, kv_head, first + 1));
    SyncThreads();
    Copy(p, span, first);
  }

  // Starts the copies of a tile whose places all threads see. Tokens that nobody sees become zeros:
  // in memory they may be anything, and a weight of 0 times NaN is no 0.
  __device__ void Copy(const AttentionParams& p, const ItemSpan& span, int tile) const {
    constexpr int kChunks = kDim / 8;  // of 16 bytes in a row
    const Bf16* const kv = static_cast<const Bf16*>(p.kv);
    Bf16* const stage = tiles + tile % kStages * 2 * kPlane;
    for (int i = static_cast<int>(threadIdx.x); i < kTokens * kChunks;
         i += static_cast<int>(blockDim.x)) {
      const int token = i / kChunks, column = i % kChunks * 8;
      const bool valid = tile * kTokens + token < span.end_token;
      const Bf16* const from =
          kv + (valid ? places[tile % 2 * kGroups + token / 16] + token % 16 * kDim + column : 0);
      Bf16* const to = stage + token * kStride + column;
      CopyAsync16(to, from, valid);
      CopyAsync16(to + kPlane, valid ? from + p.layout.v_offset : from, valid);
    }
    CommitCopies();
  }
};

// The A fragments of 16 queries, scaled: a[k] has the columns from 16 k on. Query i of the warp is
// query `first` + i of the item; those behind its end are zeros.
template <int kDim>
__device__ inline void LoadQuery(const AttentionParams& p, const AttentionItem& item, int kv_head,
                                 int first, int k, uint32_t (&a)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = first + LaneId() / 4 + 8 * half;
    const bool there = query < item.query_count;
    const float* const from =
        QueryValues(p, item, kv_head, there ? query : 0) + 16 * k + LaneId() % 4 * 2;
    const float scale = there ? p.scale : 0.0f;
    const Vector<float, 2> low = Load<2>(from), high = Load<2>(from + 8);
    a[half] = PackBf16(low.at[0] * scale, low.at[1] * scale);
    a[2 + half] = PackBf16(high.at[0] * scale, high.at[1] * scale);
  }
}

// scores[0], scores[1] += the scores of the tokens 16 n ... 16 n + 15 of a tile, over the columns
// from 16 k on.
template <int kDim>
__device__ inline void AddScores(const Bf16* keys, int n, int k, const uint32_t (&query)[4],
                                 float (&low)[4], float (&high)[4]) {
  const int lane = LaneId();
  const int token = 16 * n + lane % 8 + lane / 16 * 8;
  const int column = 16 * k + lane / 8 % 2 * 8;
  uint32_t b[4];
  LoadMatrices(b, keys + token * TokenTiles<kDim>::kStride + column);
  MultiplyAdd16x8x16(low, query, b[0], b[1]);
  MultiplyAdd16x8x16(high, query, b[2], b[3]);
}

// What a lane's two queries see, and what is known of them.
struct LaneQueries {
  int first[2];  // tokens [first, last]
  int last[2];
  float max[2];
  float sum[2];  // of this lane's columns only

  __device__ void Clear() {
    max[0] = max[1] = kNoScore;
    sum[0] = sum[1] = 0;
  }
  // The sums of all columns.
  __device__ void AddLanes() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += ShuffleXor(sum[r], 1);
      sum[r] += ShuffleXor(sum[r], 2);
    }
  }
};

__device__ inline LaneQueries LaneQueriesOf(const AttentionParams& p, const AttentionItem& item,
                                            const ItemSpan& span, int first) {
  LaneQueries queries;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = Min(first + LaneId() / 4 + 8 * r, span.last_query);
    queries.last[r] = Position(p, item, query);
    queries.first[r] = FirstToken(p, queries.last[r]);
  }
  queries.Clear();
  return queries;
}

// Turns the scores of a tile into weights and brings max and sum up to date; scale[r] is what the
// values so far are to be multiplied with. `masked` when some query does not see all tokens, which
// begin at `token`.
template <int kCount>
__device__ inline void Weigh(float (&scores)[kCount][4], int token, bool masked,
                             LaneQueries* queries, float (&scale)[2]) {
  if (masked) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = token + 8 * n + LaneId() % 4 * 2 + i % 2;
        const bool seen = t >= queries->first[i / 2] && t <= queries->last[i / 2];
        scores[n][i] = seen ? scores[n][i] : kNoScore;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float max = kNoScore;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      max = fmaxf(max, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
    }
    max = fmaxf(max, ShuffleXor(max, 1));
    max = fmaxf(queries->max[r], fmaxf(max, ShuffleXor(max, 2)));
    // With nothing seen yet all scores are -inf, and -inf - 0 still is.
    const float base = max == kNoScore ? 0.0f : max;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      scores[n][2 * r] = FastExp2(scores[n][2 * r] - base);
      scores[n][2 * r + 1] = FastExp2(scores[n][2 * r + 1] - base);
      sum += scores[n][2 * r];
      sum += scores[n][2 * r + 1];
    }
    scale[r] = FastExp2(queries->max[r] - base);
    queries->sum[r] = fmaf(queries->sum[r], scale[r], sum);
    queries->max[r] = max;
  }
}

// The weights of the tokens 16 n ... 16 n + 15 as an A fragment.
template <int kCount>
__device__ inline void PackWeights(const float (&weights)[kCount][4], int n, uint32_t (&a)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    a[2 * half] = PackBf16(weights[2 * n + half][0], weights[2 * n + half][1]);
    a[2 * half + 1] = PackBf16(weights[2 * n + half][2], weights[2 * n + half][3]);
  }
}

// low, high += weights of the tokens 16 n ... times their values in the columns from 16 d on.
template <int kDim>
__device__ inline void AddValues(const Bf16* values, int n, int d, const uint32_t (&weights)[4],
                                 float (&low)[4], float (&high)[4]) {
  const int lane = LaneId();
  const int token = 16 * n + lane % 16;
  const int column = 16 * d + lane / 16 * 8;
  uint32_t b[4];
  LoadMatricesTransposed(b, values + token * TokenTiles<kDim>::kStride + column);
  MultiplyAdd16x8x16(low, weights, b[0], b[1]);
  MultiplyAdd16x8x16(high, weights, b[2], b[3]);
}

template <int kCount>
__device__ inline void ScaleValues(float (&values)[kCount][4], const float (&scale)[2]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[n][i] *= scale[i / 2];
  }
}

// Calls start(an integral constant) for the size of heads, if it is one of
// HasTensorCoreAttention's.
template <typename Start>
void ForHeadDim(int head_dim, const Start& start) {
  switch (head_dim) {
    case 64:
      return start(std::integral_constant<int, 64>());
    case 80:
      return start(std::integral_constant<int, 80>());
    case 96:
      return start(std::integral_constant<int, 96>());
    case 128:
      return start(std::integral_constant<int, 128>());
    case 256:
      return start(std::integral_constant<int, 256>());
    default:
      break;
  }
}

}  // namespace carryover::CARRYOVER_DEVICE
