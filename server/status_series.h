// Reads collected Prometheus families for the status page: sums over labels, merged histograms and
// their quantiles, the cells of fidelity. No state.
#pragma once

#include <prometheus/metric_family.h>

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace carryover {

// The sum of histograms with equal bounds.
struct HistogramSum {
  uint64_t count = 0;
  double sum = 0;
  std::vector<double> bounds;        // finite ones
  std::vector<uint64_t> cumulative;  // observations up to bounds[i]

  // Ignores a histogram with other bounds than were added before.
  void Add(const prometheus::ClientMetric::Histogram& histogram);
  void Add(const HistogramSum& other);
  // Linear within a bucket; beyond the last bound it is that bound. None without observations.
  std::optional<double> Quantile(double q) const;
  std::optional<double> Mean() const;
};

// "" when there is no such label.
std::string LabelOf(const prometheus::ClientMetric& metric, absl::string_view name);

class SeriesIndex {
 public:
  // families outlive the index.
  explicit SeriesIndex(absl::Span<const prometheus::MetricFamily> families);

  // Empty when there is no such family.
  const std::vector<prometheus::ClientMetric>& Of(const std::string& family) const;
  double Sum(const std::string& family) const;  // of counters or gauges
  HistogramSum Histogram(const std::string& family) const;

 private:
  std::unordered_map<std::string, const prometheus::MetricFamily*> families_;
};

// What one comparison of a cell says.
struct FidelityNumbers {
  double samples = 0, invalid = 0, flips = 0;
  double positions = 0, fragile = 0;
  double stops_compared = 0, stop_disagreements = 0;
  HistogramSum kl, tv, margin_native, margin_carried, margin_shift;  // over all positions

  void Add(const FidelityNumbers& other);
};

struct FidelityRow {
  std::string model, source, target, plan, task;
  int prefix_bucket = 0;
  std::string along;  // whose text led the arms: "native", "served"
  FidelityNumbers carried;
  FidelityNumbers control, old;  // of the cell, whichever text led

  // First-token flips over the floor, drawn towards 0 where samples are few.
  double Badness() const;
};

// A row for each (pair, plan, task, bucket, along), ordered by it.
std::vector<FidelityRow> ReadFidelity(const SeriesIndex& series);

}  // namespace carryover
