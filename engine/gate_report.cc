// The gate in words and numbers.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/gate_impl.h"

namespace carryover {
namespace {

constexpr absl::string_view kMeasureWords[kGateMeasures] = {"first-token flips", "total variation",
                                                            "stop disagreement"};

std::string Percent(double share) { return absl::StrFormat("%.2f %%", 100 * share); }

}  // namespace

std::string Gate::Impl::DescribeSamples(const GateCell& cell) const {
  const GateEvidence& evidence = cell.evidence;
  std::string text = absl::StrCat("n = ", evidence.samples, " samples of ", evidence.prefixes,
                                  " prefixes, ", evidence.dropped, " dropped, epoch ", cell.epoch);
  return text;
}

std::string Gate::Impl::DescribeMeasure(const GateCell& cell, int measure) const {
  const double lower = cell.evidence.close[measure].Bound(AlphaClose(cell));
  const double upper = cell.evidence.open[measure].Bound(AlphaOpen(cell));
  const GateEvidence& floor = ClosingFloor(cell.key);
  std::string text = absl::StrCat(kMeasureWords[measure], " ", Percent(cell.evidence.mean(measure)),
                                  ", at least ", Percent(lower));
  // After a change the bounds speak of different times; the later one is told.
  if (upper >= lower) absl::StrAppend(&text, " and at most ", Percent(upper));
  absl::StrAppend(&text, ", limit ", Percent(config.limit[measure]), " over a floor ");
  if (floor.samples > 0) {
    absl::StrAppend(&text, "measured at ", Percent(floor.mean(measure)), " (n = ", floor.samples,
                    ")");
  } else {
    absl::StrAppend(&text, "of 0 to ", Percent(config.max_floor[measure]), " (not measured)");
  }
  return text;
}

CellReport Gate::Impl::Report(const GateCell& cell, double now) const {
  const GateEvidence& evidence = cell.evidence;
  CellReport report;
  report.cell = cell.key;
  report.cell.plan = config.ladder[cell.rung];
  report.state = cell.served();
  report.evidence_state = cell.state;
  report.forced = cell.forced.has_value();
  report.borrowed = cell.borrowed;
  report.epoch = cell.epoch;
  report.samples = evidence.samples;
  report.dropped = evidence.dropped;
  report.counted = evidence.counted;
  report.prefixes = evidence.prefixes;
  report.completion = evidence.completion();
  report.starved = report.completion < config.min_completion;
  const GateEvidence& floor = ClosingFloor(cell.key);
  report.controls = floor.samples;
  report.own_floor = &floor == &OpeningFloor(cell.key) && floor.samples > 0;
  report.alpha_close = AlphaClose(cell);
  if (cell.state == GateState::kClosed) report.cooldown_left = std::max(0.0, cell.retry_at - now);
  int most_over = 0;   // the measure that speaks most against the cell
  int least_sure = 0;  // the measure that opening waits for
  for (int i = 0; i < kGateMeasures; ++i) {
    MeasureReport& measure = report.measures[i];
    measure.mean = evidence.mean(i);
    measure.lower = evidence.close[i].Bound(report.alpha_close);
    measure.upper = evidence.open[i].Bound(AlphaOpen(cell));
    measure.limit = config.limit[i];
    measure.floor_mean = floor.mean(i);
    // Which of the two tests of a floor bounds it from which side.
    measure.floor_lower = floor.open[i].Bound(report.alpha_close);
    measure.floor_upper = std::min(config.max_floor[i], floor.close[i].Bound(report.alpha_close));
    measure.floor_lower = std::min(measure.floor_lower, measure.floor_upper);
    measure.open_evidence = OpenEvidence(cell, i, 0);
    measure.close_evidence = CloseEvidence(cell, i, 0);
    if (measure.close_evidence > report.measures[most_over].close_evidence) most_over = i;
    if (measure.open_evidence < report.measures[least_sure].open_evidence) least_sure = i;
  }
  // Looking for siblings takes a walk over all cells: only where they could decide, as in Judge.
  report.alpha_open = AlphaOpen(cell);
  const double evidence_now = report.measures[least_sure].open_evidence * report.alpha_open;
  if (cell.state == GateState::kLearning && evidence_now < 1 && evidence_now * kMaxBorrow >= 1) {
    bool by_task = false;
    report.alpha_open = std::min(0.5, report.alpha_open * BorrowFactor(cell, &by_task));
  }
  const std::string plan = report.cell.plan;
  std::string& text = report.explanation;
  switch (cell.state) {
    case GateState::kLearning:
      if (evidence.samples + evidence.dropped == 0) {
        text = absl::StrCat("Learning ", plan, ": no sample yet.");
      } else if (report.starved) {
        text = absl::StrCat("Learning ", plan, ": only ", Percent(report.completion),
                            " of recent shadows completed, nothing opens under ",
                            Percent(config.min_completion), ". ", DescribeSamples(cell), ".");
      } else if (evidence.prefixes < config.min_prefixes) {
        text =
            absl::StrCat("Learning ", plan, ": ", evidence.prefixes, " distinct prefixes of the ",
                         config.min_prefixes, " that it takes. ", DescribeSamples(cell), ".");
      } else {
        text = absl::StrCat(
            "Learning ", plan, ": not sure yet about ", DescribeMeasure(cell, least_sure), ". ",
            DescribeSamples(cell), "; evidence ",
            absl::StrFormat("%.3g of %.3g", report.measures[least_sure].open_evidence,
                            1 / report.alpha_open),
            ".");
      }
      break;
    case GateState::kOpen:
    case GateState::kRepaired:
      text = absl::StrCat(
          cell.state == GateState::kOpen ? "Open: " : "Repaired: ", plan, " is under its limits",
          cell.borrowed ? ", by its siblings' evidence too" : "",
          ". Closest: ", DescribeMeasure(cell, most_over), ". ", DescribeSamples(cell), ".");
      if (report.starved) {
        absl::StrAppend(&text, " Only ", Percent(report.completion),
                        " of recent shadows completed: it is hardly watched.");
      }
      break;
    case GateState::kClosed:
      text = absl::StrCat(
          "Closed: ", plan, " went over a limit: ", DescribeMeasure(cell, most_over), ". ",
          DescribeSamples(cell), absl::StrFormat(". Retry in %.0f s.", report.cooldown_left));
      break;
  }
  if (cell.forced) {
    absl::StrAppend(&text, " An operator set it to ", GateStateName(*cell.forced), ".");
  }
  return report;
}

std::vector<CellReport> Gate::Report(double now) const {
  std::vector<CellReport> reports;
  reports.reserve(impl_->cells.size());
  for (const auto& [key, cell] : impl_->cells) reports.push_back(impl_->Report(*cell, now));
  std::sort(reports.begin(), reports.end(),
            [](const CellReport& a, const CellReport& b) { return a.cell < b.cell; });
  return reports;
}

}  // namespace carryover
