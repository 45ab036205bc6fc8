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
#include "tests/golden/golden_runner.h"
#include "tests/skip.h"

namespace carryover {
namespace {

// Of the standard deviation of the logits.
constexpr double kFp32Tolerance = 1e-4;
// Nats, mean over all positions of all prompts.
constexpr double kBf16MeanKl = 2e-3;
// In bf16 the first choice must stay where the reference's two best logits are further apart than
// this many standard deviations of the logits: some ten times what bf16 moves a logit by.
constexpr double kClearMargin = 0.1;

std::unique_ptr<GoldenRunner> LoadRunner(const std::string& folder, DType type) {
  auto runner = GoldenRunner::Load(folder, CpuOps(), {.weights = type, .kv_dtype = type});
  EXPECT_TRUE(runner.ok()) << runner.status();
  return runner.ok() ? *std::move(runner) : nullptr;
}

GoldenReference LoadReference(const std::string& name) {
  auto reference = LoadGoldenReference(name);
  EXPECT_TRUE(reference.ok()) << reference.status();
  return reference.ok() ? *std::move(reference) : GoldenReference{};
}

std::vector<std::vector<int32_t>> PromptsOf(const GoldenReference& reference) {
  std::vector<std::vector<int32_t>> prompts;
  for (const GoldenPrompt& prompt : reference.prompts) prompts.push_back(prompt.tokens);
  return prompts;
}

void ExpectFp32Matches(const std::string& folder, const std::string& name,
                       const std::vector<int>& chunks) {
  const GoldenReference reference = LoadReference(name);
  const auto runner = LoadRunner(folder, DType::kF32);
  ASSERT_NE(runner, nullptr);
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

// KL(p || q) in nats of two rows of logits.
double Kl(const float* p, const float* q, int vocab) {
  const auto log_sum = [vocab](const float* x) {
    const double max = *std::max_element(x, x + vocab);
    double sum = 0;
    for (int i = 0; i < vocab; ++i) sum += std::exp(x[i] - max);
    return max + std::log(sum);
  };
  const double log_p = log_sum(p), log_q = log_sum(q);
  double kl = 0;
  for (int i = 0; i < vocab; ++i) kl += std::exp(p[i] - log_p) * ((p[i] - log_p) - (q[i] - log_q));
  return kl;
}

// Against our own fp32, which ExpectFp32Matches ties to the reference on every position.
void ExpectBf16Close(const std::string& folder, const std::string& name) {
  const GoldenReference reference = LoadReference(name);
  const auto exact = LoadRunner(folder, DType::kF32);
  const auto rounded = LoadRunner(folder, DType::kBF16);
  ASSERT_TRUE(exact != nullptr && rounded != nullptr);
  const int vocab = exact->model().config().vocab;
  const auto p = exact->Run(PromptsOf(reference), 0);
  const auto q = rounded->Run(PromptsOf(reference), 0);
  double kl = 0, largest = 0;
  int positions = 0, clear = 0, flips = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    for (size_t row = 0; row < reference.prompts[i].tokens.size(); ++row, ++positions) {
      const float* exact_row = p[i].data() + row * vocab;
      const float* rounded_row = q[i].data() + row * vocab;
      kl += Kl(exact_row, rounded_row, vocab);
      for (int v = 0; v < vocab; ++v) {
        largest = std::max<double>(largest, std::abs(exact_row[v] - rounded_row[v]));
      }
      std::vector<float> best(exact_row, exact_row + vocab);
      std::nth_element(best.begin(), best.begin() + 1, best.end(), std::greater<>());
      if (best[0] - best[1] <= kClearMargin * reference.std) continue;
      ++clear;
      flips += std::max_element(exact_row, exact_row + vocab) - exact_row !=
               std::max_element(rounded_row, rounded_row + vocab) - rounded_row;
    }
  }
  std::printf("%s: bf16 mean KL %.2e, max |delta| / std %.3f, %d flips in %d clear of %d\n",
              name.c_str(), kl / positions, largest / reference.std, flips, clear, positions);
  EXPECT_LE(kl / positions, kBf16MeanKl);
  EXPECT_GT(kl, 0) << "bf16 that equals fp32 is fp32";
  EXPECT_GT(clear, positions / 2);
  EXPECT_EQ(flips, 0);
}

std::string TinyFolder(const std::string& name) {
  return std::string(CARRYOVER_SOURCE_DIR) + "/tests/golden/tiny/" + name;
}

class TinyModel : public testing::TestWithParam<const char*> {};

TEST_P(TinyModel, Fp32MatchesTheReference) {
  ExpectFp32Matches(TinyFolder(GetParam()), GetParam(), {1, 7, 16});
}

TEST_P(TinyModel, Bf16StaysClose) { ExpectBf16Close(TinyFolder(GetParam()), GetParam()); }

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

TEST_P(RealWeights, Bf16StaysClose) {
  if (Folder().empty()) {
    SKIP_OR_FAIL_IN_CI(GetParam().folder << " is missing: " << GetParam().how);
  }
  ExpectBf16Close(Folder(), GetParam().name);
}

INSTANTIATE_TEST_SUITE_P(
    Models, RealWeights,
    testing::Values(RealModel{"smollm2_135m", "smollm2/2026-10", "run models/fetch_smollm2"},
                    RealModel{"demo_2026_10", "demo/2026-10", "it belongs to the repository"},
                    RealModel{"demo_2026_11", "demo/2026-11", "it belongs to the repository"}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace carryover
