#include "tests/golden/golden_rounded.h"

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

struct Limits {
  double mean_kl;  // nats, over all positions of all prompts
  // The first choice must stay where the reference's two best logits are further apart than this
  // many standard deviations of the logits: more than rounding moves a logit by.
  double clear_margin;
};
constexpr Limits kBf16Limits = {2e-3, 0.1};
constexpr Limits kInt8Limits = {2e-2, 0.4};

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

void ExpectRoundedClose(const std::string& folder, const std::string& name, const Ops& ops,
                        DType weights) {
  const auto loaded = LoadGoldenReference(name);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const GoldenReference& reference = *loaded;
  const Limits& limits = weights == DType::kI8 ? kInt8Limits : kBf16Limits;
  const auto exact =
      GoldenRunner::Load(folder, CpuOps(), {.weights = DType::kF32, .kv_dtype = DType::kF32});
  ASSERT_TRUE(exact.ok()) << exact.status();
  const auto rounded =
      GoldenRunner::Load(folder, ops, {.weights = weights, .kv_dtype = DType::kBF16});
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
      if (best[0] - best[1] <= limits.clear_margin * reference.std) continue;
      ++clear;
      flips += std::max_element(exact_row, exact_row + vocab) - exact_row !=
               std::max_element(rounded_row, rounded_row + vocab) - rounded_row;
    }
  }
  std::printf("%s: %s mean KL %.2e, max |delta| / std %.3f, %d flips in %d clear of %d\n",
              name.c_str(), DTypeName(weights), kl / positions, largest / reference.std, flips,
              clear, positions);
  EXPECT_LE(kl / positions, limits.mean_kl);
  EXPECT_GT(kl, 0) << "what equals fp32 is fp32";
  EXPECT_GT(clear, positions / 10);
  EXPECT_EQ(flips, 0);
}

}  // namespace carryover
