// The figures of eval.html: each gives HTML, with a caption, an SVG and a legend. Pure functions.
#pragma once

#include <string>
#include <vector>

#include "client/eval/report.h"

namespace carryover::eval {

// cells: of one task and plan, all its prefix buckets.
std::string UtilityChart(const std::vector<const Cell*>& cells);
std::string FidelityChart(const std::vector<const Cell*>& cells, const Limits& limits);
std::string TtftChart(const std::vector<const Cell*>& cells);
// Of the rows of the cell's task, by its plan.
std::string MarginChart(const Report& report, const Cell& cell);

// What each plan costs and keeps: for each task over all lengths, and for its longest prefixes. ""
// where there was one plan alone.
std::string PlansCharts(const Report& report);

}  // namespace carryover::eval
