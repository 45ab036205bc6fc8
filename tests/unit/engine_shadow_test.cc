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

// Cancels its request as it begins, before it can have more than a token.
class CancellingSink final : public CompletionSink {
 public:
  explicit CancellingSink(Engine* engine) : engine_(engine) {}
  void OnStart(const std::string&, const Usage&, const CacheInfo&) override {
    engine_->Cancel(ticket_.get_future().get());
  }
  void OnPromptLogprobs(std::vector<PositionLogprobs>) override {}
  void OnDelta(ChoiceDelta) override {}
  void OnFinish(const ChoiceFinish&) override {}
  void OnDone(const CompletionDone&) override {}
  void SetTicket(uint64_t ticket) { ticket_.set_value(ticket); }

 private:
  Engine* const engine_;
  std::promise<uint64_t> ticket_;
};

TEST_F(EngineShadowTest, WhatHasNoAnswerIsCounted) {
  MakePair();
  ASSERT_TRUE(Warm("s", Tokens(100)).ok());
  const auto sink = std::make_shared<CancellingSink>(engine_.get());
  const auto ticket = engine_->Submit(LongAsk("t", Tokens(100)), sink);
  ASSERT_TRUE(ticket.ok());
  sink->SetTicket(*ticket);
  observed_.WaitForArms(1);
  EXPECT_EQ(observed_.ended(), (std::map<std::string, int>{{"carried cancelled", 1}}));
}

// Tells when the first choice has so many tokens.
class CountingSink final : public CompletionSink {
 public:
  explicit CountingSink(int tokens) : left_(tokens) {}
  void OnStart(const std::string&, const Usage&, const CacheInfo&) override {}
  void OnPromptLogprobs(std::vector<PositionLogprobs>) override {}
  void OnDelta(ChoiceDelta delta) override {
    if (delta.index == 0 && left_ > 0 && --left_ == 0) reached_.set_value();
  }
  void OnFinish(const ChoiceFinish&) override {}
  void OnDone(const CompletionDone&) override {}
  std::future<void> reached() { return reached_.get_future(); }

 private:
  int left_;
  std::promise<void> reached_;
};

// Many clients hang up once they have seen enough: were that a drop, their cells would never open.
TEST_F(EngineShadowTest, WhoLeavesAfterWhatIsComparedIsCompared) {
  options_.fidelity.positions = 4;
  MakePair();
  ASSERT_TRUE(Warm("s", Tokens(100)).ok());
  const auto sink = std::make_shared<CountingSink>(4);
  const auto ticket = engine_->Submit(LongAsk("t", Tokens(100)), sink);
  ASSERT_TRUE(ticket.ok());
  sink->reached().wait();
  engine_->Cancel(*ticket);
  observed_.WaitForArms(1);
  EXPECT_EQ(observed_.ended()["carried completed"], 1);
  const auto samples = observed_.samples(FidelityComparison::kCarried);
  ASSERT_EQ(samples.size(), 1u);
  EXPECT_EQ(samples[0].positions.size(), 4u);
  EXPECT_EQ(samples[0].continuation, Continuation::kSameSoFar);
  ExpectSame(samples[0]);
}

// S has a prefix, and another one that begins alike.
TEST_F(EngineShadowTest, APrefixThatLostItsEndIsNotComparedAsAWholeOne) {
  options_.fidelity.time_share = 0;
  MakePair();
  const std::vector<int32_t> prompt = Tokens(100, 1);
  std::vector<int32_t> sibling(prompt.begin(), prompt.begin() + 48);
  for (int32_t token : Tokens(52, 2)) sibling.push_back(token);
  ASSERT_TRUE(Warm("s", prompt).ok());
  ASSERT_TRUE(Warm("s", sibling).ok());
  Running hold = Hold(LongAsk("s", Tokens(20, 77)));
  CompletionRequest request = Ask("t", prompt);
  request.store = false;
  EXPECT_TRUE(Run(request).cache.shadowed);
  PrefixSpec spec;
  spec.version = "s";
  spec.tokens = prompt;
  ASSERT_TRUE(engine_->EvictPrefix(spec).ok());
  EXPECT_GT(engine_->snapshot().running, 0) << "the other request was to outlast it";
  engine_->Cancel(hold.ticket);
  observed_.WaitForArms(1);
  EXPECT_EQ(observed_.ended(), (std::map<std::string, int>{{"carried evicted", 1}}));
}

// It was to carry six blocks; while it waited, three of them went.
TEST_F(EngineShadowTest, WhatShrankWhileItWaitedIsNotCompared) {
  // Its few blocks let the request that holds them have one choice; slow passes make that last.
  static const Ops slow = [] {
    Ops ops = CpuOps();
    ops.begin_pass = [](Backend* backend, const PassLayout& layout) {
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
      CpuOps().begin_pass(backend, layout);
    };
    return ops;
  }();
  ops_ = &slow;
  options_.gate.when_learning_carry = true;
  options_.kv_cache_bytes = 63 * 8192;  // 63 blocks
  MakePair();
  const std::vector<int32_t> known = Tokens(96, 1);
  std::vector<int32_t> prompt = known, sibling(known.begin(), known.begin() + 48);
  for (int32_t token : Tokens(400, 2)) prompt.push_back(token);
  for (int32_t token : Tokens(52, 3)) sibling.push_back(token);
  ASSERT_TRUE(Warm("s", known).ok());
  for (const auto& pinned : {sibling, Tokens(448, 4)}) {
    ASSERT_TRUE(Warm("s", pinned).ok());
    PrefixSpec spec;
    spec.version = "s";
    spec.tokens = pinned;
    ASSERT_TRUE(engine_->Pin(spec, true).ok());
  }
  Running hold = Hold(Ask("s", Tokens(20, 77), 350));
  hold.start.wait();
  Running waits = Begin(Ask("t", prompt, 4));
  // Between two calls lies a step, which finds no blocks for it.
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(engine_->CheckStore().ok());
  PrefixSpec spec;
  spec.version = "s";
  spec.tokens = known;
  ASSERT_TRUE(engine_->EvictPrefix(spec).ok());
  EXPECT_EQ(waits.start.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  engine_->Cancel(hold.ticket);
  EXPECT_EQ(waits.end.get().usage.carried_tokens, 48);
  observed_.WaitForArms(1);
  EXPECT_EQ(observed_.ended(), (std::map<std::string, int>{{"native evicted", 1}}));
}

// What T carries from S2 says nothing about S1.
TEST_F(EngineShadowTest, AnotherSourceIsNotComparedInItsPlace) {
  options_.fidelity.time_share = 0;
  Make(options_);
  ASSERT_TRUE(Load("s1", "llama3").ok());
  ASSERT_TRUE(Load("s2", "llama3", {}, "second").ok());
  ASSERT_TRUE(Load("t", "llama3", {"s1", "s2"}, "target").ok());
  const std::vector<int32_t> prompt = Tokens(100, 1);
  ASSERT_TRUE(Warm("s1", prompt).ok());
  ASSERT_TRUE(Warm("s2", prompt).ok());
  Running hold = Hold(LongAsk("s1", Tokens(20, 77)));
  CompletionRequest request = Ask("t", prompt);
  request.store = false;
  EXPECT_TRUE(Run(request).cache.shadowed);
  ASSERT_TRUE(engine_->Evict("m", "s1").ok());
  EXPECT_GT(engine_->snapshot().running, 0) << "the other request was to outlast it";
  engine_->Cancel(hold.ticket);
  observed_.WaitForArms(1);
  EXPECT_EQ(observed_.ended(), (std::map<std::string, int>{{"carried evicted", 1}}));
}

// Every arm that was to be compared ends once, also the one whose weights went before its turn.
TEST_F(EngineShadowTest, UnloadingTheSourceIsCounted) {
  options_.fidelity.time_share = 0;
  options_.fidelity.old_rate = 1;
  MakePair();
  ASSERT_TRUE(engine_->Promote("m", "t", 100).ok());
  Running hold = Hold(LongAsk("t", Tokens(20, 77)));
  AskAbout(1);
  ASSERT_TRUE(engine_->Unload("m", "s").ok());
  EXPECT_EQ(observed_.ended(), (std::map<std::string, int>{{"old version", 1}}));
  engine_->Cancel(hold.ticket);
  observed_.WaitForArms(2);
  EXPECT_EQ(observed_.ended()["carried completed"], 1);
}

TEST_F(EngineShadowTest, DrainDropsWhatWaits) {
  options_.fidelity.time_share = 0;  // nothing in the background while somebody runs
  MakePair();
  Running hold = Hold(LongAsk("s", Tokens(20, 77)));
  AskAbout(1);
  engine_->StartDrain();
  observed_.WaitForArms(1);
  EXPECT_EQ(observed_.ended()["carried draining"], 1);
  EXPECT_TRUE(hold.end.get().status.ok());
}

TEST_F(EngineShadowTest, RemovingTheTargetDropsItsShadows) {
  options_.fidelity.time_share = 0;
  MakePair();
  Running hold = Hold(LongAsk("s", Tokens(20, 77)));
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
  Running hold = Hold(LongAsk("s", Tokens(20, 77)));
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
  Running hold = Hold(LongAsk("s", Tokens(20, 77)));
  AskAbout(1);
  for (int i = 0; i < 1000 && observed_.ended().empty(); ++i) {
    Running next = Hold(LongAsk("s", Tokens(20, 78 + i)));  // one has not ended as the next begins
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
