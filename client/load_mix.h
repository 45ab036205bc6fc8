// The prompts of a load test: a prefix that several requests share, then a suffix of the request's
// own. Everything follows from the seed, so that two runs send the same.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace carryover {

struct MixOptions {
  int prefixes = 1;
  int prefix_tokens = 0;  // of each; 0: nothing is shared
  int suffix_tokens = 32;
  uint64_t seed = 0;
};

class PromptMix {
 public:
  // Of random token ids from low to high - 1. REQUIRES: low < high.
  static PromptMix Random(const MixOptions& options, int32_t low, int32_t high);
  // Of a real text's tokens: each prefix is another part of it. INVALID_ARGUMENT where the text is
  // too short for that.
  static absl::StatusOr<PromptMix> FromText(const MixOptions& options, std::vector<int32_t> text);

  // The prompt of request `index`; it has prefix index mod prefixes. Warm-up requests have negative
  // indices.
  std::vector<int32_t> Prompt(int64_t index) const;

 private:
  explicit PromptMix(const MixOptions& options) : options_(options) {}
  int32_t Token(uint64_t random) const;

  MixOptions options_;
  int32_t low_ = 0;
  int32_t high_ = 1;
  std::vector<int32_t> text_;  // empty: random ids
};

// Numbers from a seed and a position, without a state: the same on every machine.
uint64_t MixBits(uint64_t seed, uint64_t position);

// Seconds from the run's start at which `count` requests arrive, as a Poisson process of `rate` a
// second, the first at once.
std::vector<double> PoissonArrivals(double rate, int64_t count, uint64_t seed);

}  // namespace carryover
