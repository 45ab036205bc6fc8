#include "server/status_series.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "absl/strings/numbers.h"

namespace carryover {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricType;

// A flip in one of three samples is not yet worse than 5 in 100.
constexpr double kFewSamples = 20;

// Model, source, target, plan, task, bucket.
using Cell = std::tuple<std::string, std::string, std::string, std::string, std::string, int>;

// The labels of a series of a cell, read in one pass.
struct CellLabels {
  Cell cell;
  std::string comparison, along, path;
};

CellLabels ReadLabels(const ClientMetric& metric) {
  CellLabels labels;
  auto& [model, source, target, plan, task, bucket] = labels.cell;
  for (const ClientMetric::Label& label : metric.label) {
    if (label.name == "model") {
      model = label.value;
    } else if (label.name == "source") {
      source = label.value;
    } else if (label.name == "target") {
      target = label.value;
    } else if (label.name == "plan") {
      plan = label.value;
    } else if (label.name == "task") {
      task = label.value;
    } else if (label.name == "prefix_bucket") {
      if (!absl::SimpleAtoi(label.value, &bucket)) bucket = 0;
    } else if (label.name == "comparison") {
      labels.comparison = label.value;
    } else if (label.name == "along") {
      labels.along = label.value;
    } else if (label.name == "path") {
      labels.path = label.value;
    }
  }
  return labels;
}

class FidelityReader {
 public:
  explicit FidelityReader(const SeriesIndex& series) : series_(series) {}

  void Counters(const char* family, double FidelityNumbers::*into) {
    for (const ClientMetric& metric : series_.Of(family)) {
      Find(ReadLabels(metric))->*into += metric.counter.value;
    }
  }
  void Histograms(const char* family, HistogramSum FidelityNumbers::*into,
                  absl::string_view path = "") {
    for (const ClientMetric& metric : series_.Of(family)) {
      if (metric.histogram.sample_count == 0) continue;
      const CellLabels labels = ReadLabels(metric);
      if (labels.path == path) (Find(labels)->*into).Add(metric.histogram);
    }
  }

  std::vector<FidelityRow> Rows() {
    std::vector<FidelityRow> rows;
    for (const auto& [cell, found] : cells_) {
      for (const auto& [along, carried] : found.carried) {
        FidelityRow row;
        std::tie(row.model, row.source, row.target, row.plan, row.task, row.prefix_bucket) = cell;
        row.along = along;
        row.carried = carried;
        row.control = found.control;
        row.old = found.old;
        rows.push_back(std::move(row));
      }
    }
    return rows;
  }

 private:
  struct Found {
    std::map<std::string, FidelityNumbers> carried;  // by along
    FidelityNumbers control, old;
  };

  FidelityNumbers* Find(const CellLabels& labels) {
    Found& found = cells_[labels.cell];
    if (labels.comparison == "control") return &found.control;
    if (labels.comparison == "old") return &found.old;
    return &found.carried[labels.along];
  }

  const SeriesIndex& series_;
  std::map<Cell, Found> cells_;
};

}  // namespace

void HistogramSum::Add(const ClientMetric::Histogram& histogram) {
  HistogramSum other;
  other.count = histogram.sample_count;
  other.sum = histogram.sample_sum;
  for (const ClientMetric::Bucket& bucket : histogram.bucket) {
    if (!std::isfinite(bucket.upper_bound)) continue;
    other.bounds.push_back(bucket.upper_bound);
    other.cumulative.push_back(bucket.cumulative_count);
  }
  Add(other);
}

void HistogramSum::Add(const HistogramSum& other) {
  if (bounds.empty()) {
    bounds = other.bounds;
    cumulative.assign(bounds.size(), 0);
  }
  if (bounds != other.bounds) return;
  count += other.count;
  sum += other.sum;
  for (size_t i = 0; i < bounds.size(); ++i) cumulative[i] += other.cumulative[i];
}

std::optional<double> HistogramSum::Quantile(double q) const {
  if (count == 0 || bounds.empty()) return std::nullopt;
  const double rank = q * static_cast<double>(count);
  const auto found = std::find_if(cumulative.begin(), cumulative.end(),
                                  [&](uint64_t upto) { return static_cast<double>(upto) >= rank; });
  if (found == cumulative.end()) return bounds.back();
  const size_t i = found - cumulative.begin();
  if (i == 0 && bounds[0] <= 0) return bounds[0];
  const double low = i == 0 ? 0 : bounds[i - 1];
  const double before = i == 0 ? 0 : static_cast<double>(cumulative[i - 1]);
  const double inside = static_cast<double>(cumulative[i]) - before;
  return inside <= 0 ? bounds[i] : low + (bounds[i] - low) * (rank - before) / inside;
}

std::optional<double> HistogramSum::Mean() const {
  if (count == 0 || !std::isfinite(sum)) return std::nullopt;
  return sum / static_cast<double>(count);
}

std::string LabelOf(const ClientMetric& metric, absl::string_view name) {
  for (const ClientMetric::Label& label : metric.label) {
    if (label.name == name) return label.value;
  }
  return "";
}

SeriesIndex::SeriesIndex(absl::Span<const prometheus::MetricFamily> families) {
  for (const prometheus::MetricFamily& family : families) families_[family.name] = &family;
}

const std::vector<ClientMetric>& SeriesIndex::Of(const std::string& family) const {
  static const auto* none = new std::vector<ClientMetric>;
  const auto found = families_.find(family);
  return found == families_.end() ? *none : found->second->metric;
}

double SeriesIndex::Sum(const std::string& family) const {
  const auto found = families_.find(family);
  if (found == families_.end()) return 0;
  double sum = 0;
  for (const ClientMetric& metric : found->second->metric) {
    sum += found->second->type == MetricType::Counter ? metric.counter.value : metric.gauge.value;
  }
  return sum;
}

HistogramSum SeriesIndex::Histogram(const std::string& family) const {
  HistogramSum sum;
  for (const ClientMetric& metric : Of(family)) sum.Add(metric.histogram);
  return sum;
}

void FidelityNumbers::Add(const FidelityNumbers& other) {
  samples += other.samples;
  invalid += other.invalid;
  flips += other.flips;
  positions += other.positions;
  fragile += other.fragile;
  stops_compared += other.stops_compared;
  stop_disagreements += other.stop_disagreements;
  kl.Add(other.kl);
  tv.Add(other.tv);
  margin_native.Add(other.margin_native);
  margin_carried.Add(other.margin_carried);
  margin_shift.Add(other.margin_shift);
}

double FidelityRow::Badness() const {
  const auto rate = [](const FidelityNumbers& numbers) {
    return numbers.flips / (numbers.samples + kFewSamples);
  };
  return rate(carried) - rate(control);
}

std::vector<FidelityRow> ReadFidelity(const SeriesIndex& series) {
  FidelityReader reader(series);
  reader.Counters("carryover_fidelity_samples_total", &FidelityNumbers::samples);
  reader.Counters("carryover_fidelity_invalid_samples_total", &FidelityNumbers::invalid);
  reader.Counters("carryover_first_token_flips_total", &FidelityNumbers::flips);
  reader.Counters("carryover_fidelity_positions_total", &FidelityNumbers::positions);
  reader.Counters("carryover_fragile_total", &FidelityNumbers::fragile);
  reader.Counters("carryover_stops_compared_total", &FidelityNumbers::stops_compared);
  reader.Counters("carryover_stop_disagreements_total", &FidelityNumbers::stop_disagreements);
  reader.Histograms("carryover_fidelity_kl_nats", &FidelityNumbers::kl);
  reader.Histograms("carryover_fidelity_tv", &FidelityNumbers::tv);
  reader.Histograms("carryover_answer_margin_nats", &FidelityNumbers::margin_native, "native");
  reader.Histograms("carryover_answer_margin_nats", &FidelityNumbers::margin_carried, "carried");
  reader.Histograms("carryover_answer_margin_shift_nats", &FidelityNumbers::margin_shift);
  return reader.Rows();
}

}  // namespace carryover
