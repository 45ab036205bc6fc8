#include "engine/confidence.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace carryover {
namespace {

// The capital by its definition: every start apart, every stake apart, in order.
double PlainEvidence(Seek seek, double m, const std::vector<double>& xs,
                     const std::vector<double>& weights, double restart, double idle) {
  const double stakes[2][5] = {{0.98, 0.75, 0.5, 0.25, 0.1}, {0.01, 0.04, 0.12, 0.3, 0.7}};
  const double parts[2][5] = {{0.4, 0.2, 0.2, 0.12, 0.08}, {0.2, 0.25, 0.25, 0.2, 0.1}};
  const int side = seek == Seek::kBelow ? 0 : 1;
  double capital = 0;
  for (size_t start = 0; start < xs.size(); ++start) {
    const double n = static_cast<double>(start + 1);
    const double share =
        start == 0
            ? 1 - restart
            : restart * (1 / std::log(n - 2 + std::exp(1.0)) - 1 / std::log(n - 1 + std::exp(1.0)));
    for (int k = 0; k < 5; ++k) {
      double product = 1;
      for (size_t i = start; i < xs.size(); ++i) {
        product *= side == 0 ? 1 - stakes[0][k] * weights[i] * (xs[i] - m)
                             : 1 + stakes[1][k] * weights[i] * (xs[i] / m - 1);
      }
      capital += share * parts[side][k] * product;
    }
  }
  return idle + (1 - idle) * capital;
}

TEST(MeanTestTest, CapitalIsWhatTheFormulaSays) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> uniform;
  std::vector<double> xs, weights;
  const std::vector<double> candidates = {0.05, 0.2, 0.45};
  MeanTest below(Seek::kBelow, candidates, 0.25, 0.05);
  MeanTest above(Seek::kAbove, candidates, 0.5, 0.3);
  MeanTest plain(Seek::kAbove, candidates, 0, 0.3);
  for (int i = 0; i < 30; ++i) {
    xs.push_back(i % 3 == 0 ? std::floor(2 * uniform(random)) : 0.2 * uniform(random));
    weights.push_back(i % 2 == 0 ? 1 : uniform(random));
    below.Add(xs.back(), weights.back());
    above.Add(xs.back(), weights.back());
    plain.Add(xs.back(), weights.back());
    for (int c = 0; c < 3; ++c) {
      const double m = candidates[c];
      const double expected[] = {PlainEvidence(Seek::kBelow, m, xs, weights, 0.25, 0.05),
                                 PlainEvidence(Seek::kAbove, m, xs, weights, 0.5, 0.3),
                                 PlainEvidence(Seek::kAbove, m, xs, weights, 0, 0.3)};
      EXPECT_NEAR(below.Evidence(c) / expected[0], 1, 1e-9);
      EXPECT_NEAR(above.Evidence(c) / expected[1], 1, 1e-9);
      EXPECT_NEAR(plain.Evidence(c) / expected[2], 1, 1e-9);
    }
  }
}

// One step of the game is fair at the candidate itself, whatever was bet before: the mean of the
// next capital over a coin with that rate is the capital and what is newly staked.
TEST(MeanTestTest, TheGameIsFairAtTheCandidate) {
  for (const Seek seek : {Seek::kBelow, Seek::kAbove}) {
    for (const double m : {0.01, 0.02, 0.3}) {
      MeanTest test(seek, {m}, 0.5, 0.05);
      double set_aside = 0.95;  // never staked so far
      for (int i = 0; i < 40; ++i) {
        MeanTest zero = test, one = test;
        zero.Add(0, 0.7);
        one.Add(1, 0.7);
        const double next = (1 - m) * zero.Evidence(0) + m * one.Evidence(0);
        const double now = i == 0 ? 0.05 : test.Evidence(0);
        EXPECT_GE(next, now - 1e-12);
        set_aside -= next - now;  // what the fair game added was newly staked
        test.Add(i % 7 == 0 ? 1 : 0, 0.7);
      }
      EXPECT_GE(set_aside, 0);
      EXPECT_LT(set_aside, 0.4);
    }
  }
}

TEST(MeanTestTest, EvidenceIsMonotoneInTheCandidateAndBoundsHoldTheMean) {
  std::mt19937_64 random(2);
  std::uniform_real_distribution<double> uniform;
  std::vector<double> candidates;
  for (int i = 0; i < 24; ++i) candidates.push_back(0.01 + 0.02 * i);
  MeanTest below(Seek::kBelow, candidates, 0.25, 0.05);
  MeanTest above(Seek::kAbove, candidates, 0.5, 0.05);
  EXPECT_EQ(below.Bound(0.05), 1);
  EXPECT_EQ(above.Bound(0.05), 0);
  for (int i = 0; i < 5000; ++i) {
    const double x = uniform(random) < 0.2 ? 1 : 0;
    below.Add(x);
    above.Add(x);
    for (int c = 1; c < 24; ++c) {
      ASSERT_GE(below.Evidence(c), below.Evidence(c - 1));
      ASSERT_LE(above.Evidence(c), above.Evidence(c - 1));
    }
    ASSERT_GT(below.Bound(0.001), 0.19);
    ASSERT_LT(above.Bound(0.001), 0.21);
  }
  EXPECT_LT(below.Bound(0.001), 0.26);
  EXPECT_GT(above.Bound(0.001), 0.13);
}

TEST(MeanTestTest, ALongPastDoesNotOutweighWhatFollows) {
  const std::vector<double> candidates = {0.02, 0.07, 0.5};
  MeanTest above(Seek::kAbove, candidates, 0.5, 0.05);
  MeanTest frozen(Seek::kAbove, candidates, 0, 0.05);
  for (int i = 0; i < 50000; ++i) {
    const double x = i % 100 == 0 ? 1 : 0;
    above.Add(x);
    frozen.Add(x);
  }
  EXPECT_LT(above.Evidence(0), 20);
  int needed = 0;
  while (above.Evidence(0) < 1000) {
    const double x = needed % 5 == 0 ? 1 : 0;
    above.Add(x);
    frozen.Add(x);
    ASSERT_LT(++needed, 300);
  }
  EXPECT_GT(needed, 20);
  EXPECT_LT(frozen.Evidence(0), 1);  // without later starts it would take thousands
}

TEST(MeanTestTest, ExtremesStayFinite) {
  const std::vector<double> candidates = {0, 0.02, 0.98};
  for (const double x : {0.0, 1.0}) {
    MeanTest below(Seek::kBelow, candidates, 0, 0.05);
    MeanTest above(Seek::kAbove, candidates, 0.5, 0.05);
    for (int i = 0; i < 20000; ++i) {
      below.Add(x);
      above.Add(x);
    }
    for (int c = 0; c < 3; ++c) {
      EXPECT_TRUE(std::isfinite(below.Evidence(c)));
      EXPECT_GE(below.Evidence(c), 0.05);
      EXPECT_TRUE(std::isfinite(above.Evidence(c)));
      EXPECT_GE(above.Evidence(c), 0.05);
    }
    // Nothing is bet on a candidate 0; what is not started yet does not show.
    EXPECT_GT(above.Evidence(0), 0.9);
    EXPECT_LE(above.Evidence(0), 1);
  }
}

TEST(ExcessTest, TheFloorCountsForAndAgainst) {
  // x at 5 %, limit 2 %: over it without a floor, under it with one of 5 %.
  const std::vector<double> floor_points = {0, 0.01, 0.02, 0.03, 0.04, 0.05};
  std::vector<double> x_points;
  for (double point : floor_points) x_points.push_back(0.02 + point);
  const auto evidence = [&](int floor_every, int controls) {
    MeanTest x_below(Seek::kBelow, x_points, 0.25, 0.05),
        x_above(Seek::kAbove, x_points, 0.5, 0.05);
    MeanTest floor_above(Seek::kAbove, floor_points, 0, 0.3);
    MeanTest floor_below(Seek::kBelow, floor_points, 0, 0.3);
    for (int i = 0; i < 20000; ++i) {
      x_below.Add(i % 20 == 7 ? 1 : 0);
      x_above.Add(i % 20 == 7 ? 1 : 0);
    }
    for (int i = 0; i < controls; ++i) {
      const double x = floor_every > 0 && i % floor_every == 3 ? 1 : 0;
      floor_above.Add(x);
      floor_below.Add(x);
    }
    return std::pair(EvidenceExcessBelow(x_below, floor_above, 6),
                     EvidenceExcessAbove(x_above, floor_below, 6));
  };
  const auto [unknown_under, unknown_over] = evidence(0, 0);
  EXPECT_LT(unknown_under, 1);
  EXPECT_LT(unknown_over, 20);  // a floor of 5 % would explain it
  const auto [zero_under, zero_over] = evidence(0, 1000);
  EXPECT_LT(zero_under, 1);
  EXPECT_GT(zero_over, 1000);
  const auto [equal_under, equal_over] = evidence(20, 20000);
  EXPECT_GT(equal_under, 1000);
  EXPECT_LT(equal_over, 20);
}

}  // namespace
}  // namespace carryover
