// What the attention kernels share (attention.h says how work is cut into items).
//
// A state is what is known of a query after some tokens: the maximum of its scores, in units of
// log2; the sum of the weights 2^(score - maximum); and the values weighted by those, not divided
// yet (Milakov and Gimelshein 2018).
#pragma once

#include <cmath>

#include "kernels/cuda/attention.h"
#include "kernels/cuda/attention_tiles.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/kv_layout.h"

namespace carryover::CARRYOVER_DEVICE {

// Argument of all attention kernels.
struct AttentionParams {
  const float* qkv;
  void* out;
  const void* kv;
  const int32_t* block_table;
  const AttentionItem* items;     // of this kernel; the grid's x counts them, its y the KV heads
  float* state_values;            // (state_slots * kv_heads, head_dim)
  Vector<float, 2>* state_stats;  // (state_slots * kv_heads): maximum and sum
  DeviceKv layout;
  int heads;
  int group;
  int window;
  float scale;  // to units of log2
  bool out_bf16;
};

// `queries` is the most of any item.
void LaunchPlain(const AttentionParams& params, bool kv_bf16, int items, cudaStream_t stream);
void LaunchWide(const AttentionParams& params, int queries, int items, cudaStream_t stream);
void LaunchNarrow(const AttentionParams& params, int items, cudaStream_t stream);
void LaunchMerge(const AttentionParams& params, int queries, int items, cudaStream_t stream);

inline constexpr float kNoScore = -INFINITY;

// An item and where it lies.
struct ItemSpan {
  int last_query;   // of the item, counted in the item
  int first_token;  // the first one that any query sees
  int end_token;    // behind the last one
  int tile_begin;   // tiles of kTile tokens of its splits
  int tile_end;
  bool whole;  // its splits are all that its queries see
};

__device__ inline int Position(const AttentionParams& p, const AttentionItem& item, int query) {
  return item.kv_begin + (item.query_begin + query) / p.group;
}
__device__ inline int FirstToken(const AttentionParams& p, int position) {
  return p.window > 0 ? Max(0, position - p.window + 1) : 0;
}

template <int kTile>
__device__ inline ItemSpan SpanOf(const AttentionParams& p, const AttentionItem& item) {
  ItemSpan span;
  span.last_query = item.query_count - 1;
  span.first_token = FirstToken(p, Position(p, item, 0));
  span.end_token = Position(p, item, span.last_query) + 1;
  span.tile_begin = Max(span.first_token, item.split_begin * kAttentionSplit) / kTile;
  span.tile_end = (Min(span.end_token, item.split_end * kAttentionSplit) + kTile - 1) / kTile;
  span.whole = item.split_begin == span.first_token / kAttentionSplit &&
               item.split_end == (span.end_token - 1) / kAttentionSplit + 1;
  return span;
}

// Where a query's values begin, in qkv and in out.
__device__ inline int64_t QueryAt(const AttentionParams& p, const AttentionItem& item, int kv_head,
                                  int query, int row_heads) {
  const int at = item.query_begin + query;
  const int64_t row = item.row + at / p.group;
  return (row * row_heads + kv_head * p.group + at % p.group) * p.layout.head_dim;
}
__device__ inline const float* QueryValues(const AttentionParams& p, const AttentionItem& item,
                                           int kv_head, int query) {
  return p.qkv + QueryAt(p, item, kv_head, query, p.heads + 2 * p.layout.kv_heads);
}
__device__ inline int64_t OutAt(const AttentionParams& p, const AttentionItem& item, int kv_head,
                                int query) {
  return QueryAt(p, item, kv_head, query, p.heads);
}
__device__ inline int64_t StateAt(const AttentionParams& p, const AttentionItem& item, int kv_head,
                                  int query) {
  return static_cast<int64_t>(item.slot) * p.layout.kv_heads +
         static_cast<int64_t>(kv_head) * item.query_count + query;
}

// Two neighbouring values of a result; `at` is even.
__device__ inline void StoreOut(const AttentionParams& p, int64_t at, float a, float b) {
  if (p.out_bf16) {
    Store(static_cast<Bf16*>(p.out) + at, Vector<Bf16, 2>{ToBf16(a), ToBf16(b)});
  } else {
    Store(static_cast<float*>(p.out) + at, Vector<float, 2>{a, b});
  }
}

// By what to multiply two states that become one. All paths merge with this, in f32 without
// contraction of their own choice, so that all get the same bits.
struct Merging {
  float max;
  float kept;   // of the state of the tokens before
  float added;  // of the state of those that follow
};
__device__ inline Merging MergingOf(float before, float after) {
  const float max = fmaxf(before, after);
  // With nothing seen yet both are -inf, and -inf - 0 still is.
  const float base = max == kNoScore ? 0.0f : max;
  return {max, exp2f(before - base), exp2f(after - base)};
}
__device__ inline float Merged(const Merging& merging, float before, float after) {
  return fmaf(after, merging.added, before * merging.kept);
}

}  // namespace carryover::CARRYOVER_DEVICE
