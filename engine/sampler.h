// What the next token of one choice is chosen by; kernels/host_sample.h has the maths.
// Deterministic: the same logits, parameters, seed, choice index and position give the same token,
// whatever runs beside it.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "engine/request.h"
#include "engine/tokenizer.h"
#include "kernels/shapes.h"

namespace carryover {

// State of one choice. Engine thread only.
class Sampler {
 public:
  // seed is params.seed, or what the engine drew. stop_tokens are never chosen before
  // params.min_tokens tokens.
  Sampler(const SamplingParams& params, uint64_t seed, int choice, absl::Span<const int32_t> prompt,
          const std::vector<int32_t>& stop_tokens);

  // How to choose the token behind `position` generated ones, without a row. Appends the edits:
  // logit bias; repetition penalty (Keskar et al. 2019, over prompt and output), then presence and
  // frequency penalties (OpenAI's, over the output); min_tokens.
  SampleSpec Spec(int position, std::vector<LogitEdit>* edits) const;
  // Chooses from logits (vocab) in host memory, which are as before afterwards.
  int32_t Sample(absl::Span<float> logits, int position) const;

  // Tells the penalties what was chosen.
  void Accept(int32_t token);

 private:
  // A token whose logit may be edited.
  struct Edited {
    int32_t token = 0;
    float bias = 0;
    bool stop = false;
    bool seen = false;         // in the prompt or the output, where a penalty is on
    int32_t output_count = 0;  // in the output, where a penalty is on
  };
  Edited* Find(int32_t token);  // or makes it

  const SamplingParams params_;
  const uint64_t seed_;
  const int choice_;
  std::vector<Edited> edited_;  // no token twice
  std::vector<int32_t> index_;  // (largest token in edited_ + 1): index in edited_ + 1, or 0
};

// A uniform number in [0, 1) from a counter-based generator (SplitMix64 finaliser, Steele et al.
// 2014): random access by position, so that preemption and batching change nothing.
double UniformAt(uint64_t seed, int choice, int position);

// Log-softmax of raw logits at `chosen` and at the `top` most likely tokens; ties by lower id.
PositionLogprobs MakeLogprobs(absl::Span<const float> logits, int32_t chosen, int top,
                              const Tokenizer& tokenizer);
// The same, as the sample op found it.
PositionLogprobs MakeLogprobs(const SampledToken& sampled, const Tokenizer& tokenizer);

}  // namespace carryover
