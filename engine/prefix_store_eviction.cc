// Which blocks go, and in what order.
#include <algorithm>
#include <utility>

#include "engine/prefix_store_impl.h"

namespace carryover {

const char* EvictionReasonName(EvictionReason reason) {
  switch (reason) {
    case EvictionReason::kCapacity:
      return "capacity";
    case EvictionReason::kBudget:
      return "budget";
    case EvictionReason::kRequest:
      return "request";
    case EvictionReason::kVersionRemoved:
      return "version_removed";
  }
  return "unknown";
}

// In blocks on the device, in bytes elsewhere.
int64_t PrefixStore::Impl::Reserve(Tier tier, ProvenanceId provenance) const {
  if (std::find(reserved.begin(), reserved.end(), provenance) == reserved.end()) return 0;
  double total = pool->capacity();
  for (const std::unique_ptr<KvTier>& lower : tiers) {
    if (lower->tier() == tier) total = static_cast<double>(lower->budget_bytes());
  }
  return static_cast<int64_t>(options.reserved_share * total /
                              static_cast<double>(reserved.size()));
}

// The least recently used entry of a provenance that has more than its reserve; where there is none
// such and keep_reserved is false, the least recently used of all.
PrefixStore::Impl::Entry* PrefixStore::Impl::PickVictim(Tier tier, bool keep_reserved,
                                                        EvictionReason* reason) {
  const LruKey* oldest = nullptr;
  const LruKey* oldest_over = nullptr;
  for (const std::unique_ptr<Usage>& of : usage[static_cast<int>(tier)]) {
    // What sequences hold counts as used just now. Few are at the old end, at most one for each
    // sequence, and none is met twice with the same tick.
    while (!of->lru.empty() && of->lru.begin()->last_use < tick && InUse(*of->lru.begin()->entry)) {
      Touch(of->lru.begin()->entry);
    }
    if (of->lru.empty() || InUse(*of->lru.begin()->entry)) continue;
    const LruKey* candidate = &*of->lru.begin();
    const int64_t held = tier == Tier::kDevice ? of->row.blocks : of->row.bytes;
    if (oldest == nullptr || *candidate < *oldest) oldest = candidate;
    if (held <= Reserve(tier, of->row.provenance)) continue;
    if (oldest_over == nullptr || *candidate < *oldest_over) oldest_over = candidate;
  }
  if (oldest_over != nullptr) {
    *reason = oldest_over == oldest ? EvictionReason::kCapacity : EvictionReason::kBudget;
    return oldest_over->entry;
  }
  if (oldest == nullptr || keep_reserved) return nullptr;
  *reason = EvictionReason::kCapacity;
  return oldest->entry;
}

EvictOutcome PrefixStore::EvictUntilFree(int n, const EvictOptions& options) {
  ++impl_->tick;
  const auto enough = [&] {
    return impl_->pool->free() + (options.drop ? 0 : impl_->freeing) >= n;
  };
  while (!enough()) {
    EvictionReason reason;
    Impl::Entry* victim = impl_->PickVictim(Tier::kDevice, options.keep_reserved, &reason);
    if (victim == nullptr) break;
    if (!options.drop && impl_->StartMoveOut(victim, reason)) continue;
    Impl::Node* node = victim->node;
    impl_->DropEntry(victim, reason);
    impl_->PruneUp(node);
  }
  return {.free = impl_->pool->free(), .pending = impl_->freeing};
}

void PrefixStore::SetReserved(absl::Span<const ProvenanceId> provenances) {
  impl_->reserved.assign(provenances.begin(), provenances.end());
  std::sort(impl_->reserved.begin(), impl_->reserved.end());
  impl_->reserved.erase(std::unique(impl_->reserved.begin(), impl_->reserved.end()),
                        impl_->reserved.end());
}

void PrefixStore::Impl::TryEvict(Entry* entry, EvictReport* report) {
  if (InUse(*entry)) {
    ++report->in_use;
    return;
  }
  if (entry->pins > 0 || FindSlot(entry->node, entry->provenance)->children > 0) {
    ++report->pinned;
    return;
  }
  ++report->evicted;
  report->evicted_bytes +=
      TierOf(*entry) == Tier::kDevice ? pool->block_bytes() : entry->image_bytes;
  DropEntry(entry, EvictionReason::kRequest);
}

EvictReport PrefixStore::Impl::EvictMatching(const std::function<bool(const Entry&)>& matches) {
  std::vector<Entry*> chosen = AllEntries();
  std::erase_if(chosen, [&](const Entry* entry) { return !matches(*entry); });
  // Tails first, so that what stays is told for a reason that will not pass with the next entry.
  std::stable_sort(chosen.begin(), chosen.end(),
                   [](const Entry* a, const Entry* b) { return a->node->depth > b->node->depth; });
  EvictReport report;
  for (Entry* entry : chosen) {
    Node* node = entry->node;
    TryEvict(entry, &report);
    PruneUp(node);
  }
  return report;
}

EvictReport PrefixStore::EvictAll() {
  return impl_->EvictMatching([](const Impl::Entry&) { return true; });
}

EvictReport PrefixStore::EvictVersion(const Digest& version) {
  return impl_->EvictMatching([&](const Impl::Entry& entry) {
    return impl_->registry->Get(entry.provenance).computed_by == version;
  });
}

EvictReport PrefixStore::EvictPrefix(const CacheRoot& root_key, absl::Span<const int32_t> tokens) {
  EvictReport report;
  const Impl::Root* root = impl_->FindRoot(root_key);
  const size_t block = impl_->options.block_tokens;
  const size_t full = tokens.size() / block;
  if (root == nullptr || full == 0) return report;
  std::vector<Impl::Node*> path;
  for (size_t i = 0; i < full; ++i) {
    Impl::Node* node = impl_->FindChild(root, path.empty() ? nullptr : path.back(),
                                        tokens.subspan(i * block, block));
    if (node == nullptr) break;
    path.push_back(node);
  }

  const auto evict_node = [&](Impl::Node* node) {
    const std::vector<Impl::NodeSlot> slots = node->slots;
    for (const Impl::NodeSlot& slot : slots) {
      if (slot.entry != nullptr) impl_->TryEvict(slot.entry, &report);
    }
    return impl_->Prune(node);
  };
  if (path.size() == full) {
    // Parents come before their children in this list, so that backwards is tails first.
    std::vector<Impl::Node*> below = path.back()->children;
    for (size_t i = 0; i < below.size(); ++i) {
      below.insert(below.end(), below[i]->children.begin(), below[i]->children.end());
    }
    for (size_t i = below.size(); i-- > 0;) evict_node(below[i]);
  }
  // The way back, as far as no other prefix hangs on it.
  bool kept_behind = false;
  for (size_t i = path.size(); i-- > 0;) {
    const bool whole = path.size() == full && i + 1 == path.size();
    if (!whole && path[i]->children.size() > (kept_behind ? 1 : 0)) break;
    kept_behind = !evict_node(path[i]);
  }
  return report;
}

EvictReport PrefixStore::RemoveVersion(const Digest& version) {
  EvictReport report;
  for (Impl::Entry* entry : impl_->AllEntries()) {
    if (!impl_->registry->Get(entry->provenance).Involves(version)) continue;
    if (impl_->InUse(*entry)) {
      ++report.in_use;
    } else {
      ++report.evicted;
      report.evicted_bytes +=
          impl_->TierOf(*entry) == Tier::kDevice ? impl_->pool->block_bytes() : entry->image_bytes;
    }
    Impl::Node* node = entry->node;
    impl_->DropEntry(entry, EvictionReason::kVersionRemoved);
    impl_->PruneUp(node);
  }
  return report;
}

}  // namespace carryover
