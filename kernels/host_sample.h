// Chooses tokens from logits in host memory: the rules that every backend's sample op follows.
// Nothing here keeps state; any thread may call.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/shapes.h"

namespace carryover {

// The most likely token, the lowest id among equals. NaN never wins, and 0 where nothing does.
int32_t ArgMax(absl::Span<const float> logits);

// In this order: edits; temperature; top-k; top-p; min-p. logits (vocab) are as before afterwards.
int32_t SampleRow(absl::Span<float> logits, const SampleSpec& spec,
                  absl::Span<const LogitEdit> edits);

// Where a token stands in a row.
struct RankedToken {
  double log_sum_exp = 0;    // ln P(i) = logits[i] - log_sum_exp
  int rank = 0;              // 1: the most likely; the lower id first among equals
  std::vector<int32_t> top;  // the most likely ids, most likely first
};
RankedToken RankToken(absl::Span<const float> logits, int32_t token, int top);

}  // namespace carryover
