#include "engine/stop_matcher.h"

#include <algorithm>

namespace carryover {

StopMatcher::StopMatcher(std::vector<std::string> stops, bool include)
    : stops_(std::move(stops)), include_(include) {
  for (const std::string& stop : stops_) longest_ = std::max(longest_, stop.size());
}

std::string StopMatcher::Add(absl::string_view piece) {
  if (stopped_) return "";
  if (stops_.empty()) return std::string(piece);
  held_.append(piece.data(), piece.size());

  // A stop that is complete may still lose to one that starts earlier but is not complete yet; that
  // one would have to be waited for, and waiting could go on past the complete one. The first to be
  // complete wins, as in a character-by-character scan.
  size_t best_end = std::string::npos;
  const std::string* best = nullptr;
  for (const std::string& stop : stops_) {
    const size_t at = held_.find(stop);
    if (at == std::string::npos) continue;
    const size_t end = at + stop.size();
    if (best == nullptr || end < best_end || (end == best_end && stop.size() > best->size())) {
      best_end = end;
      best = &stop;
    }
  }
  if (best != nullptr) {
    stopped_ = true;
    matched_ = *best;
    std::string out = held_.substr(0, include_ ? best_end : best_end - best->size());
    held_.clear();
    return out;
  }

  // Hold back the longest end of the text that is a proper start of a stop.
  size_t hold = 0;
  for (const std::string& stop : stops_) {
    for (size_t n = std::min(held_.size(), stop.size() - 1); n > hold; --n) {
      if (held_.compare(held_.size() - n, n, stop, 0, n) == 0) {
        hold = n;
        break;
      }
    }
  }
  std::string out = held_.substr(0, held_.size() - hold);
  held_.erase(0, held_.size() - hold);
  return out;
}

std::string StopMatcher::Finish() {
  if (stopped_) return "";
  return std::move(held_);
}

}  // namespace carryover
