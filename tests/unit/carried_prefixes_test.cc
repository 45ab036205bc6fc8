#include "engine/carried_prefixes.h"

#include <gtest/gtest.h>

namespace carryover {
namespace {

Digest Version(uint8_t n) {
  Digest digest{};
  digest[0] = n;
  return digest;
}

class CarriedPrefixesTest : public testing::Test {
 protected:
  void Use(uint32_t slot, int length, int carried, double now = 0, uint8_t version = 1) {
    prefixes_.Used(Version(version), CacheRoot(), {slot, 1}, std::vector<int32_t>(length, slot),
                   carried, now);
  }
  // The first token of the hottest: its slot; -1 when there is none.
  int Take() {
    const auto prefix = prefixes_.TakeHottest();
    return prefix.has_value() ? prefix->tokens[0] : -1;
  }
  CarriedPrefixes prefixes_{4, 1000};
};

TEST_F(CarriedPrefixesTest, WorthIsUsesTimesCarriedTokens) {
  Use(1, 160, 100);
  Use(2, 64, 64);
  Use(2, 64, 64);
  Use(3, 96, 90);
  EXPECT_EQ(Take(), 2);  // 128 tokens saved
  EXPECT_EQ(Take(), 1);
  EXPECT_EQ(Take(), 3);
  EXPECT_EQ(Take(), -1);
  EXPECT_EQ(prefixes_.tokens(), 0);
}

TEST_F(CarriedPrefixesTest, UsesAge) {
  Use(1, 96, 96, 0);
  Use(1, 96, 96, 0);
  Use(1, 96, 96, 0);
  Use(2, 96, 96, CarriedPrefixes::kHalfLife);  // worth two uses of before
  EXPECT_EQ(Take(), 1);
  Use(1, 96, 96, 0);
  Use(1, 96, 96, 0);
  Use(1, 96, 96, 0);
  Use(2, 96, 96, 2 * CarriedPrefixes::kHalfLife);
  EXPECT_EQ(Take(), 2);
}

TEST_F(CarriedPrefixesTest, YearsOfUptimeDoNotOverflow) {
  Use(1, 96, 96, 1e9);
  Use(2, 96, 96, 1e9 + 1);
  Use(2, 96, 96, 1e9 + 2);
  EXPECT_EQ(Take(), 2);
  EXPECT_EQ(Take(), 1);
}

TEST_F(CarriedPrefixesTest, TheLeastWorthMakesRoom) {
  for (uint32_t slot = 1; slot <= 4; ++slot) Use(slot, 96, 10 * static_cast<int>(slot));
  Use(5, 96, 5);  // worth less than any
  EXPECT_EQ(prefixes_.size(), 4);
  Use(6, 96, 25);
  EXPECT_EQ(prefixes_.size(), 4);
  EXPECT_EQ(Take(), 4);
  EXPECT_EQ(Take(), 3);
  EXPECT_EQ(Take(), 6);
  EXPECT_EQ(Take(), 2);
  EXPECT_EQ(Take(), -1);
}

TEST_F(CarriedPrefixesTest, TokensAreBounded) {
  Use(1, 600, 600);
  Use(2, 300, 700);
  Use(3, 500, 900);  // takes the room of the first
  EXPECT_EQ(prefixes_.tokens(), 800);
  Use(4, 1001, 1001);
  EXPECT_EQ(prefixes_.size(), 2);
  EXPECT_EQ(Take(), 3);
  EXPECT_EQ(Take(), 2);
}

TEST_F(CarriedPrefixesTest, VersionsAreKeptApartAndForgotten) {
  Use(1, 96, 96, 0, 1);
  Use(1, 96, 90, 0, 2);
  EXPECT_EQ(prefixes_.size(), 2);
  prefixes_.Forget(Version(1));
  EXPECT_EQ(prefixes_.tokens(), 96);
  const auto left = prefixes_.TakeHottest();
  ASSERT_TRUE(left.has_value());
  EXPECT_EQ(left->target, Version(2));
  EXPECT_EQ(prefixes_.size(), 0);
}

}  // namespace
}  // namespace carryover
