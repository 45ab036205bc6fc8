#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "kernels/host_sample.h"

namespace carryover {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

class NoText final : public Tokenizer {
 public:
  absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view,
                                              const EncodeOptions&) const override {
    return absl::UnimplementedError("no text");
  }
  std::string Decode(absl::Span<const int32_t>, bool) const override { return "x"; }
  std::unique_ptr<StreamDecoder> NewStreamDecoder(bool) const override { return nullptr; }
  int32_t vocab_size() const override { return 8; }
  bool IsSpecial(int32_t) const override { return false; }
  std::string TokenText(int32_t) const override { return "x"; }
  const Digest& sha256() const override { return digest_; }

 private:
  Digest digest_{};
};

// How often each token comes out over many positions.
std::map<int32_t, int> Histogram(const SamplingParams& params, const std::vector<float>& logits,
                                 int draws) {
  Sampler sampler(params, 7, 0, {}, {});
  std::map<int32_t, int> counts;
  for (int i = 0; i < draws; ++i) {
    std::vector<float> copy = logits;
    ++counts[sampler.Sample(absl::MakeSpan(copy), i)];
  }
  return counts;
}

std::vector<float> LogitsOf(const std::vector<double>& probabilities) {
  std::vector<float> logits;
  for (double p : probabilities) logits.push_back(static_cast<float>(std::log(p)));
  return logits;
}

TEST(Sampler, GreedyTakesTheLowestIdAmongEquals) {
  SamplingParams params;
  params.temperature = 0;
  Sampler sampler(params, 1, 0, {}, {});
  std::vector<float> logits = {0, 3, 3, 1};
  EXPECT_EQ(sampler.Sample(absl::MakeSpan(logits), 0), 1);
}

TEST(Sampler, NanNeverWins) { EXPECT_EQ(ArgMax({NAN, -kInf, 1, NAN}), 2); }

TEST(Sampler, FollowsTheDistribution) {
  SamplingParams params;
  const auto counts = Histogram(params, LogitsOf({0.5, 0.3, 0.2}), 20000);
  EXPECT_NEAR(counts.at(0) / 20000.0, 0.5, 0.02);
  EXPECT_NEAR(counts.at(1) / 20000.0, 0.3, 0.02);
  EXPECT_NEAR(counts.at(2) / 20000.0, 0.2, 0.02);
}

TEST(Sampler, TemperatureSharpens) {
  SamplingParams params;
  params.temperature = 0.5;  // weights p^2: 25, 9, 4 of 38
  const auto counts = Histogram(params, LogitsOf({0.5, 0.3, 0.2}), 20000);
  EXPECT_NEAR(counts.at(0) / 20000.0, 25 / 38.0, 0.02);
  EXPECT_NEAR(counts.at(2) / 20000.0, 4 / 38.0, 0.02);
}

TEST(Sampler, TopKKeepsTheMostLikely) {
  SamplingParams params;
  params.top_k = 2;
  const auto counts = Histogram(params, LogitsOf({0.2, 0.5, 0.3}), 5000);
  EXPECT_EQ(counts.count(0), 0u);
  EXPECT_NEAR(counts.at(1) / 5000.0, 0.625, 0.03);
}

TEST(Sampler, TopPKeepsTheFewestThatReachIt) {
  SamplingParams params;
  params.top_p = 0.6;  // 0.5 is too little, 0.5 + 0.3 is enough
  const auto counts = Histogram(params, LogitsOf({0.5, 0.3, 0.15, 0.05}), 5000);
  EXPECT_EQ(counts.size(), 2u);
  EXPECT_NEAR(counts.at(0) / 5000.0, 0.625, 0.03);
}

TEST(Sampler, MinPCutsRelativeToTheMostLikely) {
  for (const float top_p : {1.0f, 0.999f}) {  // the unordered and the ordered path
    SamplingParams params;
    params.min_p = 0.5;  // of 0.5: below 0.25 goes
    params.top_p = top_p;
    const auto counts = Histogram(params, LogitsOf({0.5, 0.3, 0.2}), 5000);
    EXPECT_EQ(counts.size(), 2u);
    EXPECT_NEAR(counts.at(0) / 5000.0, 0.625, 0.03);
  }
}

TEST(Sampler, WideVocabularyTopPEqualsASortedReference) {
  std::vector<double> probabilities(5000);
  double total = 0;
  for (size_t i = 0; i < probabilities.size(); ++i) {
    probabilities[i] = 1.0 / (1 + (i * 2654435761u) % 5000);
    total += probabilities[i];
  }
  for (double& p : probabilities) p /= total;
  SamplingParams params;
  params.top_p = 0.5;
  std::vector<double> sorted = probabilities;
  std::sort(sorted.rbegin(), sorted.rend());
  double mass = 0;
  size_t kept = 0;
  while (mass < 0.5) mass += sorted[kept++];
  const double least = sorted[kept - 1];
  for (const auto& [token, count] : Histogram(params, LogitsOf(probabilities), 300)) {
    EXPECT_GE(probabilities[token], least * (1 - 1e-5));
  }
}

TEST(Sampler, PenaltiesFollowTheirFormulas) {
  SamplingParams params;
  params.temperature = 0;
  params.repetition_penalty = 2;
  params.presence_penalty = 0.5;
  params.frequency_penalty = 0.25;
  Sampler sampler(params, 1, 0, {0}, {});
  sampler.Accept(1);
  sampler.Accept(1);
  sampler.Accept(3);
  std::vector<LogitEdit> edits(1);  // of another row
  const SampleSpec spec = sampler.Spec(3, &edits);
  EXPECT_EQ(spec.edit_begin, 1);
  ASSERT_EQ(spec.edit_count, 3);
  ASSERT_EQ(edits.size(), 4u);
  const float minus[] = {0, 0.5 + 2 * 0.25, 0.5 + 0.25};  // in the prompt: repetition only
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(edits[1 + i].token, i == 2 ? 3 : i);
    EXPECT_EQ(edits[1 + i].bias, 0);
    EXPECT_EQ(edits[1 + i].repetition, 2);
    EXPECT_FLOAT_EQ(edits[1 + i].minus, minus[i]);
  }
}

// The token that a row's largest logit is of, with one edit of token 0.
int32_t BestWith(const LogitEdit& edit, std::vector<float> logits) {
  const std::vector<float> before = logits;
  SampleSpec spec;
  spec.temperature = 0;
  const int32_t best = SampleRow(absl::MakeSpan(logits), spec, {edit});
  EXPECT_EQ(logits, before);
  return best;
}

TEST(Sampler, EditsFollowTheirFormula) {
  const LogitEdit twice = {.token = 0, .bias = 0, .repetition = 2, .minus = 0};
  EXPECT_EQ(BestWith(twice, {4, 1.9f}), 0);
  EXPECT_EQ(BestWith(twice, {4, 2.1f}), 1);
  EXPECT_EQ(BestWith(twice, {-1, -1.9f}), 1);  // a negative logit is multiplied
  EXPECT_EQ(BestWith(twice, {-1, -2.1f}), 0);
  const LogitEdit all = {.token = 0, .bias = 3, .repetition = 2, .minus = 0.5f};  // of 1: 1.5
  EXPECT_EQ(BestWith(all, {1, 1.4f}), 0);
  EXPECT_EQ(BestWith(all, {1, 1.6f}), 1);
}

TEST(Sampler, BiasAndMinTokens) {
  SamplingParams params;
  params.temperature = 0;
  params.min_tokens = 2;
  params.logit_bias = {{2, 10}};
  Sampler sampler(params, 1, 0, {}, {2});
  for (int position = 0; position < 3; ++position) {
    std::vector<float> logits = {0, 1, 0};
    EXPECT_EQ(sampler.Sample(absl::MakeSpan(logits), position), position < 2 ? 1 : 2);
  }
}

TEST(Sampler, SeedAndPositionDecideAndNothingElse) {
  const std::vector<float> logits(50, 0.0f);
  SamplingParams params;
  Sampler a(params, 42, 0, {}, {}), b(params, 42, 0, {}, {}), other_choice(params, 42, 1, {}, {}),
      other_seed(params, 43, 0, {}, {});
  std::vector<int32_t> x, y, z, w;
  for (int i = 0; i < 30; ++i) {
    std::vector<float> copy = logits;
    x.push_back(a.Sample(absl::MakeSpan(copy), i));
    z.push_back(other_choice.Sample(absl::MakeSpan(copy), i));
    w.push_back(other_seed.Sample(absl::MakeSpan(copy), i));
  }
  for (int i = 29; i >= 0; --i) {  // in another order
    std::vector<float> copy = logits;
    y.insert(y.begin(), b.Sample(absl::MakeSpan(copy), i));
  }
  EXPECT_EQ(x, y);
  EXPECT_NE(x, z);
  EXPECT_NE(x, w);
}

TEST(Sampler, MaskedEverywhereStillAnswers) {
  SamplingParams params;
  Sampler sampler(params, 1, 0, {}, {});
  std::vector<float> logits = {-kInf, -kInf};
  EXPECT_EQ(sampler.Sample(absl::MakeSpan(logits), 0), 0);
}

TEST(Logprobs, AreTheLogSoftmaxWithRanks) {
  const std::vector<float> logits = {0, std::log(2.0f), std::log(2.0f), std::log(3.0f)};
  const PositionLogprobs out = MakeLogprobs(logits, 2, 2, NoText());
  EXPECT_NEAR(out.chosen.logprob, std::log(2.0 / 8), 1e-6);
  EXPECT_EQ(out.chosen.rank, 3);  // behind 3 and, equal but lower, 1
  ASSERT_EQ(out.top.size(), 2u);
  EXPECT_EQ(out.top[0].token, 3);
  EXPECT_EQ(out.top[1].token, 1);
  EXPECT_NEAR(out.top[0].logprob, std::log(3.0 / 8), 1e-6);
}

}  // namespace
}  // namespace carryover
