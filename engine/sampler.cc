#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace carryover {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

uint64_t Mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

bool HasPenalty(const SamplingParams& params) {
  return params.repetition_penalty != 1 || params.presence_penalty != 0 ||
         params.frequency_penalty != 0;
}

// More likely first; equal logits by id, so that the order is total.
struct ByLogit {
  absl::Span<const float> logits;
  bool operator()(int32_t a, int32_t b) const {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  }
};

}  // namespace

double UniformAt(uint64_t seed, int choice, int position) {
  const uint64_t stream = Mix(seed + 0x9E3779B97F4A7C15ull * (static_cast<uint64_t>(choice) + 1));
  const uint64_t bits = Mix(stream + 0x9E3779B97F4A7C15ull * (static_cast<uint64_t>(position) + 1));
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

int32_t ArgMax(absl::Span<const float> logits) {
  int32_t best = 0;
  float best_logit = kMinusInfinity;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] > best_logit) {
      best_logit = logits[i];
      best = static_cast<int32_t>(i);
    }
  }
  return best;
}

Sampler::Sampler(const SamplingParams& params, uint64_t seed, int choice,
                 absl::Span<const int32_t> prompt, std::vector<int32_t> stop_tokens)
    : params_(params), seed_(seed), choice_(choice), stop_tokens_(std::move(stop_tokens)) {
  if (!HasPenalty(params_)) return;
  for (int32_t token : prompt) {
    if (static_cast<size_t>(token) >= count_index_.size()) count_index_.resize(token + 1, 0);
    if (count_index_[token] != 0) continue;
    counts_.push_back({token, 0});
    count_index_[token] = static_cast<int32_t>(counts_.size());
  }
}

void Sampler::Accept(int32_t token) {
  if (!HasPenalty(params_)) return;
  if (static_cast<size_t>(token) >= count_index_.size()) count_index_.resize(token + 1, 0);
  int32_t& index = count_index_[token];
  if (index == 0) {
    counts_.push_back({token, 0});
    index = static_cast<int32_t>(counts_.size());
  }
  ++counts_[index - 1].output_count;
}

void Sampler::EditLogits(absl::Span<float> logits, int position) const {
  for (const auto& [token, bias] : params_.logit_bias) logits[token] += bias;
  for (const TokenCount& count : counts_) {
    float& logit = logits[count.token];
    logit = logit > 0 ? logit / params_.repetition_penalty : logit * params_.repetition_penalty;
    if (count.output_count > 0) {
      logit -= params_.presence_penalty + params_.frequency_penalty * count.output_count;
    }
  }
  if (position < params_.min_tokens) {
    for (int32_t token : stop_tokens_) logits[token] = kMinusInfinity;
  }
}

int32_t Sampler::Sample(absl::Span<float> logits, int position) {
  EditLogits(logits, position);
  if (params_.temperature == 0) return ArgMax(logits);
  return Draw(logits, UniformAt(seed_, choice_, position));
}

int32_t Sampler::Draw(absl::Span<const float> logits, double uniform) const {
  const int32_t best = ArgMax(logits);
  const double top = logits[best];
  if (!std::isfinite(top)) return best;
  const double inverse = 1.0 / params_.temperature;
  const auto weight = [&](int32_t token) {
    const double w = std::exp((logits[token] - top) * inverse);
    return w >= 0 ? w : 0.0;  // NaN weighs nothing
  };

  // min-p compares with the most likely token, so it can cut first: what it removes is the tail
  // that top-k and top-p would have to sort.
  const int vocab = static_cast<int>(logits.size());
  const bool ordered = params_.top_p < 1 || (params_.top_k > 0 && params_.top_k < vocab);
  if (!ordered) {
    double total = 0;
    for (int32_t i = 0; i < vocab; ++i) {
      const double w = weight(i);
      if (w >= params_.min_p) total += w;
    }
    double left = uniform * total;
    int32_t last = best;
    for (int32_t i = 0; i < vocab; ++i) {
      const double w = weight(i);
      if (w < params_.min_p || w == 0) continue;
      last = i;
      left -= w;
      if (left < 0) return i;
    }
    return last;  // rounding left a sliver
  }

  std::vector<int32_t> order(vocab);
  std::iota(order.begin(), order.end(), 0);
  size_t kept = params_.top_k > 0 ? std::min(params_.top_k, vocab) : vocab;
  std::vector<double> weights;
  if (kept < order.size()) {
    std::nth_element(order.begin(), order.begin() + kept, order.end(), ByLogit{logits});
    order.resize(kept);
  }
  double total = 0;
  for (int32_t token : order) total += weight(token);
  // The nucleus (Holtzman et al. 2020): the fewest tokens that together reach top_p. Sorted in
  // growing parts, since it is mostly small.
  const double target = params_.top_p * total;
  double mass = 0;
  size_t sorted = 0, used = 0;
  for (size_t part = 64; used < order.size(); part *= 8) {
    const size_t end = std::min(order.size(), sorted + part);
    std::partial_sort(order.begin() + sorted, order.begin() + end, order.end(), ByLogit{logits});
    sorted = end;
    bool full = false;
    while (used < sorted && !full) {
      const double w = weight(order[used]);
      if (used > 0 && (w < params_.min_p || (params_.top_p < 1 && mass >= target))) {
        full = true;
      } else {
        mass += w;
        weights.push_back(w);
        ++used;
      }
    }
    if (full) break;
  }
  double left = uniform * mass;
  for (size_t i = 0; i < used; ++i) {
    left -= weights[i];
    if (left < 0) return order[i];
  }
  return order[used - 1];
}

PositionLogprobs MakeLogprobs(absl::Span<const float> logits, int32_t chosen, int top,
                              const Tokenizer& tokenizer) {
  const double max = logits[ArgMax(logits)];
  double sum = 0;
  for (float logit : logits) sum += std::exp(logit - max);
  const double log_sum = max + std::log(sum);
  const auto describe = [&](int32_t token, int rank) {
    TokenLogprob out;
    out.token = token;
    out.text = tokenizer.Decode({token}, /*skip_special=*/false);
    out.logprob = static_cast<float>(logits[token] - log_sum);
    out.rank = rank;
    return out;
  };
  PositionLogprobs out;
  const ByLogit before{logits};
  int rank = 1;
  for (int32_t i = 0; i < static_cast<int32_t>(logits.size()); ++i) rank += before(i, chosen);
  out.chosen = describe(chosen, rank);
  if (top > 0) {
    std::vector<int32_t> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    const size_t count = std::min<size_t>(top, order.size());
    std::partial_sort(order.begin(), order.begin() + count, order.end(), before);
    for (size_t i = 0; i < count; ++i) {
      out.top.push_back(describe(order[i], static_cast<int>(i) + 1));
    }
  }
  return out;
}

}  // namespace carryover
