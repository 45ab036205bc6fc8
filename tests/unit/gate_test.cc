// The gate's verdicts on one plan: evidence, floors, siblings, operators, limits.
#include "engine/gate.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/unit/gate_testing.h"

namespace carryover {
namespace {

using ::testing::HasSubstr;

TEST_F(GateTest, OpensOnGoodSamplesClosesOnBadAndRetries) {
  Gate gate(DirectAlone());
  GateDecision decision = gate.Decide(Key());
  EXPECT_EQ(decision.state, GateState::kLearning);
  EXPECT_FALSE(decision.carry);
  EXPECT_EQ(decision.plan, "native");
  EXPECT_EQ(decision.shadow_plan, "direct");

  const int to_open = Feed(&gate, Key(), 1000, 0);
  EXPECT_GT(to_open, 150);
  EXPECT_LT(to_open, 300);
  ASSERT_EQ(transitions_.size(), 1u);
  EXPECT_EQ(transitions_[0].to, GateState::kOpen);
  EXPECT_EQ(transitions_[0].cause, "evidence");
  EXPECT_THAT(transitions_[0].reason, HasSubstr("limit 2.00 %"));
  decision = gate.Decide(Key());
  EXPECT_TRUE(decision.carry);
  EXPECT_EQ(decision.plan, "direct");
  EXPECT_EQ(decision.state, GateState::kOpen);

  // One in five flips now. No control was ever sampled, so the floor may be 5 %.
  const int to_close = Feed(&gate, Key(), 1000, 5);
  EXPECT_LT(to_close, 300);
  ASSERT_EQ(transitions_.size(), 2u);
  EXPECT_EQ(transitions_[1].to, GateState::kClosed);
  EXPECT_THAT(transitions_[1].reason, HasSubstr("first-token flips"));
  decision = gate.Decide(Key());
  EXPECT_FALSE(decision.carry);
  EXPECT_EQ(decision.shadow_plan, "");

  // Late samples change nothing, the cool-down ends by time, and the next epoch is harder.
  Feed(&gate, Key(), 50, 1, false);
  now_ += 599;
  EXPECT_TRUE(gate.Tick(now_).empty());
  EXPECT_NEAR(ReportOf(gate, Key()).cooldown_left, 1, 1e-9);
  now_ += 2;
  ASSERT_EQ(gate.Tick(now_).size(), 1u);
  EXPECT_EQ(gate.Decide(Key()).state, GateState::kLearning);
  EXPECT_EQ(ReportOf(gate, Key()).samples, 0);
  EXPECT_EQ(ReportOf(gate, Key()).epoch, 2);
  const int to_reopen = Feed(&gate, Key(), 1000, 0);
  EXPECT_GT(to_reopen, to_open);
  EXPECT_LT(to_reopen, 400);
}

TEST_F(GateTest, EveryMeasureIsJudged) {
  for (int bad = 0; bad < kGateMeasures; ++bad) {
    Gate gate(DirectAlone());
    GateSample sample;
    sample.cell = Key();
    for (int i = 0; i < 1000 && gate.Decide(Key()).state == GateState::kLearning; ++i) {
      sample.prefix = next_prefix_++;
      sample.values[bad] = i % 3 == 0 ? 0.9 : 0;
      gate.Observe(sample, now_);
    }
    EXPECT_EQ(gate.Decide(Key()).state, GateState::kClosed) << GateMeasureName(bad);
  }
}

TEST_F(GateTest, RepeatsOfOnePrefixAreOnePieceOfEvidence) {
  Gate gate(DirectAlone());
  GateSample sample;
  sample.cell = Key();
  for (int i = 0; i < 5000; ++i) {
    sample.prefix = i % 100;
    EXPECT_FALSE(Send(&gate, sample));
  }
  const CellReport report = ReportOf(gate, Key());
  EXPECT_EQ(report.samples, 5000);
  EXPECT_LE(report.prefixes, 100);
  EXPECT_GE(report.prefixes, 95);
  // A burst of one bad prefix does not close either.
  Gate open(DirectAlone());
  Feed(&open, Key(), 1000, 0);
  sample.prefix = 7777777;
  sample.values = {1, 1, 1};
  for (int i = 0; i < 90; ++i) EXPECT_FALSE(Send(&open, sample) && transitions_.size() > 1);
  EXPECT_EQ(open.Decide(Key()).state, GateState::kOpen);
  // But few prefixes that all turned bad do, when they come again and again.
  for (int i = 0; i < 3000 && open.Decide(Key()).state == GateState::kOpen; ++i) {
    sample.prefix = i % 30;
    Send(&open, sample);
  }
  EXPECT_EQ(open.Decide(Key()).state, GateState::kClosed);
}

TEST_F(GateTest, PrefixWeightLetsAFewPrefixesOpen) {
  GateConfig config = DirectAlone();
  config.prefix_weight = 20;
  Gate gate(config);
  GateSample sample;
  sample.cell = Key();
  for (int i = 0; i < 18 * 100; ++i) {
    sample.prefix = i % 18;
    EXPECT_FALSE(Send(&gate, sample));  // 18 are less than min_prefixes
  }
  for (int i = 0; i < 600 && gate.Decide(Key()).state == GateState::kLearning; ++i) {
    sample.prefix = i % 24;
    Send(&gate, sample);
  }
  EXPECT_EQ(gate.Decide(Key()).state, GateState::kOpen);
}

TEST_F(GateTest, DropsCountAsTheWorstAndNothingOpensUnderHalf) {
  const auto run = [&](double assume, int drop_every, bool drop_rest) {
    GateConfig config = DirectAlone();
    config.assume_dropped = assume;
    Gate gate(config);
    GateSample sample;
    sample.cell = Key();
    for (int i = 1; i <= 2000 && gate.Decide(Key()).state == GateState::kLearning; ++i) {
      sample.prefix = next_prefix_++;
      sample.dropped = (i % drop_every == 0) != drop_rest;
      gate.Observe(sample, now_);
    }
    return gate.Decide(Key()).state;
  };
  EXPECT_EQ(run(1, 1000000, false), GateState::kOpen);
  EXPECT_EQ(run(1, 20, false), GateState::kLearning);  // 5 % are over the limit of 2 %
  EXPECT_EQ(run(0, 20, false), GateState::kOpen);      // the operator trusts them
  EXPECT_EQ(run(0, 3, true), GateState::kLearning);    // 33 % completed
  EXPECT_EQ(run(0, 3, false), GateState::kOpen);       // 67 % completed

  // Values that are none are as good as dropped.
  Gate gate(DirectAlone());
  GateSample sample;
  sample.cell = Key();
  for (int i = 0; i < 500; ++i) {
    sample.prefix = next_prefix_++;
    sample.values = {0, i % 10 == 0 ? std::numeric_limits<double>::quiet_NaN() : 0, 0};
    gate.Observe(sample, now_);
  }
  EXPECT_EQ(gate.Decide(Key()).state, GateState::kLearning);
  EXPECT_EQ(ReportOf(gate, Key()).dropped, 50);
}

TEST_F(GateTest, TheFloorIsNotHeldAgainstACell) {
  // 4 % flips, and natively against natively 4 % as well.
  GateConfig config = DirectAlone();
  Gate noisy(config);
  Control(&noisy, Key(), 3000, 25);
  EXPECT_EQ(Feed(&noisy, Key(), 3000, 25), 3000);
  EXPECT_EQ(noisy.Decide(Key()).state, GateState::kLearning);
  Control(&noisy, Key(), 12000, 25);
  Feed(&noisy, Key(), 12000, 25);
  EXPECT_EQ(noisy.Decide(Key()).state, GateState::kOpen);
  const CellReport report = ReportOf(noisy, Key());
  EXPECT_EQ(report.controls, 15000);
  EXPECT_TRUE(report.own_floor);
  EXPECT_NEAR(report.measures[kGateFlip].floor_mean, 0.04, 0.002);
  EXPECT_LE(report.measures[kGateFlip].floor_lower, 0.04);
  EXPECT_GE(report.measures[kGateFlip].floor_upper, 0.04);

  // The same flips where the controls do not flip. Another task of the same target measured them.
  Gate quiet(config);
  Control(&quiet, Key("other"), 3000, 0);
  Feed(&quiet, Key(), 8000, 25);
  EXPECT_EQ(quiet.Decide(Key()).state, GateState::kClosed);
  EXPECT_FALSE(ReportOf(quiet, Key()).own_floor);

  // A floor borrowed from elsewhere helps to close, but is no credit for opening.
  Gate elsewhere(config);
  Control(&elsewhere, Key("other"), 20000, 25);
  Feed(&elsewhere, Key(), 16000, 25);
  EXPECT_EQ(elsewhere.Decide(Key()).state, GateState::kLearning);
}

TEST_F(GateTest, SparseCellsBorrowFromProvedSiblingsAndTheWorstDecides) {
  Gate gate(DirectAlone());
  const int alone = Feed(&gate, Key("qa", 256), 1000, 0);
  // The next two need less, and go on to prove themselves.
  EXPECT_LT(Feed(&gate, Key("qa", 512), 1000, 0), alone);
  EXPECT_LT(Feed(&gate, Key("qa", 2048), 1000, 0), alone);
  EXPECT_TRUE(ReportOf(gate, Key("qa", 512)).borrowed);
  Feed(&gate, Key("qa", 512), 200, 0, false);
  Feed(&gate, Key("qa", 2048), 200, 0, false);
  EXPECT_FALSE(ReportOf(gate, Key("qa", 512)).borrowed);
  // A cell of another task and bucket has nobody to borrow from.
  EXPECT_EQ(Feed(&gate, Key("sum", 4096), 1000, 0), alone);
  const int borrowed = Feed(&gate, Key("qa", 8192), 1000, 0);
  EXPECT_LT(borrowed, alone * 3 / 4);
  EXPECT_GE(borrowed, 20);
  EXPECT_EQ(transitions_.back().cause, "borrowed");
  EXPECT_THAT(transitions_.back().reason, HasSubstr("siblings by task"));
  EXPECT_TRUE(ReportOf(gate, Key("qa", 8192)).borrowed);

  // A sibling goes over its limit: what had borrowed learns again, what had not stays.
  transitions_.clear();
  Feed(&gate, Key("qa", 512), 1000, 2);
  ASSERT_EQ(transitions_.size(), 2u);
  EXPECT_EQ(transitions_[0].to, GateState::kClosed);
  EXPECT_EQ(transitions_[1].cell.prefix_bucket, 8192);
  EXPECT_EQ(transitions_[1].to, GateState::kLearning);
  EXPECT_EQ(transitions_[1].cause, "lender_closed");
  EXPECT_EQ(gate.Decide(Key("qa", 256)).state, GateState::kOpen);
  // With one closed nobody lends, and its own samples still open it.
  EXPECT_EQ(Feed(&gate, Key("qa", 8192), 1000, 0), alone - borrowed);
  EXPECT_EQ(transitions_.back().cause, "evidence");
}

TEST_F(GateTest, WhenLearningCarryEndsWithTheFirstFailure) {
  GateConfig config = DirectAlone();
  config.when_learning_carry = true;
  Gate gate(config);
  EXPECT_TRUE(gate.Decide(Key()).carry);
  EXPECT_EQ(gate.Decide(Key()).plan, "direct");
  EXPECT_EQ(gate.Decide(Key()).state, GateState::kLearning);
  Feed(&gate, Key(), 1000, 2);
  EXPECT_FALSE(gate.Decide(Key()).carry);
  now_ += 601;
  gate.Tick(now_);
  EXPECT_EQ(gate.Decide(Key()).state, GateState::kLearning);
  EXPECT_FALSE(gate.Decide(Key()).carry);
}

TEST_F(GateTest, OperatorsStateStandsOverTheEvidence) {
  Gate gate(DirectAlone());
  gate.Decide(Key("a"));
  gate.Decide(Key("b"));
  std::vector<GateTransition> changes;
  CellPattern all, only_a;
  all.source = "s";
  only_a.source = "s";
  only_a.task = "a";
  ASSERT_TRUE(gate.Force(all, GateState::kClosed, "ops", &changes).ok());
  EXPECT_EQ(changes.size(), 2u);
  EXPECT_EQ(changes[0].cause, "operator");
  ASSERT_TRUE(gate.Force(only_a, GateState::kOpen, "ops", &changes).ok());
  EXPECT_TRUE(gate.Decide(Key("a")).carry);
  EXPECT_TRUE(gate.Decide(Key("a")).forced);
  EXPECT_EQ(gate.Decide(Key("b")).state, GateState::kClosed);
  EXPECT_EQ(gate.Decide(Key("c")).state, GateState::kClosed);  // also what comes later
  // Evidence goes on below and says so.
  Feed(&gate, Key("b"), 1000, 0);
  ASSERT_EQ(transitions_.size(), 1u);
  EXPECT_TRUE(transitions_[0].hidden);
  EXPECT_EQ(gate.Decide(Key("b")).state, GateState::kClosed);
  EXPECT_EQ(ReportOf(gate, Key("b")).evidence_state, GateState::kOpen);
  EXPECT_THAT(ReportOf(gate, Key("b")).explanation, HasSubstr("An operator set it to closed"));
  changes.clear();
  ASSERT_TRUE(gate.Force(all, std::nullopt, "ops", &changes).ok());
  EXPECT_EQ(gate.Decide(Key("a")).state, GateState::kLearning);
  EXPECT_EQ(gate.Decide(Key("b")).state, GateState::kOpen);
  EXPECT_FALSE(gate.Decide(Key("b")).forced);
  EXPECT_EQ(gate.Force(all, GateState::kRepaired, "ops", &changes).code(),
            absl::StatusCode::kInvalidArgument);
  for (int i = 0; i < 64; ++i) {
    only_a.task = std::to_string(i);
    ASSERT_TRUE(gate.Force(only_a, GateState::kClosed, "ops", &changes).ok());
  }
  only_a.task = "one more";
  EXPECT_EQ(gate.Force(only_a, GateState::kClosed, "ops", &changes).code(),
            absl::StatusCode::kResourceExhausted);
}

TEST_F(GateTest, CellsAreCapped) {
  GateConfig config = DirectAlone();
  config.max_cells = 3;
  Gate gate(config);
  for (int i = 0; i < 10; ++i) {
    EXPECT_FALSE(gate.Decide(Key(std::to_string(i))).carry);
    Control(&gate, Key(std::to_string(i)), 1, 0);
  }
  EXPECT_EQ(gate.cells(), 3);
  EXPECT_EQ(gate.refused_cells(), 7);
  gate.Forget("s");
  EXPECT_EQ(gate.cells(), 0);
  EXPECT_FALSE(gate.Decide(Key(std::string(300, 'x'))).carry);
  EXPECT_EQ(gate.cells(), 0);
}

TEST_F(GateTest, BucketsArePowersOfTwo) {
  EXPECT_EQ(PrefixBucket(0), 256);
  EXPECT_EQ(PrefixBucket(511), 256);
  EXPECT_EQ(PrefixBucket(512), 512);
  EXPECT_EQ(PrefixBucket(4095), 2048);
  EXPECT_EQ(PrefixBucket(4096), 4096);
  EXPECT_EQ(PrefixBucket(1 << 30), 1 << 30);
  EXPECT_EQ(PrefixBucket(2147483647), 1 << 30);
}

TEST_F(GateTest, ConfigIsChecked) {
  EXPECT_TRUE(ValidateGateConfig(GateConfig()).ok());
  const auto field = [](auto change) {
    GateConfig config = DirectAlone();
    change(&config);
    return std::string(ValidateGateConfig(config).message());
  };
  EXPECT_THAT(field([](GateConfig* c) { c->limit[1] = 0; }), HasSubstr("limit.tv"));
  EXPECT_THAT(field([](GateConfig* c) { c->max_floor[2] = -1; }), HasSubstr("max_floor.stop"));
  EXPECT_THAT(field([](GateConfig* c) { c->alpha = std::nan(""); }), HasSubstr("alpha"));
  EXPECT_THAT(field([](GateConfig* c) { c->ladder.clear(); }), HasSubstr("ladder"));
  EXPECT_THAT(field([](GateConfig* c) {
                c->ladder = {"direct", "direct"};
              }),
              HasSubstr("ladder[0]: must be another plan"));
  EXPECT_THAT(field([](GateConfig* c) {
                c->ladder = {"direct", "native"};
              }),
              HasSubstr("ladder[1]: plan \"native\": carries nothing"));
  EXPECT_THAT(field([](GateConfig* c) { c->ladder = {"tail"}; }), HasSubstr("ladder[0]: plan"));
  EXPECT_THAT(field([](GateConfig* c) { c->prefix_weight = 256; }), HasSubstr("prefix_weight"));
  EXPECT_THAT(field([](GateConfig* c) { c->max_cells = 0; }), HasSubstr("max_cells"));
}

}  // namespace
}  // namespace carryover
