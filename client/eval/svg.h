// Charts as inline SVG, coloured by the page's style sheet (classes c0 to c5). Pure functions.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace carryover::eval {

std::string EscapeHtml(absl::string_view text);

struct ChartPoint {
  double x = 0, y = 0;
  double lower = 0, upper = 0;  // whisker; equal to y: none
  std::string tip;              // shown when pointed at
};

struct ChartSeries {
  std::string name;
  int color = 0;  // class c0 to c5
  bool dashed = false;
  std::vector<ChartPoint> points;  // by x
};

struct LineChart {
  std::string title;            // for those who cannot see it
  std::string x_label;          // x is a number of tokens, on a logarithmic axis
  bool percent = false;         // y is a share
  bool log_y = false;           // y > 0; otherwise the axis begins at 0
  double least_top = 0;         // the axis reaches at least so far
  double most_top = 0;          // and not beyond, if not 0
  std::optional<double> limit;  // a dashed line
  std::string unit;             // behind the numbers of the y axis
  std::vector<ChartSeries> series;
};
std::string DrawLines(const LineChart& chart);

struct ScatterPoint {
  double x = 0, y = 0;
  int color = 0;
  std::string tip;
};
// Both axes alike, in nats, with the diagonal and the zero lines.
std::string DrawScatter(const std::string& title, const std::string& x_label,
                        const std::string& y_label, const std::vector<ScatterPoint>& points);

// What a choice costs and what it brings: one named point each.
struct TradeOff {
  std::string name;  // stands beside it
  int color = 0;
  double ms = 0;                       // > 0, on a logarithmic axis
  double y = 0, lower = 0, upper = 0;  // a share; equal to y: no whisker
};
std::string DrawTradeOffs(const std::string& title, const std::string& y_label,
                          std::optional<double> limit, const std::vector<TradeOff>& points);

// Bars side by side, in named groups.
struct Bar {
  double value = 0;             // may be below 0
  double lower = 0, upper = 0;  // whisker; equal to value: none
  std::string tip;
};
struct Bars {
  std::string name;       // stands below, where there is room
  std::vector<Bar> bars;  // one a colour
};
struct BarChart {
  std::string title;
  std::vector<int> colors;
  std::optional<double> line;  // dashed, across
  std::vector<Bars> groups;
};
std::string DrawBars(const BarChart& chart);

struct LegendEntry {
  std::string name;
  int color = 0;
  bool dashed = false;
};
std::string DrawLegend(const std::vector<LegendEntry>& entries);

}  // namespace carryover::eval
