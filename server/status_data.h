// What the status page shows, as JSON for its script (/status.json): the versions, the engine's
// snapshot and what the Prometheus series say, summed up. It holds labels and numbers only: no
// text, tenant, salt or id of a request ever gets here. Thread-safe.
#pragma once

#include <prometheus/collectable.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/types/span.h"
#include "base/mutex.h"
#include "engine/engine.h"
#include "server/gate_change_log.h"

namespace carryover {

// Everything that one answer is made from.
struct StatusFacts {
  std::string build;
  bool serving = false;  // health
  double unix_seconds = 0;
  double started_unix_seconds = 0;
  std::vector<VersionInfo> versions;
  EngineSnapshot engine;
  std::vector<prometheus::MetricFamily> families;
  std::vector<LoggedGateChange> gate_changes;
};

// No table in it has more rows; what was left out is told beside, and the worst comes first.
inline constexpr size_t kStatusRows = 100;

// Latencies come as Prometheus histograms (bounds and cumulative counts), so that the page can take
// the difference of two answers; cells of fidelity come as quantiles, interpolated linearly within
// a bucket as PromQL's histogram_quantile does.
std::string StatusJson(const StatusFacts& facts);

// Makes it from what there is now, and so seldom that pages that are open never cost more than a
// twentieth of a core, however many they are.
class StatusSource {
 public:
  // collect is called from the caller's thread, by one at a time.
  explicit StatusSource(std::function<StatusFacts()> collect);

  std::string Json();

 private:
  const std::function<StatusFacts()> collect_;
  Mutex mutex_;
  std::string json_ ABSL_GUARDED_BY(mutex_);
  std::chrono::steady_clock::time_point next_ ABSL_GUARDED_BY(mutex_){};
};

}  // namespace carryover
