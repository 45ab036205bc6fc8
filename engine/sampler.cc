#include "engine/sampler.h"

#include <limits>

#include "kernels/host_sample.h"

namespace carryover {
namespace {

uint64_t Mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

bool HasPenalty(const SamplingParams& params) {
  return params.repetition_penalty != 1 || params.presence_penalty != 0 ||
         params.frequency_penalty != 0;
}

TokenLogprob Describe(int32_t token, int rank, float logprob, const Tokenizer& tokenizer) {
  TokenLogprob out;
  out.token = token;
  out.text = tokenizer.Decode({token}, /*skip_special=*/false);
  out.logprob = logprob;
  out.rank = rank;
  return out;
}

}  // namespace

double UniformAt(uint64_t seed, int choice, int position) {
  const uint64_t stream = Mix(seed + 0x9E3779B97F4A7C15ull * (static_cast<uint64_t>(choice) + 1));
  const uint64_t bits = Mix(stream + 0x9E3779B97F4A7C15ull * (static_cast<uint64_t>(position) + 1));
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

Sampler::Sampler(const SamplingParams& params, uint64_t seed, int choice,
                 absl::Span<const int32_t> prompt, const std::vector<int32_t>& stop_tokens)
    : params_(params), seed_(seed), choice_(choice) {
  for (const auto& [token, bias] : params_.logit_bias) Find(token)->bias += bias;
  if (params_.min_tokens > 0) {
    for (int32_t token : stop_tokens) Find(token)->stop = true;
  }
  if (!HasPenalty(params_)) return;
  for (int32_t token : prompt) Find(token)->seen = true;
}

Sampler::Edited* Sampler::Find(int32_t token) {
  if (static_cast<size_t>(token) >= index_.size()) index_.resize(token + 1, 0);
  int32_t& index = index_[token];
  if (index == 0) {
    edited_.push_back({.token = token});
    index = static_cast<int32_t>(edited_.size());
  }
  return &edited_[index - 1];
}

void Sampler::Accept(int32_t token) {
  if (!HasPenalty(params_)) return;
  Edited* const edited = Find(token);
  edited->seen = true;
  ++edited->output_count;
}

SampleSpec Sampler::Spec(int position, std::vector<LogitEdit>* edits) const {
  SampleSpec spec;
  spec.temperature = params_.temperature;
  spec.top_k = params_.top_k;
  spec.top_p = params_.top_p;
  spec.min_p = params_.min_p;
  spec.logprobs = params_.logprobs.value_or(-1);
  if (params_.temperature != 0) spec.uniform = UniformAt(seed_, choice_, position);
  spec.edit_begin = static_cast<int32_t>(edits->size());
  spec.edit_count = static_cast<int32_t>(edited_.size());
  for (const Edited& edited : edited_) {
    LogitEdit edit{.token = edited.token, .bias = edited.bias, .repetition = 1, .minus = 0};
    if (edited.stop && position < params_.min_tokens) {
      edit.bias = -std::numeric_limits<float>::infinity();
    }
    if (edited.seen) edit.repetition = params_.repetition_penalty;
    if (edited.output_count > 0) {
      edit.minus = params_.presence_penalty + params_.frequency_penalty * edited.output_count;
    }
    edits->push_back(edit);
  }
  return spec;
}

int32_t Sampler::Sample(absl::Span<float> logits, int position) const {
  std::vector<LogitEdit> edits;
  const SampleSpec spec = Spec(position, &edits);
  return SampleRow(logits, spec, edits);
}

PositionLogprobs MakeLogprobs(absl::Span<const float> logits, int32_t chosen, int top,
                              const Tokenizer& tokenizer) {
  const RankedToken ranked = RankToken(logits, chosen, top);
  const auto describe = [&](int32_t token, int rank) {
    return Describe(token, rank, static_cast<float>(logits[token] - ranked.log_sum_exp), tokenizer);
  };
  PositionLogprobs out;
  out.chosen = describe(chosen, ranked.rank);
  for (size_t i = 0; i < ranked.top.size(); ++i) {
    out.top.push_back(describe(ranked.top[i], static_cast<int>(i) + 1));
  }
  return out;
}

PositionLogprobs MakeLogprobs(const SampledToken& sampled, const Tokenizer& tokenizer) {
  PositionLogprobs out;
  out.chosen = Describe(sampled.token, sampled.rank, sampled.logprob, tokenizer);
  for (int i = 0; i < sampled.top_count; ++i) {
    out.top.push_back(Describe(sampled.top[i], i + 1, sampled.top_logprob[i], tokenizer));
  }
  return out;
}

}  // namespace carryover
