#include "engine/carry_plan.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"

namespace carryover {
namespace {

absl::Status Refuse(absl::string_view name, absl::string_view what) {
  // The name may come from anywhere and goes into logs.
  return absl::InvalidArgumentError(
      absl::StrCat("plan \"", absl::CHexEscape(name.substr(0, kMaxPlanNameBytes)), "\": ", what));
}

std::string PartName(absl::string_view word, const CarryPlan::Part& part) {
  return part.percent > 0 ? absl::StrCat(word, "(", part.percent, "%)")
                          : absl::StrCat(word, "(", part.count, ")");
}

int RoundedUp(int64_t percent, int64_t whole) {
  return static_cast<int>((percent * whole + 99) / 100);
}

// "(32)" or "(10%)" behind the word.
absl::Status ParsePart(absl::string_view name, absl::string_view word, absl::string_view rest,
                       int most, CarryPlan::Part* part) {
  const auto refuse = [&] {
    return Refuse(name, absl::StrCat(word, " takes a number from 1 to ", most,
                                     " or a percentage from 1% to 100% in brackets"));
  };
  if (part->any()) return Refuse(name, absl::StrCat(word, " stands there twice"));
  if (rest.size() < 3 || rest.front() != '(' || rest.back() != ')') return refuse();
  absl::string_view digits = rest.substr(1, rest.size() - 2);
  const bool percent = digits.back() == '%';
  if (percent) digits.remove_suffix(1);
  const bool number =
      !digits.empty() && digits.front() != '0' &&
      std::all_of(digits.begin(), digits.end(), [](char c) { return absl::ascii_isdigit(c); });
  int value = 0;
  if (!number || !absl::SimpleAtoi(digits, &value) || value > (percent ? 100 : most)) {
    return refuse();
  }
  (percent ? part->percent : part->count) = value;
  return absl::OkStatus();
}

}  // namespace

int CarryPlan::TailBlocks(int prefix_blocks, int block_tokens) const {
  if (tail.percent > 0) return RoundedUp(tail.percent, prefix_blocks);
  return std::min(prefix_blocks, (tail.count + block_tokens - 1) / block_tokens);
}

int CarryPlan::BottomLayers(int layers) const {
  return bottom.percent > 0 ? RoundedUp(bottom.percent, layers) : std::min(layers, bottom.count);
}

CarryPlan NativePlan() {
  CarryPlan plan;
  plan.carries = false;
  return plan;
}

absl::StatusOr<CarryPlan> ParseCarryPlan(absl::string_view name) {
  if (name.size() > kMaxPlanNameBytes) {
    return Refuse(name, absl::StrCat("is over ", kMaxPlanNameBytes, " bytes"));
  }
  if (name.empty()) return Refuse(name, "is empty");  // which splits into no part at all
  if (name == "native") return NativePlan();
  CarryPlan plan;
  if (name == "direct") return plan;
  int last = 0;
  for (absl::string_view part : absl::StrSplit(name, '+')) {
    const absl::string_view word = part.substr(0, part.find('('));
    const absl::string_view rest = part.substr(word.size());
    int order;
    if (part == "calibrated") {
      if (plan.calibrated) return Refuse(name, "calibrated stands there twice");
      plan.calibrated = true;
      order = 1;
    } else if (word == "bottom") {
      RETURN_IF_ERROR(ParsePart(name, word, rest, kMaxBottomLayers, &plan.bottom));
      order = 2;
    } else if (word == "tail") {
      RETURN_IF_ERROR(ParsePart(name, word, rest, kMaxTailTokens, &plan.tail));
      order = 3;
    } else {
      return Refuse(name,
                    "is not native, direct, or parts of calibrated, bottom(..) and tail(..) "
                    "joined by +");
    }
    if (order < last) return Refuse(name, "the order is calibrated, bottom, tail");
    last = order;
  }
  return plan;
}

absl::Status CheckRung(absl::string_view name) {
  ASSIGN_OR_RETURN(const CarryPlan plan, ParseCarryPlan(name));
  if (!plan.carries) return Refuse(name, "carries nothing");
  return absl::OkStatus();
}

std::string CarryPlanName(const CarryPlan& plan) {
  if (!plan.carries) return "native";
  std::vector<std::string> parts;
  if (plan.calibrated) parts.push_back("calibrated");
  if (plan.bottom.any()) parts.push_back(BottomName(plan));
  if (plan.tail.any()) parts.push_back(TailName(plan));
  return parts.empty() ? "direct" : absl::StrJoin(parts, "+");
}

std::string TailName(const CarryPlan& plan) { return PartName("tail", plan.tail); }
std::string BottomName(const CarryPlan& plan) { return PartName("bottom", plan.bottom); }

}  // namespace carryover
