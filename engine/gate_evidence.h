// What the gate keeps of the samples of one cell and plan, or of one stratum of the floor: a pair
// of tests a measure, and the caps on repeats of a prefix. Engine thread only.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "engine/confidence.h"
#include "engine/gate.h"

namespace carryover {

// The candidate means that tests of one measure look at. The first `points` decide, the others are
// there for the bounds that people see.
struct GateGrid {
  int points = 0;
  std::vector<double> carried;  // limit + the floor's points, then others
  std::vector<double> floor;    // from 0 to max_floor, then others
};
GateGrid MakeGateGrid(double limit, double max_floor);

// How often a prefix counted, in a table of counters without ids: two prefixes that share a slot
// pass for one, which only ever leaves samples out, whatever they hold.
struct PrefixCap {
  static constexpr int kSlots = 8192;
  // After so many, the table is cleared and every prefix may count again: once in thousands.
  static constexpr int kFull = kSlots * 3 / 4;

  // Whether the sample counts, given that a prefix may count `cap` times (up to 255). `fresh` tells
  // whether the prefix was new.
  bool Count(uint64_t prefix, int cap, bool* fresh);

  std::vector<uint8_t> slots;  // (kSlots), or empty before the first
  int used = 0;                // slots that are not 0
};

// Lets a prefix count again after `others` others counted, or 500 samples passed: without the
// latter, traffic of a few prefixes would not count at all any more.
struct RecentPrefixes {
  static constexpr int kMaxOthers = 20;
  static constexpr int64_t kPassed = 500;
  struct Entry {
    uint64_t prefix;
    int64_t at;
  };
  bool Count(uint64_t prefix, int others);

  std::deque<Entry> entries;  // up to kMaxOthers, oldest first
  int64_t seen = 0;
};

struct GateEvidence {
  // For kCarried, `open` seeks means below the candidates and `close` above. For kControl it is the
  // other way round: a high floor helps to open, a low one to close.
  GateEvidence(GateComparison kind, const std::array<GateGrid, kGateMeasures>& grids);

  // Whether a test moved: false for a repeat that does not count.
  bool Add(const GateSample& sample, const GateConfig& config);

  double mean(int measure) const { return weight > 0 ? sums[measure] / weight : 0; }
  double completion() const;

  GateComparison kind;
  std::vector<MeanTest> open;   // (kGateMeasures)
  std::vector<MeanTest> close;  // (kGateMeasures)
  PrefixCap cap;
  RecentPrefixes recent;
  int64_t samples = 0;  // completed
  int64_t dropped = 0;
  int64_t counted = 0;   // completed, and let through by `recent`
  int64_t prefixes = 0;  // distinct ones, completed
  double weight = 0;     // of the counted
  GateValues sums = {};  // of the counted, weighted
  // Completed and dropped of late: each sample takes 0.2 % off what was before.
  double recent_completed = 0;
  double recent_dropped = 0;
};

}  // namespace carryover
