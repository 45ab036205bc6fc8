// A prompt answered in every way.
#include <atomic>
#include <thread>

#include "tests/unit/shadow_fixture.h"

namespace carryover {
namespace {

using EngineEvaluateTest = EngineShadowTest;

// A caller who leaves is let go, though nothing in the background can run.
TEST_F(EngineEvaluateTest, EvaluateEndsWhenItsCallerLeaves) {
  options_.fidelity.time_share = 0;
  MakePair();
  Running hold = Hold(LongAsk("s", Tokens(20, 77)));
  EvaluateSpec spec;
  spec.prompt.model = "m";
  spec.prompt.version = "t";
  spec.prompt.tokens = Tokens(100, 3);
  spec.source = "s";
  spec.sampling.max_tokens = 2;
  std::atomic<bool> gone{false};
  std::thread caller([&] {
    EXPECT_EQ(engine_->Evaluate(spec, [&] { return gone.load(); }).status().code(),
              absl::StatusCode::kCancelled);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  gone = true;
  caller.join();
  EXPECT_GT(engine_->snapshot().running, 0) << "the other request was to outlast it";
  engine_->Cancel(hold.ticket);
  hold.end.wait();
}

TEST_F(EngineEvaluateTest, EvaluateLeavesNothingBehind) {
  MakePair();
  EvaluateSpec spec;
  spec.prompt.model = "m";
  spec.prompt.version = "t";
  spec.prompt.tokens = Tokens(100, 3);
  spec.source = "s";
  for (const bool cancelled : {false, true}) {
    engine_->Evaluate(spec, [&] { return cancelled; }).status().IgnoreError();
    int64_t blocks = 0;
    for (const StoreRow& row : engine_->snapshot().store) blocks += row.blocks;
    EXPECT_EQ(blocks, 0) << cancelled;
  }
}

TEST_F(EngineEvaluateTest, EvaluateAnswersInEveryWay) {
  MakeUpdatedPair();
  EvaluateSpec spec;
  spec.prompt.model = "m";
  spec.prompt.version = "t";
  spec.prompt.tokens = Tokens(100, 3);
  spec.source = "s";
  spec.control = true;
  spec.sampling.max_tokens = 6;
  spec.sampling.ignore_eos = true;
  auto evaluation = engine_->Evaluate(spec, nullptr);
  ASSERT_TRUE(evaluation.ok()) << evaluation.status();
  EXPECT_EQ(evaluation->source.version, "s");
  EXPECT_EQ(evaluation->native.version, "t");
  EXPECT_EQ(evaluation->native.usage.computed_tokens, 100);
  ASSERT_EQ(evaluation->carried.size(), 1u);
  EXPECT_EQ(evaluation->carried[0].usage.carried_tokens, 96);
  EXPECT_EQ(evaluation->carried[0].token_ids.size(), 6u);
  ASSERT_EQ(evaluation->samples.size(), 3u);
  EXPECT_EQ(evaluation->samples[0].labels.comparison, FidelityComparison::kCarried);
  EXPECT_EQ(evaluation->samples[1].labels.comparison, FidelityComparison::kControl);
  EXPECT_EQ(evaluation->samples[2].labels.comparison, FidelityComparison::kOld);
  ExpectSame(evaluation->samples[1]);
  EXPECT_TRUE(observed_.samples(FidelityComparison::kCarried).empty());  // counts nowhere
  EXPECT_TRUE(engine_->ReportGate().empty());

  // The ladder's other plans need a map.
  spec.plans = {"direct", "calibrated"};
  EXPECT_EQ(engine_->Evaluate(spec, nullptr).status(),
            absl::FailedPreconditionError(
                "plans: calibrated needs a map from s, and none was loaded with t"));
  spec.plans.clear();

  spec.prompt.tokens = Tokens(10, 3);
  EXPECT_EQ(engine_->Evaluate(spec, nullptr).status().code(),
            absl::StatusCode::kFailedPrecondition);
  spec.source = "nobody";
  EXPECT_EQ(engine_->Evaluate(spec, nullptr).status().code(),
            absl::StatusCode::kFailedPrecondition);
  ExpectIdle();
}

// Margins are those of the labelled answer where there is one, else of the native first choice.
TEST_F(EngineEvaluateTest, MarginsAreOfTheLabelledAnswers) {
  MakeUpdatedPair();
  EvaluateSpec spec;
  spec.prompt.model = "m";
  spec.prompt.version = "t";
  spec.prompt.tokens = Tokens(100, 3);
  spec.source = "s";
  spec.sampling.max_tokens = 6;
  spec.sampling.ignore_eos = true;
  const auto first = engine_->Evaluate(spec, nullptr);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto& chosen = first->samples[0].positions;
  const int32_t token = first->native.token_ids[0];
  ASSERT_EQ(chosen.size(), 6u);

  spec.answers = {token};  // what it says anyway
  const auto same = engine_->Evaluate(spec, nullptr);
  ASSERT_TRUE(same.ok()) << same.status();
  for (size_t i = 0; i < chosen.size(); ++i) {
    EXPECT_EQ(same->samples[0].positions[i].native_margin, chosen[i].native_margin) << i;
    EXPECT_EQ(same->samples[0].positions[i].carried_margin, chosen[i].carried_margin) << i;
    EXPECT_GE(chosen[i].native_margin, 0) << i;
  }
  spec.answers = {-1, first->native.token_ids[1] == 9 ? 8 : 9};  // what it does not say
  const auto other = engine_->Evaluate(spec, nullptr);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(other->samples[0].positions[0].native_margin, chosen[0].native_margin);
  EXPECT_LT(other->samples[0].positions[1].native_margin, 0);
  EXPECT_EQ(other->samples[0].positions[2].native_margin, chosen[2].native_margin);

  for (const int32_t wrong : {-2, 1 << 30}) {
    spec.answers = {wrong};
    EXPECT_EQ(engine_->Evaluate(spec, nullptr).status().code(), absl::StatusCode::kInvalidArgument)
        << wrong;
  }
}

}  // namespace
}  // namespace carryover
