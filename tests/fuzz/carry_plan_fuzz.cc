// Names of plans. What is taken is the one name of its plan, and its shares are within bounds.
#include <cstddef>
#include <cstdint>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "engine/carry_plan.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace carryover;
  const absl::string_view name(reinterpret_cast<const char*>(data), size);
  const auto plan = ParseCarryPlan(name);
  if (!plan.ok()) {
    CHECK(absl::StartsWith(plan.status().message(), "plan \""));
    CHECK(plan.status().message().size() < 500);
    return 0;
  }
  CHECK(CarryPlanName(*plan) == name);
  CHECK(*ParseCarryPlan(CarryPlanName(*plan)) == *plan);
  for (const int blocks : {0, 1, 7, 1 << 26}) {
    const int tail = plan->TailBlocks(blocks, 16);
    CHECK(tail >= 0 && tail <= blocks && (blocks == 0 || (tail > 0) == plan->tail.any()));
  }
  const int bottom = plan->BottomLayers(30);
  CHECK(bottom >= 0 && bottom <= 30 && (bottom > 0) == plan->bottom.any());
  return 0;
}
