// What one compared request says about fidelity: the measures of its positions and of the request
// as a whole, from both arms' raw logits along the text that was served. Pure functions; any thread
// that may use the backend. Measures are in docs/metrics.md in words.
//
// Rows are positions of the generated text: row i is what an arm thinks after the prompt and the
// first i served tokens, and the served token i was chosen from the serving arm's row i. p is the
// native arm, q the other. A control compares native with native, `old` the target's native arm (p)
// with the source's (q).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/ops.h"

namespace carryover {

inline constexpr int kMaxFidelityPositions = 16;

enum class FidelityComparison : uint8_t {
  kCarried,  // native against carried
  kControl,  // native against native, computed another way: the noise floor
  kOld,      // the target's native arm against the source's
};
const char* FidelityComparisonName(FidelityComparison comparison);  // "carried", "control", "old"

// Whose text the arms were led along. Only first positions may be pooled over both.
enum class Along : uint8_t {
  kNative,  // the native arm served
  kServed,  // the carried arm served
};
const char* AlongName(Along along);  // "native", "served"

// What a sample is filed under. These become metric labels: names of models, versions and plans,
// and a configured task; never anything of a request's text or owner.
struct FidelityLabels {
  std::string model;
  std::string source;  // version names
  std::string target;
  std::string plan;
  std::string task;         // as TaskLabel makes it
  int prefix_bucket = 256;  // a power of two: tokens of the reused prefix, rounded down, from 256
  FidelityComparison comparison = FidelityComparison::kCarried;
};

// `task` when it is one of the configured ones, else "other".
std::string TaskLabel(absl::Span<const std::string> configured, absl::string_view task);

struct ArmsToCompare {
  absl::Span<const float> native;   // host (positions, vocab): p
  absl::Span<const float> carried;  // host (positions, vocab): q
  int vocab = 0;
  absl::Span<const int32_t> served;       // (positions) tokens, a stop token included
  absl::Span<const int32_t> stop_tokens;  // that would end the text; empty when nothing would
  absl::Span<const int32_t> answers;      // (positions) labelled answers, or empty: as p has it
  bool complete = false;                  // the served text has no tokens after these
  // Temperature 0, and no penalty, bias or minimum length changes what is chosen.
  bool greedy = false;
  Along along = Along::kNative;
  FidelityLabels labels;
};

// One position. Without valid, a row held NaN, +inf or nothing possible, and the rest is unset.
struct PositionFidelity {
  bool valid = false;
  bool flip = false;          // argmax p != argmax q
  bool fragile = false;       // p's first choice led by less than delta_range: a flip was in reach
  double kl = 0;              // KL(p, q), nats; +inf where q is 0 and p is not
  double js = 0;              // Jensen-Shannon, nats
  double tv = 0;              // total variation
  double overlap = 0;         // share of p's 10 most likely tokens that are among q's 10
  double native_margin = 0;   // m(z) = z[a] - max over j != a of z[j], nats
  double carried_margin = 0;  // with the same a
  double margin_shift = 0;    // carried_margin - native_margin: below 0, the answer lost ground
  double delta_range = 0;     // max - min of the change over the union of both tops
  double native_stop = 0;     // P(stop)
  double carried_stop = 0;
  double stop_shift = 0;  // |carried_stop - native_stop|
};

// The groups that positions are told in: 1, 2-4, 5-16 (counted from 1).
inline constexpr int kPositionGroups = 3;
int PositionGroup(int position);           // of a position counted from 0
const char* PositionGroupName(int group);  // "1", "2-4", "5-16"

// For greedy requests: how the other arm would have gone on.
enum class Continuation : uint8_t {
  kUnknown,    // not greedy, or not valid
  kSame,       // the same tokens to the end of the text
  kSameSoFar,  // the same tokens as far as was compared
  kDiverged,   // another token first at `divergence`
};
const char* ContinuationName(Continuation continuation);  // "same", "same_so_far", "diverged"

// Each in [0, 1]; in the order that the gate has them.
inline constexpr int kFidelityFlip = 0, kFidelityTv = 1, kFidelityStop = 2;

struct FidelitySample {
  FidelityLabels labels;
  Along along = Along::kNative;
  std::vector<PositionFidelity> positions;
  bool valid = false;             // all positions are
  bool first_token_flip = false;  // at position 0, where both arms saw the same tokens

  // Greedy requests. Whether the logits say that this is one is looked at, too: when a served token
  // is not the serving arm's argmax, something else had a hand in it, and these are unknown.
  Continuation continuation = Continuation::kUnknown;
  int divergence = -1;  // position from 0 of the first other token
  // Whether the other arm would stop at another index than the served text did. Absent when it
  // parted ways before either stopped, since nobody knows what it would have said then.
  std::optional<bool> stop_disagreement;

  // First-token flip: 0 or 1. Mean of tv over the positions. Stop disagreement where it is known,
  // else StopTotalVariation of the positions. A position that is not valid counts as the worst: a
  // flip, tv = 1, stop = 1.
  std::array<double, 3> gate_values = {};
};

// INVALID_ARGUMENT when the spans do not fit together or there are none or more than
// kMaxFidelityPositions positions; what the backend says otherwise.
absl::StatusOr<FidelitySample> MeasureArms(const Ops& ops, Backend* backend,
                                           const ArmsToCompare& arms);

// MeasureArms a few positions at a time, for a caller who lets others have the device in between.
class ArmsComparison {
 public:
  // What the arms' spans point at, and backend, outlive it. Errors as MeasureArms.
  static absl::StatusOr<std::unique_ptr<ArmsComparison>> Start(const Ops& ops, Backend* backend,
                                                               const ArmsToCompare& arms);
  ~ArmsComparison();
  ArmsComparison(const ArmsComparison&) = delete;
  ArmsComparison& operator=(const ArmsComparison&) = delete;

  // Compares the next positions: one at first, more while that takes less than a millisecond.
  // True when all are compared.
  absl::StatusOr<bool> Step();
  // REQUIRES: Step has returned true.
  FidelitySample Finish() const;

 private:
  ArmsComparison(const Ops& ops, Backend* backend, const ArmsToCompare& arms);
  absl::Status Reserve(size_t rows);
  void Release();

  const Ops& ops_;
  Backend* const backend_;
  const ArmsToCompare arms_;
  std::vector<DivergenceRow> compared_;
  size_t next_ = 1;      // positions of the next step
  size_t reserved_ = 0;  // rows that there is device memory for
  void* native_ = nullptr;
  void* carried_ = nullptr;
  void* out_ = nullptr;
};

// The same from rows that ops.divergence has compared already (downloaded to the host); the
// logits' spans in `arms` are not used. REQUIRES: as many rows as served tokens, at least one.
FidelitySample MeasureRows(absl::Span<const DivergenceRow> rows, const ArmsToCompare& arms);

// Total variation between the arms' distributions of where the text stops, along the served tokens:
// with hazards h[i] = P(stop at i), f[i] = h[i] prod over j < i of (1 - h[j]), and one more value
// for not stopping there at all; sum |f - g| / 2. In [0, 1].
double StopTotalVariation(absl::Span<const PositionFidelity> positions);

// What carrying kept of an update: 1 - KL(T, carried) / KL(T, S), of means over the same requests.
// 1: as the target natively; 0: no nearer to it than the old version was. Absent when the old
// version is no different or a KL is not finite.
std::optional<double> RecoveredFidelity(double kl_carried, double kl_old);

}  // namespace carryover
