// The two-criteria verdict of a cell in words. A finding needs its whole interval on one side of
// the limit; "kept" also needs min_prefixes distinct prefixes. What lies between is undecided, with
// how many more items of the same kind would decide it if the shares stayed as they are.

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/eval/cells.h"

namespace carryover::eval {
namespace {

std::string Percent(double value) { return absl::StrFormat("%.1f %%", 100 * value); }

std::string PercentRange(const Interval& interval) {
  return absl::StrFormat("%s (%.1f to %.1f)", Percent(interval.mean), 100 * interval.lower,
                         100 * interval.upper);
}

Finding Against(const Interval& interval, double limit, bool enough) {
  if (interval.lower > limit) return Finding::kBroken;
  return interval.upper <= limit && enough ? Finding::kKept : Finding::kUndecided;
}

// -1 (beyond a million) is the most.
int64_t Most(int64_t a, int64_t b) { return a < 0 || b < 0 ? -1 : std::max(a, b); }

int64_t More(int64_t needed, int64_t n) {
  return needed < 0 ? -1 : std::max<int64_t>(0, needed - n);
}

// Items that it takes until a rate's interval lies on one side of the limit. What it is worth now
// is seen from its width: n items that share prefixes may say no more than their prefixes do.
int64_t RateNeeded(const Interval& rate, int64_t n, double limit) {
  const bool under = rate.mean < limit;
  double low = 1e-3, high = 1e9;  // of samples of which Wilson's interval is as wide
  for (int i = 0; i < 100; ++i) {
    const double middle = std::sqrt(low * high);
    const Interval wilson = Wilson(rate.mean * middle, middle);
    const bool wider = under ? wilson.upper > rate.upper : wilson.lower < rate.lower;
    (wider ? low : high) = middle;
  }
  const auto worth = static_cast<int64_t>(std::max(1.0, high));
  const int64_t needed = SamplesNeeded(rate.mean, worth, limit);
  if (needed < 0) return -1;
  const double items = static_cast<double>(n) * static_cast<double>(std::max(needed, worth)) / high;
  return items > 1e6 ? -1 : std::max(n, static_cast<int64_t>(std::ceil(items - 1e-6)));
}

// A mean's interval narrows with the root of n.
int64_t MeansNeeded(const Interval& interval, int64_t n, double limit) {
  const double gap = std::fabs(limit - interval.mean);
  const double half =
      interval.mean < limit ? interval.upper - interval.mean : interval.mean - interval.lower;
  if (gap <= 0) return -1;
  const double needed = std::ceil(static_cast<double>(n) * half * half / (gap * gap));
  return needed > 1e6 ? -1 : std::max(n, static_cast<int64_t>(needed));
}

// Items that it takes to see enough prefixes, at as many items a prefix as now.
int64_t PrefixesNeeded(const Cell& cell, const Limits& limits) {
  if (cell.prefixes >= limits.min_prefixes || cell.prefixes == 0) return cell.n;
  return static_cast<int64_t>(
      std::ceil(static_cast<double>(cell.n) * limits.min_prefixes / cell.prefixes));
}

std::string MoreText(int64_t more) {
  return more < 0 ? "more than a million more items would be needed: it lies at the limit"
                  : absl::StrCat("about ", more, " more items would decide it");
}

void JudgeUtility(const Cell& cell, const Limits& limits, Verdict* verdict) {
  const bool enough = cell.prefixes >= limits.min_prefixes;
  if (cell.paired.n() > 0) {
    verdict->utility = Against(cell.loss, limits.max_loss, enough);
    verdict->utility_text = absl::StrFormat(
        "accuracy %s natively, %s carried: a loss of %.1f points (%.1f to %.1f), limit %.1f; right "
        "to wrong %d, wrong to right %d, McNemar p = %.3g",
        Percent(cell.native.accuracy.mean), Percent(cell.carried.accuracy.mean),
        100 * cell.loss.mean, 100 * cell.loss.lower, 100 * cell.loss.upper, 100 * limits.max_loss,
        static_cast<int>(cell.paired.only_first), static_cast<int>(cell.paired.only_second),
        cell.mcnemar);
    if (verdict->utility != Finding::kUndecided) return;
    // Where what the prefixes say made the interval wider, PairsNeeded asks for too few.
    const int64_t pairs = PairsNeeded(cell.paired, limits.max_loss);
    const Interval alone = PairedDifference(cell.paired);
    const bool wider = cell.loss.lower < alone.lower || cell.loss.upper > alone.upper;
    const int64_t of_pairs =
        wider ? Most(pairs, MeansNeeded(cell.loss, cell.n, limits.max_loss)) : pairs;
    const int64_t needed = Most(of_pairs == 0 ? cell.n : of_pairs, PrefixesNeeded(cell, limits));
    verdict->more_items = Most(verdict->more_items, More(needed, cell.n));
    absl::StrAppend(&verdict->utility_text, "; n is too small: ", MoreText(More(needed, cell.n)));
  } else if (cell.native.scored > 0) {
    verdict->utility = Against(cell.score_loss, limits.max_loss, enough);
    verdict->utility_text = absl::StrFormat(
        "score %.3f natively, %.3f carried: a loss of %.3f (%.3f to %.3f), limit %.3f",
        cell.native.score.mean, cell.carried.score.mean, cell.score_loss.mean,
        cell.score_loss.lower, cell.score_loss.upper, limits.max_loss);
    if (verdict->utility != Finding::kUndecided) return;
    const int64_t needed =
        Most(MeansNeeded(cell.score_loss, cell.n, limits.max_loss), PrefixesNeeded(cell, limits));
    verdict->more_items = Most(verdict->more_items, More(needed, cell.n));
    absl::StrAppend(&verdict->utility_text, "; n is too small: ", MoreText(More(needed, cell.n)));
  } else {
    verdict->utility_text = "n/a: nothing says what is right";
  }
}

void JudgeFidelity(const Cell& cell, const Limits& limits, Verdict* verdict) {
  if (cell.fidelity.n == 0) {
    verdict->fidelity_text = "n/a: nothing was compared";
    return;
  }
  const bool enough = cell.prefixes >= limits.min_prefixes;
  const struct {
    const char* name;
    const Interval& excess;
    const Interval& floor;
    double limit;
  } measures[] = {
      {"first token differs", cell.flip_excess, cell.control.flip, limits.flip},
      {"total variation", cell.tv_excess, cell.control.tv, limits.tv},
      {"stops elsewhere", cell.stop_excess, cell.control.stop, limits.stop},
  };
  verdict->fidelity = Finding::kKept;
  std::vector<std::string> words;
  int64_t needed = PrefixesNeeded(cell, limits);
  for (const auto& measure : measures) {
    const Finding finding = Against(measure.excess, measure.limit, enough);
    if (finding == Finding::kBroken) verdict->fidelity = Finding::kBroken;
    if (finding == Finding::kUndecided && verdict->fidelity == Finding::kKept) {
      verdict->fidelity = Finding::kUndecided;
    }
    const char* const place = finding == Finding::kBroken ? "over"
                              : finding == Finding::kKept ? "under"
                                                          : "not told from";
    words.push_back(
        absl::StrFormat("%s %s above the floor (%s), %s the limit of %s", measure.name,
                        PercentRange(measure.excess),
                        cell.control.n > 0 ? Percent(measure.floor.mean) : "not measured", place,
                        Percent(measure.limit)));
    if (finding != Finding::kUndecided) continue;
    const int64_t of_measure = measure.excess.mean >= 0 && measure.excess.mean <= 1
                                   ? RateNeeded(measure.excess, cell.fidelity.n, measure.limit)
                                   : MeansNeeded(measure.excess, cell.fidelity.n, measure.limit);
    needed = Most(needed, of_measure);
  }
  verdict->fidelity_text = absl::StrJoin(words, "; ");
  if (verdict->fidelity != Finding::kUndecided) return;
  const int64_t more = More(needed, cell.n);
  verdict->more_items = Most(verdict->more_items, more);
  absl::StrAppend(&verdict->fidelity_text, "; n is too small: ", MoreText(more));
}

}  // namespace

Verdict Judge(const Cell& cell, const Limits& limits) {
  Verdict verdict;
  JudgeUtility(cell, limits, &verdict);
  JudgeFidelity(cell, limits, &verdict);
  const auto say = [](Finding finding, const char* kept, const char* broken, const char* undecided,
                      const char* none) {
    return finding == Finding::kKept     ? kept
           : finding == Finding::kBroken ? broken
           : finding == Finding::kNone   ? none
                                         : undecided;
  };
  verdict.headline = absl::StrCat(
      say(verdict.utility, "keeps the task", "loses the task", "task undecided", "no task to keep"),
      ", ",
      say(verdict.fidelity, "keeps the behaviour", "changes the behaviour", "behaviour undecided",
          "behaviour not measured"));
  return verdict;
}

}  // namespace carryover::eval
