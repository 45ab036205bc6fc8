#include "tests/golden/golden_bf16.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <vector>

#include "tests/golden/golden_reference.h"
#include "tests/golden/golden_runner.h"

namespace carryover {
namespace {

// Nats, mean over all positions of all prompts.
constexpr double kBf16MeanKl = 2e-3;
// In bf16 the first choice must stay where the reference's two best logits are further apart than
// this many standard deviations of the logits: some ten times what bf16 moves a logit by.
constexpr double kClearMargin = 0.1;

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

}  // namespace

void ExpectBf16Close(const std::string& folder, const std::string& name, const Ops& ops) {
  const auto loaded = LoadGoldenReference(name);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const GoldenReference& reference = *loaded;
  const auto exact =
      GoldenRunner::Load(folder, CpuOps(), {.weights = DType::kF32, .kv_dtype = DType::kF32});
  ASSERT_TRUE(exact.ok()) << exact.status();
  const auto rounded =
      GoldenRunner::Load(folder, ops, {.weights = DType::kBF16, .kv_dtype = DType::kBF16});
  ASSERT_TRUE(rounded.ok()) << rounded.status();
  std::vector<std::vector<int32_t>> prompts;
  for (const GoldenPrompt& prompt : reference.prompts) prompts.push_back(prompt.tokens);
  const int vocab = (*exact)->model().config().vocab;
  const auto p = (*exact)->Run(prompts, 0);
  const auto q = (*rounded)->Run(prompts, 0);
  double kl = 0, largest = 0;
  int positions = 0, clear = 0, flips = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    for (size_t row = 0; row < prompts[i].size(); ++row, ++positions) {
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

}  // namespace carryover
