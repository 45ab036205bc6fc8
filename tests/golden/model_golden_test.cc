// Our forward pass against Hugging Face transformers, and against broken copies of itself: a
// comparison that a wrong model passes would prove nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <ostream>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "tests/golden/golden_reference.h"
#include "tests/golden/golden_rounded.h"
#include "tests/golden/golden_runner.h"
#include "tests/skip.h"

namespace carryover {
namespace {

// Of the standard deviation of the logits.
constexpr double kFp32Tolerance = 1e-4;

std::vector<std::vector<int32_t>> PromptsOf(const GoldenReference& reference) {
  std::vector<std::vector<int32_t>> prompts;
  for (const GoldenPrompt& prompt : reference.prompts) prompts.push_back(prompt.tokens);
  return prompts;
}

void ExpectFp32Matches(const std::string& folder, const std::string& name,
                       const std::vector<int>& chunks) {
  const auto loaded = LoadGoldenReference(name);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const GoldenReference& reference = *loaded;
  const auto opened =
      GoldenRunner::Load(folder, CpuOps(), {.weights = DType::kF32, .kv_dtype = DType::kF32});
  ASSERT_TRUE(opened.ok()) << opened.status();
  GoldenRunner* const runner = opened->get();
  ASSERT_FALSE(reference.prompts.empty());
  ASSERT_GE(reference.std, 1);
  const int vocab = runner->model().config().vocab;

  std::vector<std::vector<float>> whole;
  double worst = 0;
  int continuations = 0;
  for (const GoldenPrompt& prompt : reference.prompts) {
    whole.push_back(runner->Run(prompt.tokens, 0));
    const double distance = MaxDistance(prompt, whole.back(), vocab) / reference.std;
    EXPECT_LE(distance, kFp32Tolerance) << prompt.tokens.size() << " tokens";
    worst = std::max(worst, distance);
    if (!prompt.greedy.empty()) {
      EXPECT_EQ(runner->Greedy(prompt.tokens, prompt.greedy.size()), prompt.greedy);
      ++continuations;
    }
  }
  EXPECT_GT(continuations, 0);
  testing::Test::RecordProperty("max_distance_over_std", std::to_string(worst));
  std::printf("%s: fp32 max |delta| / std = %.2e\n", name.c_str(), worst);

  // However prompts are cut and batched, fp32 gives the same bits.
  for (int chunk : chunks) {
    for (size_t i = 0; i < whole.size(); ++i) {
      EXPECT_EQ(runner->Run(reference.prompts[i].tokens, chunk), whole[i])
          << "chunks of " << chunk << ", prompt " << i;
    }
  }
  EXPECT_EQ(runner->Run(PromptsOf(reference), 0), whole) << "one batch";
  EXPECT_EQ(runner->Run(PromptsOf(reference), 7), whole) << "one batch in chunks of 7";
}

std::string TinyFolder(const std::string& name) {
  return std::string(CARRYOVER_SOURCE_DIR) + "/tests/golden/tiny/" + name;
}

class TinyModel : public testing::TestWithParam<const char*> {};

TEST_P(TinyModel, Fp32MatchesTheReference) {
  ExpectFp32Matches(TinyFolder(GetParam()), GetParam(), {1, 7, 16});
}

TEST_P(TinyModel, RoundedStaysClose) {
  for (const DType weights : {DType::kBF16, DType::kI8}) {
    ExpectRoundedClose(TinyFolder(GetParam()), GetParam(), CpuOps(), weights);
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, TinyModel,
                         testing::Values("llama3", "llama_linear", "llama2", "smollm2", "mistral",
                                         "qwen2", "qwen3"),
                         [](const auto& info) { return std::string(info.param); });

struct RealModel {
  const char* name;    // of the reference
  const char* folder;  // in the repository
  const char* how;     // to get it
};

void PrintTo(const RealModel& model, std::ostream* out) { *out << model.name; }

class RealWeights : public testing::TestWithParam<RealModel> {
 protected:
  // Empty when the model is not here.
  std::string Folder() const {
    const char* root = std::getenv("CARRYOVER_MODELS");
    const std::string folder =
        (root != nullptr ? std::string(root) : std::string(CARRYOVER_SOURCE_DIR) + "/models") +
        "/" + GetParam().folder;
    return std::filesystem::exists(folder + "/config.json") ? folder : "";
  }
};

TEST_P(RealWeights, Fp32MatchesTheReference) {
  if (Folder().empty()) {
    SKIP_OR_FAIL_IN_CI(GetParam().folder << " is missing: " << GetParam().how);
  }
  ExpectFp32Matches(Folder(), GetParam().name, {16});
}

TEST_P(RealWeights, RoundedStaysClose) {
  if (Folder().empty()) {
    SKIP_OR_FAIL_IN_CI(GetParam().folder << " is missing: " << GetParam().how);
  }
  for (const DType weights : {DType::kBF16, DType::kI8}) {
    ExpectRoundedClose(Folder(), GetParam().name, CpuOps(), weights);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Models, RealWeights,
    testing::Values(RealModel{"smollm2_135m", "smollm2/2026-10", "run models/fetch_smollm2"},
                    RealModel{"demo_2026_10", "demo/2026-10", "it belongs to the repository"},
                    RealModel{"demo_2026_11", "demo/2026-11", "it belongs to the repository"}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace carryover
