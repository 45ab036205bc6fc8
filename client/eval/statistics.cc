#include "client/eval/statistics.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "base/status_macros.h"

namespace carryover::eval {
namespace {

constexpr int kResamples = 2000;
constexpr int kFewClusters = 10;
constexpr int64_t kMostNeeded = 1000000;

// A number from a seed and a position (SplitMix64): equal on every machine.
uint64_t Mix(uint64_t seed, uint64_t position) {
  uint64_t z = seed + (position + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

struct Sum {
  double total = 0;
  int64_t count = 0;
};

std::vector<Sum> SumsByCluster(absl::Span<const double> values, absl::Span<const int> clusters) {
  std::map<int, Sum> by_cluster;
  for (size_t i = 0; i < values.size(); ++i) {
    Sum& sum = by_cluster[clusters[i]];
    sum.total += values[i];
    ++sum.count;
  }
  std::vector<Sum> out;
  for (const auto& [cluster, sum] : by_cluster) out.push_back(sum);
  return out;
}

double Point(const std::vector<double>& sorted, double q) {
  const double at = q * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(at);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (sorted[above] - sorted[below]) * (at - static_cast<double>(below));
}

// The first n on a geometric grid, then exactly, at which decided(n) holds and goes on to hold.
template <typename Decided>
int64_t FirstDecided(int64_t from, const Decided& decided) {
  if (decided(from)) return 0;
  int64_t low = from, high = std::max<int64_t>(from, 1);
  while (!decided(high)) {
    low = high;
    high *= 2;
    if (high > kMostNeeded) return -1;
  }
  while (low + 1 < high) {
    const int64_t middle = (low + high) / 2;
    (decided(middle) ? high : low) = middle;
  }
  return high;
}

bool OneSide(const Interval& interval, double limit) {
  return interval.upper <= limit || interval.lower > limit;
}

std::vector<double> Ranks(absl::Span<const double> values) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return values[a] < values[b]; });
  std::vector<double> ranks(values.size());
  for (size_t i = 0; i < order.size();) {
    size_t end = i;
    while (end < order.size() && values[order[end]] == values[order[i]]) ++end;
    for (size_t j = i; j < end; ++j) ranks[order[j]] = static_cast<double>(i + end - 1) / 2 + 1;
    i = end;
  }
  return ranks;
}

}  // namespace

Interval Wilson(double hits, double n, double z) {
  if (n <= 0) return {0, 0, 1};
  const double p = std::clamp(hits / n, 0.0, 1.0);
  const double z2 = z * z;
  const double middle = (p + z2 / (2 * n)) / (1 + z2 / n);
  const double half = z * std::sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n);
  // At 0 and 1 the bounds are exact, whatever rounding says.
  return {p, p == 0 ? 0 : std::max(0.0, middle - half), p == 1 ? 1 : std::min(1.0, middle + half)};
}

Interval ClusterBootstrap(absl::Span<const double> values, absl::Span<const int> clusters,
                          uint64_t seed) {
  CHECK(values.size() == clusters.size());
  if (values.empty()) return {};
  const std::vector<Sum> sums = SumsByCluster(values, clusters);
  std::vector<double> means(kResamples);
  for (int r = 0; r < kResamples; ++r) {
    Sum sum;
    for (size_t i = 0; i < sums.size(); ++i) {
      const uint64_t draw = Mix(seed, r * sums.size() + i);
      // The high half of draw times size: even over the clusters.
      const auto pick = static_cast<size_t>(((draw >> 32) * sums.size()) >> 32);
      sum.total += sums[pick].total;
      sum.count += sums[pick].count;
    }
    means[r] = sum.total / static_cast<double>(sum.count);
  }
  std::sort(means.begin(), means.end());
  const double mean =
      std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  return {mean, Point(means, 0.025), Point(means, 0.975)};
}

Interval MeanInterval(absl::Span<const double> values, absl::Span<const int> clusters, double low,
                      double high) {
  if (values.empty()) return {0, low, high};
  Interval interval = ClusterBootstrap(values, clusters);
  const auto n = static_cast<double>(SumsByCluster(values, clusters).size());
  if (n < kFewClusters || interval.lower == interval.upper) {
    const Interval wide = Wilson((interval.mean - low) / (high - low) * n, n);
    interval.lower = std::min(interval.lower, low + wide.lower * (high - low));
    interval.upper = std::max(interval.upper, low + wide.upper * (high - low));
  }
  return interval;
}

Interval PairedDifference(const Paired& paired, double z) {
  const double n = paired.n();
  if (n <= 0) return {0, -1, 1};
  const Interval first = Wilson(paired.both + paired.only_first, n, z);
  const Interval second = Wilson(paired.both + paired.only_second, n, z);
  const double down = first.mean - first.lower, up = first.upper - first.mean;
  const double down2 = second.mean - second.lower, up2 = second.upper - second.mean;
  const double margins = (paired.both + paired.only_first) * (paired.only_second + paired.neither) *
                         (paired.both + paired.only_second) * (paired.only_first + paired.neither);
  const double phi = margins <= 0
                         ? 0
                         : (paired.both * paired.neither - paired.only_first * paired.only_second) /
                               std::sqrt(margins);
  const double difference = first.mean - second.mean;
  const auto width = [phi](double a, double b) {
    return std::sqrt(std::max(0.0, a * a - 2 * phi * a * b + b * b));
  };
  return {difference, std::max(-1.0, difference - width(down, up2)),
          std::min(1.0, difference + width(up, down2))};
}

double McNemar(int64_t only_first, int64_t only_second) {
  const int64_t n = only_first + only_second, least = std::min(only_first, only_second);
  if (n == 0) return 1;
  double tail = 0;
  for (int64_t k = 0; k <= least; ++k) {
    tail += std::exp(std::lgamma(n + 1.0) - std::lgamma(k + 1.0) - std::lgamma(n - k + 1.0) -
                     static_cast<double>(n) * std::log(2.0));
  }
  return std::min(1.0, 2 * tail);
}

int64_t PairsNeeded(const Paired& paired, double limit) {
  const double n = paired.n();
  if (n <= 0) return -1;
  return FirstDecided(static_cast<int64_t>(n), [&](int64_t wanted) {
    const double k = static_cast<double>(wanted) / n;
    return OneSide(PairedDifference({paired.both * k, paired.only_first * k, paired.only_second * k,
                                     paired.neither * k}),
                   limit);
  });
}

int64_t SamplesNeeded(double rate, int64_t n, double limit) {
  return FirstDecided(std::max<int64_t>(n, 1), [&](int64_t wanted) {
    const auto samples = static_cast<double>(wanted);
    return OneSide(Wilson(rate * samples, samples), limit);
  });
}

double Spearman(absl::Span<const double> x, absl::Span<const double> y) {
  CHECK(x.size() == y.size());
  if (x.size() < 2) return 0;
  const std::vector<double> a = Ranks(x), b = Ranks(y);
  const double mean = (static_cast<double>(x.size()) + 1) / 2;
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += (a[i] - mean) * (b[i] - mean);
    aa += (a[i] - mean) * (a[i] - mean);
    bb += (b[i] - mean) * (b[i] - mean);
  }
  return aa == 0 || bb == 0 ? 0 : ab / std::sqrt(aa * bb);
}

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return Point(values, 0.5);
}

Interval MedianInterval(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const auto n = static_cast<double>(values.size());
  const double reach = kZ95 * std::sqrt(n) / 2;
  const auto low = static_cast<int64_t>(std::floor(n / 2 - reach)) - 1;
  const auto high = static_cast<int64_t>(std::ceil(n / 2 + reach));
  const auto last = static_cast<int64_t>(values.size()) - 1;
  return {Point(values, 0.5), values[std::max<int64_t>(low, 0)], values[std::min(high, last)]};
}

}  // namespace carryover::eval
