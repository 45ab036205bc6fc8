// How a version is served from another one's caches: what of the carried part it takes as it is,
// and what it repairs. A plan has a name, which is what configurations, metrics, reports and the
// gate's ladder hold. Plain values; any thread.
//
//   native           nothing is carried
//   direct           carried blocks as they are
//   calibrated       carried keys and values are changed by a map fitted for this pair of versions
//   bottom(K)        keys and values of the lowest K layers are computed by the target from the
//                    token ids, those above are carried; bottom(P%): P per cent of the layers
//   tail(R)          the last R tokens of the reused prefix, rounded up to whole blocks, are
//   computed
//                    by the target over the rest; tail(P%): P per cent of the prefix
//
// The last three are joined by '+', in this order: "calibrated+tail(32)".
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carryover {

inline constexpr int kMaxTailTokens = 1 << 20;
inline constexpr int kMaxBottomLayers = 1024;
inline constexpr int kMaxPlanNameBytes = 64;

struct CarryPlan {
  // So many, or so many per cent; at most one of the two is set, and both are 0 where there is no
  // such part.
  struct Part {
    int count = 0;
    int percent = 0;  // 1 to 100
    bool any() const { return count > 0 || percent > 0; }
    bool operator==(const Part&) const = default;
  };

  bool carries = true;  // false: "native", and there are no parts
  bool calibrated = false;
  Part bottom;  // layers
  Part tail;    // tokens

  bool operator==(const CarryPlan&) const = default;

  // Of a prefix of so many blocks: how many at its end are to be the target's own. Rounded up.
  int TailBlocks(int prefix_blocks, int block_tokens) const;
  // Of a model of so many layers: how many are computed. Rounded up.
  int BottomLayers(int layers) const;
};

CarryPlan NativePlan();

struct NamedPlan {
  std::string name;
  CarryPlan plan;
};

// INVALID_ARGUMENT says what is wrong with the name. Every plan has one name alone: spaces, leading
// zeros and other orders of the parts are refused.
absl::StatusOr<CarryPlan> ParseCarryPlan(absl::string_view name);
// Whether it is the name of a plan by which something can be carried. INVALID_ARGUMENT.
absl::Status CheckRung(absl::string_view name);
std::string CarryPlanName(const CarryPlan& plan);

// A part alone, for reports of what became of a run of tokens: "tail(32)", "bottom(2)".
std::string TailName(const CarryPlan& plan);
std::string BottomName(const CarryPlan& plan);

}  // namespace carryover
