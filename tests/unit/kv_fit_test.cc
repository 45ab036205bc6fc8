#include "engine/kv_fit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

namespace carryover {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

constexpr KvMapVariant kVariants[] = {KvMapVariant::kPerLayer, KvMapVariant::kPerHead,
                                      KvMapVariant::kLowRank};

std::vector<float> Noise(int64_t count, float size, int seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, size);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

// W of a layer, dense.
std::vector<float> Dense(const KvMapLayer& layer, KvMapVariant variant, int kv_heads, int head_dim,
                         int rank) {
  KvMap map;
  map.info.layers = 1;
  map.info.kv_heads = kv_heads;
  map.info.head_dim = head_dim;
  map.info.variant = variant;
  map.info.rank = rank;
  map.layers = {layer};
  return map.Weight(0);
}

void ExpectNear(const std::vector<float>& is, const std::vector<float>& want) {
  ASSERT_EQ(is.size(), want.size());
  for (size_t i = 0; i < is.size(); ++i) {
    EXPECT_NEAR(is[i], want[i], 2e-5 * (1 + std::abs(want[i]))) << i;
  }
}

TEST(KvFit, AgreesWithNumpy) {
  std::ifstream file(std::string(CARRYOVER_SOURCE_DIR) + "/tests/golden/reference/kv_fit.json");
  const json reference = json::parse(file);
  const int heads = reference["heads"], head_dim = reference["head_dim"];
  const std::vector<float> source = reference["source"], target = reference["target"];
  KvFitSums sums(heads, head_dim);
  sums.Add(source, target);
  int seen = 0;
  for (const json& item : reference["cases"]) {
    SCOPED_TRACE(item["variant"].get<std::string>() + " " + item["lambda"].dump() + " " +
                 item["rank"].dump());
    for (KvMapVariant variant : kVariants) {
      if (item["variant"] != KvMapVariantName(variant)) continue;
      ++seen;
      const int rank = item["rank"];
      const auto layer = sums.Solve(variant, item["lambda"], rank);
      ASSERT_TRUE(layer.ok()) << layer.status();
      ExpectNear(layer->bias, item["bias"].get<std::vector<float>>());
      if (variant == KvMapVariant::kLowRank) {
        ExpectNear(Dense(*layer, variant, heads, head_dim, rank),
                   item["product"].get<std::vector<float>>());
      } else {
        ExpectNear(layer->weight, item["weight"].get<std::vector<float>>());
      }
    }
  }
  EXPECT_EQ(seen, 15);
}

// In what pieces rows come does not matter, nor how many at a time are in doubles.
TEST(KvFit, SumsAreOfAllRows) {
  constexpr int kRows = 700, kDim = 8;
  const std::vector<float> source = Noise(kRows * kDim, 2, 1);
  std::vector<float> target = Noise(kRows * kDim, 1, 2);
  KvFitSums once(2, 2), pieces(2, 2), front(2, 2), back(2, 2);
  once.Add(source, target);
  const absl::Span<const float> x(source), y(target);
  for (int row = 0; row < kRows; row += 35) {
    pieces.Add(x.subspan(row * kDim, 35 * kDim), y.subspan(row * kDim, 35 * kDim));
  }
  front.Add(x.first(300 * kDim), y.first(300 * kDim));
  back.Add(x.subspan(300 * kDim), y.subspan(300 * kDim));
  front.Merge(back);
  EXPECT_EQ(pieces.rows(), kRows);
  EXPECT_EQ(front.rows(), kRows);
  const auto want = once.Solve(KvMapVariant::kPerLayer, 0.01, 0);
  ASSERT_TRUE(want.ok());
  for (const KvFitSums* sums : {&pieces, &front}) {
    const auto layer = sums->Solve(KvMapVariant::kPerLayer, 0.01, 0);
    ASSERT_TRUE(layer.ok());
    ExpectNear(layer->weight, want->weight);
    ExpectNear(layer->bias, want->bias);
  }
}

TEST(KvFit, EqualRowsGiveTheZeroMap) {
  const std::vector<float> rows = Noise(50 * 8, 3, 3);
  KvFitSums sums(2, 2);
  sums.Add(rows, rows);
  for (KvMapVariant variant : kVariants) {
    const auto layer = sums.Solve(variant, 1e-4, variant == KvMapVariant::kLowRank ? 3 : 0);
    ASSERT_TRUE(layer.ok()) << layer.status();
    for (float w : Dense(*layer, variant, 2, 2, 3)) EXPECT_NEAR(w, 0, 1e-4);
    for (float b : layer->bias) EXPECT_NEAR(b, 0, 1e-4);
  }
}

// With more rows than unknowns and no noise, what made the rows comes out.
TEST(KvFit, FindsTheMapThatMadeTheRows) {
  constexpr int kRows = 200, kDim = 8;
  const std::vector<float> source = Noise(kRows * kDim, 1, 5), w = Noise(kDim * kDim, 0.3f, 6);
  std::vector<float> target = source;
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < kDim; ++i) {
      target[row * kDim + i] += 0.5f * i;
      for (int j = 0; j < kDim; ++j) {
        target[row * kDim + i] += w[i * kDim + j] * source[row * kDim + j];
      }
    }
  }
  KvFitSums sums(2, 2);
  sums.Add(source, target);
  const auto layer = sums.Solve(KvMapVariant::kPerLayer, 1e-9, 0);
  ASSERT_TRUE(layer.ok());
  for (int i = 0; i < kDim * kDim; ++i) EXPECT_NEAR(layer->weight[i], w[i], 1e-4);
  for (int i = 0; i < kDim; ++i) EXPECT_NEAR(layer->bias[i], 0.5f * i, 1e-4);
  // A heavy penalty leaves the mean, which is not penalised.
  const auto heavy = sums.Solve(KvMapVariant::kPerLayer, 1e9, 0);
  ASSERT_TRUE(heavy.ok());
  for (float value : heavy->weight) EXPECT_NEAR(value, 0, 1e-6);
}

// Values that are the same in every row have no spread to divide by.
TEST(KvFit, ConstantsGetNoWeight) {
  constexpr int kRows = 60, kDim = 8;
  std::vector<float> source = Noise(kRows * kDim, 1, 7), target = source;
  for (int row = 0; row < kRows; ++row) {
    source[row * kDim + 3] = 100.1f;
    source[row * kDim + 6] = 0;
    target[row * kDim + 3] = 100.1f + source[row * kDim];
  }
  KvFitSums sums(2, 2);
  sums.Add(source, target);
  for (KvMapVariant variant : kVariants) {
    const auto layer = sums.Solve(variant, 1e-6, variant == KvMapVariant::kLowRank ? 8 : 0);
    ASSERT_TRUE(layer.ok()) << layer.status();
    const std::vector<float> w = Dense(*layer, variant, 2, 2, 8);
    for (int i = 0; i < kDim; ++i) {
      EXPECT_NEAR(w[i * kDim + 3], 0, 1e-6);
      EXPECT_NEAR(w[i * kDim + 6], 0, 1e-6);
    }
    if (variant == KvMapVariant::kPerLayer) {
      EXPECT_NEAR(w[3 * kDim], 1, 1e-3);
    }
  }
}

TEST(KvFit, FewerRowsThanUnknownsIsFine) {
  const std::vector<float> source = Noise(3 * 8, 1, 8), target = Noise(3 * 8, 1, 9);
  KvFitSums sums(2, 2);
  sums.Add(source, target);
  for (KvMapVariant variant : kVariants) {
    const auto layer = sums.Solve(variant, 1e-3, variant == KvMapVariant::kLowRank ? 4 : 0);
    ASSERT_TRUE(layer.ok()) << layer.status();
    for (float w : Dense(*layer, variant, 2, 2, 4)) EXPECT_TRUE(std::isfinite(w));
  }
}

TEST(KvFit, SaysWhatIsWrong) {
  KvFitSums sums(2, 2);
  const auto problem = [&](KvMapVariant variant, double lambda, int rank) {
    const auto layer = sums.Solve(variant, lambda, rank);
    EXPECT_EQ(layer.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(layer.status().message());
  };
  EXPECT_THAT(problem(KvMapVariant::kPerLayer, 0.1, 0), HasSubstr("no rows"));
  std::vector<float> rows = Noise(20 * 8, 1, 1);
  sums.Add(rows, Noise(20 * 8, 1, 2));
  EXPECT_TRUE(sums.Solve(KvMapVariant::kPerLayer, 0.1, 0).ok());
  EXPECT_THAT(problem(KvMapVariant::kPerLayer, 0, 0), HasSubstr("lambda"));
  EXPECT_THAT(problem(KvMapVariant::kPerLayer, NAN, 0), HasSubstr("lambda"));
  EXPECT_THAT(problem(KvMapVariant::kLowRank, 0.1, 0), HasSubstr("rank"));
  EXPECT_THAT(problem(KvMapVariant::kLowRank, 0.1, 9), HasSubstr("rank"));
  std::vector<float> broken = rows;
  broken[5] = std::numeric_limits<float>::infinity();
  sums.Add(broken, rows);
  EXPECT_THAT(problem(KvMapVariant::kPerLayer, 0.1, 0), HasSubstr("not finite"));
}

}  // namespace
}  // namespace carryover
