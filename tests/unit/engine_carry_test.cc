// Carrying caches over a model update, with its controls.
#include <gmock/gmock.h>

#include <cmath>
#include <filesystem>

#include "tests/unit/engine_fixture.h"
#include "tests/unit/perturbed_folder.h"

namespace carryover {
namespace {

using testing::HasSubstr;

class EngineCarryTest : public EngineTest {
 protected:
  void SetUp() override {
    EngineOptions options;
    options.gate.when_learning_carry = true;
    Make(options);
  }
};

// The control: weights that are equal under a fingerprint that is not. Blocks really are carried,
// and nothing may change.
TEST_F(EngineCarryTest, ByteIdenticalWeightsUnderAnotherFingerprintChangeNothing) {
  ASSERT_TRUE(Load("s", "llama3").ok());
  ASSERT_TRUE(Load("t", "llama3", {"s"}, "control").ok());
  const std::vector<int32_t> prompt = Tokens(100);
  CompletionRequest native = Ask("t", prompt, 16);
  native.reuse = ReuseMode::kNativeOnly;
  native.store = false;
  const Answer truth = Run(native);
  EXPECT_EQ(truth.usage.computed_tokens, 100);

  ASSERT_TRUE(Warm("s", prompt).ok());
  const Answer carried = Run(Ask("t", prompt, 16));
  EXPECT_EQ(carried.usage.carried_tokens, 96);
  EXPECT_EQ(carried.usage.cached_tokens, 0);
  EXPECT_EQ(carried.usage.computed_tokens, 4);
  ExpectUsageAddsUp(carried);
  ASSERT_EQ(carried.cache.segments.size(), 2u);
  EXPECT_EQ(carried.cache.target, "t");
  EXPECT_EQ(carried.cache.segments[0].source, "s");
  EXPECT_EQ(carried.cache.segments[0].plan, "direct");
  EXPECT_EQ(carried.cache.segments[1].plan, "fresh");
  EXPECT_EQ(carried.tokens, truth.tokens);
  for (size_t i = 0; i < truth.logprobs[0].size(); ++i) {
    EXPECT_NEAR(carried.logprobs[0][i], truth.logprobs[0][i], 1e-5);
  }
  ExpectIdle();
}

TEST_F(EngineCarryTest, EqualFingerprintsAreNativeToEachOther) {
  ASSERT_TRUE(Load("s", "llama3").ok());
  ASSERT_TRUE(Load("t", "llama3").ok());  // nothing declared, nothing salted
  const std::vector<int32_t> prompt = Tokens(100);
  ASSERT_TRUE(Warm("s", prompt).ok());
  CompletionRequest request = Ask("t", prompt);
  request.reuse = ReuseMode::kNativeOnly;
  const Answer answer = Run(request);
  EXPECT_EQ(answer.usage.cached_tokens, 96);
  EXPECT_EQ(answer.usage.carried_tokens, 0);
  EXPECT_EQ(answer.cache.segments[0].plan, "native");
}

// A measure that never moves proves nothing: an update that is a real one has to show.
TEST_F(EngineCarryTest, OtherWeightsShow) {
  const std::string updated = PerturbedFolder(TinyPath("llama3"), "llama3");
  ASSERT_TRUE(Load("s", "llama3").ok());
  LoadOptions options;
  options.model = "m";
  options.version = "t";
  options.path = updated;
  options.carry_from = {"s"};
  options.auto_dtype = false;
  options.weights = options.kv_dtype = DType::kF32;
  ASSERT_TRUE(engine_->Load(options, nullptr).ok());
  const std::vector<int32_t> prompt = Tokens(100);
  CompletionRequest native = Ask("t", prompt, 1);
  native.reuse = ReuseMode::kNativeOnly;
  native.store = false;
  const Answer truth = Run(native);
  ASSERT_TRUE(Warm("s", prompt).ok());
  const Answer carried = Run(Ask("t", prompt, 1));
  EXPECT_EQ(carried.usage.carried_tokens, 96);
  EXPECT_GT(std::abs(carried.logprobs[0][0] - truth.logprobs[0][0]), 1e-3);
  std::filesystem::remove_all(updated);
}

TEST_F(EngineCarryTest, BlockBorders) {
  ASSERT_TRUE(Load("s", "qwen3").ok());
  ASSERT_TRUE(Load("t", "qwen3", {"s"}, "control").ok());
  for (const int length : {1, kBlock - 1, kBlock, kBlock + 1, 2 * kBlock, 2 * kBlock + 1}) {
    const std::vector<int32_t> prompt = Tokens(length, length);
    CompletionRequest native = Ask("t", prompt);
    native.reuse = ReuseMode::kNativeOnly;
    native.store = false;
    const Answer truth = Run(native);
    ASSERT_TRUE(truth.status.ok()) << truth.status;
    ASSERT_TRUE(Warm("s", prompt).ok());
    const Answer carried = Run(Ask("t", prompt));
    ASSERT_TRUE(carried.status.ok()) << carried.status;
    EXPECT_EQ(carried.tokens, truth.tokens) << length;
    EXPECT_EQ(carried.usage.carried_tokens, (length - 1) / kBlock * kBlock) << length;
    ExpectUsageAddsUp(carried);
  }
  CompletionRequest empty = Ask("t", {});
  auto refused = engine_->Submit(empty, std::make_shared<Recorder>(1));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  ExpectIdle();
}

// InternLM/lmdeploy#4917, radixark/miles#2783: what was computed over carried blocks never comes
// back as native, over any number of updates.
TEST_F(EngineCarryTest, TaintedBlocksStayTainted) {
  ASSERT_TRUE(Load("s", "llama3").ok());
  ASSERT_TRUE(Load("t", "llama3", {"s"}, "1").ok());
  ASSERT_TRUE(Load("u", "llama3", {"t"}, "2").ok());
  const std::vector<int32_t> prompt = Tokens(64);
  ASSERT_TRUE(Warm("s", prompt).ok());
  std::vector<int32_t> turn = prompt;
  const std::vector<int32_t> question = Tokens(40, 9);
  turn.insert(turn.end(), question.begin(), question.end());
  const Answer first = Run(Ask("t", turn, 24));
  EXPECT_EQ(first.usage.carried_tokens, 64);
  // The conversation's next turn reads S's blocks, and T's own over S: all of it is carried.
  std::vector<int32_t> next = turn;
  next.insert(next.end(), first.tokens[0].begin(), first.tokens[0].end());
  const std::vector<int32_t> more = Tokens(10, 11);
  next.insert(next.end(), more.begin(), more.end());
  const Answer second = Run(Ask("t", next));
  EXPECT_EQ(second.usage.cached_tokens, 0);
  EXPECT_EQ(second.usage.carried_tokens, (104 + 23) / kBlock * kBlock);
  ASSERT_EQ(second.cache.segments.size(), 3u);
  EXPECT_EQ(second.cache.segments[0].source, "s");
  EXPECT_EQ(second.cache.segments[1].source, "t over s");
  // Who wants only native blocks finds none.
  CompletionRequest pure = Ask("t", next);
  pure.reuse = ReuseMode::kNativeOnly;
  pure.store = false;
  EXPECT_EQ(Run(pure).usage.computed_tokens, static_cast<int>(next.size()));
  // The version after T may carry T's native blocks; there are none, and T's tainted ones are no
  // such.
  const Answer third = Run(Ask("u", next));
  EXPECT_EQ(third.usage.carried_tokens, 0);
  EXPECT_EQ(third.usage.computed_tokens, static_cast<int>(next.size()));
  ExpectIdle();
}

TEST_F(EngineCarryTest, NothingIsCarriedThatWasNotDeclared) {
  ASSERT_TRUE(Load("s", "llama3").ok());
  ASSERT_TRUE(Load("t", "llama3", {}, "control").ok());
  const std::vector<int32_t> prompt = Tokens(64);
  ASSERT_TRUE(Warm("s", prompt).ok());
  CompletionRequest request = Ask("t", prompt);
  request.reuse = ReuseMode::kCarry;
  EXPECT_EQ(Run(request).usage.computed_tokens, 64);
}

TEST_F(EngineCarryTest, SaltAndTenantSeparate) {
  ASSERT_TRUE(Load("s", "llama3").ok());
  CompletionRequest request = Ask("s", Tokens(64));
  request.salt = "a";
  Run(request);
  EXPECT_EQ(Run(request).usage.cached_tokens, 48);
  request.salt = "b";
  EXPECT_EQ(Run(request).usage.cached_tokens, 0);
  request.tenant = "other";
  EXPECT_EQ(Run(request).usage.cached_tokens, 0);
}

TEST_F(EngineCarryTest, CachesServeOnAfterTheirWeightsAreGone) {
  ASSERT_TRUE(Load("s", "llama3").ok());
  ASSERT_TRUE(Load("t", "llama3", {"s"}, "control").ok());
  const std::vector<int32_t> prompt = Tokens(64);
  ASSERT_TRUE(Warm("s", prompt).ok());
  EXPECT_EQ(engine_->Unload("m", "s").code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(engine_->Promote("m", "t", 100).ok());
  ASSERT_TRUE(engine_->Unload("m", "s").ok());
  EXPECT_EQ(Run(Ask("t", prompt)).usage.carried_tokens, 48);
  // Asking the unloaded version is an error that says so.
  auto refused = engine_->Submit(Ask("s", prompt), std::make_shared<Recorder>(1));
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("unloaded"));
  // It comes back with its caches, and under its own name only as itself.
  EXPECT_EQ(Load("s", "qwen3").status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(Load("s", "llama3").ok());
  EXPECT_EQ(Run(Ask("s", prompt)).usage.cached_tokens, 48);
  // Removing takes the caches, too.
  ASSERT_TRUE(engine_->Remove("m", "s").ok());
  EXPECT_EQ(Run(Ask("t", Tokens(64))).usage.carried_tokens, 0);
  ExpectIdle();
}

TEST_F(EngineCarryTest, AChainOfVersionsAndARollback) {
  ASSERT_TRUE(Load("v1", "llama3").ok());
  ASSERT_TRUE(Load("v2", "llama3", {"v1"}, "2").ok());
  ASSERT_TRUE(Load("v3", "llama3", {"v2", "v1"}, "3").ok());
  ASSERT_TRUE(Load("v4", "llama3", {"v3", "v2", "v1"}, "4").ok());
  for (int i = 1; i <= 3; ++i) ASSERT_TRUE(Warm("v" + std::to_string(i), Tokens(64, i)).ok());
  for (int i = 1; i <= 3; ++i) {
    const Answer answer = Run(Ask("v4", Tokens(64, i)));
    EXPECT_EQ(answer.usage.carried_tokens, 48);
    EXPECT_EQ(answer.cache.segments[0].source, "v" + std::to_string(i));
  }
  // Back to v1: under another name, since versions are immutable, and declared like any update.
  ASSERT_TRUE(Load("v1-again", "llama3", {"v4"}).ok());
  EXPECT_EQ(Run(Ask("v1-again", Tokens(64, 1))).usage.cached_tokens, 48);
  ASSERT_TRUE(Warm("v4", Tokens(64, 8)).ok());
  EXPECT_EQ(Run(Ask("v1-again", Tokens(64, 8))).usage.carried_tokens, 48);
  ExpectIdle();
}

TEST_F(EngineCarryTest, IncompatibleVersionsAreRefusedWithEveryDifference) {
  ASSERT_TRUE(Load("s", "llama3").ok());
  const absl::Status status = Load("t", "qwen3", {"s"}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  for (const char* field : {"architecture", "qk_norm", "rope"}) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(field));
  }
  EXPECT_EQ(Load("t", "llama3", {"nobody"}).status().code(), absl::StatusCode::kNotFound);
}

// vllm-project/vllm#57727: flush, then resend.
TEST_F(EngineCarryTest, AFlushIsAFlush) {
  EngineOptions options;
  options.gate.when_learning_carry = true;
  options.host_cache_bytes = 1 << 20;
  Make(options);
  ASSERT_TRUE(Load("s", "llama3").ok());
  Run(Ask("s", Tokens(200)));
  EXPECT_GT(Run(Ask("s", Tokens(200))).usage.cached_tokens, 0);
  const auto result = engine_->Evict("", "");
  ASSERT_TRUE(result.ok());
  EXPECT_GE(result->blocks_evicted, 12);
  EXPECT_EQ(result->blocks_in_use, 0);
  EXPECT_EQ(Run(Ask("s", Tokens(200))).usage.cached_tokens, 0);
  ExpectIdle();
}

TEST_F(EngineCarryTest, BlocksComeBackFromHostMemory) {
  EngineOptions options;
  options.gate.when_learning_carry = true;
  options.kv_cache_bytes = 20 * 2 * 2 * 2 * kBlock * 16 * 4;  // 20 blocks of the tiny llama3
  options.host_cache_bytes = 4 << 20;
  Make(options);
  ASSERT_TRUE(Load("s", "llama3").ok());
  ASSERT_TRUE(Load("t", "llama3", {"s"}, "control").ok());
  const Answer truth = Run(Ask("s", Tokens(200)));
  for (int i = 1; i < 4; ++i) Run(Ask("s", Tokens(200, i)));  // pushes the first out
  const Answer back = Run(Ask("s", Tokens(200)));
  EXPECT_EQ(back.usage.cached_tokens, 192);
  EXPECT_EQ(back.tokens, truth.tokens);
  bool host = false;
  for (const CacheSegment& segment : back.cache.segments) host |= segment.tier == "host";
  EXPECT_TRUE(host);
  EXPECT_EQ(Run(Ask("t", Tokens(200, 1))).usage.carried_tokens, 192);
  ExpectIdle();
}

TEST_F(EngineCarryTest, PinnedPrefixesStay) {
  EngineOptions options;
  options.kv_cache_bytes = 20 * 2 * 2 * 2 * kBlock * 16 * 4;
  Make(options);
  ASSERT_TRUE(Load("s", "llama3").ok());
  ASSERT_TRUE(Warm("s", Tokens(64)).ok());
  PrefixSpec prefix;
  prefix.tokens = Tokens(64);
  EXPECT_EQ(*engine_->Pin(prefix, true), 64);
  for (int i = 1; i < 5; ++i) Run(Ask("s", Tokens(200, i)));
  EXPECT_EQ(Run(Ask("s", Tokens(64))).usage.cached_tokens, 48);
  EXPECT_EQ(engine_->Evict("", "")->blocks_pinned, 4);
  EXPECT_EQ(*engine_->Pin(prefix, false), 64);
  EXPECT_EQ(engine_->Evict("", "")->blocks_evicted, 4);
  ExpectIdle();
}

}  // namespace
}  // namespace carryover
