// Decides, cell by cell, whether a version may be served from another one's caches, by what
// shadows measured. Pure: no clock, no thread, no log; time is passed in and state changes are
// returned. Engine thread only.
//
// What is judged. A cell is (source, target, plan, task, prefix bucket, answer class). Each ended
// shadow gives three values in [0, 1]: first-token flip, mean total variation, stop disagreement.
// A cell is good when the mean of each, less the noise floor (the same measured native against
// native), is at most its limit. The tests behind are in engine/confidence.h; docs/gate.md says
// how many samples they take.
//
// The ladder. Every plan is judged by itself, on samples of its own, whichever serves: proved,
// failed or neither. The first that is proved serves. Where one fails that served, another that is
// proved takes over at once; where none is, the cell learns, with the plan that failed least often
// first. A plan that failed gets a new epoch after the cool-down, on shadows alone, and takes over
// again where it proves itself.
//
// Guarantees, however often the gate is looked at, with alpha = GateConfig::alpha:
//   a cell ever serves by a plan that is over a limit with probability <= alpha; a cell with a plan
//   under all limits ever closes with probability <= alpha. Both over all epochs: one begins with
//   every retry of a plan and gets 0.8 alpha (the first) or 0.2 alpha / (e (e - 1)) (the e-th) of
//   its part, and the plans of the ladder have equal parts. Closing splits its part over the
//   measures, since one is enough to close; opening needs all of them, and then each may use the
//   whole (Berger 1982, intersection-union).
// What they assume:
//   - A prefix counts for opening once an epoch (GateConfig::prefix_weight times), so that repeats
//     of one prefix, however alike, are one piece of evidence. For closing it counts again once 20
//     others were counted (min_prefixes, if less) or 500 samples passed, so that no prefix has much
//     more than 1/20 of it. What else requests of one time have in common, nobody told the gate.
//   - A dropped shadow counts as 1 (the worst) for opening and as 0 for closing.
//   - The floor of a stratum does not change within an epoch, and lies in [0, max_floor].
//   - Borrowing (below) assumes that the cells of a pool are alike before they are measured.
//
// Pools. A cell may open on less evidence of its own when its siblings have proved themselves: s
// open siblings, none closed and none leaning over a limit, multiply the alpha of its opening by
// s + 1, up to 8: were the cells of a pool exchangeable, the chance that this one is the only bad
// one is at most 1/(s + 1). Siblings are the cells with the same source, target, plan and task; if
// there is none that proved itself, those with the same source, target, plan and prefix bucket. The
// worst one decides: when a sibling closes, cells that opened on borrowed evidence return to
// learning. Each cell that is open on its own evidence stays judged by itself.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace carryover {

enum class GateState : uint8_t {
  kLearning,  // not proved yet: served natively, unless when_learning_carry
  kOpen,      // carried by the first plan of the ladder
  kRepaired,  // carried by a later plan of the ladder
  kClosed,    // served natively until the cool-down ends
};
absl::string_view GateStateName(GateState state);  // "learning", "open", "repaired", "closed"

// Of one plan of the ladder in a cell.
enum class RungState : uint8_t {
  kUnproved,  // neither way
  kProved,    // under its limits
  kFailed,    // was over a limit; a new epoch begins after the cool-down
};
absl::string_view RungStateName(RungState state);  // "unproved", "proved", "failed"

enum class AnswerClass : uint8_t { kShort, kLong };
inline constexpr int kShortAnswerTokens = 8;            // kShort: up to so many tokens
absl::string_view AnswerClassName(AnswerClass answer);  // "short", "long"

// The measures that are judged, and the order of values in every array here.
inline constexpr int kGateFlip = 0, kGateTv = 1, kGateStop = 2, kGateMeasures = 3;
absl::string_view GateMeasureName(int measure);  // "flip", "tv", "stop"
using GateValues = std::array<double, kGateMeasures>;

struct CellKey {
  std::string source;  // fingerprints, so that what was learned outlives a restart and a new name
  std::string target;
  std::string plan;  // of the ladder; Decide ignores it
  std::string task;
  int prefix_bucket = 256;                  // PrefixBucket()
  AnswerClass answer = AnswerClass::kLong;  // at admission by max_tokens

  auto Tie() const { return std::tie(source, target, plan, task, prefix_bucket, answer); }
  bool operator==(const CellKey& other) const { return Tie() == other.Tie(); }
  bool operator<(const CellKey& other) const { return Tie() < other.Tie(); }
  template <typename H>
  friend H AbslHashValue(H hash, const CellKey& key) {
    return H::combine(std::move(hash), key.source, key.target, key.plan, key.task,
                      key.prefix_bucket, key.answer);
  }
};

// The greatest power of two that is at most `tokens`, and at least 256.
int PrefixBucket(int tokens);

struct GateConfig {
  GateValues limit = {0.02, 0.05, 0.02};      // above the floor
  GateValues max_floor = {0.05, 0.05, 0.05};  // no floor is thought to be higher; 0: there is none
  double alpha = 0.05;
  int min_prefixes = 20;        // distinct ones before a cell opens
  double min_completion = 0.5;  // share of recent shadows that completed, below which none opens
  double cooldown_seconds = 600;
  int prefix_weight = 1;  // how often one prefix may count for opening, in an epoch
  // What a dropped shadow is taken for when a cell would open. 1 is safe against any drops; with
  // less, the dropped are trusted not to be worse than that.
  double assume_dropped = 1;
  bool when_learning_carry = false;  // carry in a cell's first epoch, before anything is proved
  int max_cells = 1024;              // and as many strata of the floor
  // Plans (engine/carry_plan.h) from the fastest to the most faithful: the first that is proved
  // serves. The latter two need a map, and are passed over where there is none.
  std::vector<std::string> ladder = {"direct", "calibrated", "calibrated+tail(10%)"};
};

// INVALID_ARGUMENT names the field.
absl::Status ValidateGateConfig(const GateConfig& config);

struct GateDecision {
  bool carry = false;
  absl::string_view plan;  // to serve with: of the ladder, or "native"
  // That shadows of this request compare: the plan that serves by the evidence or, where none does,
  // the one that is to be proved next. Empty while all have failed.
  absl::string_view shadow_plan;
  // The other plans that have not failed: samples of them are welcome, too. Until the gate's next
  // call.
  absl::Span<const absl::string_view> other_plans;
  GateState state = GateState::kLearning;
  bool forced = false;  // by an operator
  absl::string_view
      why;  // a few words, for the response and the log; both live as long as the gate
};

enum class GateComparison : uint8_t {
  kCarried,  // native against carried
  kControl,  // native against native: the floor. The cell's source and plan are ignored
};

// One sampled shadow that ended, completed or not.
struct GateSample {
  CellKey cell;
  uint64_t prefix = 0;  // hash of the carried prefix; equal for repeats
  GateComparison comparison = GateComparison::kCarried;
  bool dropped = false;    // then values do not matter. So are values outside [0, 1] taken
  GateValues values = {};  // each in [0, 1]
  // In (0, 1]: the least propensity with which this cell's requests are sampled now, over this
  // one's. 1 where all are sampled alike.
  double weight = 1;
};

struct GateTransition {
  CellKey cell;
  GateState from = GateState::kLearning;
  GateState to = GateState::kLearning;
  // For a metric: "evidence", "borrowed", "lender_closed", "next_rung" (a plan failed, and another
  // serves or is judged next), "cheaper_rung" (one before it on the ladder was proved), "cooldown",
  // "plans" (some can be used no more, or again), "operator".
  absl::string_view cause;
  std::string reason;   // in words, with n, bounds and limit; no text of a request
  bool hidden = false;  // an operator's state stands over the cell: what is served did not change
};

// Which cells an operator means. An empty string, 0 and nullopt mean any.
struct CellPattern {
  std::string source;
  std::string target;
  std::string task;
  int prefix_bucket = 0;
  std::optional<AnswerClass> answer;
  bool operator==(const CellPattern& other) const = default;
};

// An operator's word that stands over all cells that match, now and later.
struct GateRule {
  CellPattern pattern;
  GateState state = GateState::kLearning;
  std::string who;
};

// Bounds are anytime-valid at the level that decides (alpha_open, alpha_close), on a grid.
struct MeasureReport {
  double mean = 0;   // of what counted for closing, drops left out
  double lower = 0;  // of the mean of late: may be over `upper` after a change
  double upper = 1;  // of the mean of the epoch
  double limit = 0;  // above the floor
  double floor_mean = 0;
  double floor_lower = 0;
  double floor_upper = 1;     // at most max_floor
  double open_evidence = 0;   // e-value that the excess is under the limit; opens at 1/alpha_open
  double close_evidence = 0;  // that it is over the limit; closes at 1/alpha_close
};

// One plan of the ladder in a cell.
struct RungReport {
  std::string plan;
  RungState state = RungState::kUnproved;
  bool usable = true;  // false: passed over
  bool borrowed = false;
  bool starved = false;
  int epoch = 1;
  int64_t samples = 0;  // of this epoch: completed
  int64_t dropped = 0;
  int64_t counted = 0;       // that the cap on repeats let count for closing
  int64_t prefixes = 0;      // distinct ones, completed or not (about, never too many)
  double completion = 1;     // of recent shadows
  double alpha_open = 0;     // with what is borrowed
  double alpha_close = 0;    // of one measure
  double cooldown_left = 0;  // seconds, while failed
  std::array<MeasureReport, kGateMeasures> measures;
  std::string explanation;
};

// Of the plan that serves or is judged first, and of all.
struct CellReport {
  CellKey cell;                                     // with the plan being judged
  GateState state = GateState::kLearning;           // what is served
  GateState evidence_state = GateState::kLearning;  // what it would be without the operator
  bool forced = false;
  bool borrowed = false;  // open on siblings' evidence too
  bool starved = false;   // recent completion is under min_completion: hardly judged
  int epoch = 1;
  int64_t samples = 0;  // of this epoch and plan: completed
  int64_t dropped = 0;
  int64_t counted = 0;       // that the cap on repeats let count for closing
  int64_t prefixes = 0;      // distinct ones, completed or not (about, never too many)
  double completion = 1;     // of recent shadows
  int64_t controls = 0;      // samples behind the floor
  bool own_floor = false;    // the floor is this stratum's, not the whole target's
  double alpha_open = 0;     // with what is borrowed
  double alpha_close = 0;    // of one measure
  double cooldown_left = 0;  // seconds
  std::array<MeasureReport, kGateMeasures> measures;
  std::string explanation;        // a sentence or two for each plan
  std::vector<RungReport> rungs;  // in the ladder's order
};

class Gate {
 public:
  // REQUIRES: ValidateGateConfig(config).ok().
  explicit Gate(const GateConfig& config);
  ~Gate();
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  // How to serve a request of this cell now. Constant time. A cell that was not known begins to
  // learn, unless there are max_cells already; then it is native, and counted.
  GateDecision Decide(const CellKey& cell);

  // One ended shadow. A sample of an unknown plan, or over the cap on cells, is ignored.
  // Usually returns nothing; several transitions when others had borrowed from this cell.
  std::vector<GateTransition> Observe(const GateSample& sample, double now);

  // Which plans of the ladder (its size) cannot serve this source and target, since they lack what
  // it takes: passed over, whatever was proved of them, until told otherwise. At first none.
  std::vector<GateTransition> SetUnusable(const std::string& source, const std::string& target,
                                          std::vector<bool> unusable);

  // Ends cool-downs. Call about once a second. `now` is in seconds of any steady clock.
  std::vector<GateTransition> Tick(double now);

  // Puts a state over all cells that match, also over ones that come later; the evidence goes on
  // below. nullopt takes away every override whose pattern lies within `pattern`.
  // kRepaired needs a ladder of two. INVALID_ARGUMENT; RESOURCE_EXHAUSTED (64 patterns).
  // `who`, up to 256 printable ASCII characters, stands in the reason and in Rules.
  absl::Status Force(const CellPattern& pattern, std::optional<GateState> state,
                     absl::string_view who, std::vector<GateTransition>* transitions);

  // Overrides that stand; where two match a cell the later one holds.
  std::vector<GateRule> Rules() const;

  // Drops everything about a version that was removed.
  void Forget(absl::string_view fingerprint);

  // Ordered by cell. Takes some microseconds a cell.
  std::vector<CellReport> Report(double now) const;

  int64_t cells() const;
  int64_t refused_cells() const;  // decisions and samples that found no room

  // States, evidence and overrides, as bytes with a version and a checksum. About 10 KiB a cell,
  // and never more than MaxSavedBytes.
  std::string Save(double now) const;
  // Replaces everything. The bytes may come from anywhere: DATA_LOSS when they are not what Save
  // wrote, FAILED_PRECONDITION when the limits, alpha or the ladder are not those of now (the
  // evidence then means something else). The gate is unchanged on an error.
  absl::Status Restore(absl::string_view bytes, double now);
  static size_t MaxSavedBytes(const GateConfig& config);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace carryover
