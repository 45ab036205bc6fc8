// A pair of versions whose requests are compared, and an observer that keeps what the engine tells.
#pragma once

#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "tests/unit/engine_fixture.h"
#include "tests/unit/perturbed_folder.h"

namespace carryover {

class RecordingObserver final : public EngineObserver {
 public:
  void OnRequestDone(const RequestRecord& record) override {
    MutexLock lock(&mutex_);
    plans_.push_back(record.plan);
  }
  void OnRejected(absl::string_view) override {}
  void OnInterTokenLatency(double) override {}
  void OnBlockLoad(absl::string_view, double) override {}
  void OnStoreLookup(int) override {}
  void OnStoreHit(absl::string_view, absl::string_view, int) override {}
  void OnPreemption() override {}
  void OnPairDeclared(const VersionPair&) override {}
  void OnPairRemoved(const VersionPair&) override {}
  void OnFidelitySample(const FidelitySample& sample) override {
    MutexLock lock(&mutex_);
    samples_.push_back(sample);
  }
  void OnShadowEnded(absl::string_view arm, absl::string_view outcome) override {
    MutexLock lock(&mutex_);
    ++ended_[std::string(arm) + " " + std::string(outcome)];
    changed_.SignalAll();
  }
  void OnTrialDone(const TrialRecord& record) override {
    MutexLock lock(&mutex_);
    trial_.push_back(record);
  }
  void OnShadowLag(double) override {}
  void OnShadowTokens(int tokens) override { tokens_ += tokens; }
  void OnRefreshedBlocks(int blocks) override { refreshed_ += blocks; }
  void OnMappedAhead(int blocks) override { mapped_ahead_ += blocks; }
  void OnShadowDelay(double seconds) override {
    MutexLock lock(&mutex_);
    delays_.push_back(seconds);
  }
  void OnRefreshEnded(absl::string_view outcome) override {
    MutexLock lock(&mutex_);
    ++refresh_ended_[std::string(outcome)];
    changed_.SignalAll();
  }
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
  // Of the trial's ended requests; told before the client hears of the end.
  std::vector<TrialRecord> trial() {
    MutexLock lock(&mutex_);
    return trial_;
  }
  // Waits until so many prefixes were refreshed or given up.
  std::map<std::string, int> WaitForRefreshes(int count) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    MutexLock lock(&mutex_);
    const auto ended = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      int sum = 0;
      for (const auto& [what, n] : refresh_ended_) sum += n;
      return sum;
    };
    while (ended() < count && changed_.WaitUntil(&mutex_, deadline)) {
    }
    EXPECT_GE(ended(), count);
    return refresh_ended_;
  }
  std::vector<double> delays() {
    MutexLock lock(&mutex_);
    return delays_;
  }
  // That requests were served by, in the order of their ends.
  std::vector<std::string> plans() {
    MutexLock lock(&mutex_);
    return plans_;
  }
  int tokens() const { return tokens_; }
  int refreshed() const { return refreshed_; }
  int mapped_ahead() const { return mapped_ahead_; }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<FidelitySample> samples_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, int> ended_ ABSL_GUARDED_BY(mutex_);
  std::vector<GateChange> changes_ ABSL_GUARDED_BY(mutex_);
  std::vector<TrialRecord> trial_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, int> refresh_ended_ ABSL_GUARDED_BY(mutex_);
  std::vector<double> delays_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> plans_ ABSL_GUARDED_BY(mutex_);
  std::atomic<int> tokens_{0};
  std::atomic<int> refreshed_{0}, mapped_ahead_{0};
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

}  // namespace carryover
