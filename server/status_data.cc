#include "server/status_data.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "nlohmann/json.hpp"
#include "server/status_series.h"

namespace carryover {
namespace {

using Json = nlohmann::ordered_json;
using prometheus::MetricFamily;

constexpr auto kShortestInterval = std::chrono::milliseconds(500);
constexpr int kIntervalOverCost = 20;

// Keeps the first rows; returns how many went.
template <typename T>
size_t Cut(std::vector<T>* rows) {
  const size_t all = rows->size();
  if (all > kStatusRows) rows->resize(kStatusRows);
  return all - rows->size();
}

// A value outside of what JSON knows becomes null.
Json Number(std::optional<double> value) { return value.has_value() ? Json(*value) : Json(); }

Json ToJson(const HistogramSum& histogram) {
  Json bounds = Json::array(), counts = Json::array();
  for (size_t i = 0; i < histogram.bounds.size(); ++i) {
    bounds.push_back(histogram.bounds[i]);
    counts.push_back(histogram.cumulative[i]);
  }
  return {{"count", histogram.count},
          {"sum", histogram.sum},
          {"bounds", std::move(bounds)},
          {"cumulative", std::move(counts)}};
}

// {label's value: histogram} of a family, its other labels summed over.
Json HistogramsBy(const SeriesIndex& series, const char* family, const char* label) {
  std::map<std::string, HistogramSum> sums;
  for (const auto& metric : series.Of(family)) sums[LabelOf(metric, label)].Add(metric.histogram);
  Json all = Json::object();
  for (const auto& [value, sum] : sums) all[value] = ToJson(sum);
  return all;
}

Json CountersBy(const SeriesIndex& series, const char* family, const char* label) {
  std::map<std::string, double> sums;
  for (const auto& metric : series.Of(family)) sums[LabelOf(metric, label)] += metric.counter.value;
  return sums;
}

void AddRequests(const StatusFacts& facts, const SeriesIndex& series, Json* out) {
  const EngineSnapshot& now = facts.engine;
  Json failed = Json::array();
  for (const auto& metric : series.Of("carryover_requests_total")) {
    const std::string code = LabelOf(metric, "code");
    if (code == "OK" || metric.counter.value == 0) continue;
    failed.push_back(
        {{"method", LabelOf(metric, "method")}, {"code", code}, {"count", metric.counter.value}});
  }
  (*out)["requests"] = {
      {"running", now.running},
      {"waiting", now.waiting},
      {"waiting_tokens", now.waiting_tokens},
      {"rejected", CountersBy(series, "carryover_requests_rejected_total", "reason")},
      {"finished", CountersBy(series, "carryover_finished_total", "reason")},
      {"failed", std::move(failed)},
  };
  (*out)["blocks"] = {{"total", now.device_blocks},
                      {"used", now.device_blocks_used},
                      {"active", now.device_blocks_active}};
  (*out)["tokens"] = {
      {"prompt", CountersBy(series, "carryover_prompt_tokens_total", "source")},
      {"generated", series.Sum("carryover_generation_tokens_total")},
  };
  std::map<std::string, std::map<std::string, HistogramSum>> parts;
  for (const auto& metric : series.Of("carryover_first_token_part_seconds")) {
    parts[LabelOf(metric, "plan")][LabelOf(metric, "part")].Add(metric.histogram);
  }
  Json part_means = Json::object();
  for (const auto& [plan, sums] : parts) {
    for (const auto& [part, sum] : sums) part_means[plan][part] = Number(sum.Mean());
  }
  (*out)["latency"] = {
      {"first_token_part_means", std::move(part_means)},
      {"first_token", HistogramsBy(series, "carryover_time_to_first_token_seconds", "plan")},
      {"trial", HistogramsBy(series, "carryover_trial_time_to_first_token_seconds", "arm")},
      {"inter_token", ToJson(series.Histogram("carryover_inter_token_latency_seconds"))},
      {"queue", ToJson(series.Histogram("carryover_queue_seconds"))},
      {"block_load", HistogramsBy(series, "carryover_block_load_seconds", "tier")},
  };
}

void AddVersions(const StatusFacts& facts, Json* out) {
  std::vector<VersionInfo> versions = facts.versions;
  std::stable_sort(
      versions.begin(), versions.end(),
      [](const VersionInfo& a, const VersionInfo& b) { return (a.share > 0) > (b.share > 0); });
  const size_t left_out = Cut(&versions);
  Json rows = Json::array();
  for (const VersionInfo& info : versions) {
    rows.push_back({{"model", info.model},
                    {"version", info.version},
                    {"state", info.state},
                    {"share", info.share},
                    {"carry_from", info.carry_from},
                    {"weights_dtype", info.weights_dtype},
                    {"kv_dtype", info.kv_dtype},
                    {"weight_bytes", info.weight_bytes},
                    {"running", info.running_requests},
                    {"cached_tokens", info.cached_tokens},
                    {"fingerprint", info.fingerprint.substr(0, 12)}});
  }
  (*out)["versions"] = {{"rows", std::move(rows)}, {"left_out", left_out}};
}

// How bad a cell looks: closed before all others, then by excess over the floor in limits.
std::pair<int, double> Badness(const GateRow& row) {
  if (row.samples == 0) return {row.state == "closed" ? 1 : 0, -1};
  double worst = 0;
  for (const GateBound& bound : row.bounds) {
    if (bound.limit > 0) worst = std::max(worst, (bound.mean - bound.floor) / bound.limit);
  }
  return {row.state == "closed" ? 1 : 0, worst};
}

Json ToJson(const GateRow& row) {
  Json measures = Json::array();
  for (const GateBound& bound : row.bounds) {
    measures.push_back({{"name", bound.measure},
                        {"mean", bound.mean},
                        {"lower", bound.lower},
                        {"upper", bound.upper},
                        {"limit", bound.limit},
                        {"floor", bound.floor}});
  }
  return {{"model", row.cell.model},
          {"source", row.cell.source},
          {"target", row.cell.target},
          {"plan", row.cell.plan},
          {"task", row.cell.task},
          {"prefix_bucket", row.cell.prefix_bucket},
          {"answer", row.cell.answer},
          {"state", row.state},
          {"evidence_state", row.evidence_state},
          {"forced", row.forced},
          {"borrowed", row.borrowed},
          {"starved", row.starved},
          {"samples", row.samples},
          {"dropped", row.dropped},
          {"prefixes", row.prefixes},
          {"controls", row.controls},
          {"measures", std::move(measures)},
          {"explanation", row.explanation}};
}

void AddGate(const StatusFacts& facts, const SeriesIndex& series, Json* out) {
  std::vector<const GateRow*> rows;
  std::map<std::string, int> states = {
      {"learning", 0}, {"open", 0}, {"repaired", 0}, {"closed", 0}};
  if (facts.engine.gates != nullptr) {
    for (const GateRow& row : *facts.engine.gates) {
      rows.push_back(&row);
      ++states[row.state];
    }
  }
  std::stable_sort(rows.begin(), rows.end(), [](const GateRow* a, const GateRow* b) {
    const auto bad_a = Badness(*a), bad_b = Badness(*b);
    return bad_a != bad_b ? bad_a > bad_b : a->samples > b->samples;
  });
  const size_t left_out = Cut(&rows);
  Json shown = Json::array();
  for (const GateRow* row : rows) shown.push_back(ToJson(*row));

  Json transitions = Json::array();
  for (const auto& metric : series.Of("carryover_gate_transitions_total")) {
    transitions.push_back({{"from", LabelOf(metric, "from")},
                           {"to", LabelOf(metric, "to")},
                           {"reason", LabelOf(metric, "reason")},
                           {"count", metric.counter.value}});
  }
  Json recent = Json::array();
  for (const LoggedGateChange& logged : facts.gate_changes) {
    const GateCell& cell = logged.change.cell;
    recent.push_back({{"time", logged.unix_seconds},
                      {"model", cell.model},
                      {"source", cell.source},
                      {"target", cell.target},
                      {"task", cell.task},
                      {"prefix_bucket", cell.prefix_bucket},
                      {"answer", cell.answer},
                      {"from", logged.change.from},
                      {"to", logged.change.to},
                      {"reason", logged.change.cause},
                      {"hidden", logged.change.hidden}});
  }
  (*out)["gate"] = {{"cells", facts.engine.gate_cells},
                    {"refused", facts.engine.gate_cells_refused},
                    {"states", states},
                    {"rows", std::move(shown)},
                    {"left_out", left_out},
                    {"transitions", std::move(transitions)},
                    {"recent", std::move(recent)}};
}

Json ToJson(const FidelityNumbers& numbers) {
  Json out = {{"samples", numbers.samples},
              {"invalid", numbers.invalid},
              {"flips", numbers.flips},
              {"positions", numbers.positions},
              {"fragile", numbers.fragile},
              {"stops_compared", numbers.stops_compared},
              {"stop_disagreements", numbers.stop_disagreements}};
  out["kl"] = {{"p50", Number(numbers.kl.Quantile(0.5))},
               {"p95", Number(numbers.kl.Quantile(0.95))},
               {"p99", Number(numbers.kl.Quantile(0.99))}};
  out["kl_mean"] = Number(numbers.kl.Mean());
  out["tv"] = Number(numbers.tv.Mean());
  out["margin_native"] = Number(numbers.margin_native.Quantile(0.5));
  out["margin_carried"] = Number(numbers.margin_carried.Quantile(0.5));
  out["margin_shift"] = Number(numbers.margin_shift.Mean());
  return out;
}

void AddFidelity(const SeriesIndex& series, Json* out) {
  std::vector<FidelityRow> rows = ReadFidelity(series);
  const auto silent = std::stable_partition(rows.begin(), rows.end(), [](const FidelityRow& row) {
    return row.carried.samples > 0 || row.control.samples > 0 || row.old.samples > 0;
  });
  const size_t without_samples = rows.end() - silent;
  rows.erase(silent, rows.end());
  FidelityNumbers total;
  for (const FidelityRow& row : rows) total.Add(row.carried);
  std::stable_sort(rows.begin(), rows.end(), [](const FidelityRow& a, const FidelityRow& b) {
    return a.Badness() > b.Badness();
  });
  const size_t left_out = Cut(&rows);
  Json shown = Json::array();
  for (const FidelityRow& row : rows) {
    shown.push_back({{"model", row.model},
                     {"source", row.source},
                     {"target", row.target},
                     {"plan", row.plan},
                     {"task", row.task},
                     {"prefix_bucket", row.prefix_bucket},
                     {"along", row.along},
                     {"carried", ToJson(row.carried)},
                     {"control", ToJson(row.control)},
                     {"old", ToJson(row.old)}});
  }
  (*out)["fidelity"] = {
      {"cells", series.Sum("carryover_fidelity_cells")},
      {"cells_limit", series.Sum("carryover_fidelity_cells_limit")},
      {"without_cell", series.Sum("carryover_fidelity_samples_without_cell_total")},
      {"without_samples", without_samples},
      {"rows", std::move(shown)},
      {"left_out", left_out},
      {"margins",
       {{"native", ToJson(total.margin_native)}, {"carried", ToJson(total.margin_carried)}}},
  };
}

void AddShadows(const StatusFacts& facts, const SeriesIndex& series, Json* out) {
  std::map<std::string, std::map<std::string, double>> arms;
  for (const auto& metric : series.Of("carryover_shadow_total")) {
    arms[LabelOf(metric, "arm")][LabelOf(metric, "outcome")] += metric.counter.value;
  }
  (*out)["shadows"] = {
      {"waiting", facts.engine.shadows_waiting},
      {"arms", arms},
      {"lag", ToJson(series.Histogram("carryover_shadow_lag_seconds"))},
      {"tokens", series.Sum("carryover_shadow_tokens_total")},
      {"refreshed_blocks", series.Sum("carryover_refresh_blocks_total")},
  };
}

void AddStore(const StatusFacts& facts, const SeriesIndex& series, Json* out) {
  std::vector<StoreRow> rows = facts.engine.store;
  std::stable_sort(rows.begin(), rows.end(),
                   [](const StoreRow& a, const StoreRow& b) { return a.bytes > b.bytes; });
  const size_t left_out = Cut(&rows);
  Json shown = Json::array();
  for (const StoreRow& row : rows) {
    shown.push_back({{"model", row.model},
                     {"provenance", row.provenance},
                     {"tier", row.tier},
                     {"blocks", row.blocks},
                     {"bytes", row.bytes},
                     {"hit_tokens", row.hit_tokens}});
  }
  const auto counts = [](const std::vector<CounterRow>& from) {
    Json all = Json::array();
    for (const CounterRow& row : from) {
      if (row.count == 0) continue;
      all.push_back({{"tier", row.first}, {"reason", row.second}, {"count", row.count}});
    }
    return all;
  };
  (*out)["store"] = {
      {"rows", std::move(shown)},
      {"left_out", left_out},
      {"lookup_tokens", series.Sum("carryover_store_lookup_tokens_total")},
      {"hit_tokens", series.Sum("carryover_store_hit_tokens_total")},
      {"evictions", counts(facts.engine.evictions)},
      {"rejects", counts(facts.engine.rejects)},
  };
}

}  // namespace

std::string StatusJson(const StatusFacts& facts) {
  const SeriesIndex series(facts.families);
  Json out = {
      {"build", facts.build},
      {"now", facts.unix_seconds},
      {"started", facts.started_unix_seconds},
      {"serving", facts.serving},
      {"draining", facts.engine.draining},
      {"provenance_violations", facts.engine.provenance_violations},
      {"preemptions", facts.engine.preemptions},
  };
  AddVersions(facts, &out);
  AddRequests(facts, series, &out);
  AddGate(facts, series, &out);
  AddFidelity(series, &out);
  AddShadows(facts, series, &out);
  AddStore(facts, series, &out);
  return out.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

StatusSource::StatusSource(std::function<StatusFacts()> collect) : collect_(std::move(collect)) {}

std::string StatusSource::Json() {
  MutexLock lock(&mutex_);
  const auto begin = std::chrono::steady_clock::now();
  if (begin >= next_) {
    json_ = StatusJson(collect_());
    const auto end = std::chrono::steady_clock::now();
    next_ = end + std::max<std::chrono::steady_clock::duration>(kShortestInterval,
                                                                kIntervalOverCost * (end - begin));
  }
  return json_;
}

}  // namespace carryover
