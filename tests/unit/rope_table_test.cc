#include "engine/rope_table.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <vector>

namespace carryover {
namespace {

TEST(RopeTable, LinearScalingStretchesEveryWavelength) {
  const std::vector<double> plain = RopeFrequencies({.theta = 10000}, 8);
  const std::vector<double> linear =
      RopeFrequencies({.theta = 10000, .scaling = RopeScaling::kLinear, .factor = 4}, 8);
  ASSERT_EQ(plain.size(), 4u);
  EXPECT_DOUBLE_EQ(plain[0], 1);
  EXPECT_DOUBLE_EQ(plain[1], 0.1);
  for (int i = 0; i < 4; ++i) EXPECT_DOUBLE_EQ(linear[i], plain[i] / 4);
}

TEST(RopeTable, Llama3KeepsShortWavelengthsAndStretchesLongOnes) {
  const RopeConfig rope = {.theta = 500000,
                           .scaling = RopeScaling::kLlama3,
                           .factor = 8,
                           .low_freq_factor = 1,
                           .high_freq_factor = 4,
                           .original_max_positions = 8192};
  const std::vector<double> plain = RopeFrequencies({.theta = 500000}, 128);
  const std::vector<double> scaled = RopeFrequencies(rope, 128);
  int kept = 0, stretched = 0, blended = 0;
  for (int i = 0; i < 64; ++i) {
    const double wavelength = 2 * std::numbers::pi / plain[i];
    if (wavelength < 8192.0 / 4) {
      EXPECT_DOUBLE_EQ(scaled[i], plain[i]);
      ++kept;
    } else if (wavelength > 8192) {
      EXPECT_DOUBLE_EQ(scaled[i], plain[i] / 8);
      ++stretched;
    } else {
      EXPECT_LT(scaled[i], plain[i]);
      EXPECT_GT(scaled[i], plain[i] / 8);
      ++blended;
    }
  }
  EXPECT_GT(kept, 0);
  EXPECT_GT(stretched, 0);
  EXPECT_GT(blended, 0);
}

TEST(RopeTable, HoldsCosinesBeforeSinesFromAnyRowOn) {
  const std::vector<double> frequencies = {1, 0.01};
  const std::vector<float> table = RopeTable(frequencies, 3, 5);
  ASSERT_EQ(table.size(), 8u);
  EXPECT_FLOAT_EQ(table[0], std::cos(3.0));
  EXPECT_FLOAT_EQ(table[1], std::cos(0.03));
  EXPECT_FLOAT_EQ(table[2], std::sin(3.0));
  EXPECT_FLOAT_EQ(table[7], std::sin(0.04));
}

TEST(RopeTable, StaysExactAtFarPositions) {
  const std::vector<double> frequencies = RopeFrequencies({.theta = 10000}, 64);
  const int position = 1000003;
  const std::vector<float> table = RopeTable(frequencies, position, position + 1);
  EXPECT_NEAR(table[5], std::cos(position * std::pow(10000.0L, -10.0L / 64)), 1e-6);
}

}  // namespace
}  // namespace carryover
