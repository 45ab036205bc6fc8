// Carried prefixes become native in idle time, and nobody waits for it.
#include "tests/unit/shadow_fixture.h"

namespace carryover {
namespace {

class EngineRefreshTest : public EngineShadowTest {
 protected:
  EngineRefreshTest() {
    options_.gate.when_learning_carry = true;
    options_.fidelity.refresh_when_idle = true;
    // Nothing is compared: only refreshing makes native blocks.
    options_.fidelity.sample_rate = options_.fidelity.learning_sample_rate = 0;
  }
};

TEST_F(EngineRefreshTest, CarriedPrefixesBecomeNative) {
  MakePair();
  const Answer first = AskAbout(1, 100, 8);
  EXPECT_EQ(first.usage.carried_tokens, 96);
  EXPECT_FALSE(first.cache.shadowed);
  EXPECT_EQ(observed_.WaitForRefreshes(1), (std::map<std::string, int>{{"completed", 1}}));
  EXPECT_EQ(observed_.tokens(), 96);
  EXPECT_EQ(observed_.refreshed(), 6);
  const Answer second = Run(Ask("t", Tokens(100, 1)));
  EXPECT_EQ(second.usage.cached_tokens, 96);
  EXPECT_EQ(second.usage.carried_tokens, 0);
  EXPECT_EQ(second.tokens, first.tokens);
  EXPECT_TRUE(observed_.ended().empty()) << "a refresh is no comparison";
  ExpectIdle();
}

TEST_F(EngineRefreshTest, ManyPrefixesEachOnce) {
  MakePair();
  for (int i = 0; i < 8; ++i) AskAbout(i, 100 + 16 * i, 2);
  observed_.WaitForRefreshes(8);
  for (int i = 0; i < 8; ++i) {
    const Answer again = Run(Ask("t", Tokens(100 + 16 * i, i)));
    EXPECT_EQ(again.usage.carried_tokens, 0) << i;
    EXPECT_EQ(again.usage.cached_tokens, 96 + 16 * i) << i;
  }
  ExpectIdle();
}

TEST_F(EngineRefreshTest, WhatIsToBeComparedGoesFirst) {
  options_.fidelity.sample_rate = options_.fidelity.learning_sample_rate = 1;
  options_.fidelity.store_native = false;  // so that every prefix is left to refresh
  options_.fidelity.chunk_tokens = 16;
  MakePair();
  for (int i = 0; i < 6; ++i) AskAbout(i, 200, 4);
  observed_.WaitForArms(6);
  EXPECT_EQ(observed_.ended(), (std::map<std::string, int>{{"native completed", 6}}));
  EXPECT_EQ(observed_.WaitForRefreshes(6), (std::map<std::string, int>{{"completed", 6}}));
  ExpectIdle();
}

TEST_F(EngineRefreshTest, RequestsThatKeepNothingAreNotRefreshed) {
  MakePair();
  ASSERT_TRUE(Warm("s", Tokens(96, 1)).ok());
  CompletionRequest request = Ask("t", Tokens(100, 1));
  request.store = false;
  EXPECT_EQ(Run(request).usage.carried_tokens, 96);
  request.store = true;
  EXPECT_EQ(Run(request).usage.carried_tokens, 96);  // the first left nothing behind
  observed_.WaitForRefreshes(1);
  ExpectIdle();
}

TEST_F(EngineRefreshTest, NeverWhereItIsOff) {
  options_.fidelity.refresh_when_idle = false;
  MakePair();
  AskAbout(1, 100, 8);
  EXPECT_EQ(Run(Ask("t", Tokens(100, 1))).usage.carried_tokens, 96);
  EXPECT_EQ(observed_.tokens(), 0);
  ExpectIdle();
}

TEST_F(EngineRefreshTest, AVersionThatGoesIsNotRefreshed) {
  options_.fidelity.chunk_tokens = 16;
  MakePair();
  for (int i = 0; i < 4; ++i) AskAbout(i, 300, 2);
  ASSERT_TRUE(engine_->Promote("m", "s", 100).ok());
  ASSERT_TRUE(engine_->Remove("m", "t").ok());
  EXPECT_TRUE(engine_->CheckStore().ok());
  EXPECT_TRUE(Run(Ask("s", Tokens(300, 1))).status.ok());
}

// The first chunk of a refresh finds a user on the way, who stays for long.
struct Interrupting {
  Engine* engine = nullptr;
  CompletionRequest request;
  std::shared_ptr<Recorder> user;
  std::promise<void> begun;
  bool done = false;
};
Interrupting* interrupting = nullptr;

void InterruptedEmbed(Backend* backend, const void* table, DType type,
                      absl::Span<const int32_t> tokens, int dim, float* x) {
  Interrupting& test = *interrupting;
  if (!test.done && tokens.size() == 16) {
    test.done = true;
    EXPECT_TRUE(test.engine->Submit(test.request, test.user).ok());
    test.begun.set_value();
  }
  CpuOps().embed(backend, table, type, tokens, dim, x);
}

// A refresh that users interrupted takes nothing from them; what waits behind it has its share.
TEST_F(EngineRefreshTest, ARefreshHalfWayHoldsNoComparisonUp) {
  options_.fidelity.sample_rate = options_.fidelity.learning_sample_rate = 1;
  options_.fidelity.chunk_tokens = 16;
  options_.fidelity.time_share = 1;
  options_.fidelity.max_age_seconds = 0.4;  // it has waited long after a quarter of that
  static Ops ops = CpuOps();                // outlives the engine
  ops.embed = InterruptedEmbed;
  ops_ = &ops;
  Interrupting test;
  interrupting = &test;
  test.request = LongAsk("s", Tokens(20, 77));
  test.user = std::make_shared<Recorder>(16);
  MakePair();
  test.engine = engine_.get();
  Running hold;
  hold.end = test.user->end();
  ASSERT_TRUE(Warm("s", Tokens(400, 1)).ok());
  // It carries and has no answer, so it leaves nothing to compare, but something to refresh.
  EXPECT_EQ(Run(Ask("t", Tokens(400, 1), 0)).usage.carried_tokens, 400);
  test.begun.get_future().wait();
  AskAbout(2, 40, 4);
  for (int i = 0; i < 1000 && observed_.ended().empty(); ++i) {
    Running next = Hold(LongAsk("s", Tokens(20, 78 + i)));  // one has not ended as the next begins
    hold.end.wait();
    hold = std::move(next);
  }
  EXPECT_EQ(observed_.ended(), (std::map<std::string, int>{{"native completed", 1}}));
  engine_->Cancel(hold.ticket);
  hold.end.wait();
  EXPECT_GE(observed_.WaitForRefreshes(1)["completed"], 1);
}

// Work that comes while a prefix is computed waits for a layer, and it is told how long.
TEST_F(EngineRefreshTest, DelaysAreTold) {
  options_.fidelity.chunk_tokens = 512;
  MakePair();
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 200 && observed_.delays().size() < 5; ++i) {
    AskAbout(i, 450, 1);  // the next one comes while this one's prefix is refreshed
  }
  const std::vector<double> delays = observed_.delays();
  ASSERT_GE(delays.size(), 5u);
  double sum = 0;
  for (double seconds : delays) {
    EXPECT_GE(seconds, 0);
    sum += seconds;
  }
  // They are stretches of the time that passed, and do not overlap.
  EXPECT_LE(sum, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
}

}  // namespace
}  // namespace carryover
