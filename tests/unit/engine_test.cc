// Requests through the engine: batching, sampling, limits, cancellation, drain.
#include "engine/engine.h"

#include <gmock/gmock.h>

#include <atomic>
#include <cmath>
#include <random>
#include <thread>

#include "tests/unit/engine_fixture.h"

namespace carryover {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

TEST_F(EngineTest, AloneOrInABatchTheAnswerIsTheSame) {
  Make({});
  ASSERT_TRUE(Load("v", "smollm2").ok());
  std::vector<CompletionRequest> requests;
  for (int i = 0; i < 12; ++i) {
    CompletionRequest request = Ask("v", Tokens(5 + 13 * i, i), 12);
    if (i % 3 == 1) {
      request.sampling.temperature = 1;
      request.sampling.seed = 99 + i;
    }
    if (i % 4 == 2) request.sampling.n = 3;
    request.store = false;
    requests.push_back(request);
  }
  std::vector<Answer> alone;
  for (const auto& request : requests) alone.push_back(Run(request));
  std::vector<Running> together;
  CompletionRequest noise = Ask("v", Tokens(30, 77), 12);  // an unseeded neighbour (vllm#51226)
  noise.sampling.temperature = 1;
  Running neighbour = Begin(noise);
  for (const auto& request : requests) together.push_back(Begin(request));
  for (size_t i = 0; i < requests.size(); ++i) {
    const Answer answer = together[i].end.get();
    EXPECT_EQ(answer.tokens, alone[i].tokens) << i;
    EXPECT_EQ(answer.texts, alone[i].texts) << i;
    EXPECT_EQ(answer.logprobs, alone[i].logprobs) << i;
  }
  neighbour.end.get();
  ExpectIdle();
}

TEST_F(EngineTest, ChunkedPrefillChangesNothing) {
  std::vector<Answer> answers;
  for (const int step_tokens : {512, 7, 1}) {
    EngineOptions options;
    options.step_tokens = step_tokens;
    Make(options);
    ASSERT_TRUE(Load("v", "mistral").ok());
    answers.push_back(Run(Ask("v", Tokens(90), 10)));
  }
  EXPECT_EQ(answers[0].tokens, answers[1].tokens);
  EXPECT_EQ(answers[0].logprobs, answers[1].logprobs);
  EXPECT_EQ(answers[0].logprobs, answers[2].logprobs);
}

TEST_F(EngineTest, PreemptedRequestsAnswerAsIfNothingHappened) {
  EngineOptions options;
  Make(options);
  ASSERT_TRUE(Load("v", "smollm2").ok());
  std::vector<Answer> alone;
  const auto request = [&](int i) {
    CompletionRequest r = Ask("v", Tokens(40, i), 40);
    r.sampling.temperature = 1;
    r.sampling.seed = i;
    return r;
  };
  for (int i = 0; i < 6; ++i) alone.push_back(Run(request(i)));
  const StoreRow row = engine_->snapshot().store[0];
  const int64_t block_bytes = row.bytes / row.blocks;
  options.kv_cache_bytes = 14 * block_bytes;  // two and a half of them fit
  Make(options);
  ASSERT_TRUE(Load("v", "smollm2").ok());
  std::vector<Running> running;
  for (int i = 0; i < 6; ++i) running.push_back(Begin(request(i)));
  for (int i = 0; i < 6; ++i) {
    const Answer answer = running[i].end.get();
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_EQ(answer.tokens, alone[i].tokens) << i;
    EXPECT_EQ(answer.texts, alone[i].texts) << i;
    ExpectUsageAddsUp(answer);
  }
  EXPECT_GT(engine_->snapshot().preemptions, 0);
  ExpectIdle();
}

TEST_F(EngineTest, ChoicesShareTheirPromptAndDiffer) {
  Make({});
  ASSERT_TRUE(Load("v", "llama3").ok());
  CompletionRequest request = Ask("v", Tokens(50), 12);
  request.sampling.n = 4;
  request.sampling.temperature = 1.5;
  request.sampling.seed = 5;
  const Answer answer = Run(request);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.usage.completion_tokens, 48);
  EXPECT_EQ(answer.usage.prompt_tokens, 50);
  EXPECT_NE(answer.tokens[0], answer.tokens[1]);
  EXPECT_NE(answer.tokens[1], answer.tokens[2]);
  // The first choice is what n = 1 gives.
  request.sampling.n = 1;
  EXPECT_EQ(Run(request).tokens[0], answer.tokens[0]);
  ExpectIdle();
}

TEST_F(EngineTest, PromptLogprobsAreThoseOfGeneration) {
  Make({});
  ASSERT_TRUE(Load("v", "qwen2").ok());
  const std::vector<int32_t> prompt = Tokens(40);
  const Answer generated = Run(Ask("v", prompt, 30));
  std::vector<int32_t> whole = prompt;
  whole.insert(whole.end(), generated.tokens[0].begin(), generated.tokens[0].end());
  CompletionRequest score = Ask("v", whole, 0);
  score.sampling.prompt_logprobs = 2;
  const Answer scored = Run(score);
  ASSERT_TRUE(scored.status.ok()) << scored.status;
  ASSERT_EQ(scored.prompt_logprobs.size(), whole.size() - 1);
  for (int i = 0; i < 30; ++i) {
    const PositionLogprobs& position = scored.prompt_logprobs[prompt.size() - 1 + i];
    EXPECT_EQ(position.chosen.token, generated.tokens[0][i]);
    EXPECT_EQ(position.chosen.rank, 1);
    EXPECT_NEAR(position.chosen.logprob, generated.logprobs[0][i], 1e-5);
    EXPECT_EQ(position.top.size(), 2u);
  }
  EXPECT_EQ(scored.usage.computed_tokens, static_cast<int>(whole.size()));
}

TEST_F(EngineTest, EchoStopsAndFinishReasons) {
  Make({});
  ASSERT_TRUE(Load("v", "smollm2").ok());
  CompletionRequest request = Ask("v", Tokens(20), 30);
  const Answer plain = Run(request);
  EXPECT_EQ(plain.finishes[0].reason, FinishReason::kLength);
  EXPECT_EQ(plain.tokens[0].size(), 30u);

  request.sampling.stop_token_ids = {plain.tokens[0][5]};
  const Answer by_token = Run(request);
  EXPECT_EQ(by_token.finishes[0].reason, FinishReason::kStopToken);
  EXPECT_LE(by_token.tokens[0].size(), 6u);
  request.sampling.min_tokens = 20;
  EXPECT_GE(Run(request).tokens[0].size(), 20u);
  request.sampling.min_tokens = 0;
  request.sampling.stop_token_ids.clear();

  // A character of the middle of the text, whole: it starts at a byte that continues none.
  size_t at = plain.texts[0].size() / 2;
  const auto continues = [&](size_t i) {
    return i < plain.texts[0].size() && (plain.texts[0][i] & 0xC0) == 0x80;
  };
  while (continues(at)) --at;
  size_t size = 1;
  while (continues(at + size)) ++size;
  const std::string stop = plain.texts[0].substr(at, size);
  request.sampling.stop = {stop};
  const Answer by_text = Run(request);
  EXPECT_EQ(by_text.finishes[0].reason, FinishReason::kStopString);
  EXPECT_EQ(by_text.finishes[0].matched, stop);
  EXPECT_EQ(by_text.texts[0], plain.texts[0].substr(0, plain.texts[0].find(stop)));
  request.sampling.stop.clear();
  request.sampling.echo = true;
  const Answer echoed = Run(request);
  EXPECT_EQ(echoed.tokens[0].size(), 50u);
  EXPECT_THAT(echoed.texts[0], testing::EndsWith(plain.texts[0]));
}

TEST_F(EngineTest, BadRequestsNameTheirField) {
  Make({});
  ASSERT_TRUE(Load("v", "llama3").ok());
  const auto refusal = [&](const std::function<void(CompletionRequest*)>& edit) {
    CompletionRequest request = Ask("v", Tokens(20));
    edit(&request);
    const auto ticket = engine_->Submit(request, std::make_shared<Recorder>(1));
    EXPECT_FALSE(ticket.ok());
    return std::string(ticket.status().message());
  };
  EXPECT_THAT(refusal([](auto* r) { r->tokens[3] = -1; }), StartsWith("tokens:"));
  EXPECT_THAT(refusal([](auto* r) { r->tokens[3] = 1 << 30; }), StartsWith("tokens:"));
  EXPECT_THAT(refusal([](auto* r) { r->tokens.clear(); }), StartsWith("tokens:"));
  EXPECT_THAT(refusal([](auto* r) { r->tokens.resize(5000, 1); }), StartsWith("prompt:"));
  EXPECT_THAT(refusal([](auto* r) { r->sampling.max_tokens = 1 << 30; }),
              StartsWith("max_tokens:"));
  EXPECT_THAT(refusal([](auto* r) { r->sampling.max_tokens = -1; }), StartsWith("max_tokens:"));
  EXPECT_THAT(refusal([](auto* r) { r->sampling.min_tokens = 9; }), StartsWith("min_tokens:"));
  EXPECT_THAT(refusal([](auto* r) { r->sampling.n = 0; }), StartsWith("n:"));
  EXPECT_THAT(refusal([](auto* r) {
                r->sampling.logit_bias = {{99999, 1}};
              }),
              StartsWith("logit_bias:"));
  EXPECT_THAT(refusal([](auto* r) { r->sampling.stop_token_ids = {-3}; }),
              StartsWith("stop_token_ids:"));
  EXPECT_THAT(refusal([](auto* r) { r->sampling.stop = {""}; }), StartsWith("stop:"));
  EXPECT_THAT(refusal([](auto* r) { r->model = "nobody"; }), StartsWith("model:"));
  EXPECT_THAT(refusal([](auto* r) { r->version = "nobody"; }), StartsWith("version:"));
  EXPECT_THAT(refusal([](auto* r) {
                r->tokens.clear();
                r->prompt = "caf\xC3";
              }),
              StartsWith("prompt:"));
  ExpectIdle();
}

TEST_F(EngineTest, TheQueueHasLimits) {
  EngineOptions options;
  options.max_running = 1;
  options.max_waiting_requests = 3;
  Make(options);
  ASSERT_TRUE(Load("v", "llama3").ok());
  std::vector<Running> running;
  absl::Status refused;
  for (int i = 0; i < 50 && refused.ok(); ++i) {
    auto sink = std::make_shared<Recorder>(1);
    std::future<Answer> end = sink->end();
    const auto ticket = engine_->Submit(Ask("v", Tokens(200, i), 200), sink);
    if (!ticket.ok()) {
      refused = ticket.status();
      break;
    }
    running.push_back({*ticket, std::move(end), {}});
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_GE(running.size(), 3u);
  for (auto& one : running) engine_->Cancel(one.ticket);
  for (auto& one : running) one.end.get();
  ExpectIdle();
}

// What the engine says of itself while it tells a request's end.
class EndWatcher final : public CompletionSink {
 public:
  struct Seen {
    EngineSnapshot snapshot;
    int running_requests = -1;
  };
  explicit EndWatcher(Engine* engine) : engine_(engine) {}
  void OnStart(const std::string&, const Usage&, const CacheInfo&) override {}
  void OnPromptLogprobs(std::vector<PositionLogprobs>) override {}
  void OnDelta(ChoiceDelta) override {}
  void OnFinish(const ChoiceFinish&) override {}
  void OnDone(const CompletionDone&) override {
    seen_.set_value({engine_->snapshot(), engine_->ListVersions("")[0].running_requests});
  }
  std::future<Seen> seen() { return seen_.get_future(); }

 private:
  Engine* const engine_;
  std::promise<Seen> seen_;
};

TEST_F(EngineTest, GaugesAreRightWhenTheClientHearsOfTheEnd) {
  EngineOptions options;
  options.max_running = 1;
  Make(options);
  ASSERT_TRUE(Load("v", "llama3").ok());
  CompletionRequest longer = Ask("v", Tokens(100, 1), 300);
  longer.sampling.n = 16;  // runs still when the other one ends
  Running first = Begin(longer);
  first.start.get();
  auto sink = std::make_shared<EndWatcher>(engine_.get());
  const auto waiting = engine_->Submit(Ask("v", Tokens(50, 2), 4), sink);
  ASSERT_TRUE(waiting.ok()) << waiting.status();
  engine_->Cancel(*waiting);
  const EndWatcher::Seen seen = sink->seen().get();
  EXPECT_EQ(seen.snapshot.waiting, 0);
  EXPECT_EQ(seen.snapshot.waiting_tokens, 0);
  EXPECT_EQ(seen.running_requests, 1);
  engine_->Cancel(first.ticket);
  first.end.get();
}

TEST_F(EngineTest, UrgentWorkDoesNotWaitForSlots) {
  EngineOptions options;
  options.max_running = 2;
  Make(options);
  ASSERT_TRUE(Load("v", "llama3").ok());
  std::vector<Running> low;
  for (int i = 0; i < 2; ++i) {
    CompletionRequest request = Ask("v", Tokens(100, i), 300);
    request.priority = 10;
    low.push_back(Hold(request));
    low.back().start.get();
  }
  CompletionRequest urgent = Ask("v", Tokens(50, 5), 4);
  Running one = Begin(urgent);
  ASSERT_TRUE(one.end.get().status.ok());
  for (auto& request : low) {
    EXPECT_NE(request.end.wait_for(std::chrono::seconds(0)), std::future_status::ready);
    engine_->Cancel(request.ticket);
    request.end.get();
  }
  EXPECT_GT(engine_->snapshot().preemptions, 0);
  ExpectIdle();
}

TEST_F(EngineTest, DeadlinesEndRequests) {
  Make({});
  ASSERT_TRUE(Load("v", "llama3").ok());
  CompletionRequest request = Ask("v", Tokens(100), 400);
  request.sampling.n = 16;
  request.deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(5);
  const Answer answer = Run(request);
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kDeadlineExceeded);
  ExpectIdle();
}

TEST_F(EngineTest, RandomCancelsLeaveNothingBehind) {
  EngineOptions options;
  options.max_running = 6;
  options.kv_cache_bytes = 1 << 20;
  options.host_cache_bytes = 1 << 19;
  Make(options);
  ASSERT_TRUE(Load("v", "llama3").ok());
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  std::vector<Running> running;
  int cancelled = 0;
  for (int i = 0; i < 150; ++i) {
    CompletionRequest request = Ask("v", Tokens(1 + random() % 120, random() % 5), random() % 30);
    request.sampling.n = 1 + random() % 3;
    request.priority = random() % 3;
    running.push_back(Begin(request));
    if (random() % 2) engine_->Cancel(running[random() % running.size()].ticket);
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
  }
  for (auto& one : running) {
    const Answer answer = one.end.get();
    if (answer.status.code() == absl::StatusCode::kCancelled) {
      ++cancelled;
    } else {
      EXPECT_TRUE(answer.status.ok()) << answer.status;
    }
  }
  EXPECT_GT(cancelled, 0);
  ExpectIdle();
}

TEST_F(EngineTest, SessionsStayOnTheirSideOfASplit) {
  Make({});
  ASSERT_TRUE(Load("a", "llama3").ok());
  ASSERT_TRUE(Load("b", "llama3").ok());
  const auto target = [&](int session) {
    CompletionRequest request = Ask("", Tokens(3), 1);
    request.session = "session-" + std::to_string(session);
    return Run(request).cache.target;
  };
  int at_10 = 0, at_50 = 0;
  std::vector<bool> on_b(200);
  ASSERT_TRUE(engine_->Promote("m", "b", 10).ok());
  for (int i = 0; i < 200; ++i) {
    on_b[i] = target(i) == "b";
    at_10 += on_b[i];
    EXPECT_EQ(target(i) == "b", on_b[i]);
  }
  ASSERT_TRUE(engine_->Promote("m", "b", 50).ok());
  for (int i = 0; i < 200; ++i) {
    const bool now = target(i) == "b";
    if (on_b[i]) {
      EXPECT_TRUE(now) << "a session left the candidate as its share grew";
    }
    at_50 += now;
  }
  EXPECT_NEAR(at_10, 20, 16);
  EXPECT_NEAR(at_50, 100, 40);
  ASSERT_TRUE(engine_->Promote("m", "b", 100).ok());
  EXPECT_EQ(target(1), "b");
  EXPECT_EQ(engine_->Promote("m", "b", 40).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(engine_->Promote("m", "b", 101).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(engine_->Promote("m", "b", NAN).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(EngineTest, VersionsComeAndGoWhileServing) {
  Make({});
  ASSERT_TRUE(Load("v0", "llama3").ok());
  std::atomic<bool> stop{false};
  std::thread traffic([&] {
    for (int i = 0; !stop; ++i) {
      const Answer answer = Run(Ask("", Tokens(40, i % 7), 6));
      EXPECT_TRUE(answer.status.ok()) << answer.status;
    }
  });
  for (int i = 1; i < 5; ++i) {
    const std::string name = "v" + std::to_string(i), old = "v" + std::to_string(i - 1);
    ASSERT_TRUE(Load(name, "llama3", {old}, name).ok());
    ASSERT_TRUE(engine_->Promote("m", name, 50).ok());
    ASSERT_TRUE(engine_->Promote("m", name, 100).ok());
    ASSERT_TRUE((i % 2 ? engine_->Unload("m", old) : engine_->Remove("m", old)).ok());
  }
  stop = true;
  traffic.join();
  EXPECT_EQ(engine_->ListVersions("m").size(), 3u);
  ExpectIdle();
}

TEST_F(EngineTest, DrainRefusesNewAndFinishesOld) {
  Make({});
  ASSERT_TRUE(Load("v", "llama3").ok());
  Running running = Begin(Ask("v", Tokens(100), 50));
  engine_->StartDrain();
  const auto refused = engine_->Submit(Ask("v", Tokens(5)), std::make_shared<Recorder>(1));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(engine_->FinishDrain(60));
  EXPECT_TRUE(running.end.get().status.ok());
}

TEST_F(EngineTest, WorkThatOutlivesTheDrainIsEnded) {
  Make({});
  ASSERT_TRUE(Load("v", "llama3").ok());
  Running running = Hold(Ask("v", Tokens(100), 400));
  running.start.get();
  engine_->StartDrain();
  EXPECT_FALSE(engine_->FinishDrain(0));
  EXPECT_EQ(running.end.get().status.code(), absl::StatusCode::kUnavailable);
}

TEST_F(EngineTest, LoadErrorsAreClearAndLeaveNothing) {
  Make({});
  EXPECT_THAT(std::string(Load("v", "nowhere").status().message()), HasSubstr("nowhere"));
  EXPECT_EQ(Load("", "llama3").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Load("bad name", "llama3").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(engine_->ListVersions("").empty());
  ASSERT_TRUE(Load("v", "llama3").ok());
  EXPECT_EQ(Load("v", "llama3").status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(engine_->Remove("m", "x").code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(engine_->Remove("m", "v").ok());
  EXPECT_TRUE(engine_->ListVersions("").empty());
}

}  // namespace
}  // namespace carryover
