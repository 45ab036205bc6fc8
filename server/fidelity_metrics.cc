#include "server/fidelity_metrics.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace carryover {
namespace {

using prometheus::BuildCounter;
using prometheus::BuildGauge;
using prometheus::BuildHistogram;
using prometheus::Counter;
using prometheus::Family;
using prometheus::Histogram;
using prometheus::Labels;
using prometheus::Registry;
using Buckets = Histogram::BucketBoundaries;

// An infinite value falls beyond every bucket; as this it leaves the histogram's sum a number.
constexpr double kLargest = 1000;

const Buckets& NatBuckets() {  // by half decades
  static const auto* buckets =
      new Buckets{1e-6, 3.16e-6, 1e-5, 3.16e-5, 1e-4, 3.16e-4, 1e-3, 3.16e-3,
                  0.01, 0.0316,  0.1,  0.316,   1,    3.16,    10};
  return *buckets;
}
const Buckets& JsBuckets() {  // at most ln 2
  static const auto* buckets = new Buckets{1e-6, 3.16e-6, 1e-5, 3.16e-5, 1e-4, 3.16e-4,
                                           1e-3, 3.16e-3, 0.01, 0.0316,  0.1,  0.316};
  return *buckets;
}
const Buckets& ShareBuckets() {
  static const auto* buckets = new Buckets{0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1};
  return *buckets;
}
const Buckets& OverlapBuckets() {
  static const auto* buckets = new Buckets{0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1};
  return *buckets;
}
const Buckets& MarginBuckets() {
  static const auto* buckets = new Buckets{0, 0.05, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16};
  return *buckets;
}
const Buckets& ShiftBuckets() {
  static const auto* buckets = new Buckets{
      -16, -8, -4, -2, -1, -0.5, -0.25, -0.125, -0.05, 0, 0.05, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16};
  return *buckets;
}

Family<Counter>& Counters(Registry* registry, const char* name, const char* help) {
  return BuildCounter().Name(name).Help(help).Register(*registry);
}
Family<Histogram>& Histograms(Registry* registry, const char* name, const char* help) {
  return BuildHistogram().Name(name).Help(help).Register(*registry);
}

void Add(Histogram* histogram, double value) {
  histogram->Observe(std::clamp(value, -kLargest, kLargest));
}

}  // namespace

FidelityMetrics::FidelityMetrics(const FidelityMetricsOptions& options, Registry* registry)
    : options_(options),
      kl_(Histograms(registry, "carryover_fidelity_kl_nats",
                     "KL divergence of the compared arm from the native one, by position.")),
      js_(Histograms(registry, "carryover_fidelity_js_nats",
                     "Jensen-Shannon divergence of the arms, over positions.")),
      tv_(Histograms(registry, "carryover_fidelity_tv",
                     "Total variation between the arms, over positions.")),
      overlap_(Histograms(registry, "carryover_fidelity_topk_overlap",
                          "Share of the native arm's 10 likeliest tokens among the other's 10.")),
      margin_(Histograms(registry, "carryover_answer_margin_nats",
                         "Lead of the native first choice over the next token, by arm.")),
      margin_shift_(Histograms(registry, "carryover_answer_margin_shift_nats",
                               "Carried less native margin; below 0 the answer lost ground.")),
      stop_shift_(Histograms(registry, "carryover_fidelity_stop_shift",
                             "Difference of the arms' probability to stop, over positions.")),
      positions_(Counters(registry, "carryover_fidelity_positions_total",
                          "Compared positions, by group of positions.")),
      flips_(Counters(registry, "carryover_position_flips_total",
                      "Positions where the arms' first choices differ, by group of positions.")),
      continuation_(
          Counters(registry, "carryover_continuation_match_total",
                   "Greedy samples, by how long the other arm would have said the same.")),
      samples_(Counters(registry, "carryover_fidelity_samples_total", "Compared requests.")),
      invalid_(Counters(registry, "carryover_fidelity_invalid_samples_total",
                        "Compared requests with logits that are no distribution.")),
      first_flips_(Counters(registry, "carryover_first_token_flips_total",
                            "Samples whose first token would have been another.")),
      fragile_(Counters(registry, "carryover_fragile_total",
                        "Positions whose logits moved by more than the native margin.")),
      stops_compared_(Counters(registry, "carryover_stops_compared_total",
                               "Greedy samples where both arms' stop is known.")),
      stop_disagreements_(Counters(registry, "carryover_stop_disagreements_total",
                                   "Of them, where the other arm would stop elsewhere.")),
      cell_count_(BuildGauge()
                      .Name("carryover_fidelity_cells")
                      .Help("Cells that have series.")
                      .Register(*registry)
                      .Add({})),
      homeless_(Counters(registry, "carryover_fidelity_samples_without_cell_total",
                         "Samples over the limit of cells, or of a pair that is gone.")
                    .Add({})) {
  BuildGauge()
      .Name("carryover_fidelity_cells_limit")
      .Help("Cells that may have series.")
      .Register(*registry)
      .Add({})
      .Set(options_.max_cells);
}

FidelityMetrics::Cell* FidelityMetrics::FindOrMake(const CellKey& key, size_t limit) {
  if (const auto found = cells_.find(key); found != cells_.end()) return &found->second;
  if (cells_.size() >= limit) return nullptr;
  const auto& [pair, plan, task, bucket, comparison, along] = key;
  const Labels labels = {
      {"model", std::get<0>(pair)},
      {"source", std::get<1>(pair)},
      {"target", std::get<2>(pair)},
      {"plan", plan},
      {"task", task},
      {"prefix_bucket", absl::StrCat(bucket)},
      {"comparison", FidelityComparisonName(static_cast<FidelityComparison>(comparison))},
      {"along", AlongName(static_cast<Along>(along))},
  };
  Cell cell;
  const auto with = [&](const char* name, const char* value) {
    Labels more = labels;
    if (name != nullptr) more[name] = value;
    return more;
  };
  const auto counter = [&](CounterFamily& family, const char* name = nullptr,
                           const char* value = "") {
    Counter* const made = &family.Add(with(name, value));
    cell.counters.push_back({&family, made});
    return made;
  };
  const auto histogram = [&](HistogramFamily& family, const Buckets& buckets,
                             const char* name = nullptr, const char* value = "") {
    Histogram* const made = &family.Add(with(name, value), buckets);
    cell.histograms.push_back({&family, made});
    return made;
  };
  for (int group = 0; group < kPositionGroups; ++group) {
    const char* const name = PositionGroupName(group);
    cell.kl[group] = histogram(kl_, NatBuckets(), "positions", name);
    cell.positions[group] = counter(positions_, "positions", name);
    cell.flips[group] = counter(flips_, "positions", name);
  }
  cell.js = histogram(js_, JsBuckets());
  cell.tv = histogram(tv_, ShareBuckets());
  cell.overlap = histogram(overlap_, OverlapBuckets());
  cell.native_margin = histogram(margin_, MarginBuckets(), "path", "native");
  cell.carried_margin = histogram(margin_, MarginBuckets(), "path", "carried");
  cell.margin_shift = histogram(margin_shift_, ShiftBuckets());
  cell.stop_shift = histogram(stop_shift_, ShareBuckets());
  int i = 0;
  for (const Continuation c :
       {Continuation::kSame, Continuation::kSameSoFar, Continuation::kDiverged}) {
    cell.continuation[i++] = counter(continuation_, "match", ContinuationName(c));
  }
  cell.samples = counter(samples_);
  cell.invalid = counter(invalid_);
  cell.first_flips = counter(first_flips_);
  cell.fragile = counter(fragile_);
  cell.stops_compared = counter(stops_compared_);
  cell.stop_disagreements = counter(stop_disagreements_);
  Cell* const made = &cells_.emplace(key, std::move(cell)).first->second;
  cell_count_.Set(static_cast<double>(cells_.size()));
  return made;
}

void FidelityMetrics::Declare(const VersionPair& pair) {
  MutexLock lock(&mutex_);
  const PairKey key = {pair.model, pair.source, pair.target};
  pairs_.insert(key);
  std::vector<std::string> tasks = options_.tasks;
  tasks.push_back("other");
  // Half of the room stays for cells that are really met.
  const size_t limit = static_cast<size_t>(std::max(options_.max_cells, 0)) / 2;
  for (int bucket = 256; bucket == 256 || bucket <= pair.max_prefix_tokens; bucket *= 2) {
    for (const std::string& task : tasks) {
      for (const std::string& plan : options_.ladder) {
        FindOrMake({key, plan, task, bucket, static_cast<int>(FidelityComparison::kCarried),
                    static_cast<int>(Along::kNative)},
                   limit);
      }
    }
    if (bucket >= 1 << 24) break;
  }
}

void FidelityMetrics::Remove(const VersionPair& pair) {
  MutexLock lock(&mutex_);
  const PairKey key = {pair.model, pair.source, pair.target};
  pairs_.erase(key);
  for (auto it = cells_.begin(); it != cells_.end();) {
    if (std::get<0>(it->first) != key) {
      ++it;
      continue;
    }
    for (const auto& [family, counter] : it->second.counters) family->Remove(counter);
    for (const auto& [family, histogram] : it->second.histograms) family->Remove(histogram);
    it = cells_.erase(it);
  }
  cell_count_.Set(static_cast<double>(cells_.size()));
}

void FidelityMetrics::Observe(const FidelitySample& sample) {
  const FidelityLabels& labels = sample.labels;
  const PairKey pair = {labels.model, labels.source, labels.target};
  MutexLock lock(&mutex_);
  Cell* cell = nullptr;
  if (pairs_.count(pair) != 0) {
    cell =
        FindOrMake({pair, labels.plan, TaskLabel(options_.tasks, labels.task), labels.prefix_bucket,
                    static_cast<int>(labels.comparison), static_cast<int>(sample.along)},
                   static_cast<size_t>(std::max(options_.max_cells, 0)));
  }
  if (cell == nullptr) {
    homeless_.Increment();
    return;
  }
  cell->samples->Increment();
  if (!sample.valid) cell->invalid->Increment();
  if (sample.first_token_flip) cell->first_flips->Increment();
  for (size_t i = 0; i < sample.positions.size(); ++i) {
    const PositionFidelity& position = sample.positions[i];
    if (!position.valid) continue;
    const int group = PositionGroup(static_cast<int>(i));
    Add(cell->kl[group], position.kl);
    Add(cell->js, position.js);
    Add(cell->tv, position.tv);
    Add(cell->overlap, position.overlap);
    Add(cell->native_margin, position.native_margin);
    Add(cell->carried_margin, position.carried_margin);
    Add(cell->margin_shift, position.margin_shift);
    Add(cell->stop_shift, position.stop_shift);
    cell->positions[group]->Increment();
    if (position.flip) cell->flips[group]->Increment();
    if (position.fragile) cell->fragile->Increment();
  }
  if (sample.continuation != Continuation::kUnknown) {
    cell->continuation[static_cast<int>(sample.continuation) - 1]->Increment();
  }
  if (sample.stop_disagreement.has_value()) {
    cell->stops_compared->Increment();
    if (*sample.stop_disagreement) cell->stop_disagreements->Increment();
  }
}

}  // namespace carryover
