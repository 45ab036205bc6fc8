// The tests of a cell and what follows from them.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/gate_impl.h"

namespace carryover {

GateEvidence* Gate::Impl::FindOrAddFloor(const CellKey& key, bool own) {
  if (key.target.size() > kMaxKeyBytes || key.task.size() > kMaxKeyBytes) return nullptr;
  if (!own) {
    const auto found = target_floors.find(key.target);
    if (found != target_floors.end()) return found->second.get();
    if (static_cast<int>(target_floors.size()) >= config.max_cells) return nullptr;
    auto floor = std::make_unique<GateEvidence>(GateComparison::kControl, grids);
    return target_floors.emplace(key.target, std::move(floor)).first->second.get();
  }
  CellKey stratum = key;
  stratum.source.clear();
  stratum.plan.clear();
  const auto found = floors.find(stratum);
  if (found != floors.end()) return found->second.get();
  if (static_cast<int>(floors.size()) >= config.max_cells) return nullptr;
  auto floor = std::make_unique<GateEvidence>(GateComparison::kControl, grids);
  return floors.emplace(std::move(stratum), std::move(floor)).first->second.get();
}

const GateEvidence& Gate::Impl::OpeningFloor(const CellKey& key) const {
  CellKey stratum = key;
  stratum.source.clear();
  const auto found = floors.find(stratum);
  return found == floors.end() ? no_floor : *found->second;
}

const GateEvidence& Gate::Impl::ClosingFloor(const CellKey& key) const {
  const GateEvidence& own = OpeningFloor(key);
  if (own.samples >= kOwnFloorControls) return own;
  const auto found = target_floors.find(key.target);
  return found == target_floors.end() ? no_floor : *found->second;
}

double Gate::Impl::AlphaOpen(const GateCell& cell) const {
  return config.alpha * ShareOfEpoch(cell.epoch) / static_cast<double>(config.ladder.size());
}

double Gate::Impl::AlphaClose(const GateCell& cell) const {
  return AlphaOpen(cell) / kGateMeasures;
}

double Gate::Impl::OpenEvidence(const GateCell& cell, int measure, double enough) const {
  return EvidenceExcessBelow(cell.evidence.open[measure], OpeningFloor(cell.key).open[measure],
                             grids[measure].points, enough);
}

double Gate::Impl::CloseEvidence(const GateCell& cell, int measure, double enough) const {
  return EvidenceExcessAbove(cell.evidence.close[measure], ClosingFloor(cell.key).close[measure],
                             grids[measure].points, enough);
}

bool Gate::Impl::LeansOver(const GateCell& cell) const {
  if (cell.evidence.prefixes < config.min_prefixes) return false;
  for (int i = 0; i < kGateMeasures; ++i) {
    const double floor = std::min(ClosingFloor(cell.key).mean(i), config.max_floor[i]);
    if (cell.evidence.mean(i) > config.limit[i] + floor) return true;
  }
  return false;
}

int Gate::Impl::BorrowFactor(const GateCell& cell, bool* by_task) const {
  int proved[2] = {0, 0};  // by bucket, by task
  bool failed[2] = {false, false};
  for (const auto& [key, other] : cells) {
    if (other.get() == &cell || key.source != cell.key.source || key.target != cell.key.target) {
      continue;
    }
    // A cell on a later rung has failed this one.
    const bool bad = other->state == GateState::kClosed || other->rung > cell.rung ||
                     (other->rung == cell.rung && LeansOver(*other));
    const bool good = other->rung == cell.rung && IsOpen(other->state) && !other->borrowed;
    const bool member[2] = {key.prefix_bucket == cell.key.prefix_bucket, key.task == cell.key.task};
    for (int pool = 0; pool < 2; ++pool) {
      if (!member[pool]) continue;
      failed[pool] = failed[pool] || bad;
      proved[pool] += good ? 1 : 0;
    }
  }
  for (int pool : {1, 0}) {
    if (failed[pool]) return 1;
    *by_task = pool == 1;
    if (proved[pool] > 0) return std::min(kMaxBorrow, 1 + proved[pool]);
  }
  return 1;
}

void Gate::Impl::Judge(GateCell* cell, double now, Transitions* out) {
  const double close_at = 1 / AlphaClose(*cell);
  for (int i = 0; i < kGateMeasures; ++i) {
    if (CloseEvidence(*cell, i, close_at) >= close_at) {
      Fail(cell, i, now, out);
      return;
    }
  }
  const double open_at = 1 / AlphaOpen(*cell);
  const auto least_evidence = [&](double enough) {
    double least = open_at;
    for (int i = 0; i < kGateMeasures && least >= enough; ++i) {
      least = std::min(least, OpenEvidence(*cell, i, enough));
    }
    return least;
  };
  if (cell->borrowed) {
    // Once its own samples are enough it depends on nobody, and may lend itself.
    if (least_evidence(open_at) >= open_at) cell->borrowed = false;
    UpdateDecision(cell);
    return;
  }
  if (cell->state != GateState::kLearning || cell->evidence.prefixes < config.min_prefixes ||
      cell->evidence.completion() < config.min_completion) {
    return;
  }
  const double least = least_evidence(open_at / kMaxBorrow);
  if (least * kMaxBorrow < open_at) return;
  int factor = 1;
  if (least < open_at) {
    factor = BorrowFactor(*cell, &cell->by_task);
    if (least * factor < open_at || LeansOver(*cell)) return;
  }
  Open(cell, factor > 1, factor, out);
}

void Gate::Impl::Open(GateCell* cell, bool borrowed, int factor, Transitions* out) {
  cell->borrowed = borrowed;
  std::string reason = DescribeSamples(*cell);
  for (int i = 0; i < kGateMeasures; ++i) {
    absl::StrAppend(&reason, i == 0 ? ": " : "; ", DescribeMeasure(*cell, i));
  }
  if (borrowed) {
    absl::StrAppend(&reason, "; with the evidence of ", factor - 1, " proved siblings by ",
                    cell->by_task ? "task" : "prefix bucket");
  }
  SetState(cell, cell->rung == 0 ? GateState::kOpen : GateState::kRepaired,
           config.ladder[cell->rung], borrowed ? "borrowed" : "evidence", std::move(reason), out);
}

void Gate::Impl::Fail(GateCell* cell, int measure, double now, Transitions* out) {
  const int failed_rung = cell->rung;
  std::string reason = absl::StrCat(DescribeMeasure(*cell, measure), "; ", DescribeSamples(*cell));
  cell->borrowed = false;
  if (failed_rung + 1 < static_cast<int>(config.ladder.size())) {
    ++cell->rung;
    cell->evidence = GateEvidence(GateComparison::kCarried, grids);
    absl::StrAppend(&reason, "; next to be proved: ", config.ladder[cell->rung]);
    SetState(cell, GateState::kLearning, config.ladder[failed_rung], "next_rung", std::move(reason),
             out);
  } else {
    cell->retry_at = now + config.cooldown_seconds;
    SetState(cell, GateState::kClosed, config.ladder[failed_rung], "evidence", std::move(reason),
             out);
  }
  // The worst of a pool decides: what others borrowed from it is not there any more.
  for (auto& [key, other] : cells) {
    if (!other->borrowed || other->rung != failed_rung || key.source != cell->key.source ||
        key.target != cell->key.target) {
      continue;
    }
    const bool same_pool =
        other->by_task ? key.task == cell->key.task : key.prefix_bucket == cell->key.prefix_bucket;
    if (!same_pool) continue;
    other->borrowed = false;
    SetState(
        other.get(), GateState::kLearning, config.ladder[failed_rung], "lender_closed",
        absl::StrCat("opened with the evidence of siblings, one of which went over its limit (",
                     cell->key.task, ", ", cell->key.prefix_bucket, ", ",
                     AnswerClassName(cell->key.answer), ")"),
        out);
  }
}

void Gate::Impl::Retry(GateCell* cell, Transitions* out) {
  const std::string& plan = config.ladder[cell->rung];
  ++cell->epoch;
  cell->rung = 0;
  cell->evidence = GateEvidence(GateComparison::kCarried, grids);
  SetState(cell, GateState::kLearning, plan, "cooldown",
           absl::StrFormat("the cool-down of %.0f s is over: epoch %d starts on shadows alone",
                           config.cooldown_seconds, cell->epoch),
           out);
}

}  // namespace carryover
