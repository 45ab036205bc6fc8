#include "engine/carry_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace carryover {
namespace {

using testing::HasSubstr;

TEST(CarryPlanTest, EveryNameIsItsPlansOwn) {
  for (const char* name :
       {"native", "direct", "calibrated", "bottom(1)", "bottom(1024)", "bottom(25%)", "tail(1)",
        "tail(1048576)", "tail(10%)", "tail(100%)", "calibrated+tail(32)", "calibrated+bottom(2)",
        "bottom(2)+tail(5%)", "calibrated+bottom(100%)+tail(64)"}) {
    const auto plan = ParseCarryPlan(name);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(CarryPlanName(*plan), name);
    EXPECT_EQ(plan->carries, std::string(name) != "native");
  }
  const CarryPlan plan = *ParseCarryPlan("calibrated+bottom(3)+tail(10%)");
  EXPECT_TRUE(plan.calibrated);
  EXPECT_EQ(plan.bottom.count, 3);
  EXPECT_EQ(plan.tail.percent, 10);
  EXPECT_EQ(TailName(plan), "tail(10%)");
  EXPECT_EQ(BottomName(plan), "bottom(3)");
}

TEST(CarryPlanTest, OtherNamesAreRefusedWithTheReason) {
  const auto why = [](const std::string& name) {
    const auto plan = ParseCarryPlan(name);
    EXPECT_FALSE(plan.ok()) << name;
    EXPECT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(plan.status().message());
  };
  EXPECT_THAT(why(""), HasSubstr("is empty"));
  EXPECT_FALSE(ParseCarryPlan(absl::string_view()).ok());
  for (const char* name : {"x", "Direct", "direct ", "+", "direct+tail(3)", "native+tail(3)",
                           "tail(3)+", "+tail(3)", "calibrated()", "calibrated(1)"}) {
    EXPECT_THAT(why(name), HasSubstr("is not native, direct")) << name;
  }
  for (const char* name :
       {"tail", "tail()", "tail(0)", "tail(-1)", "tail(+1)", "tail(01)", "tail( 1)", "tail(1",
        "tail1)", "tail(1)x", "tail(1048577)", "tail(99999999999999999999)", "tail(0%)",
        "tail(101%)", "tail(%)", "tail(1.5%)", "tail(1%%)"}) {
    const std::string text = why(name);
    EXPECT_TRUE(text.find("from 1 to 1048576") != std::string::npos ||
                text.find("is not native, direct") != std::string::npos)
        << text;
  }
  EXPECT_THAT(why("bottom(1025)"), HasSubstr("bottom takes a number from 1 to 1024"));
  EXPECT_THAT(why("tail(1)+tail(2)"), HasSubstr("twice"));
  EXPECT_THAT(why("calibrated+calibrated"), HasSubstr("twice"));
  EXPECT_THAT(why("tail(1)+calibrated"), HasSubstr("order"));
  EXPECT_THAT(why("tail(1)+bottom(1)"), HasSubstr("order"));
  EXPECT_THAT(why(std::string(1000, 'a')), HasSubstr("over 64 bytes"));
  EXPECT_LT(why(std::string(1000, 'a')).size(), 200u);
  EXPECT_THAT(why("a\n\x01"), HasSubstr("a\\n\\x01"));
}

TEST(CarryPlanTest, SharesAreRoundedUpAndNeverMoreThanThereIs) {
  EXPECT_EQ(ParseCarryPlan("tail(1)")->TailBlocks(10, 16), 1);
  EXPECT_EQ(ParseCarryPlan("tail(16)")->TailBlocks(10, 16), 1);
  EXPECT_EQ(ParseCarryPlan("tail(17)")->TailBlocks(10, 16), 2);
  EXPECT_EQ(ParseCarryPlan("tail(1048576)")->TailBlocks(10, 16), 10);
  EXPECT_EQ(ParseCarryPlan("tail(1%)")->TailBlocks(10, 16), 1);
  EXPECT_EQ(ParseCarryPlan("tail(10%)")->TailBlocks(10, 16), 1);
  EXPECT_EQ(ParseCarryPlan("tail(11%)")->TailBlocks(10, 16), 2);
  EXPECT_EQ(ParseCarryPlan("tail(100%)")->TailBlocks(1 << 26, 16), 1 << 26);
  EXPECT_EQ(ParseCarryPlan("direct")->TailBlocks(10, 16), 0);
  EXPECT_EQ(ParseCarryPlan("bottom(25%)")->BottomLayers(30), 8);
  EXPECT_EQ(ParseCarryPlan("bottom(100)")->BottomLayers(30), 30);
  EXPECT_EQ(ParseCarryPlan("calibrated")->BottomLayers(30), 0);
}

}  // namespace
}  // namespace carryover
