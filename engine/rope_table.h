// Rotary position embedding as a table of cosines and sines (Su et al. 2021), with the scalings of
// Llama 3.1 and of linear interpolation. Pure functions.
#pragma once

#include <vector>

#include "absl/types/span.h"
#include "engine/model_config.h"

namespace carryover {

// Radians per token of each pair of a head: (head_dim / 2).
std::vector<double> RopeFrequencies(const RopeConfig& rope, int head_dim);

// Rows begin ... end - 1 of the table that Ops::rope_write reads: (end - begin, 2, head_dim / 2),
// cosines before sines. Angles are computed in double: in float a position of 100,000 is already
// off by some 0.01.
std::vector<float> RopeTable(absl::Span<const double> frequencies, int begin, int end);

}  // namespace carryover
