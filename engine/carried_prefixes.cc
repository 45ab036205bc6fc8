#include "engine/carried_prefixes.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace carryover {

void CarriedPrefixes::Used(const Digest& target, const CacheRoot& root, const EntryRef& end,
                           absl::Span<const int32_t> tokens, int carried, double now) {
  if (carried <= 0 || max_prefixes_ <= 0 || static_cast<int64_t>(tokens.size()) > max_tokens_) {
    return;
  }
  const double use = std::log2(carried) + now / kHalfLife;
  const Key key = {target, end.slot, end.generation};
  if (const auto found = entries_.find(key); found != entries_.end()) {
    double& worth = found->second.worth;
    const double more = std::max(worth, use), less = std::min(worth, use);
    worth = more + std::log2(1 + std::exp2(less - more));
    return;
  }
  while (size() >= max_prefixes_ || tokens_ + static_cast<int64_t>(tokens.size()) > max_tokens_) {
    const auto least = Least();
    if (least->second.worth > use) return;
    Erase(least);
  }
  entries_[key] = {{target, root, {tokens.begin(), tokens.end()}}, use};
  tokens_ += static_cast<int64_t>(tokens.size());
}

std::optional<CarriedPrefix> CarriedPrefixes::TakeHottest() {
  const auto hottest = std::max_element(
      entries_.begin(), entries_.end(),
      [](const auto& a, const auto& b) { return a.second.worth < b.second.worth; });
  if (hottest == entries_.end()) return std::nullopt;
  CarriedPrefix prefix = std::move(hottest->second.prefix);
  tokens_ -= static_cast<int64_t>(prefix.tokens.size());
  entries_.erase(hottest);
  return prefix;
}

void CarriedPrefixes::Forget(const Digest& target) {
  for (auto at = entries_.begin(); at != entries_.end();) {
    const auto here = at++;
    if (here->first.target == target) Erase(here);
  }
}

void CarriedPrefixes::Erase(Entries::iterator at) {
  tokens_ -= static_cast<int64_t>(at->second.prefix.tokens.size());
  entries_.erase(at);
}

CarriedPrefixes::Entries::iterator CarriedPrefixes::Least() {
  return std::min_element(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
    return a.second.worth < b.second.worth;
  });
}

}  // namespace carryover
