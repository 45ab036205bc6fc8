// An engine on the tiny checkpoints of tests/golden, with calls that wait.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "engine/engine.h"
#include "tests/source_dir.h"

namespace carryover {

struct Answer {
  absl::Status status;
  std::vector<std::string> texts;            // (n)
  std::vector<std::vector<int32_t>> tokens;  // (n)
  std::vector<std::vector<float>> logprobs;  // (n), of the chosen tokens where asked for
  std::vector<ChoiceFinish> finishes;        // (n)
  std::vector<PositionLogprobs> prompt_logprobs;
  Usage usage, first_usage;
  CacheInfo cache;
  Timing timing;
};

// Collects a request's events; checks their order on the way.
class Recorder final : public CompletionSink {
 public:
  // The engine is made to wait so long at each of the answer's tokens.
  explicit Recorder(int n, std::chrono::microseconds pace = {}) : pace_(pace) {
    answer_.texts.resize(n);
    answer_.tokens.resize(n);
    answer_.logprobs.resize(n);
    answer_.finishes.resize(n);
  }
  void OnStart(const std::string&, const Usage& usage, const CacheInfo&) override {
    EXPECT_FALSE(started_);
    started_ = true;
    answer_.first_usage = usage;
    start_.set_value();
  }
  void OnPromptLogprobs(std::vector<PositionLogprobs> logprobs) override {
    answer_.prompt_logprobs = std::move(logprobs);
  }
  void OnDelta(ChoiceDelta delta) override {
    EXPECT_TRUE(started_);
    EXPECT_EQ(answer_.finishes[delta.index].reason, FinishReason::kNone);
    answer_.texts[delta.index] += delta.text;
    for (int32_t token : delta.token_ids) answer_.tokens[delta.index].push_back(token);
    if (pace_.count() > 0) std::this_thread::sleep_for(pace_);
    for (const auto& logprob : delta.logprobs) {
      answer_.logprobs[delta.index].push_back(logprob.chosen.logprob);
    }
  }
  void OnFinish(const ChoiceFinish& finish) override { answer_.finishes[finish.index] = finish; }
  void OnDone(const CompletionDone& done) override {
    EXPECT_FALSE(done_);
    done_ = true;
    answer_.status = done.status;
    answer_.usage = done.usage;
    answer_.cache = done.cache;
    answer_.timing = done.timing;
    end_.set_value(std::move(answer_));
  }
  std::future<Answer> end() { return end_.get_future(); }
  std::future<void> start() { return start_.get_future(); }

 private:
  const std::chrono::microseconds pace_;
  bool started_ = false, done_ = false;
  Answer answer_;
  std::promise<Answer> end_;
  std::promise<void> start_;
};

class EngineTest : public testing::Test {
 protected:
  static constexpr int kBlock = 16;

  static std::string TinyPath(const std::string& name) {
    return SourceDir() + "/tests/golden/tiny/" + name;
  }

  bool compare_ = false;  // whether requests' arms may be compared
  EngineObserver* observer_ = nullptr;
  const Ops* ops_ = &CpuOps();

  void Make(EngineOptions options) {
    options.threads = 1;
    if (!compare_) {  // nothing by chance, nothing in the background
      options.fidelity.sample_rate = options.fidelity.learning_sample_rate = 0;
      options.fidelity.hold_out_rate = 0;
    }
    if (options.kv_cache_bytes == EngineOptions().kv_cache_bytes) options.kv_cache_bytes = 8 << 20;
    auto engine = Engine::Create(options, *ops_, observer_);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
  }

  absl::StatusOr<VersionInfo> Load(const std::string& version, const std::string& tiny,
                                   std::vector<std::string> carry_from = {},
                                   const std::string& distinct = "", DType dtype = DType::kF32) {
    LoadOptions options;
    options.model = "m";
    options.version = version;
    options.path = TinyPath(tiny);
    options.carry_from = std::move(carry_from);
    options.distinct = distinct;
    options.auto_dtype = false;
    options.weights = dtype;
    options.kv_dtype = dtype;
    return engine_->Load(options, nullptr);
  }

  // Deterministic tokens that no special id is among.
  static std::vector<int32_t> Tokens(int count, int seed = 0) {
    std::vector<int32_t> tokens;
    uint32_t state = 12345 + seed;
    for (int i = 0; i < count; ++i) {
      state = state * 1664525 + 1013904223;
      tokens.push_back(10 + (state >> 16) % 200);
    }
    return tokens;
  }

  static CompletionRequest Ask(const std::string& version, std::vector<int32_t> tokens,
                               int max_tokens = 8) {
    CompletionRequest request;
    request.version = version;
    request.tokens = std::move(tokens);
    request.sampling.max_tokens = max_tokens;
    request.sampling.temperature = 0;
    request.sampling.ignore_eos = true;
    request.sampling.logprobs = 0;
    return request;
  }

  struct Running {
    uint64_t ticket = 0;
    std::future<Answer> end;
    std::future<void> start;
  };
  Running Begin(CompletionRequest request, std::chrono::microseconds pace = {}) {
    auto sink = std::make_shared<Recorder>(request.sampling.n, pace);
    Running running;
    running.end = sink->end();
    running.start = sink->start();
    auto ticket = engine_->Submit(std::move(request), sink);
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    if (ticket.ok()) running.ticket = *ticket;
    return running;
  }
  // A request that outlasts what a test does meanwhile, on however quick a machine.
  Running Hold(CompletionRequest request) {
    return Begin(std::move(request), std::chrono::microseconds(100));
  }
  Answer Run(CompletionRequest request) { return Begin(std::move(request)).end.get(); }

  absl::StatusOr<WarmResult> Warm(const std::string& version, std::vector<int32_t> tokens) {
    PrefixSpec prefix;
    prefix.version = version;
    prefix.tokens = std::move(tokens);
    return engine_->Warm(prefix, nullptr, nullptr);
  }

  // Nothing runs, nothing is held, nothing is broken.
  void ExpectIdle() {
    const EngineSnapshot snapshot = engine_->snapshot();
    EXPECT_EQ(snapshot.running, 0);
    EXPECT_EQ(snapshot.waiting, 0);
    EXPECT_EQ(snapshot.waiting_tokens, 0);
    EXPECT_EQ(snapshot.device_blocks_active, 0);
    EXPECT_EQ(snapshot.provenance_violations, 0);
    EXPECT_TRUE(engine_->CheckStore().ok()) << engine_->CheckStore();
  }

  static void ExpectUsageAddsUp(const Answer& answer) {
    const Usage& u = answer.usage;
    EXPECT_EQ(u.prompt_tokens,
              u.cached_tokens + u.carried_tokens + u.repaired_tokens + u.computed_tokens);
    int segments = 0;
    for (const CacheSegment& segment : answer.cache.segments) segments += segment.tokens;
    EXPECT_EQ(segments, u.prompt_tokens);
  }

  std::unique_ptr<Engine> engine_;
};

}  // namespace carryover
