// What the store tells about itself.
#include <algorithm>

#include "engine/prefix_store_impl.h"

namespace carryover {

const char* RejectReasonName(RejectReason reason) {
  switch (reason) {
    case RejectReason::kViolation:
      return "violation";
    case RejectReason::kOrphan:
      return "orphan";
    case RejectReason::kCorrupt:
      return "corrupt";
    case RejectReason::kLost:
      return "lost";
    case RejectReason::kTransfer:
      return "transfer";
  }
  return "unknown";
}

StoreStats PrefixStore::stats() const {
  StoreStats stats;
  for (const auto& of_tier : impl_->usage) {
    for (const std::unique_ptr<Impl::Usage>& of : of_tier) {
      if (of->ever) stats.rows.push_back(of->row);
    }
  }
  stats.rejects = impl_->rejects;
  stats.provenance_violations = impl_->rejects[static_cast<int>(RejectReason::kViolation)];
  stats.nodes = static_cast<int64_t>(impl_->nodes.size());
  for (const auto& [id, transfer] : impl_->transfers) {
    ++(transfer.write ? stats.moving_out : stats.loading);
  }
  return stats;
}

int64_t PrefixStore::device_blocks() const {
  int64_t blocks = 0;
  for (const std::unique_ptr<Impl::Usage>& of : impl_->usage[static_cast<int>(Tier::kDevice)]) {
    blocks += of->row.blocks;
  }
  for (const auto& [id, transfer] : impl_->transfers) {
    // A write's block is counted with its entry as long as there is one; a cancelled write's block
    // may have gone on to somebody else only when the entry no longer exists.
    if (!transfer.write || impl_->Get(transfer.entry) == nullptr) ++blocks;
  }
  return blocks;
}

std::vector<const PrefixStore::Impl::Entry*> PrefixStore::Impl::Hottest(ProvenanceId of,
                                                                        int limit) const {
  std::vector<const Entry*> hottest;
  for (const Entry* entry : AllEntries()) {
    if (of != ProvenanceId::kNone && entry->provenance != of) continue;
    bool outlasted = false;
    for (Node* child : entry->node->children) {
      const NodeSlot* slot = FindSlot(child, entry->provenance);
      if (slot == nullptr || slot->entry == nullptr) continue;
      outlasted |= slot->entry->hits >= entry->hits;
    }
    if (!outlasted) hottest.push_back(entry);
  }
  const size_t count = std::min<size_t>(std::max(limit, 0), hottest.size());
  std::partial_sort(hottest.begin(), hottest.begin() + static_cast<ptrdiff_t>(count), hottest.end(),
                    [](const Entry* a, const Entry* b) {
                      if (a->hits != b->hits) return a->hits > b->hits;
                      if (a->last_use != b->last_use) return a->last_use > b->last_use;
                      return a->self.slot < b->self.slot;
                    });
  hottest.resize(count);
  return hottest;
}

std::vector<EntryRef> PrefixStore::HottestOf(ProvenanceId provenance, int limit) const {
  std::vector<EntryRef> last;
  for (const Impl::Entry* entry : impl_->Hottest(provenance, limit)) last.push_back(entry->self);
  return last;
}

std::vector<PrefixListing> PrefixStore::Hottest(int limit) const {
  const auto now = std::chrono::steady_clock::now();
  std::vector<PrefixListing> listings;
  for (const Impl::Entry* hot : impl_->Hottest(ProvenanceId::kNone, limit)) {
    const Impl::Entry& entry = *hot;
    listings.push_back(
        {.key = entry.node->key,
         .provenance = entry.provenance,
         .tier = impl_->TierOf(entry),
         .tokens = int64_t{entry.node->depth + 1} * impl_->options.block_tokens,
         .hits = entry.hits,
         .idle_seconds = std::chrono::duration<double>(now - entry.last_time).count(),
         .pinned = entry.pins > 0});
  }
  return listings;
}

}  // namespace carryover
