// The tiny models on the emulated CUDA device, in both lane orders, against Hugging Face
// transformers.
#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "kernels/cuda/emulation/block.h"
#include "kernels/ops.h"
#include "tests/golden/golden_reference.h"
#include "tests/golden/golden_rounded.h"
#include "tests/golden/golden_runner.h"
#include "tests/source_dir.h"

namespace carryover {
namespace {

using emulation::Order;

class EmulatedTinyModel : public testing::TestWithParam<std::tuple<const char*, Order>> {
 protected:
  void SetUp() override { emulation::SetOrder(std::get<Order>(GetParam())); }
  void TearDown() override { emulation::SetOrder(Order::kForward); }
};

TEST_P(EmulatedTinyModel, Fp32MatchesTheReference) {
  const std::string name = std::get<const char*>(GetParam());
  const auto reference = LoadGoldenReference(name);
  ASSERT_TRUE(reference.ok()) << reference.status();
  const auto runner =
      GoldenRunner::Load(SourceDir() + "/tests/golden/tiny/" + name, EmulatedCudaOps(),
                         {.weights = DType::kF32, .kv_dtype = DType::kF32});
  ASSERT_TRUE(runner.ok()) << runner.status();
  const int vocab = (*runner)->model().config().vocab;
  ASSERT_FALSE(reference->prompts.empty());
  const GoldenPrompt* shortest = &reference->prompts[0];
  for (const GoldenPrompt& prompt : reference->prompts) {
    if (prompt.tokens.size() < shortest->tokens.size()) shortest = &prompt;
    const std::vector<float> logits = (*runner)->Run(prompt.tokens, 0);
    EXPECT_LE(MaxDistance(prompt, logits, vocab) / reference->std, 1e-4);
  }
  // However a prompt is cut, fp32 gives the same bits.
  EXPECT_EQ((*runner)->Run(shortest->tokens, 7), (*runner)->Run(shortest->tokens, 0));
}

TEST_P(EmulatedTinyModel, Bf16StaysClose) {
  const std::string name = std::get<const char*>(GetParam());
  ExpectRoundedClose(CARRYOVER_SOURCE_DIR "/tests/golden/tiny/" + name, name, EmulatedCudaOps(),
                     DType::kBF16);
}

INSTANTIATE_TEST_SUITE_P(Architectures, EmulatedTinyModel,
                         testing::Combine(testing::Values("llama3", "llama_linear", "llama2",
                                                          "smollm2", "mistral", "qwen2", "qwen3"),
                                          testing::Values(Order::kForward, Order::kReverse)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) == Order::kForward ? "" : "Reverse");
                         });

// Heads of 64: the tiny models' are too small for the attention on tensor cores.
class EmulatedDemoModel : public testing::TestWithParam<Order> {
 protected:
  void SetUp() override { emulation::SetOrder(GetParam()); }
  void TearDown() override { emulation::SetOrder(Order::kForward); }
};

TEST_P(EmulatedDemoModel, Bf16StaysCloseOnTensorCores) {
  ExpectRoundedClose(CARRYOVER_SOURCE_DIR "/models/demo/2026-10", "demo_2026_10", EmulatedCudaOps(),
                     DType::kBF16);
}

INSTANTIATE_TEST_SUITE_P(Orders, EmulatedDemoModel,
                         testing::Values(Order::kForward, Order::kReverse), [](const auto& info) {
                           return info.param == Order::kForward ? "Forward" : "Reverse";
                         });

}  // namespace
}  // namespace carryover
