// Gauges and totals read at each scrape: the engine's snapshot, its versions, and the process.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>

#include <vector>

#include "engine/engine.h"

namespace carryover {

// The version of this program, as `carryover-server --version` prints it.
extern const char kBuildVersion[];

class EngineCollector final : public prometheus::Collectable {
 public:
  explicit EngineCollector(Engine* engine) : engine_(engine) {}  // outlives this
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  Engine* const engine_;
};

// process_*, by the names that all Prometheus clients use.
class ProcessCollector final : public prometheus::Collectable {
 public:
  std::vector<prometheus::MetricFamily> Collect() const override;
};

}  // namespace carryover
