// Paged attention on a device: AttentionArgs of kernels/ops.h as kernels see them.
//
// A pass is planned on the host: PlanAttention cuts the sequences' queries into items, which the
// caller copies to the device once and gives to LaunchAttention of every layer of that window. The
// queries of a sequence are counted row by row, the `group = heads / kv_heads` heads that share a
// KV head one behind the other: query i is head i % group of row i / group. An item is some
// consecutive queries over some splits of the tokens; each is done for every KV head.
//
// Tokens are walked in tiles, counted from token 0, and gathered into splits of kAttentionSplit
// tokens, whose results are merged in order. A query's bits therefore depend on nothing but its own
// tokens, on whatever path: neither on other rows, nor on chunks, nor on how many items there are.
//
// Plain host code; calls from one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cuda/runtime.h"
#include "kernels/shapes.h"

namespace carryover::CARRYOVER_DEVICE {

inline constexpr int kAttentionSplit = 512;  // tokens between merges

// As kernels read it.
struct AttentionItem {
  int32_t row;          // the sequence's first row in the batch
  int32_t kv_begin;     // and the position of that row
  int32_t table_begin;  // the sequence's first entry in the block table
  int32_t query_begin;
  int32_t query_count;  // 0: nothing to do
  int32_t split_begin;  // splits [split_begin, split_end) of the tokens
  int32_t split_end;
  int32_t slot;  // where results of single splits are kept, in queries of one KV head
};

struct AttentionLimits {
  int multiprocessors = 1;
  size_t shared_bytes = 0;   // that a block may ask for (cudaDevAttrMaxSharedMemoryPerBlockOptin)
  size_t scratch_bytes = 0;  // about; splitting chunks of few rows over more blocks stops there
};

// The kernels: `plain` for f32 KV and head sizes that the others were not built for, with f32
// products; `wide` and `narrow` on tensor cores, for many and for few queries.
struct AttentionCounts {
  int wide = 0;  // how many items are plain or wide
  int narrow = 0;
  int merges = 0;
  int merge_queries = 0;     // the most of one merge
  int wide_queries = 0;      // the most of one wide item
  int64_t state_slots = 0;   // queries of one KV head that scratch keeps states of
  size_t scratch_bytes = 0;  // that LaunchAttention needs
  bool operator==(const AttentionCounts&) const = default;
};
struct AttentionPlan : AttentionCounts {
  std::vector<AttentionItem> items;        // plain or wide ones, then narrow ones, then merges
  std::vector<AttentionItem> merge_items;  // PlanAttention's own
};

// Whether there are tensor-core kernels for these keys and values.
bool HasTensorCoreAttention(const KvGeometry& geometry);

// heads is a multiple of geometry.kv_heads; window as in AttentionArgs. `plan` is overwritten.
void PlanAttention(const KvGeometry& geometry, int heads, int window, const AttentionLimits& limits,
                   const SequenceRows* sequences, int sequence_count, AttentionPlan* plan);

// Rounds the numbers of narrow items and of merges, with empty ones, and what scratch keeps up to
// powers of two, so that plans of about a size launch alike.
void PadAttentionPlan(const KvGeometry& geometry, AttentionPlan* plan);

struct AttentionLaunch {
  const float* qkv = nullptr;  // device (rows, (heads + 2 kv_heads) * head_dim)
  void* out = nullptr;         // device (rows, heads * head_dim) of out_type, kF32 or kBF16
  DType out_type = DType::kF32;
  const void* kv_base = nullptr;  // device
  KvGeometry geometry;
  int heads = 0;
  int layer = 0;
  int window = 0;
  float scale = 0;
  const int32_t* block_table = nullptr;  // device
  const AttentionItem* items = nullptr;  // device; plan.items
  void* scratch = nullptr;               // device, plan.scratch_bytes, at a multiple of 256
  bool operator==(const AttentionLaunch&) const = default;
};

// One to three kernels on the stream. Errors are the stream's.
void LaunchAttention(const AttentionLaunch& launch, const AttentionCounts& plan,
                     cudaStream_t stream);

}  // namespace carryover::CARRYOVER_DEVICE
