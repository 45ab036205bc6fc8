// Intervals and tests of the evaluator. Pure functions; any thread. Checked against scipy.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace carryover::eval {

struct Interval {
  double mean = 0;
  double lower = 0;
  double upper = 0;
};

inline constexpr double kZ95 = 1.959963984540054;  // 97.5 % point of the normal distribution

// Wilson's score interval for a rate; hits need not be whole. [0, 1] where n is 0.
Interval Wilson(double hits, double n, double z = kZ95);

// Values with the cluster (prefix) that each belongs to: those of one cluster are drawn together.
// The 2.5 % and 97.5 % points of the means of 2,000 resamples of clusters, from a fixed seed. Where
// all clusters have the same mean, and that is no proof: see MeanInterval.
Interval ClusterBootstrap(absl::Span<const double> values, absl::Span<const int> clusters,
                          uint64_t seed = 1);

// For values within [low, high]: the bootstrap's interval, widened to Wilson's of the mean's place
// between low and high when there are under 10 clusters or the bootstrap has no width. (A value
// within bounds varies at most as a rate of the same mean does.)
Interval MeanInterval(absl::Span<const double> values, absl::Span<const int> clusters, double low,
                      double high);

// Paired right and wrong of two arms: how often each combination came.
struct Paired {
  double both = 0;
  double only_first = 0;
  double only_second = 0;
  double neither = 0;
  double n() const { return both + only_first + only_second + neither; }
};

// Rate of the first less that of the second, with Newcombe's interval for paired rates (1998,
// method 10, without continuity correction).
Interval PairedDifference(const Paired& paired, double z = kZ95);

// Two-sided exact McNemar test: twice the smaller tail of Binomial(b + c, 1/2), at most 1.
double McNemar(int64_t only_first, int64_t only_second);

// How many pairs it would take, at the same shares, until the interval of PairedDifference lies on
// one side of the limit; 0 when it does now, -1 beyond a million. At the limit itself: -1.
int64_t PairsNeeded(const Paired& paired, double limit);
// The same for Wilson's interval of a rate.
int64_t SamplesNeeded(double rate, int64_t n, double limit);

// Spearman's rank correlation, ties by mean rank; 0 for under two values or without variation.
double Spearman(absl::Span<const double> x, absl::Span<const double> y);

// Middle value (of two: their mean); 0 of nothing.
double Median(std::vector<double> values);
// Interval of a median from the order statistics: between the values whose ranks the binomial
// distribution of signs gives at 95 % (normal approximation). All of it for a few values.
Interval MedianInterval(std::vector<double> values);

}  // namespace carryover::eval
