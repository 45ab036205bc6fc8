#include "engine/confidence.h"

#include <algorithm>
#include <cmath>

#include "base/status_macros.h"

namespace carryover {
namespace {

constexpr double kE = 2.718281828459045;

// Stakes and their parts of the capital that is bet. Below: samples are mostly 0 and rates a part
// of the candidate, so most is staked high. Above: the best stake for a coin of rate r against m
// is (r - m) / (1 - m).
constexpr double kBelowStakes[MeanTest::kStakes] = {0.98, 0.75, 0.5, 0.25, 0.1};
constexpr double kBelowParts[MeanTest::kStakes] = {0.4, 0.2, 0.2, 0.12, 0.08};
constexpr double kAboveStakes[MeanTest::kStakes] = {0.01, 0.04, 0.12, 0.3, 0.7};
constexpr double kAboveParts[MeanTest::kStakes] = {0.2, 0.25, 0.25, 0.2, 0.1};

// Candidates are updated so many at a time, which compilers vectorise.
constexpr int kLanes = 8;
static_assert(MeanTest::kCandidates % kLanes == 0);

// Keeps capital that is never restarted out of the denormals; adds up to nothing.
constexpr double kTiny = 1e-30;

void Bet(const double* __restrict odds, double stake, double start, double* __restrict capital) {
  for (int i = 0; i < kLanes; ++i) {
    const double next = (capital[i] + start) * (1 + stake * odds[i]);
    capital[i] = next < kMaxCapital ? next : kMaxCapital;
  }
}

}  // namespace

MeanTest::MeanTest(Seek seek, absl::Span<const double> points, double restart, double idle)
    : seek(seek), size(static_cast<int>(points.size())), restart(restart), idle(idle) {
  CHECK(size >= 1 && size <= kCandidates);
  for (int i = 0; i < kCandidates; ++i) {
    candidates[i] = points[std::min(i, size - 1)];
    inverse_[i] = candidates[i] > 0 ? 1 / candidates[i] : 0;
  }
}

void MeanTest::Add(double x, double weight) {
  double start = kTiny;
  if (n == 0) {
    start += 1 - restart;
  } else if (restart > 0) {
    // Sample n + 1, in the header's count.
    const double share = share_n_ == n ? next_share_ : 1 / std::log(n - 1 + kE);
    next_share_ = 1 / std::log(n + kE);
    share_n_ = n + 1;
    start += restart * (share - next_share_);
  }
  ++n;
  const int lanes = (size + kLanes - 1) / kLanes * kLanes;
  // What is bet on, for each candidate: m - x, or x / m - 1, times stake and weight.
  double odds[kCandidates];
  for (int i = 0; i < lanes; ++i) {
    // Nothing is bet on a candidate 0: any sample above it would be infinite evidence.
    odds[i] = seek == Seek::kBelow ? candidates[i] - x : inverse_[i] > 0 ? x * inverse_[i] - 1 : 0;
  }
  const double* const stakes = seek == Seek::kBelow ? kBelowStakes : kAboveStakes;
  for (int k = 0; k < kStakes; ++k) {
    for (int i = 0; i < lanes; i += kLanes) {
      Bet(odds + i, stakes[k] * weight, start, capital[k].data() + i);
    }
  }
}

double MeanTest::Evidence(int i) const {
  // What will be started later is capital, too, but counting it would only help those who wait.
  double sum = n == 0 ? 1 - idle : 0;
  const double* const parts = seek == Seek::kBelow ? kBelowParts : kAboveParts;
  for (int k = 0; k < kStakes; ++k) sum += (1 - idle) * parts[k] * capital[k][i];
  return idle + sum;
}

double MeanTest::Bound(double alpha) const {
  double bound = seek == Seek::kBelow ? 1 : 0;
  for (int i = 0; i < size; ++i) {
    if (Evidence(i) < 1 / alpha) continue;
    bound = seek == Seek::kBelow ? std::min(bound, candidates[i]) : std::max(bound, candidates[i]);
  }
  return bound;
}

double EvidenceExcessBelow(const MeanTest& x_below, const MeanTest& floor_above, int points,
                           double enough) {
  // A floor over the greatest point is credited no more than that.
  double least = x_below.Evidence(points - 1);
  for (int i = 0; i + 1 < points && least >= enough; ++i) {
    least = std::min(least, x_below.Evidence(i) * floor_above.Evidence(i + 1));
  }
  return least;
}

double EvidenceExcessAbove(const MeanTest& x_above, const MeanTest& floor_below, int points,
                           double enough) {
  if (points == 1) return x_above.Evidence(0);
  double least = x_above.Evidence(points - 1) * floor_below.Evidence(points - 2);
  for (int i = points - 3; i >= 0 && least >= enough; --i) {
    least = std::min(least, x_above.Evidence(i + 1) * floor_below.Evidence(i));
  }
  return least;
}

}  // namespace carryover
