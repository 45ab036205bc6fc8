// The tiny models on a GPU against Hugging Face transformers, in fp32 and, closely, in bf16.
#if defined(CARRYOVER_CUDA)

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "kernels/ops.h"
#include "tests/golden/golden_reference.h"
#include "tests/golden/golden_runner.h"
#include "tests/skip.h"
#include "tests/source_dir.h"

namespace carryover {
namespace {

class CudaTinyModel : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const auto backend = CudaOps().create({});
    SKIP_WITHOUT_GPU(backend.status());
    ASSERT_TRUE(backend.ok()) << backend.status();
    CudaOps().destroy(*backend);
  }
  // The largest distance from the reference, in standard deviations of its logits.
  double Distance(DType type) {
    const auto reference = LoadGoldenReference(GetParam());
    EXPECT_TRUE(reference.ok()) << reference.status();
    const auto runner = GoldenRunner::Load(SourceDir() + "/tests/golden/tiny/" + GetParam(),
                                           CudaOps(), {.weights = type, .kv_dtype = type});
    EXPECT_TRUE(runner.ok()) << runner.status();
    if (!reference.ok() || !runner.ok()) return INFINITY;
    double worst = 0;
    for (const GoldenPrompt& prompt : reference->prompts) {
      const std::vector<float> logits = (*runner)->Run(prompt.tokens, 0);
      worst = std::max(worst, MaxDistance(prompt, logits, (*runner)->model().config().vocab));
      if (type == DType::kF32) {  // however the prompt is cut, the same bits
        EXPECT_EQ((*runner)->Run(prompt.tokens, 7), logits);
      }
    }
    EXPECT_FALSE(reference->prompts.empty());
    return worst / reference->std;
  }
};

TEST_P(CudaTinyModel, Fp32MatchesTheReference) { EXPECT_LE(Distance(DType::kF32), 1e-4); }

// On the CPU bf16 moves a logit of these models by 0.01 to 0.04 of a standard deviation.
TEST_P(CudaTinyModel, Bf16IsClose) {
  const double distance = Distance(DType::kBF16);
  EXPECT_LE(distance, 0.1);
  EXPECT_GT(distance, 1e-4) << "bf16 that equals fp32 is fp32";
}

INSTANTIATE_TEST_SUITE_P(Architectures, CudaTinyModel,
                         testing::Values("llama3", "llama_linear", "llama2", "smollm2", "mistral",
                                         "qwen2", "qwen3"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace carryover

#endif  // CARRYOVER_CUDA
