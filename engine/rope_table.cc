#include "engine/rope_table.h"

#include <cmath>
#include <numbers>

namespace carryover {
namespace {

// Llama 3.1: long wavelengths are stretched by the factor, short ones kept, those between blended.
double Llama3(const RopeConfig& rope, double frequency) {
  const double turns = rope.original_max_positions * frequency / (2 * std::numbers::pi);
  if (turns < rope.low_freq_factor) return frequency / rope.factor;
  if (turns > rope.high_freq_factor) return frequency;
  const double kept =
      (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  return (1 - kept) * frequency / rope.factor + kept * frequency;
}

}  // namespace

std::vector<double> RopeFrequencies(const RopeConfig& rope, int head_dim) {
  std::vector<double> frequencies(head_dim / 2);
  for (int i = 0; i < head_dim / 2; ++i) {
    const double frequency = std::pow(rope.theta, -2.0 * i / head_dim);
    switch (rope.scaling) {
      case RopeScaling::kNone:
        frequencies[i] = frequency;
        break;
      case RopeScaling::kLinear:
        frequencies[i] = frequency / rope.factor;
        break;
      case RopeScaling::kLlama3:
        frequencies[i] = Llama3(rope, frequency);
        break;
    }
  }
  return frequencies;
}

std::vector<float> RopeTable(absl::Span<const double> frequencies, int begin, int end) {
  const size_t half = frequencies.size();
  std::vector<float> table((end - begin) * 2 * half);
  float* row = table.data();
  for (int position = begin; position < end; ++position, row += 2 * half) {
    for (size_t i = 0; i < half; ++i) {
      const double angle = position * frequencies[i];
      row[i] = static_cast<float>(std::cos(angle));
      row[half + i] = static_cast<float>(std::sin(angle));
    }
  }
  return table;
}

}  // namespace carryover
