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

std::string Gate::Impl::DescribeSamples(const GateRung& rung) const {
  const GateEvidence& evidence = rung.evidence;
  return absl::StrCat("n = ", evidence.samples, " samples of ", evidence.prefixes, " prefixes, ",
                      evidence.dropped, " dropped, epoch ", rung.epoch);
}

std::string Gate::Impl::DescribeMeasure(const GateCell& cell, int index, int measure) const {
  const GateRung& rung = cell.rungs[index];
  const double lower = rung.evidence.close[measure].Bound(AlphaClose(rung));
  const double upper = rung.evidence.open[measure].Bound(AlphaOpen(rung));
  const GateEvidence& floor = ClosingFloor(cell.key);
  std::string text = absl::StrCat(kMeasureWords[measure], " ", Percent(rung.evidence.mean(measure)),
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

RungReport Gate::Impl::ReportRung(const GateCell& cell, int index, double now) const {
  const GateRung& rung = cell.rungs[index];
  const GateEvidence& evidence = rung.evidence;
  RungReport report;
  report.plan = config.ladder[index];
  report.state = rung.state;
  report.usable = Usable(cell.key, index);
  report.borrowed = rung.borrowed;
  report.epoch = rung.epoch;
  report.samples = evidence.samples;
  report.dropped = evidence.dropped;
  report.counted = evidence.counted;
  report.prefixes = evidence.prefixes;
  report.completion = evidence.completion();
  report.starved = report.completion < config.min_completion;
  report.alpha_close = AlphaClose(rung);
  if (rung.state == RungState::kFailed) report.cooldown_left = std::max(0.0, rung.retry_at - now);
  const GateEvidence& floor = ClosingFloor(cell.key);
  int most_over = 0;   // the measure that speaks most against the rung
  int least_sure = 0;  // the measure that proof waits for
  for (int i = 0; i < kGateMeasures; ++i) {
    MeasureReport& measure = report.measures[i];
    measure.mean = evidence.mean(i);
    measure.lower = evidence.close[i].Bound(report.alpha_close);
    measure.upper = evidence.open[i].Bound(AlphaOpen(rung));
    measure.limit = config.limit[i];
    measure.floor_mean = floor.mean(i);
    // Which of the two tests of a floor bounds it from which side.
    measure.floor_lower = floor.open[i].Bound(report.alpha_close);
    measure.floor_upper = std::min(config.max_floor[i], floor.close[i].Bound(report.alpha_close));
    measure.floor_lower = std::min(measure.floor_lower, measure.floor_upper);
    measure.open_evidence = OpenEvidence(cell, index, i, 0);
    measure.close_evidence = CloseEvidence(cell, index, i, 0);
    if (measure.close_evidence > report.measures[most_over].close_evidence) most_over = i;
    if (measure.open_evidence < report.measures[least_sure].open_evidence) least_sure = i;
  }
  // Looking for siblings takes a walk over all cells: only where they could decide, as in Judge.
  report.alpha_open = AlphaOpen(rung);
  const double evidence_now = report.measures[least_sure].open_evidence * report.alpha_open;
  if (rung.state == RungState::kUnproved && evidence_now < 1 && evidence_now * kMaxBorrow >= 1) {
    bool by_task = false;
    report.alpha_open = std::min(0.5, report.alpha_open * BorrowFactor(cell, index, &by_task));
  }
  std::string& text = report.explanation;
  if (!report.usable) {
    text = "cannot be used: no map from this source was loaded with the target.";
    return report;
  }
  switch (rung.state) {
    case RungState::kUnproved:
      if (evidence.samples + evidence.dropped == 0) {
        text = "no sample yet.";
      } else if (report.starved) {
        text = absl::StrCat("only ", Percent(report.completion),
                            " of recent shadows completed, nothing opens under ",
                            Percent(config.min_completion), ". ", DescribeSamples(rung), ".");
      } else if (evidence.prefixes < config.min_prefixes) {
        text = absl::StrCat(evidence.prefixes, " distinct prefixes of the ", config.min_prefixes,
                            " that it takes. ", DescribeSamples(rung), ".");
      } else {
        text =
            absl::StrCat("not sure yet about ", DescribeMeasure(cell, index, least_sure), ". ",
                         DescribeSamples(rung), "; evidence ",
                         absl::StrFormat("%.3g of %.3g", report.measures[least_sure].open_evidence,
                                         1 / report.alpha_open),
                         ".");
      }
      break;
    case RungState::kProved:
      text = absl::StrCat(
          "under its limits", rung.borrowed ? ", by its siblings' evidence too" : "",
          ". Closest: ", DescribeMeasure(cell, index, most_over), ". ", DescribeSamples(rung), ".");
      if (report.starved) {
        absl::StrAppend(&text, " Only ", Percent(report.completion),
                        " of recent shadows completed: it is hardly watched.");
      }
      break;
    case RungState::kFailed:
      text = absl::StrCat("went over a limit: ", DescribeMeasure(cell, index, most_over), ". ",
                          DescribeSamples(rung),
                          absl::StrFormat(". Retry in %.0f s.", report.cooldown_left));
      break;
  }
  return report;
}

CellReport Gate::Impl::Report(const GateCell& cell, double now) const {
  CellReport report;
  for (int i = 0; i < static_cast<int>(cell.rungs.size()); ++i) {
    report.rungs.push_back(ReportRung(cell, i, now));
  }
  const RungReport& rung = report.rungs[cell.rung];
  report.cell = cell.key;
  report.cell.plan = rung.plan;
  report.state = cell.served();
  report.evidence_state = cell.state;
  report.forced = cell.forced.has_value();
  report.borrowed = rung.borrowed;
  report.starved = rung.starved;
  report.epoch = rung.epoch;
  report.samples = rung.samples;
  report.dropped = rung.dropped;
  report.counted = rung.counted;
  report.prefixes = rung.prefixes;
  report.completion = rung.completion;
  const GateEvidence& floor = ClosingFloor(cell.key);
  report.controls = floor.samples;
  report.own_floor = &floor == &OpeningFloor(cell.key) && floor.samples > 0;
  report.alpha_open = rung.alpha_open;
  report.alpha_close = rung.alpha_close;
  report.measures = rung.measures;
  if (cell.state == GateState::kClosed) {
    report.cooldown_left = rung.cooldown_left;
    for (const RungReport& other : report.rungs) {  // it learns again with the first of them
      report.cooldown_left = std::min(report.cooldown_left, other.cooldown_left);
    }
  }
  constexpr absl::string_view kOpening[] = {"Learning ", "Open: ", "Repaired: ", "Closed: "};
  std::string& text = report.explanation;
  text = absl::StrCat(kOpening[static_cast<int>(cell.state)], rung.plan,
                      cell.state == GateState::kLearning ? ": "
                      : IsOpen(cell.state)               ? " is "
                                                         : " ",
                      rung.explanation);
  for (int i = 0; i < static_cast<int>(report.rungs.size()); ++i) {
    if (i == cell.rung) continue;
    absl::StrAppend(&text, i < cell.rung ? " Cheaper: " : " Next: ", report.rungs[i].plan, " (",
                    report.rungs[i].usable ? RungStateName(report.rungs[i].state) : "no map",
                    "): ", report.rungs[i].explanation);
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
