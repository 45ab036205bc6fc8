// Chooses a token a row by the rules of kernels/host_sample.h, without sorting the row. A block a
// row.
//
// Top-k, the nucleus and the draw all ask the same: tokens are in an order, each weighs something;
// which is the first with which the sum reaches a target? A token's place in an order is a number,
// its key. The answer is found by cutting the keys that it may have into eight, again and again,
// with a pass over the row each time. Weights are whole numbers of 2^-40 of the most likely
// token's, so that sums are exact, in whatever order they are added.
#include <math.h>

#include "kernels/cuda/device.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/logit_key.h"

namespace carryover::CARRYOVER_DEVICE {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kParts = 8;
constexpr float kOne = 1099511627776.0f;  // 2^40
constexpr float kLog2E = 1.44269504088896341f;
constexpr Key kEveryKey = ~static_cast<Key>(0);
using Weight = unsigned long long;

struct Scratch {
  Weight weights[kWarps][kParts];
  int counts[kWarps][kParts];
  Weight values[kWarpSize];  // of BlockSum and BlockMax
};

// A row, and what its tokens weigh. The same in all threads.
struct Row {
  const float* logits;
  int vocab;
  float top;     // the largest logit
  float factor;  // a token weighs 2^((logit - top) factor),
  Weight least;  // and nothing where that is less,
  Key last;      // or its logit's key is lower

  __device__ Key LogitKey(int id) const {
    const float logit = logits[id];
    return isnan(logit) ? 0 : MakeKey(logit, id);
  }
  __device__ Weight WeightOf(int id) const {
    const float logit = logits[id];
    if (!(logit > -INFINITY) || LogitKey(id) < last) return 0;
    const auto weight = static_cast<Weight>(FastExp2((logit - top) * factor) * kOne + 0.5f);
    return weight < least ? 0 : weight;
  }
};

// What Select goes by. The keys of all that weighs something are from Lowest to Highest.
struct ByCount {  // the most likely first, all alike
  __device__ static Key Lowest(const Row& /*row*/) { return 1; }
  __device__ static Key Highest(const Row& row) { return MakeKey(row.top, 0); }
  __device__ static Key KeyOf(const Row& row, int id) { return row.LogitKey(id); }
  __device__ static Weight WeightOf(const Row& /*row*/, int /*id*/) { return 1; }
};
struct ByLogit {  // the most likely first
  // 2^-42 of the most likely token's weight is none.
  __device__ static Key Lowest(const Row& row) {
    return Max(row.last, MakeKey(row.top - 42.0f / row.factor, row.vocab));
  }
  __device__ static Key Highest(const Row& row) { return MakeKey(row.top, 0); }
  __device__ static Key KeyOf(const Row& row, int id) { return row.LogitKey(id); }
  __device__ static Weight WeightOf(const Row& row, int id) { return row.WeightOf(id); }
};
struct ById {
  __device__ static Key Lowest(const Row& row) { return MakeKey(0, row.vocab - 1); }
  __device__ static Key Highest(const Row& /*row*/) { return MakeKey(0, 0); }
  __device__ static Key KeyOf(const Row& /*row*/, int id) { return MakeKey(0, id); }
  __device__ static Weight WeightOf(const Row& row, int id) { return row.WeightOf(id); }
};

__device__ Weight Total(const Row& row, Scratch* scratch) {
  Weight sum = 0;
  for (int id = static_cast<int>(threadIdx.x); id < row.vocab; id += kThreads) {
    sum += row.WeightOf(id);
  }
  return BlockSum(sum, scratch->values);
}

// The largest key within [low, high] of a token that weighs something; 0 without any.
template <typename Order>
__device__ Key Largest(const Row& row, Key low, Key high, Scratch* scratch) {
  Key best = 0;
  for (int id = static_cast<int>(threadIdx.x); id < row.vocab; id += kThreads) {
    const Key key = Order::KeyOf(row, id);
    if (key < low || key > high || key < best) continue;
    if (Order::WeightOf(row, id) != 0) best = key;
  }
  return BlockMax(best, scratch->values);
}

// The key of the token with which the sum reaches the target. 1 where all together do not.
template <typename Order>
__device__ Key Select(const Row& row, Weight target, Scratch* scratch) {
  Key low = Order::Lowest(row), high = Order::Highest(row);  // it is one of these
  Weight above = 0;        // the sum of what lies above high, less than the target
  int inside = row.vocab;  // at most so many tokens weigh something from low to high
  while (low < high && inside > 1) {
    const Key step = (high - low) / kParts + 1;
    Weight weights[kParts] = {};  // from low + j step on
    int counts[kParts] = {};
    for (int id = static_cast<int>(threadIdx.x); id < row.vocab; id += kThreads) {
      const Key key = Order::KeyOf(row, id);
      if (key < low || key > high) continue;
      const Weight weight = Order::WeightOf(row, id);
      if (weight == 0) continue;
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        const bool in = key - low >= static_cast<Key>(j) * step;
        weights[j] += in ? weight : 0;
        counts[j] += in ? 1 : 0;
      }
    }
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      weights[j] = WarpSum(weights[j]);
      counts[j] = WarpSum(counts[j]);
      if (LaneId() == 0) {
        scratch->weights[WarpId()][j] = weights[j];
        scratch->counts[WarpId()][j] = counts[j];
      }
    }
    SyncThreads();
    // The last part from which on the sum is enough, and what lies above it.
    int part = kParts, count = 0, count_above = 0;
    Weight sum = 0, sum_above = 0;
    do {
      --part;
      sum_above = sum;
      count_above = count;
      sum = 0;
      count = 0;
      for (int w = 0; w < kWarps; ++w) {
        sum += scratch->weights[w][part];
        count += scratch->counts[w][part];
      }
    } while (above + sum < target && part > 0);
    SyncThreads();
    if (above + sum < target) return 1;
    above += sum_above;
    inside = count - count_above;
    if (part + 1 < kParts) high = Min(high, low + static_cast<Key>(part + 1) * step - 1);
    low += static_cast<Key>(part) * step;
  }
  return low == high ? low : Largest<Order>(row, low, high, scratch);
}

__device__ int Draw(Row row, const SampleSpec& spec, Scratch* scratch) {
  const bool few = spec.top_k > 0 && spec.top_k < row.vocab;
  if (few) row.last = Select<ByCount>(row, static_cast<Weight>(spec.top_k), scratch);
  if (spec.top_p < 1) {
    const double target =
        static_cast<double>(spec.top_p) * static_cast<double>(Total(row, scratch));
    row.last = Select<ByLogit>(row, static_cast<Weight>(ceil(target)), scratch);
  }
  row.least = static_cast<Weight>(spec.min_p * kOne);
  const Weight total = Total(row, scratch);
  const Weight target =
      Min(static_cast<Weight>(spec.uniform * static_cast<double>(total)) + 1, total);
  return IdOf(few || spec.top_p < 1 ? Select<ByLogit>(row, target, scratch)
                                    : Select<ById>(row, target, scratch));
}

// The rank of the chosen token, and the largest logits.
__device__ void Rank(Row row, int wanted, SampledToken* out, Scratch* scratch) {
  const float chosen = row.logits[out->token];
  int before = 0, broken = 0;
  for (int id = static_cast<int>(threadIdx.x); id < row.vocab; id += kThreads) {
    const float logit = row.logits[id];
    before += (logit != chosen ? logit > chosen : id < out->token) ? 1 : 0;
    broken |= isnan(logit) ? 1 : 0;
  }
  before = BlockSum(before, reinterpret_cast<int*>(scratch->values));
  broken = BlockMax(broken, reinterpret_cast<int*>(scratch->values));
  row.factor = kLog2E;
  double log_sum_exp = static_cast<double>(NAN);
  if (broken == 0 && isfinite(row.top)) {
    const double total = static_cast<double>(Total(row, scratch));
    log_sum_exp = static_cast<double>(row.top) + log(total / static_cast<double>(kOne));
  }
  const auto logprob = [&](float logit) {
    return static_cast<float>(static_cast<double>(logit) - log_sum_exp);
  };
  // The largest of all threads' best ones, again and again; each time one thread looks for its next
  // best.
  Key last = kEveryKey, best = 0;
  bool look = true;
  int count = 0;
  for (; count < wanted && count < row.vocab; ++count) {
    if (look) {
      best = 0;
      for (int id = static_cast<int>(threadIdx.x); id < row.vocab; id += kThreads) {
        const Key key = row.LogitKey(id);
        if (key < last && key > best) best = key;
      }
    }
    const Key winner = BlockMax(best, scratch->values);
    if (winner == 0) break;
    look = winner == best;
    if (look) {
      last = winner;
      out->top[count] = IdOf(winner);
      out->top_logprob[count] = logprob(row.logits[IdOf(winner)]);
    }
  }
  if (threadIdx.x != 0) return;
  out->rank = before + 1;
  out->logprob = logprob(chosen);
  out->top_count = count;
}

// The row's top and the token that it is of: 0 where no logit is a number over -inf.
__device__ int FindTop(Row* row, Scratch* scratch) {
  Key best = 0;
  for (int id = static_cast<int>(threadIdx.x); id < row->vocab; id += kThreads) {
    if (row->logits[id] > -INFINITY) best = Max(best, row->LogitKey(id));
  }
  best = BlockMax(best, scratch->values);
  row->top = best == 0 ? -INFINITY : row->logits[IdOf(best)];
  return best == 0 ? 0 : IdOf(best);
}

__global__ void __launch_bounds__(kThreads) SampleRows(SampleLaunch args) {
  auto* const scratch = DynamicShared<Scratch>();
  const SampleSpec spec = args.rows[blockIdx.x];
  SampledToken* const out = args.out + blockIdx.x;
  float* const logits = args.logits + static_cast<int64_t>(spec.row) * args.vocab;
  const LogitEdit* const edits = args.edits + spec.edit_begin;
  float* const saved = args.saved + spec.edit_begin;
  for (int i = static_cast<int>(threadIdx.x); i < spec.edit_count; i += kThreads) {
    const LogitEdit edit = edits[i];
    float logit = logits[edit.token];
    saved[i] = logit;
    logit += edit.bias;
    logit = logit > 0 ? logit / edit.repetition : logit * edit.repetition;
    logits[edit.token] = logit - edit.minus;
  }
  SyncThreads();
  Row row = {logits, args.vocab, 0, 0, 0, 0};
  int token = FindTop(&row, scratch);
  if (spec.temperature != 0 && isfinite(row.top)) {
    row.factor = Min(kLog2E / spec.temperature, 1e30f);  // times 0 is still 0
    token = Draw(row, spec, scratch);
  }
  if (threadIdx.x == 0) out->token = token;
  SyncThreads();
  for (int i = static_cast<int>(threadIdx.x); i < spec.edit_count; i += kThreads) {
    logits[edits[i].token] = saved[i];
  }
  SyncThreads();
  if (spec.logprobs < 0) return;
  if (spec.edit_count > 0) FindTop(&row, scratch);
  Rank(row, spec.logprobs, out, scratch);
}

}  // namespace

void LaunchSample(const SampleLaunch& args, cudaStream_t stream) {
  if (args.count <= 0) return;
  Launch(SampleRows, {static_cast<unsigned>(args.count)}, kThreads, sizeof(Scratch), stream, args);
}

}  // namespace carryover::CARRYOVER_DEVICE
