// The whole engine on the emulated CUDA device, in both lane orders.
#include <gtest/gtest.h>

#include "kernels/cuda/emulation/block.h"
#include "tests/unit/engine_fixture.h"

namespace carryover {
namespace {

using emulation::Order;

class EngineEmulatedTest : public EngineTest, public testing::WithParamInterface<Order> {
 protected:
  void SetUp() override {
    emulation::SetOrder(GetParam());
    ops_ = &EmulatedCudaOps();
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
    const Answer carried = Run(Ask(t, prompt, 8));
    EXPECT_EQ(carried.usage.carried_tokens, 96);
    EXPECT_EQ(carried.usage.computed_tokens, 4);
    EXPECT_EQ(carried.tokens, truth.tokens);
    EXPECT_EQ(carried.logprobs, truth.logprobs) << DTypeName(type);
  }
  ExpectIdle();
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

INSTANTIATE_TEST_SUITE_P(Orders, EngineEmulatedTest,
                         testing::Values(Order::kForward, Order::kReverse), [](const auto& info) {
                           return info.param == Order::kForward ? "Forward" : "Reverse";
                         });

}  // namespace
}  // namespace carryover
