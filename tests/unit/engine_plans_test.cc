// Plans that repair what they carry: what they compute, how it is labelled, and the two ends of
// the scale.
#include <gmock/gmock.h>

#include <algorithm>

#include "tests/unit/shadow_fixture.h"

namespace carryover {
namespace {

using testing::HasSubstr;

class EnginePlansTest : public EngineShadowTest {
 protected:
  // T serves by this plan without being asked to prove it, and nothing is compared.
  void CarryBy(const std::string& plan) {
    options_.gate.when_learning_carry = true;
    options_.gate.ladder = {plan};
    options_.fidelity.sample_rate = options_.fidelity.learning_sample_rate = 0;
  }
  Answer Native(const std::vector<int32_t>& prompt, int max_tokens = 8) {
    CompletionRequest request = Ask("t", prompt, max_tokens);
    request.reuse = ReuseMode::kNativeOnly;
    request.store = false;
    return Run(request);
  }
  static void ExpectSameLogprobs(const Answer& answer, const Answer& truth) {
    EXPECT_EQ(answer.tokens, truth.tokens);
    ASSERT_EQ(answer.logprobs, truth.logprobs);  // bit for bit
  }
  EvaluateSpec Spec(int length, int max_tokens = 6) {
    EvaluateSpec spec;
    spec.prompt.model = "m";
    spec.prompt.version = "t";
    spec.prompt.tokens = Tokens(length, 3);
    spec.source = "s";
    spec.sampling.max_tokens = max_tokens;
    spec.sampling.ignore_eos = true;
    return spec;
  }
};

TEST_F(EnginePlansTest, ATailIsComputedOverCarriedBlocksAndSaysSo) {
  CarryBy("tail(20)");  // two blocks
  MakePair();
  const std::vector<int32_t> prompt = Tokens(100);
  const Answer truth = Native(prompt);
  ASSERT_TRUE(Warm("s", prompt).ok());
  const Answer answer = Run(Ask("t", prompt));
  EXPECT_EQ(answer.usage.carried_tokens, 64);
  EXPECT_EQ(answer.usage.repaired_tokens, 32);
  EXPECT_EQ(answer.usage.computed_tokens, 4);
  ExpectUsageAddsUp(answer);
  ASSERT_EQ(answer.cache.segments.size(), 3u);
  EXPECT_EQ(answer.cache.segments[0].source, "s");
  EXPECT_EQ(answer.cache.segments[0].plan, "direct");
  EXPECT_EQ(answer.cache.segments[0].tokens, 64);
  EXPECT_EQ(answer.cache.segments[1].source, "t over s");
  EXPECT_EQ(answer.cache.segments[1].plan, "tail(20)");
  EXPECT_EQ(answer.cache.segments[1].tier, "");
  EXPECT_EQ(answer.cache.segments[1].tokens, 32);
  EXPECT_EQ(answer.cache.segments[2].plan, "fresh");
  // The control: equal weights.
  ExpectSameLogprobs(answer, truth);

  // The tail was kept as what it is, and serves who comes next.
  const Answer second = Run(Ask("t", prompt));
  EXPECT_EQ(second.usage.carried_tokens, 96);
  EXPECT_EQ(second.usage.repaired_tokens, 0);
  EXPECT_EQ(second.cache.segments[0].source, "s");
  EXPECT_EQ(second.cache.segments[1].source, "t over s");
  ExpectSameLogprobs(second, truth);
  EXPECT_EQ(Native(prompt).usage.cached_tokens, 0);
  EXPECT_THAT(observed_.plans(),
              testing::ElementsAre("native", "native", "tail(20)", "tail(20)", "native"));
  ExpectIdle();
}

TEST_F(EnginePlansTest, ATailOverAllIsNative) {
  CarryBy("tail(100%)");
  MakeUpdatedPair();
  const std::vector<int32_t> prompt = Tokens(100);
  const Answer truth = Native(prompt);
  ASSERT_TRUE(Warm("s", prompt).ok());
  const Answer answer = Run(Ask("t", prompt));
  EXPECT_EQ(answer.usage.computed_tokens, 100);
  EXPECT_EQ(answer.usage.repaired_tokens, 0);
  EXPECT_EQ(observed_.plans().back(), "native");
  ExpectSameLogprobs(answer, truth);
  // It attended to nothing but its own, so that its blocks are native.
  const Answer again = Native(prompt);
  EXPECT_EQ(again.usage.cached_tokens, 96);
  ExpectSameLogprobs(again, truth);
  ExpectIdle();
}

// Between the ends: other weights show, and the longer the tail the less.
TEST_F(EnginePlansTest, EveryWayOfCarryingIsEvaluated) {
  MakeUpdatedPair();
  EvaluateSpec spec = Spec(100);
  spec.plans = {"direct", "tail(16)", "tail(50%)", "tail(95)", "tail(96)", "tail(1000)"};
  const auto evaluation = engine_->Evaluate(spec, nullptr);
  ASSERT_TRUE(evaluation.ok()) << evaluation.status();
  ASSERT_EQ(evaluation->carried.size(), 6u);
  const int repaired[] = {0, 16, 48, 0, 0, 0}, carried[] = {96, 80, 48, 0, 0, 0};
  for (size_t i = 0; i < 6; ++i) {
    const EvaluatedAnswer& answer = evaluation->carried[i];
    EXPECT_EQ(answer.plan, spec.plans[i]);
    EXPECT_EQ(answer.usage.repaired_tokens, repaired[i]) << answer.plan;
    EXPECT_EQ(answer.usage.carried_tokens, carried[i]) << answer.plan;
  }
  std::map<std::string, double> kl;
  for (const FidelitySample& sample : evaluation->samples) {
    if (sample.labels.comparison != FidelityComparison::kCarried) continue;
    for (const PositionFidelity& position : sample.positions) kl[sample.labels.plan] += position.kl;
  }
  ASSERT_EQ(kl.size(), 6u);
  EXPECT_GT(kl["direct"], 1e-3);
  EXPECT_GT(kl["tail(50%)"], 1e-6);
  EXPECT_LT(kl["tail(50%)"], kl["direct"]);
  for (const char* whole : {"tail(95)", "tail(96)", "tail(1000)"}) {
    EXPECT_EQ(kl[whole], 0) << whole;
    EXPECT_EQ(evaluation->carried[5].token_ids, evaluation->native.token_ids);
  }
  ExpectIdle();

  // Without plans it takes those of the ladder; what is none is refused.
  spec.plans.clear();
  EXPECT_EQ(engine_->Evaluate(spec, nullptr)->carried[0].plan, "direct");
  spec.plans = {"direct", "direct"};
  EXPECT_THAT(std::string(engine_->Evaluate(spec, nullptr).status().message()),
              HasSubstr("plans[1]: stands there twice"));
  spec.plans = {"native"};
  EXPECT_THAT(std::string(engine_->Evaluate(spec, nullptr).status().message()),
              HasSubstr("plans[0]: plan \"native\": carries nothing"));
  spec.plans.assign(9, "direct");
  EXPECT_EQ(engine_->Evaluate(spec, nullptr).status().code(), absl::StatusCode::kInvalidArgument);
}

// Shadows measure the rung that is judged: the first until it fails, then the next.
TEST_F(EnginePlansTest, ShadowsMeasureTheRungThatIsJudged) {
  options_.gate.ladder = {"direct", "tail(32)"};
  options_.gate.limit = {0.0001, 0.0001, 0.0001};
  options_.gate.max_floor = {0, 0, 0};
  options_.gate.min_prefixes = 1;
  options_.gate.alpha = 0.5;
  MakeUpdatedPair();
  int arms = 0;
  while (arms < 200 && observed_.changes().empty()) {
    AskAbout(arms++);
    observed_.WaitForArms(arms);
  }
  ASSERT_EQ(observed_.changes().size(), 1u);
  EXPECT_EQ(observed_.changes()[0].cause, "next_rung");
  EXPECT_EQ(observed_.changes()[0].cell.plan, "direct");
  const int before = observed_.tokens();
  AskAbout(arms++);
  observed_.WaitForArms(arms);
  // Four tokens and the served ones as under direct, and the tail.
  EXPECT_EQ(observed_.tokens() - before, 32 + 4 + 7);
  const auto samples = observed_.samples(FidelityComparison::kCarried);
  ASSERT_EQ(samples.size(), static_cast<size_t>(arms));
  for (const FidelitySample& sample : samples) {
    EXPECT_EQ(sample.labels.plan, &sample == &samples.back() ? "tail(32)" : "direct");
  }
  const auto cells = engine_->ReportGate();
  ASSERT_EQ(cells.size(), 1u);
  EXPECT_EQ(cells[0].cell.plan, "tail(32)");
  EXPECT_EQ(cells[0].samples, 1);
}

// What serves is one plan and what is judged another: both are compared, each under its name.
TEST_F(EnginePlansTest, AnOperatorsRungAndTheJudgedOneAreBothCompared) {
  options_.gate.ladder = {"direct", "tail(32)"};
  MakePair();
  ASSERT_TRUE(engine_->SetGate({}, GateState::kRepaired, "anna").ok());
  const Answer answer = AskAbout(1);
  EXPECT_EQ(answer.usage.repaired_tokens, 32);
  EXPECT_EQ(answer.cache.gate, "repaired");
  observed_.WaitForArms(2);
  EXPECT_EQ(observed_.ended(),
            (std::map<std::string, int>{{"native completed", 1}, {"carried completed", 1}}));
  const auto samples = observed_.samples(FidelityComparison::kCarried);
  ASSERT_EQ(samples.size(), 2u);
  EXPECT_EQ(samples[0].labels.plan, "tail(32)");
  EXPECT_EQ(samples[1].labels.plan, "direct");
  for (const FidelitySample& sample : samples) {
    EXPECT_EQ(sample.along, Along::kServed);
    ExpectSame(sample);
  }
  ExpectIdle();
}

TEST_F(EnginePlansTest, HeldOutRequestsCompareThePlanThatWouldHaveServed) {
  CarryBy("tail(32)");
  options_.fidelity.hold_out_rate = 1;
  MakeUpdatedPair();
  EXPECT_EQ(AskAbout(1).usage.computed_tokens, 100);
  observed_.WaitForArms(2);
  const auto samples = observed_.samples(FidelityComparison::kCarried);
  ASSERT_EQ(samples.size(), 1u);
  EXPECT_EQ(samples[0].labels.plan, "tail(32)");
  ASSERT_EQ(observed_.trial().size(), 1u);
  EXPECT_EQ(observed_.trial()[0].plan, "tail(32)");
  EXPECT_TRUE(observed_.trial()[0].held_out);
}

// Nothing is compared where a tail leaves nothing to carry: it would be no news, and no drop
// either.
TEST_F(EnginePlansTest, WhatATailCoversWhollyIsNotCompared) {
  options_.gate.ladder = {"tail(96)"};
  MakePair();
  const Answer covered = AskAbout(1, 100);
  EXPECT_FALSE(covered.cache.shadowed);
  const Answer more = AskAbout(2, 132);
  EXPECT_TRUE(more.cache.shadowed);
  observed_.WaitForArms(1);
  EXPECT_EQ(observed_.ended(), (std::map<std::string, int>{{"carried completed", 1}}));
}

TEST_F(EnginePlansTest, WhoAsksToCarryIsServedByTheJudgedPlan) {
  options_.gate.ladder = {"tail(32)"};
  options_.fidelity.sample_rate = options_.fidelity.learning_sample_rate = 0;
  MakePair();
  const std::vector<int32_t> prompt = Tokens(100);
  ASSERT_TRUE(Warm("s", prompt).ok());
  CompletionRequest request = Ask("t", prompt);
  request.reuse = ReuseMode::kCarry;
  EXPECT_EQ(Run(request).usage.repaired_tokens, 32);
}

TEST_F(EnginePlansTest, WhatIsNoPlanIsNoLadder) {
  options_.gate.ladder = {"direct", "tail"};
  const auto engine = Engine::Create(options_, CpuOps(), nullptr);
  EXPECT_EQ(engine.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(engine.status().message()), HasSubstr("ladder[1]: plan \"tail\""));
}

}  // namespace
}  // namespace carryover
