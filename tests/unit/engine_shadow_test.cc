// Comparing arms beside users' work: what is compared, what it costs, what becomes of it, and that
// users never notice.
#include <future>
#include <memory>
#include <thread>

#include "tests/unit/shadow_fixture.h"

namespace carryover {
namespace {

// The control of the whole measure: carried blocks of equal weights change nothing.
TEST_F(EngineShadowTest, EqualWeightsShowNoDivergence) {
  MakePair();
  for (int i = 0; i < 20; ++i) {
    const Answer answer = AskAbout(i, 60 + 7 * i);
    EXPECT_EQ(answer.usage.carried_tokens, 0);  // learning: served natively
    EXPECT_EQ(answer.cache.gate, "learning");
    EXPECT_TRUE(answer.cache.shadowed);
  }
  observed_.WaitForArms(20);
  const auto samples = observed_.samples(FidelityComparison::kCarried);
  ASSERT_EQ(samples.size(), 20u);
  for (const FidelitySample& sample : samples) {
    ExpectSame(sample);
    EXPECT_EQ(sample.positions.size(), 8u);
    EXPECT_EQ(sample.along, Along::kNative);
    EXPECT_EQ(sample.labels.source, "s");
    EXPECT_EQ(sample.labels.target, "t");
    EXPECT_EQ(sample.labels.plan, "direct");
    EXPECT_EQ(sample.labels.task, "other");
    EXPECT_EQ(sample.continuation, Continuation::kSame);
  }
  EXPECT_EQ(observed_.ended(), (std::map<std::string, int>{{"carried completed", 20}}));
  ExpectIdle();
}

TEST_F(EngineShadowTest, OtherWeightsShow) {
  MakeUpdatedPair();
  for (int i = 0; i < 3; ++i) AskAbout(i);  // a few more, and the gate would close
  observed_.WaitForArms(3);
  int flips = 0;
  for (const FidelitySample& sample : observed_.samples(FidelityComparison::kCarried)) {
    EXPECT_TRUE(sample.valid);
    EXPECT_GT(sample.positions[0].kl, 1e-4);
    for (const PositionFidelity& position : sample.positions) flips += position.flip;
  }
  EXPECT_GT(flips, 0);
}

// A carried shadow of a native request costs its suffix and the served tokens; a native shadow of
// a carried one the whole prompt.
TEST_F(EngineShadowTest, CostsNoMoreThanItMust) {
  MakePair();
  AskAbout(1, 100, 8);
  observed_.WaitForArms(1);
  EXPECT_EQ(observed_.tokens(),
            4 + 7);  // 96 tokens lie in blocks; the last served one needs no row
}

TEST_F(EngineShadowTest, NativeShadowsHealTheStore) {
  options_.gate.when_learning_carry = true;
  MakePair();
  const Answer first = AskAbout(1, 100, 8);
  EXPECT_EQ(first.usage.carried_tokens, 96);
  observed_.WaitForArms(1);
  EXPECT_EQ(observed_.tokens(), 100 + 7);
  EXPECT_EQ(observed_.refreshed(), 6);
  const auto samples = observed_.samples(FidelityComparison::kCarried);
  ASSERT_EQ(samples.size(), 1u);
  EXPECT_EQ(samples[0].along, Along::kServed);
  ExpectSame(samples[0]);
  const Answer second = Run(Ask("t", Tokens(100, 1)));
  EXPECT_EQ(second.usage.cached_tokens, 96);
  EXPECT_EQ(second.usage.carried_tokens, 0);
  EXPECT_EQ(second.tokens, first.tokens);
  ExpectIdle();
}

TEST_F(EngineShadowTest, HeldOutRequestsAreServedNativelyAndShowTheNoiseFloor) {
  options_.gate.when_learning_carry = true;
  options_.fidelity.hold_out_rate = 1;
  MakeUpdatedPair();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(AskAbout(i).usage.carried_tokens, 0);
  }
  observed_.WaitForArms(6);
  const auto controls = observed_.samples(FidelityComparison::kControl);
  ASSERT_EQ(controls.size(), 3u);
  for (const FidelitySample& sample : controls) ExpectSame(sample);
  EXPECT_EQ(observed_.samples(FidelityComparison::kCarried).size(), 3u);
}

TEST_F(EngineShadowTest, TheOldVersionIsComparedWhileItIsLoaded) {
  options_.fidelity.old_rate = 1;
  MakeUpdatedPair();
  AskAbout(1);
  observed_.WaitForArms(2);
  const auto old = observed_.samples(FidelityComparison::kOld);
  ASSERT_EQ(old.size(), 1u);
  EXPECT_GT(old[0].positions[0].kl, 0);
  ASSERT_TRUE(engine_->Promote("m", "t", 100).ok());
  ASSERT_TRUE(engine_->Unload("m", "s").ok());
  Run(Ask("t", Tokens(100, 1)));  // nothing left to carry: it is native by now
  EXPECT_EQ(observed_.samples(FidelityComparison::kOld).size(), 1u);
}

// Whatever runs in the background, users get the same tokens as without it.
TEST_F(EngineShadowTest, UsersGetTheSameBesideShadows) {
  options_.gate.when_learning_carry = true;
  MakeUpdatedPair();
  std::vector<Answer> alone;
  for (int i = 0; i < 6; ++i) {
    CompletionRequest request = Ask("t", Tokens(150, i), 24);
    request.reuse = ReuseMode::kNativeOnly;
    request.store = false;
    alone.push_back(Run(request));
    ASSERT_TRUE(Warm("s", Tokens(90, 100 + i)).ok());
  }
  std::vector<Running> beside;
  for (int i = 0; i < 6; ++i) {
    Run(Ask("t", Tokens(90, 100 + i), 4));  // leaves a native shadow behind
    CompletionRequest request = Ask("t", Tokens(150, i), 24);
    request.reuse = ReuseMode::kNativeOnly;
    request.store = false;
    beside.push_back(Begin(request));
  }
  for (int i = 0; i < 6; ++i) {
    const Answer answer = beside[i].end.get();
    EXPECT_EQ(answer.tokens, alone[i].tokens);
    EXPECT_EQ(answer.logprobs, alone[i].logprobs);
  }
  observed_.WaitForArms(6);
  EXPECT_EQ(observed_.ended()["native completed"], 6);
}

TEST_F(EngineShadowTest, WhatFindsNoRoomIsCounted) {
  options_.fidelity.max_queue = 0;
  MakePair();
  AskAbout(0);
  EXPECT_EQ(observed_.ended()["carried queue_full"], 1);
}

TEST_F(EngineShadowTest, WhatHasNoAnswerIsCounted) {
  MakePair();
  ASSERT_TRUE(Warm("s", Tokens(100)).ok());
  Running cancelled = Begin(LongAsk("t", Tokens(100)));
  cancelled.start.wait();
  engine_->Cancel(cancelled.ticket);
  EXPECT_EQ(cancelled.end.get().status.code(), absl::StatusCode::kCancelled);
  observed_.WaitForArms(1);
  EXPECT_EQ(observed_.ended()["carried cancelled"], 1);
}

TEST_F(EngineShadowTest, DrainDropsWhatWaits) {
  options_.fidelity.time_share = 0;  // nothing in the background while somebody runs
  MakePair();
  Running hold = Begin(LongAsk("s", Tokens(20, 77)));
  AskAbout(1);
  engine_->StartDrain();
  observed_.WaitForArms(1);
  EXPECT_EQ(observed_.ended()["carried draining"], 1);
  EXPECT_TRUE(hold.end.get().status.ok());
}

TEST_F(EngineShadowTest, RemovingTheTargetDropsItsShadows) {
  options_.fidelity.time_share = 0;
  MakePair();
  Running hold = Begin(LongAsk("s", Tokens(20, 77)));
  AskAbout(1);
  ASSERT_TRUE(engine_->Remove("m", "t").ok());
  EXPECT_EQ(observed_.ended()["carried version"], 1);
  EXPECT_TRUE(hold.end.get().status.ok());
  ExpectIdle();
}

TEST_F(EngineShadowTest, UsersTakeTheBlocksBack) {
  options_.gate.when_learning_carry = true;
  options_.fidelity.kv_share = 1;
  options_.kv_cache_bytes = 40 * 8192;  // 40 blocks
  MakePair();
  for (int i = 0; i < 4; ++i) {
    const Answer answer = AskAbout(i, 200, 4);
    EXPECT_TRUE(answer.status.ok()) << answer.status;
    const Answer big = Run(Ask("t", Tokens(300, 50 + i), 8));
    EXPECT_TRUE(big.status.ok()) << big.status;
  }
  ExpectIdle();
}

// Both arms start from what is there already, and neither computes a row more.
TEST_F(EngineShadowTest, CostsLessOverWhatIsNative) {
  options_.fidelity.store_native = false;
  MakePair();
  const std::vector<int32_t> prompt = Tokens(150, 1);
  ASSERT_TRUE(Warm("t", std::vector<int32_t>(prompt.begin(), prompt.begin() + 65)).ok());
  ASSERT_TRUE(Warm("s", prompt).ok());
  const auto ask = [&](ReuseMode reuse) {
    CompletionRequest request = Ask("t", prompt, 5);
    request.reuse = reuse;
    request.store = false;
    return Run(request);
  };
  EXPECT_EQ(ask(ReuseMode::kAuto).usage.cached_tokens, 64);
  observed_.WaitForArms(1);
  EXPECT_EQ(observed_.tokens(), 150 - 144 + 4);  // the suffix after 9 blocks
  EXPECT_EQ(ask(ReuseMode::kCarry).usage.carried_tokens, 80);
  observed_.WaitForArms(2);
  EXPECT_EQ(observed_.tokens(), 150 - 144 + 4 + 150 - 64 + 4);  // what is not native yet
}

TEST_F(EngineShadowTest, ControlsCostAPrefillEach) {
  options_.fidelity.control_rate = options_.fidelity.old_rate = 1;
  MakePair();
  AskAbout(1, 100, 8);
  observed_.WaitForArms(3);
  // Carried: the suffix. Control: everything. Old: the source has its own blocks.
  EXPECT_EQ(observed_.tokens(), (4 + 7) + (100 + 7) + (4 + 7));
}

// The first divergence of a comparison finds a user on the way: he is done before the next.
struct Interrupting {
  Engine* engine = nullptr;
  std::shared_ptr<Recorder> user;
  std::future<Answer> end;
  CompletionRequest request;
  int steps = 0, rows = 0;
  bool user_first = false;
};
Interrupting* interrupting = nullptr;

void InterruptedDivergence(Backend* backend, const DivergenceArgs& args) {
  Interrupting& test = *interrupting;
  if (test.steps == 0) {
    EXPECT_TRUE(test.engine->Submit(test.request, test.user).ok());
  } else if (test.steps == 1) {
    test.user_first = test.end.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  ++test.steps;
  test.rows += args.rows;
  CpuOps().divergence(backend, args);
}

TEST_F(EngineShadowTest, ComparingGivesWayBetweenPositions) {
  options_.fidelity.time_share = 0;
  static Ops ops = CpuOps();  // outlives the engine
  ops.divergence = InterruptedDivergence;
  ops_ = &ops;
  Interrupting test;
  interrupting = &test;
  test.user = std::make_shared<Recorder>(1);
  test.end = test.user->end();
  test.request = Ask("s", Tokens(30, 9), 20);
  MakePair();
  test.engine = engine_.get();
  AskAbout(1, 100, 16);
  observed_.WaitForArms(1);
  EXPECT_GT(test.steps, 1);
  EXPECT_EQ(test.rows, 16);
  EXPECT_TRUE(test.user_first);
  const auto samples = observed_.samples(FidelityComparison::kCarried);
  ASSERT_EQ(samples.size(), 1u);
  EXPECT_EQ(samples[0].positions.size(), 16u);
  ExpectSame(samples[0]);
}

// However large the share of users' time that it may have.
TEST_F(EngineShadowTest, WorkInTheBackgroundFirstWaitsForAQuietMoment) {
  options_.fidelity.time_share = 1;
  options_.fidelity.max_age_seconds = 1000;
  MakePair();
  Running hold = Begin(LongAsk("s", Tokens(20, 77)));
  AskAbout(1);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(observed_.tokens(), 0);
  EXPECT_GT(engine_->snapshot().running, 0) << "the other request was to outlast it";
  engine_->Cancel(hold.ticket);
  hold.end.wait();
  observed_.WaitForArms(1);
  EXPECT_EQ(observed_.ended()["carried completed"], 1);
}

TEST_F(EngineShadowTest, WhatFindsNoQuietMomentForLongTakesItsShareOfUsersTime) {
  options_.fidelity.time_share = 0.5;
  options_.fidelity.max_age_seconds = 1.6;
  MakePair();
  Running hold = Begin(LongAsk("s", Tokens(20, 77)));
  AskAbout(1);
  for (int i = 0; i < 1000 && observed_.ended().empty(); ++i) {
    Running next = Begin(LongAsk("s", Tokens(20, 78 + i)));  // one has not ended as the next begins
    hold.end.wait();
    hold = std::move(next);
  }
  EXPECT_EQ(observed_.ended()["carried completed"], 1);
  engine_->Cancel(hold.ticket);
  hold.end.wait();
}

// Who hears of the last arm's end finds none waiting.
TEST_F(EngineShadowTest, NoneWaitsOnceTheLastHasEnded) {
  MakePair();
  for (int i = 0; i < 20; ++i) {
    AskAbout(i, 40, 1);
    observed_.WaitForArms(i + 1);
    EXPECT_EQ(engine_->snapshot().shadows_waiting, 0);
  }
}

}  // namespace
}  // namespace carryover
