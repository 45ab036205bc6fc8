// eval.html: verdicts first, then for each task utility beside fidelity, then tables, then where it
// all comes from.
#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/eval/report.h"
#include "client/eval/report_charts.h"
#include "client/eval/report_style.h"
#include "client/eval/svg.h"

namespace carryover::eval {
namespace {

std::string Percent(double value) { return absl::StrFormat("%.1f %%", 100 * value); }

std::string Rate(const Interval& rate) {
  return absl::StrFormat("%.1f %% <small>%.1f–%.1f</small>", 100 * rate.mean, 100 * rate.lower,
                         100 * rate.upper);
}

std::string Mean(const Interval& mean) {
  return absl::StrFormat("%.3g <small>%.3g–%.3g</small>", mean.mean, mean.lower, mean.upper);
}

std::string Signed(const Interval& mean) {
  return absl::StrFormat("%+.2f <small>%+.2f to %+.2f</small>", mean.mean, mean.lower, mean.upper);
}

std::string Milliseconds(double seconds) {
  return seconds <= 0 ? "–" : absl::StrFormat("%.1f ms", 1000 * seconds);
}

std::string Lengths(const Cell& cell) {
  return cell.bucket == 0 ? "all" : absl::StrCat(cell.bucket, "–", 2 * cell.bucket - 1);
}

// A table whose cells are HTML.
class HtmlTable {
 public:
  explicit HtmlTable(const std::vector<std::string>& heading) {
    out_ = "<div class=\"wide\"><table><thead><tr>";
    for (const std::string& cell : heading) absl::StrAppend(&out_, "<th>", cell, "</th>");
    out_ += "</tr></thead><tbody>";
  }
  void Row(const std::vector<std::string>& cells, bool strong = false) {
    out_ += strong ? "<tr class=\"strong\">" : "<tr>";
    for (const std::string& cell : cells) absl::StrAppend(&out_, "<td>", cell, "</td>");
    out_ += "</tr>";
  }
  std::string Done() const { return out_ + "</tbody></table></div>"; }

 private:
  std::string out_;
};

const char* ChipClass(Finding finding) {
  switch (finding) {
    case Finding::kKept:
      return "good";
    case Finding::kBroken:
      return "bad";
    default:
      return "open";
  }
}

std::string Chip(const char* name, Finding finding) {
  const char* const word = finding == Finding::kKept     ? "kept"
                           : finding == Finding::kBroken ? "not kept"
                           : finding == Finding::kNone   ? "n/a"
                                                         : "undecided";
  return absl::StrCat("<span class=\"chip ", ChipClass(finding), "\">", name, ": ", word,
                      "</span> ");
}

std::string Name(const Cell& cell) {
  return absl::StrCat(EscapeHtml(cell.task), " <small>", EscapeHtml(cell.plan), "</small>");
}

void Verdicts(const std::vector<const Cell*>& cells, std::string* out) {
  for (const Cell* cell : cells) {
    const Verdict& verdict = cell->verdict;
    if (cell->bucket == 0) {
      absl::StrAppend(out, "<section class=\"card\"><h3>", Name(*cell), "</h3><p>",
                      Chip("task", verdict.utility), Chip("behaviour", verdict.fidelity), "<b>",
                      EscapeHtml(verdict.headline), "</b> <small>n = ", cell->n, ", ",
                      cell->prefixes,
                      " prefixes</small></p><p>Utility: ", EscapeHtml(verdict.utility_text),
                      ".</p><p>Fidelity: ", EscapeHtml(verdict.fidelity_text),
                      ".</p><details><summary>By length</summary>");
      HtmlTable table({"prefix", "n", "verdict", "utility", "fidelity"});
      for (const Cell* other : cells) {
        if (other->task != cell->task || other->plan != cell->plan || other->bucket == 0) continue;
        table.Row(
            {Lengths(*other), absl::StrCat(other->n),
             Chip("task", other->verdict.utility) + Chip("behaviour", other->verdict.fidelity),
             EscapeHtml(other->verdict.utility_text), EscapeHtml(other->verdict.fidelity_text)});
      }
      absl::StrAppend(out, table.Done(), "</details></section>");
    }
  }
}

void UtilityTable(const std::vector<Cell>& cells, std::string* out) {
  HtmlTable table({"task", "prefix", "n", "old version", "natively", "carried", "loss, points",
                   "right → wrong", "wrong → right", "McNemar p"});
  for (const Cell& cell : cells) {
    const auto rate = [](const ArmSummary& arm) {
      return arm.judged > 0   ? Rate(arm.accuracy)
             : arm.scored > 0 ? Mean(arm.score)
                              : std::string("n/a");
    };
    const bool judged = cell.paired.n() > 0;
    table.Row({Name(cell), Lengths(cell), absl::StrCat(cell.n), rate(cell.source),
               rate(cell.native), rate(cell.carried),
               judged ? Signed({100 * cell.loss.mean, 100 * cell.loss.lower, 100 * cell.loss.upper})
                      : "n/a",
               judged ? absl::StrCat(static_cast<int>(cell.paired.only_first)) : "n/a",
               judged ? absl::StrCat(static_cast<int>(cell.paired.only_second)) : "n/a",
               judged ? absl::StrFormat("%.3g", cell.mcnemar) : "n/a"},
              cell.bucket == 0);
  }
  absl::StrAppend(out, "<h2>Utility</h2>", table.Done());
}

void FidelityTables(const std::vector<Cell>& cells, std::string* out) {
  HtmlTable table({"task", "prefix", "compared", "KL, nats", "KL p50 / p95 / p99", "JS", "TV",
                   "top-10 overlap", "first flip", "flips 1 / 2–4 / 5–16", "fragile", "stop",
                   "recovered"});
  for (const Cell& cell : cells) {
    for (const auto& [name, summary] :
         {std::pair("carried", &cell.fidelity), std::pair("A/A", &cell.control),
          std::pair("old version", &cell.old)}) {
      if (summary->n == 0) continue;
      std::string flips;
      for (int g = 0; g < kGroups; ++g) {
        absl::StrAppend(&flips, g > 0 ? " / " : "",
                        summary->positions[g] > 0 ? Percent(summary->flips[g].mean) : "–");
      }
      const bool carried = summary == &cell.fidelity;
      table.Row(
          {Name(cell), Lengths(cell), absl::StrCat(name, " <small>", summary->n, "</small>"),
           Mean(summary->kl),
           absl::StrFormat("%.2g / %.2g / %.2g", summary->kl_p50, summary->kl_p95, summary->kl_p99),
           Mean(summary->js), Mean(summary->tv), Mean(summary->overlap), Rate(summary->flip), flips,
           Rate(summary->fragile), Mean(summary->stop),
           carried && cell.recovered ? absl::StrFormat("%.3f", *cell.recovered) : "–"},
          cell.bucket == 0 && carried);
    }
  }
  absl::StrAppend(out, "<h2>Fidelity</h2>", table.Done(),
                  "<p class=\"quiet\">Recovered: 1 − KL(native ‖ carried) / KL(native ‖ old "
                  "version). All along the native answer, over its first 16 tokens.</p>");

  HtmlTable same(
      {"task", "prefix", "first token", "items", "same whole answer", "same stop", "same outcome"});
  for (const Cell& cell : cells) {
    if (cell.bucket != 0) continue;
    for (const auto& [name, agreement] :
         {std::pair("same", &cell.same_first), std::pair("other", &cell.other_first)}) {
      const auto share = [](int part, int all) {
        return all == 0 ? std::string("–")
                        : absl::StrCat(Percent(static_cast<double>(part) / all), " <small>", part,
                                       " of ", all, "</small>");
      };
      same.Row({Name(cell), Lengths(cell), name, absl::StrCat(agreement->n),
                share(agreement->same_answer, agreement->n),
                share(agreement->same_stop, agreement->n),
                share(agreement->same_outcome, agreement->judged)});
    }
  }
  absl::StrAppend(out, "<h2>Does the same first token mean the same answer?</h2>", same.Done());

  HtmlTable bins({"task", "native margin, nats", "right natively", "right carried, too", "share"});
  bool any = false;
  for (const Cell& cell : cells) {
    if (cell.bucket != 0) continue;
    for (const MarginBin& bin : cell.margins) {
      if (bin.right == 0) continue;
      any = true;
      bins.Row({Name(cell),
                std::isfinite(bin.high) ? absl::StrFormat("%g–%g", bin.low, bin.high)
                                        : absl::StrFormat("%g and more", bin.low),
                absl::StrCat(bin.right), absl::StrCat(bin.survived),
                Rate(Wilson(bin.survived, bin.right))});
    }
  }
  if (any) absl::StrAppend(out, "<h2>Which right answers survive?</h2>", bins.Done());
}

void TimeTable(const std::vector<Cell>& cells, std::string* out) {
  HtmlTable table(
      {"task", "prefix", "natively", "own cache", "carried", "native / carried", "prompt carried"});
  for (const Cell& cell : cells) {
    table.Row({Name(cell), Lengths(cell), Milliseconds(cell.native.ttft_median),
               Milliseconds(cell.hit.ttft_median), Milliseconds(cell.carried.ttft_median),
               absl::StrFormat("%.1f × <small>%.1f–%.1f</small>", cell.speedup.mean,
                               cell.speedup.lower, cell.speedup.upper),
               Percent(cell.carried_share)},
              cell.bucket == 0);
  }
  absl::StrAppend(out, "<h2>Time to first token</h2>", table.Done());
}

void SensitivitySection(const Report& report, std::string* out) {
  if (report.sensitivity.empty()) return;
  *out += "<h2>Where the divergence comes from</h2><div class=\"charts\">";
  HtmlTable table({"task", "prefix", "prompts", "part", "carried alone: TV", "KL, nats", "flips",
                   "native alone: TV falls by"});
  for (const SensitivitySummary& one : report.sensitivity) {
    if (one.bucket == 0) *out += SensitivityCharts(one);
    for (const PartSummary& part : one.parts) {
      table.Row({EscapeHtml(one.task),
                 one.bucket == 0 ? "all" : absl::StrCat(one.bucket, "–", 2 * one.bucket - 1),
                 absl::StrCat(part.n), EscapeHtml(part.name), Mean(part.tv),
                 absl::StrFormat("%.3g", part.kl), Percent(part.flips),
                 part.gain ? Mean(*part.gain) : "–"},
                part.kind == "ALL");
    }
  }
  absl::StrAppend(out, "</div><details><summary>All parts</summary>", table.Done(), "</details>");
}

void Provenance(const Report& report, std::string* out) {
  *out += "<h2>Where this comes from</h2><div class=\"wide\"><table class=\"plain\"><tbody>";
  const std::function<void(const std::string&, const nlohmann::ordered_json&)> show =
      [&](const std::string& name, const nlohmann::ordered_json& value) {
        if (value.is_object()) {
          for (const auto& [key, inner] : value.items()) {
            show(name.empty() ? key : name + " " + key, inner);
          }
        } else if (value.is_array()) {
          for (size_t i = 0; i < value.size(); ++i) show(absl::StrCat(name, " ", i + 1), value[i]);
        } else {
          absl::StrAppend(out, "<tr><th>", EscapeHtml(name), "</th><td class=\"code\">",
                          EscapeHtml(value.is_string() ? value.get<std::string>() : value.dump()),
                          "</td></tr>");
        }
      };
  nlohmann::ordered_json run = report.run;
  if (run.contains("identity")) {
    show("", run["identity"]);
    run.erase("identity");
  }
  show("", run);
  *out += "</tbody></table></div>";
  if (report.failed == 0) return;
  *out += "<h2>Failed items</h2><ul>";
  int shown = 0;
  for (const auto& [index, row] : report.rows) {
    if (row.ok() || ++shown > 50) continue;
    absl::StrAppend(out, "<li>", EscapeHtml(row.id), ": ", EscapeHtml(row.error), "</li>");
  }
  *out += "</ul>";
}

std::string Field(const nlohmann::ordered_json& json, const char* outer, const char* inner) {
  const auto found = json.find(outer);
  if (found == json.end() || !found->is_object()) return "?";
  const auto value = found->find(inner);
  return value == found->end() || !value->is_string() ? "?" : value->get<std::string>();
}

}  // namespace

std::string ReportToHtml(const Report& report) {
  const nlohmann::ordered_json identity =
      report.run.contains("identity") ? report.run["identity"] : nlohmann::ordered_json::object();
  const std::string source = EscapeHtml(Field(identity, "source", "version"));
  const std::string target = EscapeHtml(Field(identity, "target", "version"));
  std::string out = absl::StrCat(
      "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width, initial-scale=1\"><title>",
      target, " over ", source, "</title><style>", kReportStyle, "</style></head><body><main><h1>",
      target, " over the caches of ", source, "</h1><p>", report.done, " of ", report.wanted,
      " items", report.failed > 0 ? absl::StrCat(", ", report.failed, " failed") : "",
      report.done + report.failed < report.wanted ? " <b>(not finished)</b>" : "",
      ". Each was answered by ", source, " and by ", target, " natively, and by ", target,
      " over what ", source,
      " had computed of the prefix. <b>Utility</b> asks whether the answer is right, <b>fidelity"
      "</b> whether it is what ",
      target, " would have said; neither stands for the other.</p>");

  std::vector<const Cell*> all;
  for (const Cell& cell : report.cells) all.push_back(&cell);
  out += "<h2>Verdicts</h2>";
  Verdicts(all, &out);
  if (report.cells.empty()) out += "<p>No item was answered.</p>";
  for (const Cell& head : report.cells) {
    if (head.bucket != 0) continue;
    std::vector<const Cell*> cells;
    for (const Cell& cell : report.cells) {
      if (cell.task == head.task && cell.plan == head.plan) cells.push_back(&cell);
    }
    absl::StrAppend(&out, "<h2>", Name(head), "</h2><div class=\"charts\">", UtilityChart(cells),
                    FidelityChart(cells, report.limits));
    if (head.native.judged > 0) out += MarginChart(report, head);
    absl::StrAppend(&out, TtftChart(cells), "</div>");
  }
  out += PlansCharts(report);
  SensitivitySection(report, &out);
  UtilityTable(report.cells, &out);
  FidelityTables(report.cells, &out);
  TimeTable(report.cells, &out);
  Provenance(report, &out);
  return out + "</main></body></html>\n";
}

}  // namespace carryover::eval
