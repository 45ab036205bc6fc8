// Tests of a mean that may be looked at after every sample. Pure: no clock, no thread.
//
// X_1, X_2, ... lie in [0, 1] and come with weights w in [0, 1]. For a candidate mean m a test bets
// on the next sample and keeps what the bets have grown to. Where m is true the game is not
// favourable, so by Ville's inequality the capital ever reaches 1/alpha with probability <= alpha:
// a capital E is evidence against m (an e-value), whenever one stops to look.
//
//   seeking "the mean is below m":  1 - l w (X - m),        l in (0, 1)   (null: mean >= m)
//   seeking "the mean is above m":  1 + t w (X / m - 1),    t in (0, 1)   (null: mean <= m)
//
// These are the bets of Waudby-Smith and Ramdas, "Estimating means of bounded random variables by
// betting", JRSS-B 86 (2024), section 4, with fixed stakes on a grid, mixed: the capital is
// idle + sum_k p_k M_k, where `idle` is never bet, so that evidence never falls below it. The null
// is one about every sample's mean given the past; the samples need not be alike. Both kinds are
// monotone in m, so that the capitals of a grid of candidates bound those between them.
//
// A mean that turns after a long past is found by starting the bets anew at every sample with a
// part of the capital that was set aside for it:
//
//   M_n = (M_{n-1} + s_n) * bet_n,   sum_n s_n <= 1,  s_1 = 1 - restart,
//   s_n = restart (1 / ln(n - 2 + e) - 1 / ln(n - 1 + e))  for n >= 2,
//
// the recursion of the Shiryaev-Roberts e-detector (Shin, Ramdas and Rinaldo, "E-detectors: a
// nonparametric framework for sequential change detection", NEJSDS 2 (2023)) with starts weighted
// to a sum of 1. So it is an e-process still, and the chance of a false alarm stays <= alpha for
// ever, where the plain detector only bounds how often alarms come. The price is ln(1/s_n) of log
// capital: 15.6 after 50,000 samples, that is about 50 samples at a rate ten times the candidate.
#pragma once

#include <array>
#include <cstdint>

#include "absl/types/span.h"

namespace carryover {

enum class Seek : uint8_t { kBelow, kAbove };

// Capital above this is taken off (which keeps the inequality), so that a past however long does
// not outweigh what comes after it on the candidates that bounds are read from.
inline constexpr double kMaxCapital = 1e15;

struct MeanTest {
  static constexpr int kStakes = 5;
  static constexpr int kCandidates = 24;  // at most

  // points: the candidates, up to kCandidates, each in [0, 1). kAbove never bets on a candidate 0.
  // restart in [0, 1): the part of the capital for later starts; with 0 there are none.
  MeanTest(Seek seek, absl::Span<const double> points, double restart, double idle);

  // REQUIRES: x and weight in [0, 1].
  void Add(double x, double weight = 1);

  // The e-value against candidate i. At least `idle`.
  double Evidence(int i) const;

  // kBelow: the least candidate with evidence >= 1/alpha, or 1: with probability 1 - alpha no
  // smaller than the mean, if that does not change. kAbove: the greatest such, or 0.
  double Bound(double alpha) const;

  Seek seek;
  int size;                                         // candidates that there are
  std::array<double, kCandidates> candidates = {};  // the rest repeats the last
  double restart;
  double idle;
  int64_t n = 0;                                                      // samples so far
  std::array<std::array<double, kCandidates>, kStakes> capital = {};  // M_k: [0, kMaxCapital]

 private:
  std::array<double, kCandidates> inverse_ = {};  // 1/m; 0 for m = 0
  double next_share_ = 0;                         // 1 / ln(n - 1 + e), kept from the last Add
  int64_t share_n_ = -1;                          // for which n
};

// Evidence that mean(x) - mean(floor) is under or over `limit`, where `floor` has an unknown mean
// in [0, max]. floor_points ascend from 0 to max; candidate i of the tests of x is limit +
// floor_points[i], candidate i of the tests of the floor is floor_points[i]. For every mean m of
// the floor the product of the evidence against (x at limit + m) and that against (floor at m) is
// an e-value; the least of them over m is one for any m. Between two points the monotone bounds of
// both are multiplied. With the one point 0 there is no floor and its test is not looked at.
// The search ends as soon as the result is known to be less than `enough`, and then returns
// something less than that.
double EvidenceExcessBelow(const MeanTest& x_below, const MeanTest& floor_above, int points,
                           double enough = 0);
double EvidenceExcessAbove(const MeanTest& x_above, const MeanTest& floor_below, int points,
                           double enough = 0);

}  // namespace carryover
