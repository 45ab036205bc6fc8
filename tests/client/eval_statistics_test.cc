// Against scipy's values (tests/golden/make_statistics.py), and what an interval must never claim.
#include <gtest/gtest.h>

#include <fstream>

#include "client/eval/statistics.h"
#include "nlohmann/json.hpp"

namespace carryover::eval {
namespace {

nlohmann::json Reference() {
  std::ifstream file(CARRYOVER_SOURCE_DIR "/tests/golden/reference/statistics.json");
  return nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
}

TEST(EvalStatisticsTest, WilsonAsScipy) {
  const auto cases = Reference()["wilson"];
  ASSERT_GE(cases.size(), 10u);
  for (const auto& c : cases) {
    const Interval interval = Wilson(c[0], c[1]);
    EXPECT_NEAR(interval.lower, c[2].get<double>(), 1e-9) << c;
    EXPECT_NEAR(interval.upper, c[3].get<double>(), 1e-9) << c;
  }
  EXPECT_EQ(Wilson(0, 0).upper, 1);
  EXPECT_EQ(Wilson(5, 5).upper, 1);
  EXPECT_EQ(Wilson(0, 5).lower, 0);
}

TEST(EvalStatisticsTest, McNemarAsScipy) {
  const auto cases = Reference()["mcnemar"];
  ASSERT_GE(cases.size(), 7u);
  for (const auto& c : cases) {
    EXPECT_NEAR(McNemar(c[0], c[1]) / c[2].get<double>(), 1, 1e-9) << c;
    EXPECT_EQ(McNemar(c[0], c[1]), McNemar(c[1], c[0]));
  }
  EXPECT_EQ(McNemar(0, 0), 1);
}

TEST(EvalStatisticsTest, SpearmanAsScipy) {
  const auto cases = Reference()["spearman"];
  ASSERT_FALSE(cases.empty());
  for (const auto& c : cases) {
    EXPECT_NEAR(Spearman(c["x"].get<std::vector<double>>(), c["y"].get<std::vector<double>>()),
                c["rho"].get<double>(), 1e-12);
  }
  const std::vector<double> flat = {1, 1, 1}, other = {1, 2, 3};
  EXPECT_EQ(Spearman(flat, other), 0);
}

TEST(EvalStatisticsTest, PairedDifferenceAsTheFormulaInNumpy) {
  const auto cases = Reference()["paired"];
  ASSERT_GE(cases.size(), 7u);
  for (const auto& c : cases) {
    const auto cells = c["cells"].get<std::vector<double>>();
    const Interval interval = PairedDifference({cells[0], cells[1], cells[2], cells[3]});
    EXPECT_NEAR(interval.mean, c["mean"].get<double>(), 1e-9) << c;
    EXPECT_NEAR(interval.lower, c["lower"].get<double>(), 1e-9) << c;
    EXPECT_NEAR(interval.upper, c["upper"].get<double>(), 1e-9) << c;
  }
}

TEST(EvalStatisticsTest, BootstrapNearScipy) {
  const auto cases = Reference()["bootstrap"];
  ASSERT_EQ(cases.size(), 3u);
  for (const auto& c : cases) {
    const Interval interval = ClusterBootstrap(c["values"].get<std::vector<double>>(),
                                               c["clusters"].get<std::vector<int>>());
    const double width = c["upper"].get<double>() - c["lower"].get<double>();
    EXPECT_NEAR(interval.mean, c["mean"].get<double>(), 1e-12);
    EXPECT_NEAR(interval.lower, c["lower"].get<double>(), 0.06 * width);
    EXPECT_NEAR(interval.upper, c["upper"].get<double>(), 0.06 * width);
  }
}

TEST(EvalStatisticsTest, RepeatsOfAPrefixAreNoEvidence) {
  std::vector<double> values;
  std::vector<int> apart, together;
  for (int i = 0; i < 200; ++i) {
    values.push_back(i / 10 % 2);
    apart.push_back(i);
    together.push_back(i / 10);
  }
  const Interval alone = ClusterBootstrap(values, apart);
  const Interval shared = ClusterBootstrap(values, together);
  EXPECT_GT(shared.upper - shared.lower, 2.5 * (alone.upper - alone.lower));
}

TEST(EvalStatisticsTest, EqualValuesDoNotLookCertain) {
  const std::vector<double> zeros(15, 0.0);
  std::vector<int> clusters(15);
  for (int i = 0; i < 15; ++i) clusters[i] = i;
  const Interval interval = MeanInterval(zeros, clusters, 0, 1);
  EXPECT_EQ(interval.mean, 0);
  EXPECT_NEAR(interval.upper, Wilson(0, 15).upper, 1e-12);
}

TEST(EvalStatisticsTest, NeededIsJustEnough) {
  const Paired all_right{50, 0, 0, 0};
  const int64_t needed = PairsNeeded(all_right, 0.02);
  ASSERT_GT(needed, 50);
  const auto at = [](int64_t n) { return PairedDifference({static_cast<double>(n), 0, 0, 0}); };
  EXPECT_LE(at(needed).upper, 0.02);
  EXPECT_GT(at(needed - 1).upper, 0.02);
  EXPECT_EQ(PairsNeeded({10, 40, 0, 0}, 0.02), 0) << "decided";
  EXPECT_EQ(SamplesNeeded(0.02, 100, 0.02), -1) << "at the limit";
  const int64_t samples = SamplesNeeded(0.0, 30, 0.02);
  EXPECT_LE(Wilson(0, static_cast<double>(samples)).upper, 0.02);
  EXPECT_GT(Wilson(0, static_cast<double>(samples) - 1).upper, 0.02);
}

TEST(EvalStatisticsTest, MedianAndItsOrderStatistics) {
  std::vector<double> values;
  for (int i = 1; i <= 100; ++i) values.push_back(i);
  const Interval interval = MedianInterval(values);
  EXPECT_EQ(interval.mean, 50.5);
  EXPECT_EQ(interval.lower, 40);  // the ranks of the exact binomial interval
  EXPECT_EQ(interval.upper, 61);
  EXPECT_EQ(MedianInterval({3, 1}).lower, 1);
  EXPECT_EQ(MedianInterval({3, 1}).upper, 3);
}

}  // namespace
}  // namespace carryover::eval
