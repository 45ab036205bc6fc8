// The sample op on every backend against the rules of kernels/host_sample.h, whose own tests are in
// sampler_test.cc.
#include <gmock/gmock.h>

#include <algorithm>
#include <set>

#include "kernels/host_sample.h"
#include "tests/unit/ops_testing.h"

namespace carryover {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();

// What may come out where a decision is as close as 1e-5.
std::set<int32_t> Acceptable(std::vector<float> logits, const SampleSpec& spec,
                             absl::Span<const LogitEdit> edits) {
  std::set<int32_t> tokens;
  for (const int i : {-1, 0, 1}) {
    for (const int j : {-1, 0, 1}) {
      for (const int k : {-1, 0, 1}) {
        constexpr double kGap = 1e-5;
        SampleSpec near = spec;
        near.uniform = std::clamp(spec.uniform + i * kGap, 0.0, 1 - kGap);
        if (spec.top_p < 1) {
          near.top_p = std::clamp<float>(spec.top_p * static_cast<float>(1 + j * kGap), 1e-6f,
                                         static_cast<float>(1 - 1e-6));
        }
        near.min_p = std::min(spec.min_p * static_cast<float>(1 + k * kGap), 1.0f);
        tokens.insert(SampleRow(absl::MakeSpan(logits), near, edits));
      }
    }
  }
  return tokens;
}

class SampleTest : public OpsTestBase {
 protected:
  // One more than there are rows, to show a write past the end.
  std::vector<SampledToken> Sample(std::vector<float>* logits, int vocab,
                                   const std::vector<SampleSpec>& rows,
                                   const std::vector<LogitEdit>& edits) {
    SampleArgs args;
    args.logits = Upload(*logits);
    args.vocab = vocab;
    args.rows = rows;
    args.edits = edits;
    args.out = static_cast<SampledToken*>(Poisoned((rows.size() + 1) * sizeof(SampledToken)));
    ops().sample(backend_, args);
    std::vector<SampledToken> out(rows.size() + 1);
    ops().download(backend_, out.data(), args.out, out.size() * sizeof(SampledToken));
    const std::vector<float> after = Download(args.logits, logits->size());
    EXPECT_TRUE(SameBits(after.data(), logits->data(), after.size())) << "edits are left";
    EXPECT_EQ(out.back().token, -1) << "wrote past the end";
    out.pop_back();
    return out;
  }
  SampledToken SampleOne(std::vector<float> logits, SampleSpec spec) {
    return Sample(&logits, static_cast<int>(logits.size()), {spec}, {})[0];
  }

  float AnyOf(std::vector<float> values) {
    return values[Random(0, static_cast<int>(values.size()) - 1)];
  }
  SampleSpec AnySpec(int vocab) {
    SampleSpec spec;
    spec.temperature = AnyOf({0, 1, 1, 0.3f, 2.5f, 1e-3f});
    spec.top_k = Random(0, 2) == 0 ? Random(1, vocab + 3) : 0;
    spec.top_p = AnyOf({1, 1, 0.9f, 0.5f, 0.999f, 1e-6f});
    spec.min_p = AnyOf({0, 0, 0.01f, 0.3f, 1});
    spec.uniform = std::uniform_real_distribution<double>(0, 1)(random_);
    spec.logprobs = Random(-1, kSampleTop);
    return spec;
  }
  std::vector<LogitEdit> AnyEdits(int vocab) {
    std::vector<LogitEdit> edits;
    std::set<int32_t> tokens;
    for (int i = Random(0, 1) * Random(1, 700); i > 0; --i) tokens.insert(Random(0, vocab - 1));
    for (const int32_t token : tokens) {
      edits.push_back(
          {token, AnyOf({0, 0, 1.5f, -3, kMasked}), AnyOf({1, 1.3f}), AnyOf({0, 0.7f, -0.2f})});
    }
    return edits;
  }
};

TEST_P(SampleTest, ChoosesAsTheHostDoes) {
  int rows_seen = 0, equal = 0;
  for (int round = 0; round < 25; ++round) {
    const int rows = Random(1, 4), vocab = Coin() ? Random(1, 40) : 2 * Random(1, 900) + 1;
    SCOPED_TRACE(testing::Message() << "round " << round << ", " << rows << " rows of " << vocab);
    std::vector<float> logits =
        Values(static_cast<size_t>(rows) * vocab, DType::kF32, AnyOf({0.1f, 2, 6}));
    const float quantum = AnyOf({0, 0, 0.5f});  // many equal ones
    for (float& logit : logits) {
      if (quantum != 0) logit = std::floor(logit / quantum) * quantum;
      if (Random(0, 50) == 0) logit = kMasked;
    }
    std::vector<SampleSpec> specs;
    std::vector<LogitEdit> edits;
    for (int r = rows - 1; r >= 0; --r) {
      if (rows > 1 && r == 1) continue;  // a row that nobody asks about
      SampleSpec spec = AnySpec(vocab);
      const std::vector<LogitEdit> own = AnyEdits(vocab);
      spec.row = r;
      spec.edit_begin = static_cast<int32_t>(edits.size());
      spec.edit_count = static_cast<int32_t>(own.size());
      edits.insert(edits.end(), own.begin(), own.end());
      specs.push_back(spec);
    }
    const std::vector<SampledToken> sampled = Sample(&logits, vocab, specs, edits);
    for (size_t i = 0; i < specs.size(); ++i) {
      const SampleSpec& spec = specs[i];
      SCOPED_TRACE(testing::Message()
                   << "temperature " << spec.temperature << ", top_k " << spec.top_k << ", top_p "
                   << spec.top_p << ", min_p " << spec.min_p << ", uniform " << spec.uniform
                   << ", logprobs " << spec.logprobs << ", edits " << spec.edit_count);
      const auto row = absl::MakeSpan(logits).subspan(static_cast<size_t>(spec.row) * vocab, vocab);
      const auto own = absl::MakeConstSpan(edits).subspan(spec.edit_begin, spec.edit_count);
      ++rows_seen;
      if (sampled[i].token == SampleRow(row, spec, own)) {
        ++equal;
      } else {
        EXPECT_NE(spec.temperature, 0);
        EXPECT_THAT(Acceptable({row.begin(), row.end()}, spec, own),
                    testing::Contains(sampled[i].token));
      }
      if (spec.logprobs < 0) {
        EXPECT_EQ(sampled[i].rank, -1);  // untouched
        continue;
      }
      ASSERT_GE(sampled[i].token, 0);
      ASSERT_LT(sampled[i].token, vocab);
      const RankedToken ranked = RankToken(row, sampled[i].token, spec.logprobs);
      const auto near = [&](float logprob, int32_t token) {
        const double want = row[token] - ranked.log_sum_exp;
        if (std::isfinite(want)) {
          EXPECT_NEAR(logprob, want, 1e-5);
        } else if (std::isnan(want)) {  // all are masked: no distribution
          EXPECT_TRUE(std::isnan(logprob)) << logprob;
        } else {
          EXPECT_EQ(logprob, want);
        }
      };
      EXPECT_EQ(sampled[i].rank, ranked.rank);
      near(sampled[i].logprob, sampled[i].token);
      ASSERT_EQ(sampled[i].top_count, static_cast<int>(ranked.top.size()));
      for (size_t k = 0; k < ranked.top.size(); ++k) {
        EXPECT_EQ(sampled[i].top[k], ranked.top[k]);
        near(sampled[i].top_logprob[k], ranked.top[k]);
      }
    }
  }
  EXPECT_GE(equal, rows_seen - 2);
}

// Every token of a row as often as it weighs: what a walk of uniform numbers in order meets.
TEST_P(SampleTest, AWalkMeetsAllTokensInOrder) {
  for (const float top_p : {1.0f, 0.999f}) {
    SampleSpec spec;
    spec.top_p = top_p;
    std::vector<int32_t> met;
    for (int i = 0; i < 64; ++i) {
      spec.uniform = (i + 0.5) / 64;
      met.push_back(
          SampleOne({std::log(2.0f), std::log(5.0f), kMasked, std::log(1.0f)}, spec).token);
    }
    const bool by_id = top_p == 1;
    EXPECT_EQ(std::count(met.begin(), met.end(), 0), 16);
    EXPECT_EQ(std::count(met.begin(), met.end(), 1), 40);
    EXPECT_EQ(std::count(met.begin(), met.end(), 3), 8);
    EXPECT_EQ(met.front(), by_id ? 0 : 1);
    EXPECT_EQ(met.back(), 3);
  }
}

TEST_P(SampleTest, AnswersWhateverTheLogits) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float temperature : {0.0f, 1.0f}) {
    SampleSpec spec;
    spec.temperature = temperature;
    spec.uniform = 0.9999;
    spec.logprobs = 2;
    EXPECT_EQ(SampleOne({kMasked, kMasked, kMasked}, spec).token, 0);
    EXPECT_EQ(SampleOne({Nan(), Nan(), Nan()}, spec).token, 0);
    EXPECT_EQ(SampleOne({1, kInfinity, kInfinity}, spec).token, 1);
    const SampledToken one = SampleOne({Nan(), kMasked, 1, Nan()}, spec);
    EXPECT_EQ(one.token, 2);
    EXPECT_TRUE(std::isnan(one.logprob));
    EXPECT_EQ(SampleOne({-0.0f, 0.0f, -1e30f}, {.temperature = 0}).token, 0);
  }
  SampleArgs args;
  ops().sample(backend_, args);  // no work
  EXPECT_TRUE(ops().sync(backend_).ok());
  const SampleSpec spec;
  args.rows = absl::MakeConstSpan(&spec, 1);
  ops().sample(backend_, args);
  EXPECT_EQ(ops().sync(backend_).code(), absl::StatusCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Backends, SampleTest, testing::ValuesIn(BackendCases()), CaseName);

}  // namespace
}  // namespace carryover
