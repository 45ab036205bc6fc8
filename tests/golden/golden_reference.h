// Reads what make_golden.py wrote. Tests only.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace carryover {

struct GoldenPrompt {
  std::vector<int32_t> tokens;
  int stride = 1;                // of the columns in logits
  std::vector<float> logits;     // (tokens, ceil(vocab / stride))
  std::vector<float> logsumexp;  // (tokens), over all columns
  std::vector<int32_t> top_ids;  // (tokens, k), empty where stride is 1
  std::vector<float> top;        // (tokens, k)
  std::vector<int32_t> greedy;   // empty where no continuation was kept
};

struct GoldenReference {
  double std = 0;  // standard deviation of all logits
  std::vector<GoldenPrompt> prompts;
};

// tests/golden/reference/NAME.safetensors
absl::StatusOr<GoldenReference> LoadGoldenReference(const std::string& name);

}  // namespace carryover
