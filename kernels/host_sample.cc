#include "kernels/host_sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace carryover {
namespace {

// More likely first; equal logits by id, so that the order is total.
struct ByLogit {
  absl::Span<const float> logits;
  bool operator()(int32_t a, int32_t b) const {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  }
};

int32_t Draw(absl::Span<const float> logits, const SampleSpec& spec) {
  const int32_t best = ArgMax(logits);
  const double top = logits[best];
  if (!std::isfinite(top)) return best;
  const double inverse = 1.0 / spec.temperature;
  const auto weight = [&](int32_t token) {
    const double w = std::exp((logits[token] - top) * inverse);
    return w >= 0 ? w : 0.0;  // NaN weighs nothing
  };

  // min-p compares with the most likely token, so it can cut first: what it removes is the tail
  // that top-k and top-p would have to sort.
  const int vocab = static_cast<int>(logits.size());
  const bool ordered = spec.top_p < 1 || (spec.top_k > 0 && spec.top_k < vocab);
  if (!ordered) {
    double total = 0;
    for (int32_t i = 0; i < vocab; ++i) {
      const double w = weight(i);
      if (w >= spec.min_p) total += w;
    }
    double left = spec.uniform * total;
    int32_t last = best;
    for (int32_t i = 0; i < vocab; ++i) {
      const double w = weight(i);
      if (w < spec.min_p || w == 0) continue;
      last = i;
      left -= w;
      if (left < 0) return i;
    }
    return last;  // rounding left a sliver
  }

  std::vector<int32_t> order(vocab);
  std::iota(order.begin(), order.end(), 0);
  size_t kept = spec.top_k > 0 ? std::min(spec.top_k, vocab) : vocab;
  std::vector<double> weights;
  if (kept < order.size()) {
    std::nth_element(order.begin(), order.begin() + kept, order.end(), ByLogit{logits});
    order.resize(kept);
  }
  double total = 0;
  for (int32_t token : order) total += weight(token);
  // The nucleus (Holtzman et al. 2020): the fewest tokens that together reach top_p. Sorted in
  // growing parts, since it is mostly small.
  const double target = spec.top_p * total;
  double mass = 0;
  size_t sorted = 0, used = 0;
  for (size_t part = 64; used < order.size(); part *= 8) {
    const size_t end = std::min(order.size(), sorted + part);
    std::partial_sort(order.begin() + sorted, order.begin() + end, order.end(), ByLogit{logits});
    sorted = end;
    bool full = false;
    while (used < sorted && !full) {
      const double w = weight(order[used]);
      if (used > 0 && (w < spec.min_p || (spec.top_p < 1 && mass >= target))) {
        full = true;
      } else {
        mass += w;
        weights.push_back(w);
        ++used;
      }
    }
    if (full) break;
  }
  double left = spec.uniform * mass;
  for (size_t i = 0; i < used; ++i) {
    left -= weights[i];
    if (left < 0) return order[i];
  }
  return order[used - 1];
}

}  // namespace

int32_t ArgMax(absl::Span<const float> logits) {
  int32_t best = 0;
  float best_logit = -std::numeric_limits<float>::infinity();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] > best_logit) {
      best_logit = logits[i];
      best = static_cast<int32_t>(i);
    }
  }
  return best;
}

int32_t SampleRow(absl::Span<float> logits, const SampleSpec& spec,
                  absl::Span<const LogitEdit> edits) {
  std::vector<float> saved(edits.size());
  for (size_t i = 0; i < edits.size(); ++i) {
    const LogitEdit& edit = edits[i];
    float& logit = logits[edit.token];
    saved[i] = logit;
    logit += edit.bias;
    logit = logit > 0 ? logit / edit.repetition : logit * edit.repetition;
    logit -= edit.minus;
  }
  const int32_t token = spec.temperature == 0 ? ArgMax(logits) : Draw(logits, spec);
  for (size_t i = 0; i < edits.size(); ++i) logits[edits[i].token] = saved[i];
  return token;
}

RankedToken RankToken(absl::Span<const float> logits, int32_t token, int top) {
  const double max = logits[ArgMax(logits)];
  double sum = 0;
  for (float logit : logits) sum += std::exp(logit - max);
  RankedToken out;
  out.log_sum_exp = max + std::log(sum);
  const ByLogit before{logits};
  out.rank = 1;
  for (int32_t i = 0; i < static_cast<int32_t>(logits.size()); ++i) {
    out.rank += before(i, token) ? 1 : 0;
  }
  if (top > 0) {
    out.top.resize(logits.size());
    std::iota(out.top.begin(), out.top.end(), 0);
    const size_t count = std::min<size_t>(top, out.top.size());
    std::partial_sort(out.top.begin(), out.top.begin() + count, out.top.end(), before);
    out.top.resize(count);
  }
  return out;
}

}  // namespace carryover
