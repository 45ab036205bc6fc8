// What the rows of a run say together, cell by cell: task x prefix bucket x plan, and each task
// over all its lengths. The two criteria stay apart: utility (is the task still solved?) and
// fidelity (is it what the target would have said?). Pure functions; any thread.
//
// Intervals are 95 %. A rate's is Wilson's over items, widened to the bootstrap's over prefixes
// where that is wider; other means' are the bootstrap's (statistics.h).
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "client/eval/result.h"
#include "client/eval/statistics.h"

namespace carryover::eval {

inline constexpr int kGroups = 3;  // positions 1, 2-4, 5-16
const char* GroupName(int group);

// How one arm did.
struct ArmSummary {
  int judged = 0;     // items with right or wrong
  Interval accuracy;  // of those
  int scored = 0;
  Interval score;
  double ttft_median = 0;  // seconds
};

// One comparison (carried, control, old) over the cell's items.
struct FidelitySummary {
  int n = 0;
  int invalid = 0;                                   // with a position that could not be compared
  int infinite_kl = 0;                               // left out of the KL means
  Interval flip;                                     // first token
  Interval kl, kl_first, js, tv, tv_first, overlap;  // kl to overlap: mean over an item's positions
  double kl_p50 = 0, kl_p95 = 0, kl_p99 = 0;         // over items
  Interval native_margin, other_margin, margin_shift;  // first position
  Interval fragile;                                    // first position
  int positions[kGroups] = {};
  Interval flips[kGroups];
  Interval stop;  // what the gate judges: stop disagreement, or its bound by distributions
  int stop_known = 0;
  Interval stop_disagreement;  // of those
  std::map<std::string, int> continuation;
  double divergence_median = -1;  // position of the first other token, of those that parted
};

// Of the items whose first token was the same in both arms, or was not: how many are alike.
struct Agreement {
  int n = 0;
  int same_answer = 0;  // all tokens
  int same_stop = 0;    // finish and length
  int judged = 0;
  int same_outcome = 0;  // both right or both wrong
};

// Right answers of the target by their native margin at the first token.
struct MarginBin {
  double low = 0, high = 0;  // nats; low <= m < high
  int right = 0;             // natively
  int survived = 0;          // and carried
};

enum class Finding { kKept, kBroken, kUndecided, kNone };

struct Verdict {
  Finding utility = Finding::kNone;
  Finding fidelity = Finding::kNone;
  std::string headline;  // "keeps the task, changes the behaviour"
  std::string utility_text, fidelity_text;
  int64_t more_items = 0;  // to decide what is undecided; -1: more than a million
};

struct Limits {
  double max_loss = 0.02;
  // Above the floor; the gate's defaults.
  double flip = 0.02, tv = 0.05, stop = 0.02;
  int min_prefixes = 20;
};

struct Cell {
  std::string task;
  int bucket = 0;  // 0: all lengths
  std::string plan;
  int n = 0, prefixes = 0, failed = 0;
  ArmSummary source, native, carried, hit;
  Paired paired;  // right: target natively, carried
  double mcnemar = 1;
  Interval loss;        // of accuracy, natively less carried
  Interval score_loss;  // of the score
  FidelitySummary fidelity, control, old;
  // Over the noise floor, on the items that have a control.
  int with_control = 0;
  Interval flip_excess, tv_excess, stop_excess;
  std::optional<double> recovered, recovered_first;  // 1 - KL(T, carried) / KL(T, S)
  Agreement same_first, other_first;
  std::vector<MarginBin> margins;
  double carried_share = 0;  // of the prompt's tokens
  Interval speedup;          // TTFT natively / carried: the median
  Verdict verdict;
};

// Cells in order of task, plan, bucket; the one over all lengths first. Rows that failed only
// count.
std::vector<Cell> MakeCells(const std::map<int, ItemResult>& rows, const Limits& limits);

// Of the rows that have a sensitivity profile: in order of task and bucket, the one over all
// lengths first.
std::vector<SensitivitySummary> MakeSensitivity(const std::map<int, ItemResult>& rows);

// verdict.cc. REQUIRES: all else of the cell is set.
Verdict Judge(const Cell& cell, const Limits& limits);

}  // namespace carryover::eval
