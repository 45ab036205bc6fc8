// The gate with several plans: which one serves, which one is judged next.
#include <gmock/gmock.h>

#include <optional>
#include <vector>

#include "engine/gate.h"
#include "tests/unit/gate_testing.h"

namespace carryover {
namespace {

using ::testing::HasSubstr;

class GateLadderTest : public GateTest {};

TEST_F(GateLadderTest, TheLadderIsClimbedBeforeACellCloses) {
  GateConfig config = DirectAlone();
  config.ladder = {"direct", "tail(32)"};
  Gate gate(config);
  Feed(&gate, Key(), 1000, 0);
  EXPECT_EQ(gate.Decide(Key()).state, GateState::kOpen);
  Feed(&gate, Key(), 1000, 3);
  EXPECT_EQ(transitions_.back().cause, "next_rung");
  EXPECT_EQ(transitions_.back().cell.plan, "direct");
  EXPECT_THAT(transitions_.back().reason, HasSubstr("next to be proved: tail(32)"));
  EXPECT_EQ(gate.Decide(Key()).state, GateState::kLearning);
  EXPECT_EQ(gate.Decide(Key()).shadow_plan, "tail(32)");
  EXPECT_TRUE(gate.Decide(Key()).other_plans.empty());
  Feed(&gate, Key(), 100, 1, false);  // of "direct", late
  EXPECT_EQ(ReportOf(gate, Key()).samples, 0);
  CellKey tail = Key();
  tail.plan = "tail(32)";
  Feed(&gate, tail, 1000, 0);
  EXPECT_EQ(gate.Decide(Key()).state, GateState::kRepaired);
  EXPECT_EQ(gate.Decide(Key()).plan, "tail(32)");
  Feed(&gate, tail, 1000, 3);
  EXPECT_EQ(gate.Decide(Key()).state, GateState::kClosed);
  EXPECT_EQ(transitions_.back().cause, "evidence");
  now_ += 601;
  gate.Tick(now_);
  EXPECT_EQ(gate.Decide(Key()).state, GateState::kLearning);
  EXPECT_EQ(gate.Decide(Key()).shadow_plan, "direct");
  EXPECT_EQ(gate.Decide(Key()).other_plans.size(), 1u);
}

// What shadows told of a plan that did not serve is there when it is needed.
TEST_F(GateLadderTest, AnotherProvedPlanTakesOverAtOnceAndGivesBack) {
  GateConfig config = DirectAlone();
  config.ladder = {"direct", "tail(32)", "tail(50%)"};
  Gate gate(config);
  CellKey tail = Key(), half = Key();
  tail.plan = "tail(32)";
  half.plan = "tail(50%)";
  // The last is proved first, and serves until a cheaper one is.
  Feed(&gate, half, 1000, 0);
  EXPECT_EQ(gate.Decide(Key()).state, GateState::kRepaired);
  EXPECT_EQ(gate.Decide(Key()).plan, "tail(50%)");
  EXPECT_EQ(gate.Decide(Key()).shadow_plan, "tail(50%)");
  EXPECT_EQ(gate.Decide(Key()).other_plans.size(), 2u);
  Feed(&gate, tail, 1000, 0);
  EXPECT_EQ(gate.Decide(Key()).plan, "tail(32)");
  EXPECT_EQ(transitions_.back().cause, "cheaper_rung");
  EXPECT_THAT(transitions_.back().reason, HasSubstr("takes the place of tail(50%)"));
  Feed(&gate, Key(), 1000, 0);
  EXPECT_EQ(gate.Decide(Key()).state, GateState::kOpen);
  EXPECT_EQ(transitions_.back().from, GateState::kRepaired);

  // The first fails: no request is served natively in between.
  transitions_.clear();
  Feed(&gate, Key(), 1000, 3);
  ASSERT_EQ(transitions_.size(), 1u);
  EXPECT_EQ(transitions_[0].from, GateState::kOpen);
  EXPECT_EQ(transitions_[0].to, GateState::kRepaired);
  EXPECT_EQ(transitions_[0].cause, "next_rung");
  EXPECT_THAT(transitions_[0].reason, HasSubstr("served instead by tail(32)"));
  // One that does not serve fails, and nothing changes but what is known.
  Feed(&gate, half, 1000, 3);
  EXPECT_EQ(transitions_.size(), 1u);
  CellReport report = ReportOf(gate, Key());
  ASSERT_EQ(report.rungs.size(), 3u);
  EXPECT_EQ(report.cell.plan, "tail(32)");
  EXPECT_EQ(report.rungs[0].state, RungState::kFailed);
  EXPECT_EQ(report.rungs[1].state, RungState::kProved);
  EXPECT_EQ(report.rungs[2].state, RungState::kFailed);
  EXPECT_EQ(report.rungs[0].cooldown_left, 600);
  EXPECT_THAT(report.explanation, HasSubstr("Repaired: tail(32) is under its limits"));
  EXPECT_THAT(report.explanation, HasSubstr("Cheaper: direct (failed): went over a limit"));
  EXPECT_THAT(report.explanation, HasSubstr("Next: tail(50%) (failed)"));

  // After the cool-down the first has another try while the second serves, and comes back only
  // with evidence of its own, of a second epoch.
  now_ += 601;
  EXPECT_TRUE(gate.Tick(now_).empty());
  EXPECT_EQ(gate.Decide(Key()).plan, "tail(32)");
  report = ReportOf(gate, Key());
  EXPECT_EQ(report.rungs[0].epoch, 2);
  EXPECT_EQ(report.rungs[0].state, RungState::kUnproved);
  EXPECT_GT(Feed(&gate, Key(), 2000, 0), 250);  // less alpha is left
  EXPECT_EQ(gate.Decide(Key()).state, GateState::kOpen);
  EXPECT_EQ(transitions_.back().cause, "cheaper_rung");
}

// A plan that failed waits for those that did not: they are judged first when it may try again.
TEST_F(GateLadderTest, PlansThatCannotBeUsedArePassedOver) {
  GateConfig config = DirectAlone();
  config.ladder = {"calibrated", "direct", "calibrated+tail(32)"};
  config.when_learning_carry = true;
  Gate gate(config);
  EXPECT_EQ(gate.Decide(Key()).plan, "calibrated");
  const CellKey key = Key();
  const auto changed = gate.SetUnusable(key.source, key.target, {true, false, true});
  ASSERT_EQ(changed.size(), 1u);
  EXPECT_EQ(changed[0].cause, "plans");
  for (const GateDecision& decision : {gate.Decide(key), [&] {
                                         CellKey other = Key();
                                         other.task = "other";
                                         return gate.Decide(other);
                                       }()}) {
    EXPECT_EQ(decision.plan, "direct");
    EXPECT_EQ(decision.shadow_plan, "direct");
    EXPECT_TRUE(decision.other_plans.empty());
  }
  EXPECT_TRUE(gate.SetUnusable(key.source, key.target, {true, false, true}).empty());
  std::vector<GateTransition> transitions;
  ASSERT_TRUE(gate.Force({}, GateState::kRepaired, "anna", &transitions).ok());
  EXPECT_EQ(gate.Decide(key).plan, "direct");
  ASSERT_TRUE(gate.Force({}, std::nullopt, "anna", &transitions).ok());
  // Saved evidence knows nothing of it, and is not hurt by it.
  ASSERT_TRUE(gate.Restore(gate.Save(0), 0).ok());
  EXPECT_EQ(gate.Decide(key).shadow_plan, "direct");
  EXPECT_FALSE(ReportOf(gate, key).rungs[0].usable);

  // All that can be used has failed: closed. Nothing can be used: nothing failed either.
  CellKey direct = key;
  direct.plan = "direct";
  Feed(&gate, direct, 1000, 1);
  EXPECT_EQ(gate.Decide(key).state, GateState::kClosed);
  gate.SetUnusable(key.source, key.target, {true, true, true});
  EXPECT_EQ(gate.Decide(key).state, GateState::kLearning);
  gate.SetUnusable(key.source, key.target, {false, false, false});
  EXPECT_EQ(gate.Decide(key).shadow_plan, "calibrated");
  EXPECT_TRUE(ReportOf(gate, key).rungs[0].usable);
}

TEST_F(GateLadderTest, WhatNeverFailedIsJudgedFirst) {
  GateConfig config = DirectAlone();
  config.ladder = {"direct", "tail(32)"};
  Gate gate(config);
  Feed(&gate, Key(), 1000, 3);
  EXPECT_EQ(gate.Decide(Key()).shadow_plan, "tail(32)");
  now_ += 601;
  gate.Tick(now_);
  EXPECT_EQ(gate.Decide(Key()).shadow_plan, "tail(32)");
  ASSERT_EQ(gate.Decide(Key()).other_plans.size(), 1u);
  EXPECT_EQ(gate.Decide(Key()).other_plans[0], "direct");
}

}  // namespace
}  // namespace carryover
