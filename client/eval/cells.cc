#include "client/eval/cells.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <tuple>
#include <utility>

namespace carryover::eval {
namespace {

// Values with the prefix that each came from.
struct Sample {
  std::vector<double> values;
  std::vector<int> clusters;
  void Add(double value, int cluster) {
    values.push_back(value);
    clusters.push_back(cluster);
  }
  int size() const { return static_cast<int>(values.size()); }
  Interval Rate() const {
    double hits = 0;
    for (double value : values) hits += value;
    const Interval wilson = Wilson(hits, static_cast<double>(values.size()));
    if (values.empty()) return wilson;
    const Interval drawn = ClusterBootstrap(values, clusters);
    return {wilson.mean, std::min(wilson.lower, drawn.lower), std::max(wilson.upper, drawn.upper)};
  }
  Interval Mean() const { return ClusterBootstrap(values, clusters); }
  Interval Bounded(double low, double high) const {
    return MeanInterval(values, clusters, low, high);
  }
};

struct Row {
  const ItemResult* item;
  const Arm* carried;  // by the cell's plan
  int cluster;
};

double Percentile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double at = q * static_cast<double>(values.size() - 1);
  const auto below = static_cast<size_t>(at);
  const size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (values[above] - values[below]) * (at - static_cast<double>(below));
}

ArmSummary SummarizeArm(const std::vector<Row>& rows, const Arm* (*arm_of)(const Row&)) {
  ArmSummary out;
  Sample right, score;
  std::vector<double> ttft;
  for (const Row& row : rows) {
    const Arm* arm = arm_of(row);
    if (arm == nullptr) continue;
    if (arm->right) right.Add(*arm->right ? 1 : 0, row.cluster);
    if (arm->score) score.Add(*arm->score, row.cluster);
    ttft.push_back(arm->ttft);
  }
  out.judged = right.size();
  out.accuracy = right.Rate();
  out.scored = score.size();
  out.score = score.Bounded(0, 1);
  out.ttft_median = Median(ttft);
  return out;
}

int GroupOf(size_t position) { return position < 1 ? 0 : position < 4 ? 1 : 2; }

// The mean over an item's positions; nothing where it is not finite.
template <typename Value>
void AddMean(const Comparison& one, int cluster, Sample* sample, const Value& value) {
  double sum = 0;
  for (const Position& position : one.positions) sum += value(position);
  const double mean = sum / static_cast<double>(one.positions.size());
  if (std::isfinite(mean)) sample->Add(mean, cluster);
}

FidelitySummary SummarizeFidelity(const std::vector<Row>& rows, const char* comparison,
                                  const std::string& plan) {
  FidelitySummary out;
  Sample flip, kl, kl_first, js, tv, tv_first, overlap, native, other, shift, fragile, stop,
      disagreement, groups[kGroups];
  std::vector<double> divergences;
  for (const Row& row : rows) {
    const Comparison* one = row.item->Find(comparison, plan);
    if (one == nullptr || one->positions.empty()) continue;
    ++out.n;
    flip.Add(one->gate_flip, row.cluster);
    stop.Add(one->gate_stop, row.cluster);
    if (one->stop_disagreement) disagreement.Add(*one->stop_disagreement ? 1 : 0, row.cluster);
    ++out.continuation[one->continuation];
    if (one->divergence >= 0) divergences.push_back(one->divergence);
    if (!one->valid) {
      ++out.invalid;
      continue;
    }
    if (!std::isfinite(one->MeanKl())) ++out.infinite_kl;
    AddMean(*one, row.cluster, &kl, [](const Position& p) { return p.kl; });
    AddMean(*one, row.cluster, &js, [](const Position& p) { return p.js; });
    AddMean(*one, row.cluster, &tv, [](const Position& p) { return p.tv; });
    AddMean(*one, row.cluster, &overlap, [](const Position& p) { return p.overlap; });
    const Position& first = one->positions[0];
    if (std::isfinite(first.kl)) kl_first.Add(first.kl, row.cluster);
    tv_first.Add(first.tv, row.cluster);
    if (std::isfinite(first.native_margin) && std::isfinite(first.carried_margin)) {
      native.Add(first.native_margin, row.cluster);
      other.Add(first.carried_margin, row.cluster);
      shift.Add(first.carried_margin - first.native_margin, row.cluster);
    }
    fragile.Add(first.fragile ? 1 : 0, row.cluster);
    for (size_t i = 0; i < one->positions.size(); ++i) {
      groups[GroupOf(i)].Add(one->positions[i].flip ? 1 : 0, row.cluster);
    }
  }
  out.flip = flip.Rate();
  out.kl = kl.Mean();
  out.kl_p50 = Percentile(kl.values, 0.5);
  out.kl_p95 = Percentile(kl.values, 0.95);
  out.kl_p99 = Percentile(kl.values, 0.99);
  out.kl_first = kl_first.Mean();
  out.js = js.Mean();
  out.tv = tv.Bounded(0, 1);
  out.tv_first = tv_first.Bounded(0, 1);
  out.overlap = overlap.Bounded(0, 1);
  out.native_margin = native.Mean();
  out.other_margin = other.Mean();
  out.margin_shift = shift.Mean();
  out.fragile = fragile.Rate();
  for (int g = 0; g < kGroups; ++g) {
    out.positions[g] = groups[g].size();
    out.flips[g] = groups[g].Rate();
  }
  out.stop = stop.Bounded(0, 1);
  out.stop_known = disagreement.size();
  out.stop_disagreement = disagreement.Rate();
  if (!divergences.empty()) out.divergence_median = Median(divergences);
  return out;
}

// Over the floor, item by item where a control was computed. A floor that is 0 throughout leaves
// the values as they are, within [0, 1].
Interval Excess(const std::vector<Row>& rows, const std::string& plan, double Comparison::*value) {
  Sample all, difference;
  bool zero = true;
  for (const Row& row : rows) {
    const Comparison* carried = row.item->Find("carried", plan);
    const Comparison* control = row.item->Find("control");
    if (carried == nullptr) continue;
    all.Add(carried->*value, row.cluster);
    if (control == nullptr) continue;
    zero &= control->*value <= 1e-6;
    difference.Add(carried->*value - control->*value, row.cluster);
  }
  return difference.size() == 0 || zero ? all.Bounded(0, 1) : difference.Bounded(-1, 1);
}

// Not narrower than Wilson's, around the same floor: a rate of 0 or 1 must not look certain.
Interval RateExcess(const std::vector<Row>& rows, const std::string& plan,
                    double Comparison::*value) {
  Interval excess = Excess(rows, plan, value);
  Sample all;
  for (const Row& row : rows) {
    if (const Comparison* one = row.item->Find("carried", plan)) {
      all.Add(one->*value, row.cluster);
    }
  }
  const Interval rate = all.Rate();
  const double floor = rate.mean - excess.mean;
  excess.lower = std::min(excess.lower, rate.lower - floor);
  excess.upper = std::max(excess.upper, rate.upper - floor);
  return excess;
}

std::optional<double> Recovered(const std::vector<Row>& rows, const std::string& plan, bool first) {
  double carried = 0, old = 0;
  for (const Row& row : rows) {
    const Comparison* a = row.item->Find("carried", plan);
    const Comparison* b = row.item->Find("old");
    if (a == nullptr || b == nullptr || !a->valid || !b->valid || a->positions.empty() ||
        b->positions.empty()) {
      continue;
    }
    const double kl_a = first ? a->positions[0].kl : a->MeanKl();
    const double kl_b = first ? b->positions[0].kl : b->MeanKl();
    if (!std::isfinite(kl_a) || !std::isfinite(kl_b)) continue;
    carried += kl_a;
    old += kl_b;
  }
  if (old <= 1e-9 * static_cast<double>(std::max<size_t>(rows.size(), 1))) return std::nullopt;
  return 1 - carried / old;
}

void AddAgreement(const Row& row, Cell* cell) {
  const Arm& native = row.item->native;
  const Arm& carried = *row.carried;
  const bool same_first =
      !native.tokens.empty() && !carried.tokens.empty() && native.tokens[0] == carried.tokens[0];
  Agreement& agreement = same_first ? cell->same_first : cell->other_first;
  ++agreement.n;
  agreement.same_answer += native.tokens == carried.tokens;
  agreement.same_stop +=
      native.finish == carried.finish && native.tokens.size() == carried.tokens.size();
  if (!native.right || !carried.right) return;
  ++agreement.judged;
  agreement.same_outcome += *native.right == *carried.right;
}

// Of TTFT natively / carried.
Interval Speedup(const std::vector<Row>& rows) {
  Sample ratios;
  for (const Row& row : rows) {
    if (row.carried->ttft > 0 && row.item->native.ttft > 0) {
      ratios.Add(row.item->native.ttft / row.carried->ttft, row.cluster);
    }
  }
  return MedianInterval(ratios.values);
}

Cell MakeCell(const std::vector<Row>& rows, const std::string& task, int bucket,
              const std::string& plan, int failed, const Limits& limits) {
  Cell cell;
  cell.task = task;
  cell.bucket = bucket;
  cell.plan = plan;
  cell.n = static_cast<int>(rows.size());
  cell.failed = failed;
  std::set<int> prefixes;
  for (const Row& row : rows) prefixes.insert(row.cluster);
  cell.prefixes = static_cast<int>(prefixes.size());
  cell.source = SummarizeArm(rows, [](const Row& row) { return &row.item->source; });
  cell.native = SummarizeArm(rows, [](const Row& row) { return &row.item->native; });
  cell.carried = SummarizeArm(rows, [](const Row& row) { return row.carried; });
  cell.hit = SummarizeArm(
      rows, [](const Row& row) -> const Arm* { return row.item->hit ? &*row.item->hit : nullptr; });

  for (const double edge : {0.0, 0.5, 1.0, 2.0, 4.0, 8.0}) {
    if (!cell.margins.empty()) cell.margins.back().high = edge;
    cell.margins.push_back({edge, std::numeric_limits<double>::infinity()});
  }
  Sample right_difference, score_difference;
  double prompt = 0, carried_tokens = 0;
  for (const Row& row : rows) {
    const Arm& native = row.item->native;
    prompt += row.item->prompt_tokens;
    carried_tokens += row.carried->carried;
    AddAgreement(row, &cell);
    if (native.score && row.carried->score) {
      score_difference.Add(*native.score - *row.carried->score, row.cluster);
    }
    const Comparison* one = row.item->Find("carried", plan);
    cell.with_control += row.item->Find("control") != nullptr;
    if (!native.right || !row.carried->right) continue;
    const bool a = *native.right, b = *row.carried->right;
    (a ? (b ? cell.paired.both : cell.paired.only_first)
       : (b ? cell.paired.only_second : cell.paired.neither)) += 1;
    right_difference.Add((a ? 1 : 0) - (b ? 1 : 0), row.cluster);
    if (!a || one == nullptr || one->positions.empty()) continue;
    for (MarginBin& bin : cell.margins) {
      const double margin = std::max(0.0, one->positions[0].native_margin);
      if (margin < bin.low || margin >= bin.high) continue;
      ++bin.right;
      bin.survived += b;
    }
  }
  cell.carried_share = prompt > 0 ? carried_tokens / prompt : 0;
  cell.mcnemar = McNemar(static_cast<int64_t>(cell.paired.only_first),
                         static_cast<int64_t>(cell.paired.only_second));
  cell.loss = PairedDifference(cell.paired);
  if (right_difference.size() > 0) {
    const Interval drawn = right_difference.Mean();
    cell.loss.lower = std::min(cell.loss.lower, drawn.lower);
    cell.loss.upper = std::max(cell.loss.upper, drawn.upper);
  }
  cell.score_loss = score_difference.Mean();
  cell.fidelity = SummarizeFidelity(rows, "carried", plan);
  cell.control = SummarizeFidelity(rows, "control", "");
  cell.old = SummarizeFidelity(rows, "old", "");
  cell.flip_excess = RateExcess(rows, plan, &Comparison::gate_flip);
  cell.tv_excess = Excess(rows, plan, &Comparison::gate_tv);
  cell.stop_excess = RateExcess(rows, plan, &Comparison::gate_stop);
  cell.recovered = Recovered(rows, plan, false);
  cell.recovered_first = Recovered(rows, plan, true);
  cell.speedup = Speedup(rows);
  cell.verdict = Judge(cell, limits);
  return cell;
}

}  // namespace

const char* GroupName(int group) {
  constexpr const char* kNames[kGroups] = {"1", "2-4", "5-16"};
  return kNames[group];
}

std::vector<Cell> MakeCells(const std::map<int, ItemResult>& rows, const Limits& limits) {
  std::map<std::string, int> clusters;
  std::map<std::tuple<std::string, std::string, int>, std::vector<Row>> cells;
  std::map<std::string, int> failed;
  for (const auto& [index, item] : rows) {
    if (!item.ok()) {
      ++failed[item.task];
      continue;
    }
    const int cluster =
        clusters.emplace(item.prefix_key, static_cast<int>(clusters.size())).first->second;
    for (const Arm& arm : item.carried) {
      for (const int bucket : {0, item.bucket}) {
        cells[{item.task, arm.plan, bucket}].push_back({&item, &arm, cluster});
      }
    }
  }
  std::vector<Cell> out;
  for (const auto& [key, of_cell] : cells) {
    const auto& [task, plan, bucket] = key;
    out.push_back(MakeCell(of_cell, task, bucket, plan, bucket == 0 ? failed[task] : 0, limits));
  }
  return out;
}

std::vector<SensitivitySummary> MakeSensitivity(const std::map<int, ItemResult>& rows) {
  std::map<std::string, int> clusters;
  std::map<std::pair<std::string, int>, std::vector<ClusteredProfile>> groups;
  for (const auto& [index, item] : rows) {
    if (!item.ok() || !item.sensitivity) continue;
    const int cluster =
        clusters.emplace(item.prefix_key, static_cast<int>(clusters.size())).first->second;
    for (const int bucket : {0, item.bucket}) {
      groups[{item.task, bucket}].push_back({&*item.sensitivity, cluster});
    }
  }
  std::vector<SensitivitySummary> out;
  for (const auto& [key, profiles] : groups) {
    SensitivitySummary& summary = out.emplace_back(Summarize(profiles));
    std::tie(summary.task, summary.bucket) = key;
  }
  return out;
}

}  // namespace carryover::eval
