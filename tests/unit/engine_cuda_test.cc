// The whole engine on a GPU: carrying changes nothing where the weights are equal.
#if defined(CARRYOVER_CUDA)

#include <gtest/gtest.h>

#include "tests/skip.h"
#include "tests/unit/engine_fixture.h"

namespace carryover {
namespace {

class EngineCudaTest : public EngineTest {
 protected:
  void SetUp() override {
    const auto backend = CudaOps().create({});
    SKIP_WITHOUT_GPU(backend.status());
    ASSERT_TRUE(backend.ok()) << backend.status();
    CudaOps().destroy(*backend);
    ops_ = &CudaOps();
    EngineOptions options;
    options.gate.when_learning_carry = true;
    Make(options);
  }
};

// In fp32 bit for bit. In bf16, where a prompt and its last rows are multiplied by algorithms of
// their own (docs/cuda.md), the same answer from logits that are nearly the same.
TEST_F(EngineCudaTest, ByteIdenticalWeightsUnderAnotherFingerprintChangeNothing) {
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
    ASSERT_TRUE(Warm(s, prompt).ok());
    const Answer carried = Run(Ask(t, prompt, 8));
    EXPECT_EQ(carried.usage.carried_tokens, 96);
    if (type == DType::kF32) {
      EXPECT_EQ(carried.tokens, truth.tokens);
      EXPECT_EQ(carried.logprobs, truth.logprobs);
    } else {
      ASSERT_FALSE(truth.logprobs[0].empty());
      EXPECT_NEAR(carried.logprobs[0][0], truth.logprobs[0][0], 0.1);
    }
  }
  ExpectIdle();
}

}  // namespace
}  // namespace carryover

#endif  // CARRYOVER_CUDA
