// Causal grouped-query attention over paged KV, in one pass with a running maximum (Milakov and
// Gimelshein 2018; Dao et al. 2022).
//
// A work item is a KV head of some rows of a sequence: the rows' query heads of that group are its
// queries, taken in tiles that share every K and V that was read. Tokens are walked in steps of
// kStep, counted from token 0, and steps are gathered into splits of kSplit tokens, whose results
// are merged in order. Where there are few items, splits become items of their own; since the merge
// is the same, a row's bits depend neither on that, nor on the chunk that it came in, nor on
// threads.
//
// Queries and weights are f32, or rounded to bf16 where the CPU multiplies pairs of bf16
// (kernels/cpu/bf16_dot.h). Weights are rounded before they are summed, so that they still add up.
//
// Slots that hold no token yet may hold anything. Their scores are replaced, not multiplied, and
// their values are never read.
#define HWY_WANT_AVX3_DL
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include <algorithm>
#include <utility>

#include "hwy/highway.h"
#include "kernels/cpu/attention_item.h"
#include "kernels/cpu/backend.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carryover::cpu::HWY_NAMESPACE {

// One item while it runs. T is the type of K and V.
template <typename T>
struct Walk {
  const AttentionJob& job;
  const AttentionItem& item;
  const AttentionScratch& scratch;
  const SequenceRows& sequence;
  const KvGeometry& geometry;

  // K or V of the tile that begins at token `token`.
  const T* KeyTile(int token) const { return Tile(token, false); }
  const T* ValueTile(int token) const { return Tile(token, true); }
  const T* Tile(int token, bool value) const {
    const int32_t block =
        job.layout->block_table[sequence.table_begin + token / geometry.block_tokens];
    const char* const head = static_cast<const char*>(job.args->kv_base) +
                             KvOffset(geometry, block, job.args->layer, value, item.kv_head);
    return reinterpret_cast<const T*>(head) +
           static_cast<size_t>(token % geometry.block_tokens) * geometry.head_dim;
  }
  int Position(int query) const { return sequence.kv_begin + item.first_row + query / job.Group(); }
};

// scores[m][t] = query m . key t for the tokens [begin, end), begin a multiple of kStep. Up to the
// next multiple of 16 the scores are of whatever stands there.
template <int kRows, typename T>
void Score(const Walk<T>& walk, const Left<T>* queries, int begin, int end, float* scores) {
  constexpr int kVectors = TileVectors(kRows);
  constexpr size_t kPack = sizeof(T) == 2 ? 2 : 1;
  constexpr int kLanesInt = static_cast<int>(kLanes);
  const DF d;
  const T* tiles[kStep / kKvTile];
  const int count = (end - begin + kKvTile - 1) / kKvTile;
  for (int t = 0; t < count; ++t) tiles[t] = walk.KeyTile(begin + t * kKvTile);

  const int vectors = count * (kKvTile / kLanesInt);
  for (int v0 = 0; v0 < vectors; v0 += kVectors) {
    const T* w[kVectors];
    hn::Vec<DF> sums[kRows][kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const int lane = std::min(v0 + v, vectors - 1) * kLanesInt;
      w[v] = tiles[lane / kKvTile] + lane % kKvTile * kPack;
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) sums[m][v] = hn::Zero(d);
    }
    MultiplyTile<kRows, kVectors>(d, queries, Constant<kQueryStride>(), w, kKvTile * kPack,
                                  walk.geometry.head_dim, sums);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        hn::StoreU(sums[m][v], d, scores + m * kScoreStride + (v0 + v) * kLanes);
      }
    }
  }
}

// Replaces the scores of one query outside of [first, last], which it does not see, and answers
// with the largest of the others, or `max`.
float MaskScores(float* scores, int padded, int first, int last, float max) {
  const DF d;
  if (first > 0 || last < padded - 1) {
    for (int i = 0; i < std::min(first, padded); ++i) scores[i] = kNoScore;
    for (int i = std::max(last + 1, 0); i < padded; ++i) scores[i] = kNoScore;
  }
  auto maxs = hn::Set(d, max);
  for (int i = 0; i < padded; i += static_cast<int>(kLanes)) {
    maxs = hn::Max(maxs, hn::LoadU(d, scores + i));
  }
  return hn::GetLane(hn::MaxOfLanes(d, maxs));
}

// Turns scores into weights 2^(score - base), in place as Left<T>, and answers with their sum.
template <typename T>
float Weigh(float* scores, int padded, float base) {
  const DF d;
  const auto bases = hn::Set(d, base);
  auto sums = hn::Zero(d);
  constexpr int lanes = static_cast<int>(kLanes);
#if HWY_TARGET == HWY_AVX3_DL
  if constexpr (kPerLeft<T> == 2) {
    const auto weight = [&](int i) HWY_ATTR {
      return Exp2Rough(d, hn::Sub(hn::LoadU(d, scores + i), bases));
    };
    const hn::Rebind<uint32_t, DF> du32;
    auto* const pairs = reinterpret_cast<uint32_t*>(scores);
    const auto ones = hn::Set(du32, 0x3f803f80u);
    for (int i = 0; i < padded; i += 2 * lanes) {
      const auto high = i + lanes < padded ? weight(i + lanes) : hn::Zero(d);
      const auto rounded = RoundToPairs(weight(i), high);
      hn::StoreU(rounded, du32, pairs + i / 2);  // where all scores have been read
      sums = AddDotOfPairs(sums, ones, rounded);
    }
    return hn::GetLane(hn::SumOfLanes(d, sums));
  }
#endif
  for (int i = 0; i < padded; i += lanes) {
    const auto weight = Exp2(d, hn::Sub(hn::LoadU(d, scores + i), bases));
    hn::StoreU(weight, d, scores + i);
    sums = hn::Add(sums, weight);
  }
  return hn::GetLane(hn::SumOfLanes(d, sums));
}

// out[m][dims] = out[m][dims] * scales[m] + sum over tokens of weight * value, for kVectors vectors
// of dims from `dim` on.
template <int kRows, int kVectors, class D, typename T>
HWY_INLINE void AddValuesAt(D d, const T* const* tiles, const Left<T>* weights, int count,
                            size_t head_dim, size_t dim, const float* scales, float* out) {
  constexpr size_t kPack = sizeof(T) == 2 ? 2 : 1;
  constexpr size_t kWidth = hn::MaxLanes(D());
  hn::Vec<D> sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    const auto scale = hn::Set(d, scales[m]);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      sums[m][v] = hn::Mul(scale, hn::LoadU(d, out + m * head_dim + dim + v * kWidth));
    }
  }
  for (int t = 0; t < count; t += kKvTile) {
    const T* w[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) w[v] = tiles[t / kKvTile] + (dim + v * kWidth) * kPack;
    MultiplyTile<kRows, kVectors>(d, weights + t / kPerLeft<T>, Constant<kScoreStride>(), w,
                                  head_dim * kPack, std::min(kKvTile, count - t), sums);
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      hn::StoreU(sums[m][v], d, out + m * head_dim + dim + v * kWidth);
    }
  }
}

template <int kRows, typename T>
void AddValues(const Walk<T>& walk, const Left<T>* weights, int begin, int end, const float* scales,
               float* out) {
  constexpr int kVectors = TileVectors(kRows);
  const DF d;
  const T* tiles[kStep / kKvTile];
  const int count = end - begin;
  for (int t = 0; t < count; t += kKvTile) tiles[t / kKvTile] = walk.ValueTile(begin + t);
  const size_t head_dim = static_cast<size_t>(walk.geometry.head_dim);
  size_t dim = 0;
  for (; dim + kVectors * kLanes <= head_dim; dim += kVectors * kLanes) {
    AddValuesAt<kRows, kVectors>(d, tiles, weights, count, head_dim, dim, scales, out);
  }
  if constexpr (kVectors > 4) {
    for (; dim + 4 * kLanes <= head_dim; dim += 4 * kLanes) {
      AddValuesAt<kRows, 4>(d, tiles, weights, count, head_dim, dim, scales, out);
    }
  }
  for (; dim + kLanes <= head_dim; dim += kLanes) {
    AddValuesAt<kRows, 1>(d, tiles, weights, count, head_dim, dim, scales, out);
  }
  const hn::CappedTag<float, 2> d2;  // head_dim is even
  for (; dim < head_dim; dim += hn::Lanes(d2)) {
    AddValuesAt<kRows, 1>(d2, tiles, weights, count, head_dim, dim, scales, out);
  }
}

// Queries [first, first + kRows) of the item over the tokens [begin, end) of one step.
template <int kRows, typename T>
void StepTile(const Walk<T>& walk, int first, int begin, int end) {
  const AttentionState state =
      AttentionState::At(walk.scratch.running, walk.item.rows * walk.job.Group());
  float* const scores = walk.scratch.scores;
  const auto* const queries = reinterpret_cast<const Left<T>*>(walk.scratch.queries);
  Score<kRows>(walk, queries + first * kQueryStride, begin, end, scores);
  const int padded = (end - begin + static_cast<int>(kLanes) - 1) / static_cast<int>(kLanes) *
                     static_cast<int>(kLanes);
  // By what the earlier sum and out are multiplied. All maxima before all weights: the rows' chains
  // of dependent steps run side by side.
  float scales[kRows];
  for (int m = 0; m < kRows; ++m) {
    const int position = walk.Position(first + m);
    float& max = state.max[first + m];
    scales[m] = max;
    max = MaskScores(scores + m * kScoreStride, padded,
                     FirstToken(*walk.job.args, position) - begin, position - begin, max);
  }
  const DF d;
  for (int m = 0; m < kRows; ++m) {
    const float max = state.max[first + m];
    // With nothing visible yet all scores are -inf, and -inf - 0 is still -inf.
    const float base = max == kNoScore ? 0.0f : max;
    scales[m] = hn::GetLane(Exp2(d, hn::Set(d, scales[m] - base)));
    float& sum = state.sum[first + m];
    sum = sum * scales[m] + Weigh<T>(scores + m * kScoreStride, padded, base);
  }
  AddValues<kRows>(walk, reinterpret_cast<const Left<T>*>(scores), begin, end, scales,
                   state.out + static_cast<size_t>(first) * walk.geometry.head_dim);
}

template <typename T>
using StepFunction = void (*)(const Walk<T>&, int, int, int);

template <typename T, size_t... kIndex>
StepFunction<T> StepFor(int rows, std::index_sequence<kIndex...>) {
  static constexpr StepFunction<T> kFunctions[] = {StepTile<static_cast<int>(kIndex) + 1, T>...};
  return kFunctions[rows - 1];
}

void Clear(AttentionState state, int queries, int head_dim) {
  std::fill_n(state.max, queries, kNoScore);
  std::fill_n(state.sum, queries, 0.0f);
  std::fill_n(state.out, static_cast<size_t>(queries) * head_dim, 0.0f);
}

// total = total and part, whose tokens follow.
void Merge(AttentionState part, AttentionState total, int queries, int head_dim) {
  const DF d;
  const size_t dims = static_cast<size_t>(head_dim);
  for (int q = 0; q < queries; ++q) {
    const float max = std::max(total.max[q], part.max[q]);
    const float base = max == kNoScore ? 0.0f : max;
    const float a = hn::GetLane(Exp2(d, hn::Set(d, total.max[q] - base)));
    const float b = hn::GetLane(Exp2(d, hn::Set(d, part.max[q] - base)));
    total.max[q] = max;
    total.sum[q] = total.sum[q] * a + part.sum[q] * b;
    float* const out = total.out + q * dims;
    const float* const more = part.out + q * dims;
    size_t i = 0;
    for (; i + kLanes <= dims; i += kLanes) {
      const auto kept = hn::Mul(hn::LoadU(d, out + i), hn::Set(d, a));
      hn::StoreU(hn::MulAdd(hn::LoadU(d, more + i), hn::Set(d, b), kept), d, out + i);
    }
    for (; i < dims; ++i) out[i] = more[i] * b + out[i] * a;
  }
}

// Divides by the sums and writes the item's rows.
void Finish(const AttentionJob& job, const AttentionItem& item, AttentionState state) {
  const AttentionArgs& args = *job.args;
  const DF d;
  const int group = job.Group();
  const size_t dims = static_cast<size_t>(args.geometry.head_dim);
  const SequenceRows& sequence = job.layout->sequences[item.sequence];
  const auto write = [&](auto* to, const float* from, float scale) HWY_ATTR {
    size_t i = 0;
    for (; i + kLanes <= dims; i += kLanes) {
      StoreAs(d, hn::Mul(hn::LoadU(d, from + i), hn::Set(d, scale)), to + i);
    }
    for (; i < dims; ++i) StoreScalar(from[i] * scale, to + i);
  };
  for (int q = 0; q < item.rows * group; ++q) {
    const int row = sequence.row_begin + item.first_row + q / group;
    const int head = item.kv_head * group + q % group;
    const size_t at = (static_cast<size_t>(row) * args.heads + head) * dims;
    const float scale = 1.0f / state.sum[q];
    if (args.out_type == DType::kBF16) {
      write(static_cast<uint16_t*>(args.out) + at, state.out + q * dims, scale);
    } else {
      write(static_cast<float*>(args.out) + at, state.out + q * dims, scale);
    }
  }
}

template <typename T>
void RunItemAs(const AttentionJob& job, const AttentionItem& item,
               const AttentionScratch& scratch) {
  const AttentionArgs& args = *job.args;
  const KvGeometry& geometry = args.geometry;
  const SequenceRows& sequence = job.layout->sequences[item.sequence];
  const Walk<T> walk{job, item, scratch, sequence, geometry};
  const int group = job.Group();
  const int queries = item.rows * group;
  const int dims = geometry.head_dim;

  // Scores are kept in units of log2, so that weights are powers of two.
  const float scale = args.scale * 1.44269504088896341f;
  const size_t width = static_cast<size_t>(args.heads + 2 * geometry.kv_heads) * dims;
  for (int q = 0; q < queries; ++q) {
    const float* const from = args.qkv + (sequence.row_begin + item.first_row + q / group) * width +
                              (item.kv_head * group + q % group) * static_cast<size_t>(dims);
    float* const to = scratch.queries + q * kQueryStride;
    if constexpr (kPerLeft<T> == 2) {
      auto* const halves = reinterpret_cast<uint16_t*>(to);
      for (int i = 0; i < dims; ++i) halves[i] = Bf16FromFloat(from[i] * scale);
    } else {
      for (int i = 0; i < dims; ++i) to[i] = from[i] * scale;
    }
  }

  const AttentionState running = AttentionState::At(scratch.running, queries);
  const AttentionState total = AttentionState::At(scratch.total, queries);
  const int first_position = sequence.kv_begin + item.first_row;
  const int first_token = FirstToken(args, first_position);
  const int end = first_position + item.rows;
  const int tiles = (queries + kMaxTileRows - 1) / kMaxTileRows;
  const int first_split = item.split >= 0 ? item.split : first_token / kSplit;
  const int last_split = item.split >= 0 ? item.split : (end - 1) / kSplit;

  if (item.split < 0) Clear(total, queries, dims);
  for (int split = first_split; split <= last_split; ++split) {
    Clear(running, queries, dims);
    const int split_end = std::min(end, (split + 1) * kSplit);
    for (int begin = std::max(split * kSplit, first_token / kStep * kStep); begin < split_end;
         begin += kStep) {
      for (int t = 0; t < tiles; ++t) {
        const int first = queries * t / tiles;
        const int count = queries * (t + 1) / tiles - first;
        // The tile's last query bounds what any of them sees.
        const int tile_end =
            std::min({begin + kStep, split_end, walk.Position(first + count - 1) + 1});
        if (tile_end <= begin) continue;
        StepFor<T>(count, std::make_index_sequence<kMaxTileRows>())(walk, first, begin, tile_end);
      }
    }
    if (item.split < 0) Merge(running, total, queries, dims);
  }
  if (item.split >= 0) {
    std::copy_n(scratch.running, AttentionState::Floats(queries, dims), item.partial);
  } else {
    Finish(job, item, total);
  }
}

void RunItem(const AttentionJob& job, const AttentionItem& item, const AttentionScratch& scratch) {
  if (job.args->geometry.dtype == DType::kBF16) {
    RunItemAs<uint16_t>(job, item, scratch);
  } else {
    RunItemAs<float>(job, item, scratch);
  }
}

// The rest of an item whose splits [0, count) are done.
void MergeSplits(const AttentionJob& job, const AttentionItem* splits, int count,
                 const AttentionScratch& scratch) {
  const int queries = splits[0].rows * job.Group();
  const int dims = job.args->geometry.head_dim;
  const AttentionState total = AttentionState::At(scratch.total, queries);
  Clear(total, queries, dims);
  for (int s = 0; s < count; ++s) {
    Merge(AttentionState::At(splits[s].partial, queries), total, queries, dims);
  }
  Finish(job, splits[0], total);
}

}  // namespace carryover::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carryover::cpu {

HWY_EXPORT(RunItem);
HWY_EXPORT(MergeSplits);

namespace {

constexpr int kScoreRows = 12;  // at least kMaxTileRows of every target

// Calls visit(item) for every item, splits left whole. Rows late in a sequence cost most and come
// first, so that threads end together.
template <typename Visit>
void ForItems(const AttentionJob& job, const Visit& visit) {
  const int rows_per_item = std::max(1, kQueriesPerItem / job.Group());
  const absl::Span<const SequenceRows> sequences = job.layout->sequences;
  for (int s = 0; s < static_cast<int>(sequences.size()); ++s) {
    const int rows = sequences[s].row_count;
    const int cuts = (rows + rows_per_item - 1) / rows_per_item;
    for (int c = cuts - 1; c >= 0; --c) {
      const int first = rows * c / cuts;
      for (int h = 0; h < job.args->geometry.kv_heads; ++h) {
        visit(AttentionItem{s, h, first, rows * (c + 1) / cuts - first, -1, nullptr});
      }
    }
  }
}

struct SplitRange {
  int first;
  int last;
};
SplitRange SplitsOf(const AttentionJob& job, const AttentionItem& item) {
  const int begin = job.layout->sequences[item.sequence].kv_begin + item.first_row;
  return {FirstToken(*job.args, begin) / kSplit, (begin + item.rows - 1) / kSplit};
}

}  // namespace

void Attention(Backend* backend, const AttentionArgs& args) {
  const KvGeometry& g = args.geometry;
  if (absl::Status status = CheckGeometry(g, args.heads, args.layer); !status.ok()) {
    backend->status.Update(status);
    return;
  }
  if (args.heads == 0) {
    backend->status.Update(absl::InvalidArgumentError("attention without heads"));
    return;
  }
  ThreadPool& pool = backend->pool;
  const AttentionJob job{&args, &backend->layout};
  const int max_queries = std::max(1, kQueriesPerItem / job.Group()) * job.Group();

  int whole_items = 0;
  int split_items = 0;
  size_t partial_floats = 0;
  ForItems(job, [&](const AttentionItem& item) {
    const SplitRange range = SplitsOf(job, item);
    ++whole_items;
    split_items += range.last - range.first + 1;
    partial_floats += static_cast<size_t>(range.last - range.first + 1) *
                      AttentionState::Floats(item.rows * job.Group(), g.head_dim);
  });
  if (whole_items == 0) return;
  // Too few whole items would leave threads idle at the end.
  const bool split =
      pool.threads() > 1 && whole_items < 4 * pool.threads() && split_items > whole_items;

  const size_t state_floats = AttentionState::Floats(max_queries, g.head_dim);
  const size_t score_floats = kScoreRows * kScoreStride;
  const size_t thread_floats =
      (max_queries * kQueryStride + score_floats + 2 * state_floats + 63) / 16 * 16;
  const int item_count = split ? split_items : whole_items;
  float* const memory =
      backend->attention.Get<float>(thread_floats * pool.threads(), &backend->status);
  auto* const items = backend->items.Get<AttentionItem>(item_count, &backend->status);
  float* const partials =
      split ? backend->partials.Get<float>(partial_floats, &backend->status) : nullptr;
  if (memory == nullptr || items == nullptr || (split && partials == nullptr)) return;
  const auto scratch_of = [&](int thread) {
    float* const p = memory + thread_floats * thread;
    float* const scores = p + max_queries * kQueryStride;
    float* const running = scores + score_floats;
    return AttentionScratch{p, scores, running, running + state_floats};
  };

  int count = 0;
  float* partial = partials;
  ForItems(job, [&](const AttentionItem& item) {
    if (!split) {
      items[count++] = item;
      return;
    }
    const SplitRange range = SplitsOf(job, item);
    for (int s = range.first; s <= range.last; ++s) {
      items[count] = item;
      items[count].split = s;
      items[count].partial = partial;
      partial += AttentionState::Floats(item.rows * job.Group(), g.head_dim);
      ++count;
    }
  });
  pool.Run(count, [&](int part, int thread) {
    HWY_DYNAMIC_DISPATCH(RunItem)(job, items[part], scratch_of(thread));
  });
  if (!split) return;
  for (int begin = 0; begin < count;) {
    const SplitRange range = SplitsOf(job, items[begin]);
    const int splits = range.last - range.first + 1;
    HWY_DYNAMIC_DISPATCH(MergeSplits)(job, items + begin, splits, scratch_of(0));
    begin += splits;
  }
}

}  // namespace carryover::cpu
#endif  // HWY_ONCE
