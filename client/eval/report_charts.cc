#include "client/eval/report_charts.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/eval/svg.h"

namespace carryover::eval {
namespace {

// Colours by what a series is; the style sheet has them.
enum Color { kOld = 0, kNative = 1, kCarried = 2, kHit = 3, kFloor = 4, kWrong = 5 };

std::string Percent(double value) { return absl::StrFormat("%.1f %%", 100 * value); }

// A series over the lengths of a task.
ChartSeries Series(const std::vector<const Cell*>& cells, const std::string& name, int color,
                   bool dashed, const std::function<bool(const Cell&, Interval*)>& value) {
  ChartSeries series;
  series.name = name;
  series.color = color;
  series.dashed = dashed;
  for (const Cell* cell : cells) {
    Interval at;
    if (cell->bucket == 0 || !value(*cell, &at)) continue;
    series.points.push_back({static_cast<double>(cell->bucket), at.mean, at.lower, at.upper,
                             absl::StrFormat("%s, %d: %.4g (%.4g to %.4g), n = %d", name,
                                             cell->bucket, at.mean, at.lower, at.upper, cell->n)});
  }
  return series;
}

std::string Figure(const std::string& heading, const std::string& chart,
                   const std::vector<LegendEntry>& legend, const std::string& note) {
  return absl::StrCat("<figure><figcaption>", heading, "</figcaption>", chart,
                      legend.empty() ? "" : DrawLegend(legend), "<p class=\"quiet\">", note,
                      "</p></figure>");
}

// Cells of one task and length, one a plan: which of them is worth its time.
std::string PlansOf(const std::vector<const Cell*>& cells, const Limits& limits) {
  std::vector<TradeOff> tv, right;
  const double native_ms = 1000 * cells[0]->native.ttft_median;
  tv.push_back({"natively", kNative, native_ms, 0, 0, 0});
  const Interval& native = cells[0]->native.accuracy;
  right.push_back({"natively", kNative, native_ms, native.mean, native.lower, native.upper});
  for (const Cell* cell : cells) {
    const double ms = 1000 * cell->carried.ttft_median;
    const Interval& apart = cell->fidelity.tv;
    if (cell->fidelity.n > 0) {
      tv.push_back({cell->plan, kCarried, ms, apart.mean, apart.lower, apart.upper});
    }
    const Interval& accuracy = cell->carried.accuracy;
    right.push_back({cell->plan, kCarried, ms, accuracy.mean, accuracy.lower, accuracy.upper});
  }
  const std::string title = absl::StrCat(
      EscapeHtml(cells[0]->task), ", ",
      cells[0]->bucket == 0 ? "all lengths" : absl::StrCat("prefixes from ", cells[0]->bucket));
  std::string out = Figure(
      title,
      DrawTradeOffs("total variation by time to first token", "total variation", limits.tv, tv), {},
      "Lower left is better. Line across: the limit, above the floor.");
  if (cells[0]->native.judged > 0) {
    out += Figure(
        title,
        DrawTradeOffs("right answers by time to first token", "right answers", std::nullopt, right),
        {}, "Upper left is better.");
  }
  return out;
}

}  // namespace

std::string UtilityChart(const std::vector<const Cell*>& cells) {
  LineChart chart;
  chart.title = "utility by prefix length";
  chart.x_label = "tokens of prefix, from";
  chart.percent = true;
  chart.least_top = chart.most_top = 1;
  const auto of = [](ArmSummary Cell::*arm) {
    return [arm](const Cell& cell, Interval* out) {
      const ArmSummary& summary = cell.*arm;
      *out = summary.judged > 0 ? summary.accuracy : summary.score;
      return summary.judged > 0 || summary.scored > 0;
    };
  };
  chart.series = {Series(cells, "old version", kOld, true, of(&Cell::source)),
                  Series(cells, "natively", kNative, false, of(&Cell::native)),
                  Series(cells, "carried", kCarried, false, of(&Cell::carried))};
  if (chart.series[1].points.empty()) {
    return Figure("Utility", "<p class=\"quiet\">n/a: nothing says what is right here</p>", {}, "");
  }
  return Figure(cells[0]->native.judged > 0 ? "Utility: right answers" : "Utility: mean score",
                DrawLines(chart),
                {{"old version", kOld, true}, {"natively", kNative}, {"carried", kCarried}},
                "Whiskers: 95 %.");
}

std::string FidelityChart(const std::vector<const Cell*>& cells, const Limits& limits) {
  LineChart chart;
  chart.title = "fidelity by prefix length";
  chart.x_label = "tokens of prefix, from";
  chart.percent = true;
  chart.least_top = 0.1;
  chart.most_top = 1;
  chart.limit = limits.tv;
  const auto with = [](const FidelitySummary& summary, const Interval& value, Interval* out) {
    *out = value;
    return summary.n > 0;
  };
  chart.series = {
      Series(cells, "first token differs", kWrong, false,
             [&](const Cell& cell, Interval* out) {
               return with(cell.fidelity, cell.fidelity.flip, out);
             }),
      Series(cells, "total variation", kCarried, false,
             [&](const Cell& cell, Interval* out) {
               return with(cell.fidelity, cell.fidelity.tv, out);
             }),
      Series(cells, "total variation, old version", kOld, true,
             [&](const Cell& cell, Interval* out) { return with(cell.old, cell.old.tv, out); }),
      Series(cells, "total variation, A/A", kFloor, true,
             [&](const Cell& cell, Interval* out) {
               return with(cell.control, cell.control.tv, out);
             }),
  };
  return Figure("Fidelity: distance from the native answer", DrawLines(chart),
                {{"first token differs", kWrong},
                 {"total variation", kCarried},
                 {"the old version's", kOld, true},
                 {"A/A floor", kFloor, true}},
                absl::StrFormat("Line across: the limit of total variation, %s above the floor.",
                                Percent(limits.tv)));
}

std::string TtftChart(const std::vector<const Cell*>& cells) {
  LineChart chart;
  chart.title = "time to first token by prefix length";
  chart.x_label = "tokens of prefix, from";
  chart.log_y = true;
  chart.unit = " ms";
  const auto of = [](ArmSummary Cell::*arm) {
    return [arm](const Cell& cell, Interval* out) {
      const double ms = 1000 * (cell.*arm).ttft_median;
      *out = {ms, ms, ms};
      return ms > 0;
    };
  };
  chart.series = {Series(cells, "natively", kNative, false, of(&Cell::native)),
                  Series(cells, "carried", kCarried, false, of(&Cell::carried)),
                  Series(cells, "own cache", kHit, true, of(&Cell::hit))};
  return Figure("Time to first token", DrawLines(chart),
                {{"natively", kNative}, {"carried", kCarried}, {"own cache", kHit, true}},
                "Medians; from when the server had the request.");
}

std::string MarginChart(const Report& report, const Cell& cell) {
  std::vector<ScatterPoint> points;
  constexpr size_t kMost = 2000;  // more would be one blot
  for (const auto& [index, row] : report.rows) {
    if (!row.ok() || row.task != cell.task || points.size() == kMost) continue;
    const Comparison* one = row.Find("carried", cell.plan);
    const auto arm = std::find_if(row.carried.begin(), row.carried.end(),
                                  [&](const Arm& a) { return a.plan == cell.plan; });
    if (one == nullptr || one->positions.empty() || !one->positions[0].valid ||
        arm == row.carried.end() || row.answer_token < 0) {
      continue;
    }
    const Position& first = one->positions[0];
    if (!std::isfinite(first.native_margin) || !std::isfinite(first.carried_margin)) continue;
    int color = kOld;
    const char* what = "not judged";
    if (row.native.right && arm->right) {
      color = *row.native.right ? (*arm->right ? kHit : kWrong) : (*arm->right ? kNative : kOld);
      what = *row.native.right ? (*arm->right ? "right in both" : "right to wrong")
                               : (*arm->right ? "wrong to right" : "wrong in both");
    }
    points.push_back(
        {first.native_margin, first.carried_margin, color,
         absl::StrFormat("%s: %.2f natively, %.2f carried, %s, %d tokens",
                         row.id.substr(row.id.find_last_of('/') + 1), first.native_margin,
                         first.carried_margin, what, row.prefix_tokens)});
  }
  return Figure(
      "Margin of the right answer's first token, nats",
      DrawScatter("answer margins, native against carried", "natively", "carried", points),
      {{"right in both", kHit},
       {"right to wrong", kWrong},
       {"wrong to right", kNative},
       {"wrong in both", kOld}},
      "Below the diagonal the right answer lost ground; below zero another token leads.");
}

std::string PlansCharts(const Report& report) {
  std::map<std::pair<std::string, int>, std::vector<const Cell*>> groups;
  std::map<std::string, int> longest;
  for (const Cell& cell : report.cells) {
    if (cell.n == 0) continue;
    groups[{cell.task, cell.bucket}].push_back(&cell);
    longest[cell.task] = std::max(longest[cell.task], cell.bucket);
  }
  std::string charts;
  for (const auto& [key, cells] : groups) {
    const auto& [task, bucket] = key;
    if (cells.size() < 2 || (bucket != 0 && bucket != longest[task])) continue;
    charts += PlansOf(cells, report.limits);
  }
  if (charts.empty()) return "";
  return absl::StrCat("<h2>Which way of carrying?</h2><div class=\"charts\">", charts, "</div>");
}

}  // namespace carryover::eval
