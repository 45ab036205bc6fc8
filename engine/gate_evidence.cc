#include "engine/gate_evidence.h"

#include <algorithm>
#include <cmath>

namespace carryover {
namespace {

// Of the capital, for starts after the first. Closing has to see what turns bad after a long past;
// opening pays less for that, since a cell that was bad may as well wait for its retry. The floor
// is taken for constant.
constexpr double kRestartOpen = 0.1;
constexpr double kRestartClose = 0.5;
// Of the capital, never bet. With a floor, evidence on the one side has to last while evidence
// on the other side rules a floor out.
constexpr double kIdleCarried = 0.05;
constexpr double kIdleFloor = 0.3;

constexpr double kRecentDecay = 0.998;

// Of max_floor. Dense near 0, where most floors are.
constexpr double kFloorPoints[] = {0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1};
// Between and around them, for bounds.
constexpr double kShownPoints[] = {0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.03,
                                   0.05,  0.1,    0.15,  0.25,   0.4,  0.7};

}  // namespace

GateGrid MakeGateGrid(double limit, double max_floor) {
  GateGrid grid;
  for (double part : kFloorPoints) {
    if (part > 0 && max_floor <= 0) break;
    grid.carried.push_back(limit + part * max_floor);
    grid.floor.push_back(part * max_floor);
  }
  grid.points = static_cast<int>(grid.floor.size());
  for (double point : kShownPoints) {
    grid.carried.push_back(point);
    grid.floor.push_back(point);
  }
  return grid;
}

bool PrefixCap::Count(uint64_t prefix, int cap, bool* fresh) {
  if (used >= kFull) {
    slots.clear();
    used = 0;
  }
  if (slots.empty()) slots.resize(kSlots);
  uint8_t& slot = slots[(prefix * 0x9e3779b97f4a7c15u) >> 51];  // 13 bits of a product
  *fresh = slot == 0;
  if (slot >= cap) return false;
  if (*fresh) ++used;
  ++slot;
  return true;
}

bool RecentPrefixes::Count(uint64_t prefix, int others) {
  ++seen;
  for (auto entry = entries.begin(); entry != entries.end(); ++entry) {
    if (entry->prefix != prefix) continue;
    if (seen - entry->at < kPassed) return false;
    entries.erase(entry);
    break;
  }
  entries.push_back({prefix, seen});
  while (static_cast<int>(entries.size()) > others) entries.pop_front();
  return true;
}

GateEvidence::GateEvidence(GateComparison kind, const std::array<GateGrid, kGateMeasures>& grids)
    : kind(kind) {
  for (const GateGrid& grid : grids) {
    if (kind == GateComparison::kCarried) {
      open.emplace_back(Seek::kBelow, grid.carried, kRestartOpen, kIdleCarried);
      close.emplace_back(Seek::kAbove, grid.carried, kRestartClose, kIdleCarried);
    } else {
      open.emplace_back(Seek::kAbove, grid.floor, 0, kIdleFloor);
      close.emplace_back(Seek::kBelow, grid.floor, 0, kIdleFloor);
    }
  }
}

bool GateEvidence::Add(const GateSample& sample, const GateConfig& config) {
  bool lost = sample.dropped;
  for (double value : sample.values) lost = lost || !(value >= 0 && value <= 1);
  const double weight_now =
      sample.weight > 0 ? std::min(1.0, sample.weight) : 1;  // NaN is 1, too: nothing is ignored

  recent_completed = recent_completed * kRecentDecay + (lost ? 0 : 1);
  recent_dropped = recent_dropped * kRecentDecay + (lost ? 1 : 0);
  ++(lost ? dropped : samples);

  // What counts is decided before the outcome is looked at, drops included: were a prefix's next
  // sample taken when its first was dropped, one could drop until it is good.
  bool fresh = false;
  const bool for_open = cap.Count(sample.prefix, config.prefix_weight, &fresh);
  if (for_open) {
    const double worst = kind == GateComparison::kCarried ? config.assume_dropped : 0;
    for (int i = 0; i < kGateMeasures; ++i) {
      open[i].Add(lost ? worst : sample.values[i], weight_now);
    }
  }
  if (fresh && !lost) ++prefixes;
  const int others = std::min(RecentPrefixes::kMaxOthers, config.min_prefixes);
  const bool for_close = recent.Count(sample.prefix, others);
  if (for_close) {
    const double worst = kind == GateComparison::kCarried ? 0 : 1;
    for (int i = 0; i < kGateMeasures; ++i) {
      close[i].Add(lost ? worst : sample.values[i], weight_now);
    }
    if (!lost) {
      ++counted;
      weight += weight_now;
      for (int i = 0; i < kGateMeasures; ++i) sums[i] += weight_now * sample.values[i];
    }
  }
  return for_open || for_close;
}

double GateEvidence::completion() const {
  const double ended = recent_completed + recent_dropped;
  return ended > 0 ? recent_completed / ended : 1;
}

}  // namespace carryover
