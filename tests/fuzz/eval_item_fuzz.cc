// A line of a tasks file. What is taken is within the bounds, and comes back as it was when it is
// written in our own format.
#include <cstddef>
#include <cstdint>

#include "absl/strings/match.h"
#include "base/status_macros.h"
#include "client/eval/item.h"
#include "client/eval/scoring.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace carryover::eval;
  const absl::string_view line(reinterpret_cast<const char*>(data), size);
  const auto item = ParseItem(line, "f:1", "stem");
  if (!item.ok()) {
    CHECK(absl::StartsWith(item.status().message(), "f:1: "));
    return 0;
  }
  CHECK(!item->task.empty() && !item->id.empty());
  CHECK(item->metric == Metric::kNone || !item->answers.empty());
  const auto again = ParseItem(ItemToJson(*item).dump(), "f:1", "stem");
  CHECK(again.ok());
  CHECK(ItemKey(*again) == ItemKey(*item));
  const Score score = ScoreAnswer(*item, item->prefix);
  CHECK(!score.value || (*score.value >= 0 && *score.value <= 1));
  return 0;
}
