// Comparing arms beside users' work: what is compared, what it costs, what becomes of it, and that
// users never notice.
#include <gmock/gmock.h>

#include <atomic>
#include <map>
#include <thread>

#include "base/mutex.h"
#include "engine/shadow_runner.h"
#include "tests/unit/engine_fixture.h"
#include "tests/unit/perturbed_folder.h"

namespace carryover {
namespace {

class RecordingObserver final : public EngineObserver {
 public:
  void OnRequestDone(const RequestRecord&) override {}
  void OnRejected(absl::string_view) override {}
  void OnInterTokenLatency(double) override {}
  void OnBlockLoad(absl::string_view, double) override {}
  void OnStoreLookup(int) override {}
  void OnStoreHit(absl::string_view, absl::string_view, int) override {}
  void OnPreemption() override {}
  void OnFidelitySample(const FidelitySample& sample) override {
    MutexLock lock(&mutex_);
    samples_.push_back(sample);
  }
  void OnShadowEnded(absl::string_view arm, absl::string_view outcome) override {
    MutexLock lock(&mutex_);
    ++ended_[std::string(arm) + " " + std::string(outcome)];
    changed_.SignalAll();
  }
  void OnShadowTokens(int tokens) override { tokens_ += tokens; }
  void OnRefreshedBlocks(int blocks) override { refreshed_ += blocks; }
  void OnGateChange(const GateChange& change) override {
    MutexLock lock(&mutex_);
    changes_.push_back(change);
  }

  // Waits until so many arms have ended, in whatever way; for seconds at most.
  void WaitForArms(int count) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    MutexLock lock(&mutex_);
    const auto ended = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      int sum = 0;
      for (const auto& [what, n] : ended_) sum += n;
      return sum;
    };
    while (ended() < count && changed_.WaitUntil(&mutex_, deadline)) {
    }
    EXPECT_GE(ended(), count);
  }
  std::vector<FidelitySample> samples(FidelityComparison comparison) {
    MutexLock lock(&mutex_);
    std::vector<FidelitySample> out;
    for (const FidelitySample& sample : samples_) {
      if (sample.labels.comparison == comparison) out.push_back(sample);
    }
    return out;
  }
  std::map<std::string, int> ended() {
    MutexLock lock(&mutex_);
    return ended_;
  }
  std::vector<GateChange> changes() {
    MutexLock lock(&mutex_);
    return changes_;
  }
  int tokens() const { return tokens_; }
  int refreshed() const { return refreshed_; }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<FidelitySample> samples_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, int> ended_ ABSL_GUARDED_BY(mutex_);
  std::vector<GateChange> changes_ ABSL_GUARDED_BY(mutex_);
  std::atomic<int> tokens_{0};
  std::atomic<int> refreshed_{0};
};

class EngineShadowTest : public EngineTest {
 protected:
  EngineShadowTest() {
    compare_ = true;
    observer_ = &observed_;
    options_.fidelity.sample_rate = options_.fidelity.learning_sample_rate = 1;
    options_.fidelity.hold_out_rate = 0;
    options_.fidelity.control_rate = options_.fidelity.old_rate = 0;
    options_.fidelity.tasks = {"qa"};
  }
  void TearDown() override { engine_.reset(); }  // it tells the observer until it ends

  // S, and T with the same weights under another fingerprint.
  void MakePair() {
    Make(options_);
    ASSERT_TRUE(Load("s", "llama3").ok());
    ASSERT_TRUE(Load("t", "llama3", {"s"}, "control").ok());
  }
  // S, and T with other weights.
  void MakeUpdatedPair() {
    Make(options_);
    ASSERT_TRUE(Load("s", "llama3").ok());
    const std::string folder = PerturbedFolder(TinyPath("llama3"), "llama3");
    LoadOptions load;
    load.model = "m";
    load.version = "t";
    load.path = folder;
    load.carry_from = {"s"};
    load.auto_dtype = false;
    load.weights = load.kv_dtype = DType::kF32;
    ASSERT_TRUE(engine_->Load(load, nullptr).ok());
    std::filesystem::remove_all(folder);
  }
  Answer AskAbout(int seed, int length = 100, int max_tokens = 8) {
    const std::vector<int32_t> prompt = Tokens(length, seed);
    EXPECT_TRUE(Warm("s", prompt).ok());
    return Run(Ask("t", prompt, max_tokens));
  }
  // Runs for some hundreds of steps of many rows.
  static CompletionRequest LongAsk(const std::string& version, std::vector<int32_t> tokens) {
    CompletionRequest request = Ask(version, std::move(tokens), 350);
    request.sampling.n = 16;
    return request;
  }
  static void ExpectSame(const FidelitySample& sample) {
    EXPECT_TRUE(sample.valid);
    EXPECT_FALSE(sample.first_token_flip);
    for (const PositionFidelity& position : sample.positions) {
      EXPECT_LE(position.kl, 1e-6);
      EXPECT_LE(position.tv, 1e-4);
      EXPECT_FALSE(position.flip);
    }
  }

  EngineOptions options_;
  RecordingObserver observed_;
};

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

TEST_F(EngineShadowTest, TheGateOpensOnEvidenceAndClosesOnIt) {
  // Loose limits and no floor: a few dozen samples settle it.
  options_.gate.limit = {0.2, 0.2, 0.2};
  options_.gate.max_floor = {0, 0, 0};
  MakePair();
  int asked = 0;
  Answer answer;
  for (; asked < 300; ++asked) {
    answer = AskAbout(1000 + asked, 40, 2);
    if (answer.usage.carried_tokens > 0) break;
  }
  EXPECT_EQ(answer.cache.gate, "open") << asked;
  ASSERT_FALSE(observed_.changes().empty());
  EXPECT_EQ(observed_.changes()[0].from, "learning");
  EXPECT_EQ(observed_.changes()[0].to, "open");
  // An operator closes it: the next request is native.
  EXPECT_EQ(engine_->SetGate({.task = "zzz"}, GateState::kClosed, "test").status().code(),
            absl::StatusCode::kInvalidArgument);
  auto changed = engine_->SetGate({.source = "s"}, GateState::kClosed, "test");
  ASSERT_TRUE(changed.ok()) << changed.status();
  EXPECT_EQ(*changed, 1);
  answer = AskAbout(5000, 40, 2);
  EXPECT_EQ(answer.usage.carried_tokens, 0);
  EXPECT_EQ(answer.cache.gate, "closed");
  const auto cells = engine_->ReportGate();
  ASSERT_EQ(cells.size(), 1u);
  EXPECT_EQ(cells[0].cell.source, "s");
  EXPECT_TRUE(cells[0].forced);
  EXPECT_FALSE(cells[0].explanation.empty());
}

TEST_F(EngineShadowTest, BadCarryingClosesTheGate) {
  options_.gate.when_learning_carry = true;
  options_.fidelity.hold_out_rate = 0.1;
  MakeUpdatedPair();
  Answer answer;
  int asked = 0;
  for (; asked < 400; ++asked) {
    answer = AskAbout(asked, 60, 4);
    if (answer.cache.gate == "closed") break;
  }
  EXPECT_EQ(answer.cache.gate, "closed");
  EXPECT_EQ(answer.usage.carried_tokens, 0);
}

TEST_F(EngineShadowTest, SamplingIsBlindToWhatClientsSend) {
  options_.fidelity.learning_sample_rate = 0.5;
  MakePair();
  ASSERT_TRUE(Warm("s", Tokens(40)).ok());
  int shadowed = 0;
  for (int i = 0; i < 200; ++i) {
    CompletionRequest request = Ask("t", Tokens(40), 1);
    request.id = "always the same";
    request.sampling.seed = 1;
    request.store = false;
    shadowed += Run(request).cache.shadowed;
  }
  EXPECT_GT(shadowed, 50);  // 7 standard deviations
  EXPECT_LT(shadowed, 150);
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

// A caller who leaves is let go, though nothing in the background can run.
TEST_F(EngineShadowTest, EvaluateEndsWhenItsCallerLeaves) {
  options_.fidelity.time_share = 0;
  MakePair();
  Running hold = Begin(LongAsk("s", Tokens(20, 77)));
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
  EXPECT_EQ(engine_->snapshot().running > 0, true) << "the other request was to outlast it";
  engine_->Cancel(hold.ticket);
  hold.end.wait();
}

TEST_F(EngineShadowTest, EvaluateLeavesNothingBehind) {
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

TEST_F(EngineShadowTest, ARemovedVersionLeavesNoCell) {
  options_.fidelity.time_share = 0;
  options_.fidelity.old_rate = 0;
  MakePair();
  AskAbout(1);
  observed_.WaitForArms(1);
  EXPECT_EQ(engine_->ReportGate().size(), 1u);
  Running hold = Begin(LongAsk("t", Tokens(20, 77)));
  AskAbout(2);
  ASSERT_TRUE(engine_->Promote("m", "t", 100).ok());
  ASSERT_TRUE(engine_->Remove("m", "s").ok());
  EXPECT_TRUE(engine_->ReportGate().empty());
  engine_->Cancel(hold.ticket);
  hold.end.wait();
  observed_.WaitForArms(2);
  EXPECT_EQ(observed_.ended()["carried version"], 1);
  EXPECT_TRUE(engine_->ReportGate().empty());
}

TEST_F(EngineShadowTest, EvaluateAnswersInEveryWay) {
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

  spec.prompt.tokens = Tokens(10, 3);
  EXPECT_EQ(engine_->Evaluate(spec, nullptr).status().code(),
            absl::StatusCode::kFailedPrecondition);
  spec.source = "nobody";
  EXPECT_EQ(engine_->Evaluate(spec, nullptr).status().code(),
            absl::StatusCode::kFailedPrecondition);
  ExpectIdle();
}

}  // namespace
}  // namespace carryover
