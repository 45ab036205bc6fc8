// What compared requests say, as Prometheus series, one set of them a cell: (model, source, target,
// plan, task, prefix bucket, comparison, along). The sets of a declared pair exist from the start,
// those of a removed pair are gone with it, and there are never more than a fixed number of them.
// Thread-safe; a call takes one short lock.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <array>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "engine/observer.h"

namespace carryover {

struct FidelityMetricsOptions {
  std::vector<std::string> ladder = {"direct"};  // plans
  std::vector<std::string> tasks;  // labels that are shown; every other task becomes "other"
  int max_cells = 256;             // about 170 series each
};

class FidelityMetrics {
 public:
  // registry outlives this.
  FidelityMetrics(const FidelityMetricsOptions& options, prometheus::Registry* registry);

  void Declare(const VersionPair& pair);
  void Remove(const VersionPair& pair);
  // A sample of a pair that is not declared, or that finds no room, is only counted.
  void Observe(const FidelitySample& sample);

 private:
  using CounterFamily = prometheus::Family<prometheus::Counter>;
  using HistogramFamily = prometheus::Family<prometheus::Histogram>;
  using PairKey = std::tuple<std::string, std::string, std::string>;  // model, source, target
  // Plan, task, bucket, comparison, along.
  using CellKey = std::tuple<PairKey, std::string, std::string, int, int, int>;

  // The series of one cell; they belong to their families.
  struct Cell {
    std::array<prometheus::Histogram*, kPositionGroups> kl;
    prometheus::Histogram* js;
    prometheus::Histogram* tv;
    prometheus::Histogram* overlap;
    prometheus::Histogram* native_margin;
    prometheus::Histogram* carried_margin;
    prometheus::Histogram* margin_shift;
    prometheus::Histogram* stop_shift;
    std::array<prometheus::Counter*, kPositionGroups> positions;
    std::array<prometheus::Counter*, kPositionGroups> flips;
    std::array<prometheus::Counter*, 3> continuation;  // same, same_so_far, diverged
    prometheus::Counter* samples;
    prometheus::Counter* invalid;
    prometheus::Counter* first_flips;
    prometheus::Counter* fragile;
    prometheus::Counter* stops_compared;
    prometheus::Counter* stop_disagreements;
    // How to take all of them away again.
    std::vector<std::pair<CounterFamily*, prometheus::Counter*>> counters;
    std::vector<std::pair<HistogramFamily*, prometheus::Histogram*>> histograms;
  };

  // Null when there is no room.
  Cell* FindOrMake(const CellKey& key, size_t limit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const FidelityMetricsOptions options_;
  HistogramFamily& kl_;
  HistogramFamily& js_;
  HistogramFamily& tv_;
  HistogramFamily& overlap_;
  HistogramFamily& margin_;
  HistogramFamily& margin_shift_;
  HistogramFamily& stop_shift_;
  CounterFamily& positions_;
  CounterFamily& flips_;
  CounterFamily& continuation_;
  CounterFamily& samples_;
  CounterFamily& invalid_;
  CounterFamily& first_flips_;
  CounterFamily& fragile_;
  CounterFamily& stops_compared_;
  CounterFamily& stop_disagreements_;
  prometheus::Gauge& cell_count_;
  prometheus::Counter& homeless_;

  Mutex mutex_;
  std::set<PairKey> pairs_ ABSL_GUARDED_BY(mutex_);
  std::map<CellKey, Cell> cells_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace carryover
