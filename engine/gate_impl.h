// Inside of the gate, shared by its files: what it holds, and the steps that change it. Engine
// thread only.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/gate.h"
#include "engine/gate_evidence.h"

namespace carryover {

inline constexpr int kMaxBorrow = 8;  // siblings multiply alpha by no more
inline constexpr int kMaxForceRules = 64;
inline constexpr size_t kMaxKeyBytes = 256;  // of each string of a key
inline constexpr int kMaxPrefixBucket = 1 << 30;
// With so many controls a stratum's own floor closes its cells; with fewer the target's does.
inline constexpr int64_t kOwnFloorControls = 100;

// What is known of one plan of the ladder in one cell.
struct GateRung {
  explicit GateRung(const std::array<GateGrid, kGateMeasures>& grids)
      : evidence(GateComparison::kCarried, grids) {}

  RungState state = RungState::kUnproved;
  int epoch = 1;
  double retry_at = 0;    // while failed
  bool borrowed = false;  // proved with siblings' evidence
  bool by_task = false;   // from which pool
  GateEvidence evidence;  // in this epoch
};

// One cell without its plan. Each rung of the ladder is judged by itself; what serves follows.
struct GateCell {
  GateCell(CellKey key, size_t ladder, const std::array<GateGrid, kGateMeasures>& grids)
      : key(std::move(key)), rungs(ladder, GateRung(grids)) {}

  CellKey key;                             // plan is empty
  GateState state = GateState::kLearning;  // by the evidence
  std::optional<GateState> forced;
  int rung = 0;  // that serves by the evidence; while none does, the one that is judged first
  std::vector<GateRung> rungs;            // (ladder)
  GateDecision decision;                  // what Decide answers
  std::vector<absl::string_view> others;  // GateDecision::other_plans

  GateState served() const { return forced.value_or(state); }
};

// Cells are found without their plan.
struct PlanlessHash {
  size_t operator()(const CellKey& key) const {
    return absl::HashOf(key.source, key.target, key.task, key.prefix_bucket, key.answer);
  }
};
struct PlanlessEqual {
  bool operator()(const CellKey& a, const CellKey& b) const {
    return a.prefix_bucket == b.prefix_bucket && a.answer == b.answer && a.task == b.task &&
           a.source == b.source && a.target == b.target;
  }
};

bool Matches(const CellPattern& pattern, const CellKey& key);
bool IsOpen(GateState state);
// Goes into logs and reports.
bool IsPrintable(absl::string_view text);

// Parts of alpha. ShareOfEpoch sums to 1 over all epochs.
double ShareOfEpoch(int epoch);

struct Gate::Impl {
  explicit Impl(const GateConfig& config);

  // Null when it is not a key, or there is no room.
  GateCell* FindOrAdd(const CellKey& key);
  GateEvidence* FindOrAddFloor(const CellKey& key, bool own);
  // What the cell's floor is taken to be when it would open (own only, or nothing known), and
  // close.
  const GateEvidence& OpeningFloor(const CellKey& key) const;
  const GateEvidence& ClosingFloor(const CellKey& key) const;

  double AlphaOpen(const GateRung& rung) const;  // without what is borrowed
  double AlphaClose(const GateRung& rung) const;
  double OpenEvidence(const GateCell& cell, int rung, int measure, double enough) const;
  double CloseEvidence(const GateCell& cell, int rung, int measure, double enough) const;
  bool Usable(const CellKey& key, int rung) const;
  // The first or last rung that is usable; any where none is.
  int FirstUsable(const CellKey& key) const;
  int LastUsable(const CellKey& key) const;
  // Times alpha, 1 if nothing can be borrowed.
  int BorrowFactor(const GateCell& cell, int rung, bool* by_task) const;
  bool LeansOver(const GateCell& cell, int rung) const;

  using Transitions = std::vector<GateTransition>;
  void Judge(GateCell* cell, int rung, double now, Transitions* out);
  void Prove(GateCell* cell, int rung, bool borrowed, int factor, Transitions* out);
  void Fail(GateCell* cell, int rung, int measure, double now, Transitions* out);
  void Retry(GateCell* cell, int rung, Transitions* out);
  // Sets state and rung by what the rungs are, and tells where that changes what is served or
  // judged first. `plan` is the one whose evidence moved.
  void Settle(GateCell* cell, int plan, absl::string_view cause, std::string reason,
              Transitions* out);
  // Without telling.
  void SettleState(GateCell* cell) const;
  void ApplyRules(GateCell* cell) const;
  void UpdateDecision(GateCell* cell) const;

  std::string DescribeMeasure(const GateCell& cell, int rung, int measure) const;
  std::string DescribeSamples(const GateRung& rung) const;
  RungReport ReportRung(const GateCell& cell, int rung, double now) const;
  CellReport Report(const GateCell& cell, double now) const;

  const GateConfig config;
  std::array<GateGrid, kGateMeasures> grids;
  absl::flat_hash_map<CellKey, std::unique_ptr<GateCell>, PlanlessHash, PlanlessEqual> cells;
  // By stratum (source and plan are empty), and by target alone.
  absl::flat_hash_map<CellKey, std::unique_ptr<GateEvidence>, PlanlessHash, PlanlessEqual> floors;
  std::map<std::string, std::unique_ptr<GateEvidence>> target_floors;
  GateEvidence no_floor;                                                      // never sampled
  std::map<std::pair<std::string, std::string>, std::vector<bool>> unusable;  // source, target
  std::vector<GateRule> rules;                                                // a later one wins
  int64_t refused = 0;
};

}  // namespace carryover
