#include "engine/fidelity_measures.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace carryover {
namespace {

bool Contains(absl::Span<const int32_t> tokens, int32_t token) {
  return std::find(tokens.begin(), tokens.end(), token) != tokens.end();
}

PositionFidelity MeasurePosition(const DivergenceRow& row) {
  PositionFidelity out;
  out.valid = row.valid != 0;
  if (!out.valid) return out;
  out.flip = row.native_top[0] != row.carried_top[0];
  out.fragile = row.native_gap < row.delta_range;
  out.kl = row.kl;
  out.js = row.js;
  out.tv = row.tv;
  out.overlap = static_cast<double>(row.overlap) / row.native_count;
  out.native_margin = row.native_margin;
  out.carried_margin = row.carried_margin;
  // Equal infinities have not moved.
  out.margin_shift =
      row.native_margin == row.carried_margin ? 0 : row.carried_margin - row.native_margin;
  out.delta_range = row.delta_range;
  out.native_stop = row.native_stop;
  out.carried_stop = row.carried_stop;
  out.stop_shift = std::fabs(row.carried_stop - row.native_stop);
  return out;
}

// What the other arm would have said, as far as it can be known from the text that was served.
void FollowGreedy(absl::Span<const DivergenceRow> rows, const ArmsToCompare& arms,
                  FidelitySample* sample) {
  if (!arms.greedy || !sample->valid) return;
  const bool native_served = arms.along == Along::kNative;
  const size_t count = rows.size();
  for (size_t i = 0; i < count; ++i) {
    const DivergenceRow& row = rows[i];
    if ((native_served ? row.native_top : row.carried_top)[0] != arms.served[i]) return;
  }
  sample->continuation = arms.complete ? Continuation::kSame : Continuation::kSameSoFar;
  sample->stop_disagreement = false;
  for (size_t i = 0; i < count; ++i) {
    const int32_t other = (native_served ? rows[i].carried_top : rows[i].native_top)[0];
    if (other == arms.served[i]) continue;
    sample->continuation = Continuation::kDiverged;
    sample->divergence = static_cast<int>(i);
    const bool other_stops = Contains(arms.stop_tokens, other);
    const bool served_stops = Contains(arms.stop_tokens, arms.served[i]);
    if (other_stops || served_stops) {
      sample->stop_disagreement = other_stops != served_stops;
    } else {
      sample->stop_disagreement.reset();
    }
    return;
  }
}

}  // namespace

const char* FidelityComparisonName(FidelityComparison comparison) {
  switch (comparison) {
    case FidelityComparison::kCarried:
      return "carried";
    case FidelityComparison::kControl:
      return "control";
    case FidelityComparison::kOld:
      return "old";
  }
  return "carried";
}

const char* AlongName(Along along) { return along == Along::kNative ? "native" : "served"; }

std::string TaskLabel(absl::Span<const std::string> configured, absl::string_view task) {
  const bool known = !task.empty() && std::any_of(configured.begin(), configured.end(),
                                                  [&](const auto& name) { return name == task; });
  return known ? std::string(task) : "other";
}

int PositionGroup(int position) { return position < 1 ? 0 : position < 4 ? 1 : 2; }

const char* PositionGroupName(int group) {
  static constexpr const char* kNames[kPositionGroups] = {"1", "2-4", "5-16"};
  return kNames[std::clamp(group, 0, kPositionGroups - 1)];
}

const char* ContinuationName(Continuation continuation) {
  switch (continuation) {
    case Continuation::kUnknown:
      return "unknown";
    case Continuation::kSame:
      return "same";
    case Continuation::kSameSoFar:
      return "same_so_far";
    case Continuation::kDiverged:
      return "diverged";
  }
  return "unknown";
}

double StopTotalVariation(absl::Span<const PositionFidelity> positions) {
  double sum = 0;
  double native_left = 1;  // probability that the text goes on up to here
  double carried_left = 1;
  for (const PositionFidelity& position : positions) {
    sum += std::fabs(native_left * position.native_stop - carried_left * position.carried_stop);
    native_left *= 1 - position.native_stop;
    carried_left *= 1 - position.carried_stop;
  }
  sum += std::fabs(native_left - carried_left);
  return std::clamp(sum / 2, 0.0, 1.0);
}

FidelitySample MeasureRows(absl::Span<const DivergenceRow> rows, const ArmsToCompare& arms) {
  FidelitySample sample;
  sample.labels = arms.labels;
  sample.along = arms.along;
  sample.valid = true;
  double tv = 0;
  for (const DivergenceRow& row : rows) {
    sample.positions.push_back(MeasurePosition(row));
    sample.valid = sample.valid && sample.positions.back().valid;
    tv += sample.positions.back().valid ? row.tv : 1;
  }
  const PositionFidelity& first = sample.positions[0];
  sample.first_token_flip = !first.valid || first.flip;
  FollowGreedy(rows, arms, &sample);
  sample.gate_values[kFidelityFlip] = sample.first_token_flip ? 1 : 0;
  sample.gate_values[kFidelityTv] = tv / static_cast<double>(rows.size());
  sample.gate_values[kFidelityStop] = !sample.valid ? 1.0
                                      : sample.stop_disagreement.has_value()
                                          ? *sample.stop_disagreement
                                          : StopTotalVariation(sample.positions);
  return sample;
}

ArmsComparison::ArmsComparison(const Ops& ops, Backend* backend, const ArmsToCompare& arms)
    : ops_(ops), backend_(backend), arms_(arms) {}

ArmsComparison::~ArmsComparison() { Release(); }

absl::StatusOr<std::unique_ptr<ArmsComparison>> ArmsComparison::Start(const Ops& ops,
                                                                      Backend* backend,
                                                                      const ArmsToCompare& arms) {
  const size_t rows = arms.served.size();
  const size_t values = rows * static_cast<size_t>(std::max(arms.vocab, 0));
  if (rows == 0 || rows > kMaxFidelityPositions || arms.vocab <= 0 ||
      arms.native.size() != values || arms.carried.size() != values ||
      (!arms.answers.empty() && arms.answers.size() != rows)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "arms of ", arms.native.size(), " and ", arms.carried.size(), " logits over ", arms.vocab,
        " tokens, ", rows, " served tokens, ", arms.answers.size(), " answers"));
  }
  return std::unique_ptr<ArmsComparison>(new ArmsComparison(ops, backend, arms));
}

void ArmsComparison::Release() {
  for (void** data : {&native_, &carried_, &out_}) {
    if (*data != nullptr) ops_.release(backend_, std::exchange(*data, nullptr));
  }
  reserved_ = 0;
}

absl::Status ArmsComparison::Reserve(size_t rows) {
  if (rows <= reserved_) return absl::OkStatus();
  Release();
  const size_t bytes = rows * static_cast<size_t>(arms_.vocab) * sizeof(float);
  ASSIGN_OR_RETURN(native_, ops_.alloc(backend_, bytes));
  ASSIGN_OR_RETURN(carried_, ops_.alloc(backend_, bytes));
  ASSIGN_OR_RETURN(out_, ops_.alloc(backend_, rows * sizeof(DivergenceRow)));
  reserved_ = rows;
  return absl::OkStatus();
}

absl::StatusOr<bool> ArmsComparison::Step() {
  constexpr double kStepSeconds = 1e-3;
  const auto begin = std::chrono::steady_clock::now();
  const size_t vocab = static_cast<size_t>(arms_.vocab);
  const size_t first = compared_.size();
  const size_t rows = std::min(next_, arms_.served.size() - first);
  RETURN_IF_ERROR(Reserve(rows));
  const size_t bytes = rows * vocab * sizeof(float);
  ops_.upload(backend_, native_, arms_.native.data() + first * vocab, bytes);
  ops_.upload(backend_, carried_, arms_.carried.data() + first * vocab, bytes);
  DivergenceArgs args;
  args.native = static_cast<const float*>(native_);
  args.carried = static_cast<const float*>(carried_);
  args.rows = static_cast<int>(rows);
  args.vocab = arms_.vocab;
  args.stop_tokens = arms_.stop_tokens;
  if (!arms_.answers.empty()) args.answers = arms_.answers.subspan(first, rows);
  args.out = static_cast<DivergenceRow*>(out_);
  ops_.divergence(backend_, args);
  compared_.resize(first + rows);
  ops_.download(backend_, &compared_[first], out_, rows * sizeof(DivergenceRow));
  RETURN_IF_ERROR(ops_.sync(backend_));
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  if (2 * took.count() <= kStepSeconds) {
    next_ = 2 * rows;
  } else if (took.count() > kStepSeconds) {
    next_ = std::max<size_t>(1, rows / 2);
  }
  return compared_.size() == arms_.served.size();
}

FidelitySample ArmsComparison::Finish() const { return MeasureRows(compared_, arms_); }

absl::StatusOr<FidelitySample> MeasureArms(const Ops& ops, Backend* backend,
                                           const ArmsToCompare& arms) {
  ASSIGN_OR_RETURN(const auto comparison, ArmsComparison::Start(ops, backend, arms));
  while (true) {
    ASSIGN_OR_RETURN(const bool done, comparison->Step());
    if (done) return comparison->Finish();
  }
}

std::optional<double> RecoveredFidelity(double kl_carried, double kl_old) {
  if (!std::isfinite(kl_carried) || !std::isfinite(kl_old) || kl_old <= 0) return std::nullopt;
  return 1 - kl_carried / kl_old;
}

}  // namespace carryover
