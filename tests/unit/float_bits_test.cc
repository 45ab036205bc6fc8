#include "engine/float_bits.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace carryover {
namespace {

TEST(FloatBits, ReadsEveryKindOfF16) {
  EXPECT_EQ(FloatFromF16(0x3c00), 1.0f);
  EXPECT_EQ(FloatFromF16(0xc000), -2.0f);
  EXPECT_EQ(FloatFromF16(0x7bff), 65504.0f);
  EXPECT_EQ(FloatFromF16(0x0001), 0x1p-24f);
  EXPECT_EQ(FloatFromF16(0x83ff), -1023 * 0x1p-24f);
  EXPECT_TRUE(std::signbit(FloatFromF16(0x8000)));
  EXPECT_EQ(FloatFromF16(0x7c00), std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(FloatFromF16(0x7e00)));
}

TEST(FloatBits, Bf16RoundsToNearestAndTiesToEven) {
  EXPECT_EQ(Bf16FromFloat(1.0f), 0x3f80);
  EXPECT_EQ(Bf16FromFloat(1.0f + 0x1p-8f), 0x3f80);             // half way, down to even
  EXPECT_EQ(Bf16FromFloat(1.0f + 3 * 0x1p-8f), 0x3f82);         // half way, up to even
  EXPECT_EQ(Bf16FromFloat(1.0f + 0x1p-8f + 0x1p-20f), 0x3f81);  // just above half way
  EXPECT_EQ(Bf16FromFloat(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_TRUE(std::isnan(FloatFromBf16(Bf16FromFloat(std::nanf("1")))));
  for (uint32_t bits = 0; bits < 0x7f80; ++bits) {
    ASSERT_EQ(Bf16FromFloat(FloatFromBf16(bits)), bits);
  }
}

}  // namespace
}  // namespace carryover
