// Chooses the next token of one choice from its logits. Deterministic: the same logits, parameters,
// seed, choice index and position give the same token, whatever runs beside it.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "engine/request.h"
#include "engine/tokenizer.h"

namespace carryover {

// How often each token stands in the prompt and in the output, for the penalties.
struct TokenCount {
  int32_t token = 0;
  int32_t output_count = 0;  // 0: only in the prompt
};

// State of one choice. Engine thread only.
class Sampler {
 public:
  // seed is params.seed, or what the engine drew. stop_tokens are never chosen before
  // params.min_tokens tokens.
  Sampler(const SamplingParams& params, uint64_t seed, int choice, absl::Span<const int32_t> prompt,
          std::vector<int32_t> stop_tokens);

  // In this order: logit bias; repetition penalty (Keskar et al. 2019, over prompt and output),
  // then presence and frequency penalties (OpenAI's, over the output); min_tokens; temperature;
  // top-k; top-p; min-p. position counts the generated tokens so far. logits (vocab) are edited in
  // place.
  int32_t Sample(absl::Span<float> logits, int position);

  // Tells the penalties what was chosen.
  void Accept(int32_t token);

 private:
  void EditLogits(absl::Span<float> logits, int position) const;
  int32_t Draw(absl::Span<const float> logits, double uniform) const;

  const SamplingParams params_;
  const uint64_t seed_;
  const int choice_;
  const std::vector<int32_t> stop_tokens_;
  std::vector<TokenCount> counts_;    // empty when no penalty is on
  std::vector<int32_t> count_index_;  // (largest token seen + 1): index in counts_ + 1, or 0
};

// A uniform number in [0, 1) from a counter-based generator (SplitMix64 finaliser, Steele et al.
// 2014): random access by position, so that preemption and batching change nothing.
double UniformAt(uint64_t seed, int choice, int position);

// Log-softmax of raw logits at `chosen` and at the `top` most likely tokens; ties by lower id.
PositionLogprobs MakeLogprobs(absl::Span<const float> logits, int32_t chosen, int top,
                              const Tokenizer& tokenizer);

// The most likely token, the lowest id among equals. NaN never wins.
int32_t ArgMax(absl::Span<const float> logits);

}  // namespace carryover
