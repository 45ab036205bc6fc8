// The whole engine on the emulated CUDA device, in both lane orders.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>

#include "kernels/cuda/emulation/block.h"
#include "tests/unit/engine_fixture.h"

namespace carryover {
namespace {

using emulation::Order;

std::atomic<int> copies{0};  // of blocks, on the device or to or from the host

const Ops& CountingOps() {
  static const Ops ops = [] {
    Ops ops = EmulatedCudaOps();
    ops.copy_kv = [](Backend* backend, const CopyKvArgs& args) {
      ++copies;
      EmulatedCudaOps().copy_kv(backend, args);
    };
    ops.read_kv = [](Backend* backend, const ReadKvArgs& args) {
      ++copies;
      EmulatedCudaOps().read_kv(backend, args);
    };
    ops.prepare_copy = [](Backend* backend) {
      ++copies;
      return EmulatedCudaOps().prepare_copy(backend);
    };
    return ops;
  }();
  return ops;
}

class EngineEmulatedTest : public EngineTest, public testing::WithParamInterface<Order> {
 protected:
  void SetUp() override {
    emulation::SetOrder(GetParam());
    ops_ = &CountingOps();
    EngineOptions options;
    options.gate.when_learning_carry = true;
    Make(options);
  }
  void TearDown() override {
    engine_.reset();
    emulation::SetOrder(Order::kForward);
  }
};

// The control of engine_carry_test.cc, bit for bit.
TEST_P(EngineEmulatedTest, ByteIdenticalWeightsUnderAnotherFingerprintChangeNothing) {
  for (const DType type : {DType::kF32, DType::kBF16}) {
    const std::string s = type == DType::kF32 ? "s" : "s16", t = type == DType::kF32 ? "t" : "t16";
    const auto loaded = Load(s, "llama3", {}, "", type);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    ASSERT_TRUE(Load(t, "llama3", {s}, "control", type).ok());
    const std::vector<int32_t> prompt = Tokens(100);
    CompletionRequest native = Ask(t, prompt, 8);
    native.reuse = ReuseMode::kNativeOnly;
    native.store = false;
    const Answer truth = Run(native);
    ASSERT_TRUE(truth.status.ok()) << truth.status;
    EXPECT_EQ(truth.usage.computed_tokens, 100);

    ASSERT_TRUE(Warm(s, prompt).ok());
    const int before = copies;
    const Answer carried = Run(Ask(t, prompt, 8));
    EXPECT_EQ(copies, before) << "a carried block was not used in place";
    EXPECT_EQ(carried.usage.carried_tokens, 96);
    EXPECT_EQ(carried.usage.computed_tokens, 4);
    EXPECT_EQ(carried.tokens, truth.tokens);
    EXPECT_EQ(carried.logprobs, truth.logprobs) << DTypeName(type);

    // A repair from below does copy the layers above it.
    CompletionRequest repaired = Ask(t, prompt, 8);
    repaired.judged = false;
    repaired.reuse = ReuseMode::kCarry;
    repaired.carry_plan = *ParseCarryPlan("bottom(1)");
    EXPECT_EQ(Run(repaired).logprobs, truth.logprobs) << DTypeName(type);
    EXPECT_GT(copies, before);
  }
  ExpectIdle();
}

TEST_P(EngineEmulatedTest, Int8WeightsAreRefused) {
  LoadOptions options;
  options.model = "m";
  options.version = "s";
  options.path = TinyPath("llama3");
  options.auto_dtype = false;
  options.weights = DType::kI8;
  const auto loaded = engine_->Load(options, nullptr);
  EXPECT_EQ(loaded.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(loaded.status().message()),
              testing::HasSubstr("INT8 weights are for the CPU alone"));
  ASSERT_TRUE(Load("s", "llama3").ok());
  EXPECT_TRUE(Run(Ask("s", Tokens(20), 2)).status.ok());
}

// More alternatives than the sample op ranks bring the logits to the host, which then chooses.
TEST_P(EngineEmulatedTest, TheDeviceChoosesAsTheHostDoes) {
  ASSERT_TRUE(Load("s", "llama3").ok());
  CompletionRequest request = Ask("s", Tokens(40), 24);
  request.sampling.n = 3;
  request.sampling.seed = 11;
  request.sampling.temperature = 1.5;
  request.sampling.top_p = 0.95f;
  request.sampling.min_p = 0.001f;
  request.sampling.repetition_penalty = 1.1f;
  request.sampling.logit_bias = {{7, -100}, {30, 2}};
  request.sampling.logprobs = kSampleTop;
  const Answer device = Run(request);
  ASSERT_TRUE(device.status.ok()) << device.status;
  request.sampling.logprobs = kSampleTop + 1;
  const Answer host = Run(request);
  ASSERT_TRUE(host.status.ok()) << host.status;
  EXPECT_EQ(device.tokens, host.tokens);
  EXPECT_NE(device.tokens[0], device.tokens[1]);
  for (int choice = 0; choice < 3; ++choice) {
    ASSERT_EQ(device.logprobs[choice].size(), 24u);
    for (int i = 0; i < 24; ++i) {
      EXPECT_NEAR(device.logprobs[choice][i], host.logprobs[choice][i], 1e-5);
    }
  }
  ExpectIdle();
}

// Requests of several lengths, sampled and greedy, with one more on the way: what they answer, and
// how many passes were replayed.
TEST_P(EngineEmulatedTest, ReplayedPassesAnswerTheSame) {
  std::vector<Answer> answers[2];
  int64_t replayed[2];
  for (const bool graphs : {false, true}) {
    EngineOptions options;
    options.graphs = graphs;
    Make(options);
    ASSERT_TRUE(Load("s", "llama3").ok());
    ASSERT_TRUE(Load("s16", "llama3", {}, "", DType::kBF16).ok());
    for (const char* version : {"s", "s16"}) {
      for (int i = 0; i < 2; ++i) {
        CompletionRequest request = Ask(version, Tokens(20 + 20 * i, i), 20);
        request.sampling.n = 2;
        request.sampling.seed = 5;
        request.sampling.temperature = static_cast<float>(i);
        request.sampling.frequency_penalty = 0.1f;
        request.sampling.logprobs = 3;
        answers[graphs].push_back(Run(std::move(request)));
      }
    }
    ExpectIdle();
    replayed[graphs] = engine_->snapshot().replayed_passes;
  }
  EXPECT_EQ(replayed[0], 0);
  EXPECT_GT(replayed[1], 30);  // of 4 * 20 and a few
  for (size_t i = 0; i < answers[0].size(); ++i) {
    ASSERT_TRUE(answers[0][i].status.ok()) << answers[0][i].status;
    EXPECT_EQ(answers[1][i].tokens, answers[0][i].tokens) << i;
    EXPECT_EQ(answers[1][i].logprobs, answers[0][i].logprobs) << i;
  }
}

// Blocks leave the device and come back by copies beside its work.
class EngineCopiesTest : public EngineTest {
 protected:
  void TearDown() override { engine_.reset(); }

  // Asks for a prompt, for others that push it out of the device, and for it again.
  struct Returned {
    Answer before, after;
    int64_t rejects = 0;
    bool from_host = false;
  };
  Returned PushOutAndAskAgain(const Ops& ops) {
    ops_ = &ops;
    EngineOptions options;
    options.kv_cache_bytes = 20 * 2 * 2 * 2 * kBlock * 16 * 4;  // 20 blocks of the tiny llama3
    options.host_cache_bytes = 4 << 20;
    Make(options);
    EXPECT_TRUE(Load("s", "llama3").ok());
    Returned out;
    out.before = Run(Ask("s", Tokens(200)));
    for (int i = 1; i < 4; ++i) EXPECT_TRUE(Run(Ask("s", Tokens(200, i))).status.ok());
    out.after = Run(Ask("s", Tokens(200)));
    for (const CacheSegment& segment : out.after.cache.segments) {
      out.from_host |= segment.tier == "host";
    }
    for (const CounterRow& row : engine_->snapshot().rejects) out.rejects += row.count;
    return out;
  }
};

TEST_F(EngineCopiesTest, BlocksComeBackFromPinnedMemory) {
  const Returned out = PushOutAndAskAgain(EmulatedCudaOps());
  EXPECT_EQ(out.after.usage.cached_tokens, 192);  // 12 blocks, where others left room for 7
  EXPECT_EQ(out.after.tokens, out.before.tokens);
  EXPECT_EQ(out.after.logprobs, out.before.logprobs);
  EXPECT_EQ(out.rejects, 0);
  ExpectIdle();
}

// Forgets to wait for copies in one direction: the emulated device shows what a GPU shows at times.
template <CopyWay kWay>
const Ops& HastyOps() {
  static std::vector<Copy*> skipped;  // a worker's
  static Ops ops = EmulatedCudaOps();
  ops.start_copy = [](Backend* backend, Copy* copy, void* to, const void* from, size_t bytes,
                      CopyWay way) {
    if (way == kWay) skipped.push_back(copy);
    EmulatedCudaOps().start_copy(backend, copy, to, from, bytes, way);
  };
  ops.finish_copy = [](Backend* backend, Copy* copy) {
    const bool skip = std::find(skipped.begin(), skipped.end(), copy) != skipped.end();
    if (skip) return absl::OkStatus();
    return EmulatedCudaOps().finish_copy(backend, copy);
  };
  return ops;
}

// A copy that nobody waited for may still run when its memory is another's, which AddressSanitizer
// reports before these tests see anything.
#if !defined(__SANITIZE_ADDRESS__)

// What was read too early has another checksum than what is there in the end: it is never served.
TEST_F(EngineCopiesTest, AnImageReadBeforeItsCopyIsRejected) {
  const Returned out = PushOutAndAskAgain(HastyOps<CopyWay::kToHost>());
  EXPECT_GT(out.rejects, 0);
  EXPECT_FALSE(out.from_host);
  EXPECT_EQ(out.after.tokens, out.before.tokens);
  ExpectIdle();
}

TEST_F(EngineCopiesTest, ABlockReadBeforeItsCopyShows) {
  const Returned out = PushOutAndAskAgain(HastyOps<CopyWay::kToDevice>());
  EXPECT_EQ(out.after.usage.cached_tokens, 192);
  EXPECT_NE(out.after.tokens, out.before.tokens);
}

#endif

INSTANTIATE_TEST_SUITE_P(Orders, EngineEmulatedTest,
                         testing::Values(Order::kForward, Order::kReverse), [](const auto& info) {
                           return info.param == Order::kForward ? "Forward" : "Reverse";
                         });

}  // namespace
}  // namespace carryover
