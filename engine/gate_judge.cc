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

double Gate::Impl::AlphaOpen(const GateRung& rung) const {
  return config.alpha * ShareOfEpoch(rung.epoch) / static_cast<double>(config.ladder.size());
}

double Gate::Impl::AlphaClose(const GateRung& rung) const {
  return AlphaOpen(rung) / kGateMeasures;
}

double Gate::Impl::OpenEvidence(const GateCell& cell, int rung, int measure, double enough) const {
  return EvidenceExcessBelow(cell.rungs[rung].evidence.open[measure],
                             OpeningFloor(cell.key).open[measure], grids[measure].points, enough);
}

double Gate::Impl::CloseEvidence(const GateCell& cell, int rung, int measure, double enough) const {
  return EvidenceExcessAbove(cell.rungs[rung].evidence.close[measure],
                             ClosingFloor(cell.key).close[measure], grids[measure].points, enough);
}

bool Gate::Impl::LeansOver(const GateCell& cell, int rung) const {
  const GateEvidence& evidence = cell.rungs[rung].evidence;
  if (evidence.prefixes < config.min_prefixes) return false;
  for (int i = 0; i < kGateMeasures; ++i) {
    const double floor = std::min(ClosingFloor(cell.key).mean(i), config.max_floor[i]);
    if (evidence.mean(i) > config.limit[i] + floor) return true;
  }
  return false;
}

int Gate::Impl::BorrowFactor(const GateCell& cell, int rung, bool* by_task) const {
  int proved[2] = {0, 0};  // by bucket, by task
  bool failed[2] = {false, false};
  for (const auto& [key, other] : cells) {
    if (other.get() == &cell || key.source != cell.key.source || key.target != cell.key.target) {
      continue;
    }
    const GateRung& same = other->rungs[rung];
    const bool bad = same.state == RungState::kFailed || LeansOver(*other, rung);
    const bool good = same.state == RungState::kProved && !same.borrowed;
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

void Gate::Impl::Judge(GateCell* cell, int index, double now, Transitions* out) {
  GateRung& rung = cell->rungs[index];
  const double close_at = 1 / AlphaClose(rung);
  for (int i = 0; i < kGateMeasures; ++i) {
    if (CloseEvidence(*cell, index, i, close_at) >= close_at) {
      Fail(cell, index, i, now, out);
      return;
    }
  }
  const double open_at = 1 / AlphaOpen(rung);
  const auto least_evidence = [&](double enough) {
    double least = open_at;
    for (int i = 0; i < kGateMeasures && least >= enough; ++i) {
      least = std::min(least, OpenEvidence(*cell, index, i, enough));
    }
    return least;
  };
  if (rung.borrowed) {
    // Once its own samples are enough it depends on nobody, and may lend itself.
    if (least_evidence(open_at) >= open_at) rung.borrowed = false;
    UpdateDecision(cell);
    return;
  }
  if (rung.state != RungState::kUnproved || rung.evidence.prefixes < config.min_prefixes ||
      rung.evidence.completion() < config.min_completion) {
    return;
  }
  const double least = least_evidence(open_at / kMaxBorrow);
  if (least * kMaxBorrow < open_at) return;
  int factor = 1;
  if (least < open_at) {
    factor = BorrowFactor(*cell, index, &rung.by_task);
    if (least * factor < open_at || LeansOver(*cell, index)) return;
  }
  Prove(cell, index, factor > 1, factor, out);
}

void Gate::Impl::Prove(GateCell* cell, int index, bool borrowed, int factor, Transitions* out) {
  GateRung& rung = cell->rungs[index];
  rung.state = RungState::kProved;
  rung.borrowed = borrowed;
  std::string reason = DescribeSamples(rung);
  for (int i = 0; i < kGateMeasures; ++i) {
    absl::StrAppend(&reason, i == 0 ? ": " : "; ", DescribeMeasure(*cell, index, i));
  }
  if (borrowed) {
    absl::StrAppend(&reason, "; with the evidence of ", factor - 1, " proved siblings by ",
                    rung.by_task ? "task" : "prefix bucket");
  }
  const bool down = IsOpen(cell->state);
  if (down && index < cell->rung) {
    absl::StrAppend(&reason, "; takes the place of ", config.ladder[cell->rung]);
  }
  Settle(cell, index,
         down       ? "cheaper_rung"
         : borrowed ? "borrowed"
                    : "evidence",
         std::move(reason), out);
}

void Gate::Impl::Fail(GateCell* cell, int index, int measure, double now, Transitions* out) {
  GateRung& rung = cell->rungs[index];
  std::string reason =
      absl::StrCat(DescribeMeasure(*cell, index, measure), "; ", DescribeSamples(rung));
  rung.state = RungState::kFailed;
  rung.borrowed = false;
  rung.retry_at = now + config.cooldown_seconds;
  // What is known of the others decides what comes instead: it may be proved already.
  GateCell after = *cell;
  SettleState(&after);
  if (after.state != GateState::kClosed && index == cell->rung) {
    absl::StrAppend(&reason, IsOpen(after.state) ? "; served instead by " : "; next to be proved: ",
                    config.ladder[after.rung]);
  }
  Settle(cell, index, after.state == GateState::kClosed ? "evidence" : "next_rung",
         std::move(reason), out);
  // The worst of a pool decides: what others borrowed from it is not there any more.
  for (auto& [key, other] : cells) {
    GateRung& lent = other->rungs[index];
    if (!lent.borrowed || key.source != cell->key.source || key.target != cell->key.target) {
      continue;
    }
    const bool same_pool =
        lent.by_task ? key.task == cell->key.task : key.prefix_bucket == cell->key.prefix_bucket;
    if (!same_pool) continue;
    lent.borrowed = false;
    lent.state = RungState::kUnproved;
    Settle(other.get(), index, "lender_closed",
           absl::StrCat("opened with the evidence of siblings, one of which went over its limit (",
                        cell->key.task, ", ", cell->key.prefix_bucket, ", ",
                        AnswerClassName(cell->key.answer), ")"),
           out);
  }
}

void Gate::Impl::Retry(GateCell* cell, int index, Transitions* out) {
  GateRung& rung = cell->rungs[index];
  rung.state = RungState::kUnproved;
  ++rung.epoch;
  rung.evidence = GateEvidence(GateComparison::kCarried, grids);
  Settle(cell, index, "cooldown",
         absl::StrFormat("the cool-down of %.0f s is over: epoch %d starts on shadows alone",
                         config.cooldown_seconds, rung.epoch),
         out);
}

}  // namespace carryover
