// The trial that the hold-out makes, as Prometheus series: of requests that the gate would carry, a
// random few are served natively, so lengths, stops and first tokens of both arms may be compared
// without bias. A set of series a (model, source, target, plan, task, prefix bucket), both arms,
// made on first use, gone with its pair, and never more than a fixed number of sets. Thread-safe; a
// call takes one short lock.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <array>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "engine/observer.h"
#include "server/fidelity_metrics.h"

namespace carryover {

// From accepting a request to its first token, in vLLM's buckets, so that dashboards carry over.
const prometheus::Histogram::BucketBoundaries& FirstTokenBuckets();

// "stop_token", "stop_string", "length", "cancelled": the values of the label `reason`.
const char* FinishReasonName(FinishReason reason);

class TrialMetrics {
 public:
  // registry outlives this. At most options.max_cells sets, about 90 series each.
  TrialMetrics(const FidelityMetricsOptions& options, prometheus::Registry* registry);

  void Declare(const VersionPair& pair);
  void Remove(const VersionPair& pair);
  // A request of a pair that is not declared, or that finds no room, is only counted.
  void Observe(const TrialRecord& record);

 private:
  static constexpr int kReasons = 4;
  using PairKey = std::tuple<std::string, std::string, std::string>;   // model, source, target
  using CellKey = std::tuple<PairKey, std::string, std::string, int>;  // plan, task, bucket

  struct Arm {
    prometheus::Histogram* tokens;
    prometheus::Histogram* first_token;
    std::array<prometheus::Counter*, kReasons> finished;
  };
  using Cell = std::array<Arm, 2>;  // carried, held_out

  Cell* FindOrMake(const CellKey& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const FidelityMetricsOptions options_;
  prometheus::Family<prometheus::Histogram>& tokens_;
  prometheus::Family<prometheus::Histogram>& first_token_;
  prometheus::Family<prometheus::Counter>& finished_;
  prometheus::Counter& homeless_;

  Mutex mutex_;
  std::set<PairKey> pairs_ ABSL_GUARDED_BY(mutex_);
  std::map<CellKey, Cell> cells_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace carryover
