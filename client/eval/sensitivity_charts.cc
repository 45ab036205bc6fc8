// The pictures of a sensitivity profile.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/eval/sensitivity.h"
#include "client/eval/svg.h"

namespace carryover::eval {
namespace {

// Colours by what a bar is; the style sheet has them.
constexpr int kNative = 1, kCarried = 2;

std::string Figure(const std::string& heading, const SensitivitySummary& summary,
                   const std::vector<std::string>& kinds, const std::string& note) {
  BarChart chart;
  chart.title = heading;
  chart.colors = {kCarried, kNative};
  if (const PartSummary* all = summary.All()) chart.line = all->tv.mean;
  for (const PartSummary& part : summary.parts) {
    if (part.n == 0 || std::find(kinds.begin(), kinds.end(), part.kind) == kinds.end()) continue;
    Bars bars;
    // Of layers the numbers are enough.
    bars.name = part.kind != "LAYERS"        ? part.name
                : part.end - part.begin == 1 ? absl::StrCat(part.begin)
                                             : absl::StrCat(part.begin, "–", part.end - 1);
    bars.bars.push_back(
        {part.tv.mean, part.tv.lower, part.tv.upper,
         absl::StrFormat("%s carried alone: TV %.4f (%.4f to %.4f), n = %d", part.name,
                         part.tv.mean, part.tv.lower, part.tv.upper, part.n)});
    if (part.gain) {
      bars.bars.push_back(
          {part.gain->mean, part.gain->lower, part.gain->upper,
           absl::StrFormat("%s native alone: TV falls by %.4f (%.4f to %.4f)", part.name,
                           part.gain->mean, part.gain->lower, part.gain->upper)});
    }
    chart.groups.push_back(std::move(bars));
  }
  return absl::StrCat(
      "<figure><figcaption>", heading, "</figcaption>", DrawBars(chart),
      DrawLegend({{"carried alone: TV", kCarried}, {"native alone: TV falls by", kNative}}),
      "<p class=\"quiet\">", note, "</p></figure>");
}

}  // namespace

std::string SensitivityCharts(const SensitivitySummary& summary) {
  const std::string where =
      absl::StrCat(EscapeHtml(summary.task), ", ",
                   summary.bucket == 0 ? std::string("all lengths")
                                       : absl::StrCat("prefixes from ", summary.bucket));
  return absl::StrCat(
      Figure(absl::StrCat(where, ": by layer"), summary, {"LAYERS"},
             "From the bottom. Line across: all of it carried."),
      Figure(absl::StrCat(where, ": by position in the prefix"), summary, {"POSITIONS"},
             "The first block, equal runs of those between, the last block."),
      Figure(absl::StrCat(where, ": keys against values"), summary, {"ALL", "KEYS", "VALUES"},
             "Of all layers and positions."));
}

}  // namespace carryover::eval
