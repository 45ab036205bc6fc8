// Which requests are compared and which are held out, by chance alone; and the trial that the
// hold-out makes.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "tests/unit/shadow_fixture.h"

namespace carryover {
namespace {

using EngineSamplingTest = EngineShadowTest;

// What became of requests, in the order that they were submitted.
struct Drawn {
  std::vector<bool> sampled, held_out;
};

class SampledSetTest : public EngineShadowTest {
 protected:
  static constexpr int kRequests = 150;

  // All carry or are held out; nothing that they compute changes what the next one finds.
  void MakeWithKey(uint8_t key) {
    options_.fidelity.sampling_key.fill(key);
    options_.fidelity.hold_out_rate = 0.3;
    options_.fidelity.sample_rate = options_.fidelity.learning_sample_rate = 0.4;
    options_.fidelity.store_native = false;
    options_.gate.when_learning_carry = true;
    MakePair();
  }
  static CompletionRequest Next(const std::vector<int32_t>& prompt, int max_tokens) {
    CompletionRequest request = Ask("t", prompt, max_tokens);
    request.store = false;
    return request;
  }
  static void Note(const Answer& answer, Drawn* drawn) {
    drawn->sampled.push_back(answer.cache.shadowed);
    drawn->held_out.push_back(answer.usage.carried_tokens == 0);
  }
  // One after the other, always the same.
  Drawn Quiet() {
    EXPECT_TRUE(Warm("s", Tokens(40)).ok());
    Drawn drawn;
    for (int i = 0; i < kRequests; ++i) Note(Run(Next(Tokens(40), 1)), &drawn);
    return drawn;
  }
  // All at once, no two alike, beside others and with full queues of comparisons.
  Drawn Busy() {
    const std::vector<int32_t> prefix = Tokens(64, 5);
    EXPECT_TRUE(Warm("s", prefix).ok());
    std::vector<Running> running;
    for (int i = 0; i < kRequests; ++i) {
      std::vector<int32_t> prompt = prefix;
      for (int32_t token : Tokens(1 + i % 37, 100 + i)) prompt.push_back(token);
      CompletionRequest request = Next(prompt, 1 + i % 12);
      request.id = absl::StrCat("request ", i * 7919);
      request.session = absl::StrCat("session ", i);
      request.task = i % 3 == 0 ? "qa" : "";
      request.sampling.seed = i;
      request.sampling.temperature = 0.7;
      running.push_back(Begin(std::move(request)));
    }
    Drawn drawn;
    for (Running& request : running) Note(request.end.get(), &drawn);
    return drawn;
  }
};

TEST_F(SampledSetTest, NeitherLoadNorContentNorIdsMoveIt) {
  MakeWithKey(1);
  const Drawn quiet = Quiet();
  MakeWithKey(1);
  const Drawn busy = Busy();
  EXPECT_EQ(quiet.sampled, busy.sampled);
  EXPECT_EQ(quiet.held_out, busy.held_out);
  // Another key, another set, of the same share: within 5 standard deviations.
  MakeWithKey(2);
  const Drawn other = Quiet();
  EXPECT_NE(other.held_out, quiet.held_out);
  EXPECT_NE(other.sampled, quiet.sampled);
  for (const Drawn* drawn : {&quiet, &other}) {
    const auto near = [](const std::vector<bool>& set, double rate) {
      const double count = static_cast<double>(std::count(set.begin(), set.end(), true));
      EXPECT_NEAR(count, rate * kRequests, 5 * std::sqrt(rate * (1 - rate) * kRequests));
    };
    near(drawn->held_out, 0.3);
    near(drawn->sampled, 1 - 0.7 * 0.6);  // all that are held out, and 0.4 of the others
    for (int i = 0; i < kRequests; ++i) {
      EXPECT_LE(drawn->held_out[i], drawn->sampled[i]) << i;
    }
  }
}

// Who asks for carried blocks himself is never held out, and compared as often as others are.
TEST_F(SampledSetTest, WhoCarriesInAnyCaseIsComparedAsOften) {
  MakeWithKey(1);
  EXPECT_TRUE(Warm("s", Tokens(40)).ok());
  int sampled = 0;
  for (int i = 0; i < kRequests; ++i) {
    CompletionRequest request = Next(Tokens(40), 1);
    request.reuse = ReuseMode::kCarry;
    const Answer answer = Run(std::move(request));
    EXPECT_GT(answer.usage.carried_tokens, 0);
    sampled += answer.cache.shadowed;
  }
  const double rate = 1 - 0.7 * 0.6;  // 0.4, which it was once, is 4.5 standard deviations off
  EXPECT_NEAR(sampled, rate * kRequests, 3.5 * std::sqrt(rate * (1 - rate) * kRequests));
}

// Both arms are requests that could have been drawn, and the arm is the draw's.
TEST_F(EngineSamplingTest, TheTrialIsOfThoseThatChanceDecided) {
  options_.gate.when_learning_carry = true;
  options_.fidelity.hold_out_rate = 0.5;
  options_.fidelity.store_native = false;
  MakePair();
  const std::vector<int32_t> prompt = Tokens(60, 1);
  ASSERT_TRUE(Warm("s", prompt).ok());
  int held_out = 0;
  for (int i = 0; i < 40; ++i) {
    CompletionRequest request = Ask("t", prompt, 1 + i % 5);
    request.store = false;
    request.task = "qa";
    request.sampling.n = 1 + i % 2;
    const Answer answer = Run(request);
    const std::vector<TrialRecord> trial = observed_.trial();
    ASSERT_EQ(trial.size(), i + 1u);
    const TrialRecord& record = trial.back();
    EXPECT_EQ(record.held_out, answer.usage.carried_tokens == 0);
    EXPECT_EQ(record.pair.model, "m");
    EXPECT_EQ(record.pair.source, "s");
    EXPECT_EQ(record.pair.target, "t");
    EXPECT_EQ(record.plan, "direct");
    EXPECT_EQ(record.task, "qa");
    EXPECT_EQ(record.prefix_bucket, 256);
    EXPECT_EQ(record.answer_tokens, std::vector<int>(1 + i % 2, 1 + i % 5));
    EXPECT_EQ(record.reasons, std::vector<FinishReason>(1 + i % 2, FinishReason::kLength));
    ASSERT_TRUE(record.first_token.has_value());
    EXPECT_GT(*record.first_token, 0);
    EXPECT_LE(*record.first_token, answer.timing.total);
    held_out += record.held_out;
  }
  EXPECT_GT(held_out, 4);  // 5 standard deviations
  EXPECT_LT(held_out, 36);

  // Others are served as they say, whatever chance has to say.
  const auto not_in_it = [&](auto change) {
    CompletionRequest request = Ask("t", prompt, 2);
    request.store = false;
    change(&request);
    EXPECT_TRUE(Run(request).status.ok());
    EXPECT_EQ(observed_.trial().size(), 40u);
  };
  for (int i = 0; i < 5; ++i) {
    not_in_it([](CompletionRequest* r) { r->reuse = ReuseMode::kCarry; });
    not_in_it([](CompletionRequest* r) { r->reuse = ReuseMode::kNativeOnly; });
    not_in_it([](CompletionRequest* r) { r->tokens = Tokens(10, 3); });   // nothing to carry
    not_in_it([](CompletionRequest* r) { r->version = "s"; });            // nor here
    not_in_it([](CompletionRequest* r) { r->sampling.max_tokens = 0; });  // no answer
  }
  ASSERT_TRUE(engine_->SetGate({}, GateState::kClosed, "test").ok());
  not_in_it([](CompletionRequest*) {});
}

TEST_F(EngineSamplingTest, WhoLeavesTheTrialCountsWithWhatHeGot) {
  options_.gate.when_learning_carry = true;
  options_.fidelity.hold_out_rate = 1;
  MakePair();
  ASSERT_TRUE(Warm("s", Tokens(100)).ok());
  Running running = Hold(LongAsk("t", Tokens(100)));
  running.start.wait();
  engine_->Cancel(running.ticket);
  running.end.wait();
  const std::vector<TrialRecord> trial = observed_.trial();
  ASSERT_EQ(trial.size(), 1u);
  EXPECT_TRUE(trial[0].held_out);
  EXPECT_EQ(trial[0].reasons, std::vector<FinishReason>(16, FinishReason::kCancelled));
  EXPECT_LT(trial[0].answer_tokens[0], 350);
}

TEST_F(EngineSamplingTest, WithoutAHoldOutThereIsNoTrial) {
  options_.gate.when_learning_carry = true;
  options_.fidelity.hold_out_rate = 0;
  MakePair();
  EXPECT_EQ(AskAbout(1).usage.carried_tokens, 96);
  EXPECT_TRUE(observed_.trial().empty());
}

}  // namespace
}  // namespace carryover
