#include <cmath>
#include <utility>

#include "client/eval/report.h"

namespace carryover::eval {
namespace {

using Json = nlohmann::ordered_json;

Json Number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

Json ToJson(const Interval& interval) {
  return {{"mean", Number(interval.mean)},
          {"lower", Number(interval.lower)},
          {"upper", Number(interval.upper)}};
}

Json ToJson(const std::optional<double>& value) { return value ? Number(*value) : Json(nullptr); }

Json ToJson(const ArmSummary& arm) {
  Json json = {{"judged", arm.judged}};
  json["accuracy"] = arm.judged > 0 ? ToJson(arm.accuracy) : Json(nullptr);
  json["score"] = arm.scored > 0 ? ToJson(arm.score) : Json(nullptr);
  json["ttft_median_s"] = arm.ttft_median;
  return json;
}

Json ToJson(const FidelitySummary& from) {
  if (from.n == 0) return nullptr;
  Json json = {{"n", from.n}, {"invalid", from.invalid}, {"infinite_kl", from.infinite_kl}};
  json["first_token_flip"] = ToJson(from.flip);
  json["kl_nats"] = ToJson(from.kl);
  json["kl_p50"] = from.kl_p50;
  json["kl_p95"] = from.kl_p95;
  json["kl_p99"] = from.kl_p99;
  json["kl_first_nats"] = ToJson(from.kl_first);
  json["js_nats"] = ToJson(from.js);
  json["tv"] = ToJson(from.tv);
  json["tv_first"] = ToJson(from.tv_first);
  json["top10_overlap"] = ToJson(from.overlap);
  json["native_margin"] = ToJson(from.native_margin);
  json["carried_margin"] = ToJson(from.other_margin);
  json["margin_shift"] = ToJson(from.margin_shift);
  json["fragile"] = ToJson(from.fragile);
  for (int g = 0; g < kGroups; ++g) {
    json["flips"][GroupName(g)] = from.positions[g] > 0 ? ToJson(from.flips[g]) : Json(nullptr);
    if (from.positions[g] > 0) json["flips"][GroupName(g)]["positions"] = from.positions[g];
  }
  json["stop"] = ToJson(from.stop);
  json["stop_known"] = from.stop_known;
  json["stop_disagreement"] = from.stop_known > 0 ? ToJson(from.stop_disagreement) : Json(nullptr);
  json["continuation"] = from.continuation;
  json["divergence_median"] =
      from.divergence_median >= 0 ? Json(from.divergence_median) : Json(nullptr);
  return json;
}

Json ToJson(const Agreement& from) {
  return {{"n", from.n},
          {"same_answer", from.same_answer},
          {"same_stop", from.same_stop},
          {"judged", from.judged},
          {"same_outcome", from.same_outcome}};
}

const char* FindingName(Finding finding) {
  switch (finding) {
    case Finding::kKept:
      return "kept";
    case Finding::kBroken:
      return "broken";
    case Finding::kUndecided:
      return "undecided";
    case Finding::kNone:
      return "none";
  }
  return "none";
}

Json ToJson(const Cell& cell) {
  Json json = {{"task", cell.task},
               {"prefix_bucket", cell.bucket},
               {"plan", cell.plan},
               {"n", cell.n},
               {"prefixes", cell.prefixes},
               {"failed", cell.failed},
               {"carried_share", cell.carried_share}};
  json["verdict"] = {{"headline", cell.verdict.headline},
                     {"utility", FindingName(cell.verdict.utility)},
                     {"utility_text", cell.verdict.utility_text},
                     {"fidelity", FindingName(cell.verdict.fidelity)},
                     {"fidelity_text", cell.verdict.fidelity_text},
                     {"more_items", cell.verdict.more_items}};
  Json& utility = json["utility"];
  utility = {{"source", ToJson(cell.source)},
             {"native", ToJson(cell.native)},
             {"carried", ToJson(cell.carried)}};
  const bool judged = cell.paired.n() > 0;
  utility["both_right"] = static_cast<int>(cell.paired.both);
  utility["correct_to_wrong"] = static_cast<int>(cell.paired.only_first);
  utility["wrong_to_correct"] = static_cast<int>(cell.paired.only_second);
  utility["both_wrong"] = static_cast<int>(cell.paired.neither);
  utility["mcnemar_p"] = judged ? Json(cell.mcnemar) : Json(nullptr);
  utility["accuracy_loss"] = judged ? ToJson(cell.loss) : Json(nullptr);
  utility["score_loss"] = cell.native.scored > 0 ? ToJson(cell.score_loss) : Json(nullptr);
  Json& fidelity = json["fidelity"];
  fidelity = {{"carried", ToJson(cell.fidelity)},
              {"control", ToJson(cell.control)},
              {"old", ToJson(cell.old)}};
  fidelity["flip_excess"] = ToJson(cell.flip_excess);
  fidelity["tv_excess"] = ToJson(cell.tv_excess);
  fidelity["stop_excess"] = ToJson(cell.stop_excess);
  fidelity["recovered"] = ToJson(cell.recovered);
  fidelity["recovered_first"] = ToJson(cell.recovered_first);
  json["same_first_token"] = ToJson(cell.same_first);
  json["other_first_token"] = ToJson(cell.other_first);
  for (const MarginBin& bin : cell.margins) {
    json["right_by_native_margin"].push_back({{"from", bin.low},
                                              {"to", Number(bin.high)},
                                              {"right", bin.right},
                                              {"survived", bin.survived}});
  }
  json["ttft_s"] = {{"native", cell.native.ttft_median},
                    {"hit", cell.hit.ttft_median > 0 ? Json(cell.hit.ttft_median) : Json(nullptr)},
                    {"carried", cell.carried.ttft_median},
                    {"source", cell.source.ttft_median}};
  json["speedup"] = ToJson(cell.speedup);
  return json;
}

}  // namespace

Report MakeReport(Json run, std::map<int, ItemResult> rows) {
  Report report;
  report.run = std::move(run);
  report.rows = std::move(rows);
  if (report.run.contains("items") && report.run["items"].is_number_integer()) {
    report.wanted = report.run["items"].get<int>();
  }
  if (report.run.contains("max_loss") && report.run["max_loss"].is_number()) {
    report.limits.max_loss = report.run["max_loss"].get<double>();
  }
  for (const auto& [index, row] : report.rows) ++(row.ok() ? report.done : report.failed);
  report.cells = MakeCells(report.rows, report.limits);
  report.sensitivity = MakeSensitivity(report.rows);
  return report;
}

Json ReportToJson(const Report& report) {
  Json json = {{"schema_version", 1}, {"run", report.run}};
  json["limits"] = {{"max_loss", report.limits.max_loss},
                    {"flip", report.limits.flip},
                    {"tv", report.limits.tv},
                    {"stop", report.limits.stop},
                    {"min_prefixes", report.limits.min_prefixes}};
  json["counts"] = {{"items", report.wanted}, {"done", report.done}, {"failed", report.failed}};
  json["cells"] = Json::array();
  for (const Cell& cell : report.cells) json["cells"].push_back(ToJson(cell));
  if (!report.sensitivity.empty()) {
    json["sensitivity"] = Json::array();
    for (const SensitivitySummary& one : report.sensitivity) {
      json["sensitivity"].push_back(ToJson(one));
    }
  }
  json["items"] = Json::array();
  for (const auto& [index, row] : report.rows) json["items"].push_back(ResultToJson(row));
  return json;
}

}  // namespace carryover::eval
