// What attention is cut into, shared by the code that is compiled once per instruction set and the
// code that hands the pieces out (attention.cc).
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>

#include "kernels/cpu/backend.h"

namespace carryover::cpu {

inline constexpr int kKvTile = 16;           // tokens that K is interleaved over
inline constexpr int kStep = 256;            // tokens scored before values are added up
inline constexpr int kSplit = 512;           // tokens between merges; a multiple of kStep
inline constexpr size_t kQueryStride = 272;  // floats; spreads rows over cache sets
inline constexpr size_t kScoreStride = kStep + 16;
inline constexpr int kQueriesPerItem = 96;  // about; K and V are read once for as many
inline constexpr float kNoScore = -std::numeric_limits<float>::infinity();

// Rows [first_row, first_row + rows) of a sequence, and one KV head.
struct AttentionItem {
  int sequence;
  int kv_head;
  int first_row;  // counted from the sequence's first row in the batch
  int rows;
  int split;       // the only split to do, or -1 for all of them
  float* partial;  // where a single split leaves its State, or null
};

// What is known of each query after some tokens. Arrays have one entry per query.
struct AttentionState {
  float* max;  // of the scores, in units of log2
  float* sum;  // of 2^(score - max)
  float* out;  // (queries, head_dim), weighted by the same

  static size_t Floats(int queries, int head_dim) {
    return static_cast<size_t>(queries) * (head_dim + 2);
  }
  static AttentionState At(float* p, int queries) { return {p, p + queries, p + 2 * queries}; }
};

struct AttentionScratch {
  float* queries;  // (queries, kQueryStride), scaled; of Left<T>
  float* scores;   // (kMaxTileRows, kScoreStride), and weights of Left<T>
  float* running;  // a State: of the current split
  float* total;    // a State: of the splits before
};

// Per pass constants and the batch.
struct AttentionJob {
  const AttentionArgs* args;
  const PassLayout* layout;

  int Group() const { return args->heads / args->geometry.kv_heads; }
};

// The tokens that the row at `position` sees: first ... position.
inline int FirstToken(const AttentionArgs& args, int position) {
  return args.window > 0 ? std::max(0, position - args.window + 1) : 0;
}

}  // namespace carryover::cpu
