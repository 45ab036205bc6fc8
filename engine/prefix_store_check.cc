// The integrity check: everything that the store keeps twice is computed anew and compared.
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "engine/prefix_store_impl.h"

namespace carryover {

struct PrefixStore::Checker {
  const Impl& store;

  using Node = Impl::Node;
  using Entry = Impl::Entry;
  using State = Impl::State;

  // Names a node or entry by its key: never by its tokens.
  template <typename... Args>
  static absl::Status Wrong(const Node& node, const Args&... args) {
    return absl::InternalError(absl::StrCat("prefix store: node ", ShortHex(node.key), " at depth ",
                                            node.depth, ": ", args...));
  }
  template <typename... Args>
  absl::Status Wrong(const Entry& entry, const Args&... args) const {
    return Wrong(*entry.node, "entry of ", store.registry->Name(entry.provenance), ": ", args...);
  }

  absl::Status Run() {
    RETURN_IF_ERROR(CheckTrees());
    RETURN_IF_ERROR(CheckEntries());
    RETURN_IF_ERROR(CheckUsage());
    return CheckReferences();
  }

  absl::Status CheckTrees() {
    size_t reached = 0;
    std::vector<const Node*> pending;
    for (const auto& [key, root] : store.roots) {
      if (key != root->root.key) return absl::InternalError("prefix store: root under a wrong key");
      if (root->children.empty()) return absl::InternalError("prefix store: root without a node");
      RETURN_IF_ERROR(CheckChildren(*root, nullptr, root->children, &pending));
    }
    while (!pending.empty()) {
      const Node* node = pending.back();
      pending.pop_back();
      ++reached;
      if (node->entries == 0 && node->children.empty()) return Wrong(*node, "holds nothing");
      RETURN_IF_ERROR(CheckChildren(*node->root, node, node->children, &pending));
      RETURN_IF_ERROR(CheckSlots(*node));
    }
    if (reached != store.nodes.size()) {
      return absl::InternalError(absl::StrCat("prefix store: ", store.nodes.size(),
                                              " nodes, of which ", reached, " hang on a root"));
    }
    return absl::OkStatus();
  }

  absl::Status CheckChildren(const Impl::Root& root, const Node* parent,
                             const std::vector<Node*>& children,
                             std::vector<const Node*>* pending) {
    for (size_t i = 0; i < children.size(); ++i) {
      const Node* child = children[i];
      if (child->parent != parent || child->root != &root || child->index_in_parent != i ||
          child->depth != (parent == nullptr ? 0 : parent->depth + 1)) {
        return Wrong(*child, "is linked wrongly");
      }
      if (child->tokens.size() != static_cast<size_t>(store.options.block_tokens)) {
        return Wrong(*child, "has ", child->tokens.size(), " tokens");
      }
      if (store.ChildKey(&root, parent, child->tokens) != child->key) {
        return Wrong(*child, "its tokens do not give its key");
      }
      if (store.FindByKey(child->key, &root, parent, child->tokens) != child) {
        return Wrong(*child, "another node is found in its place");
      }
      pending->push_back(child);
    }
    return absl::OkStatus();
  }

  absl::Status CheckSlots(const Node& node) {
    int with_entry = 0;
    std::unordered_set<int> seen;
    for (const Impl::NodeSlot& slot : node.slots) {
      if (!seen.insert(ProvenanceIndex(slot.provenance)).second) {
        return Wrong(node, "two slots of one provenance");
      }
      if (slot.entry == nullptr && slot.children == 0) return Wrong(node, "an empty slot");
      int children = 0;
      int device_children = 0;
      for (Node* child : node.children) {
        const Impl::NodeSlot* below = Impl::FindSlot(child, slot.provenance);
        if (below == nullptr || below->entry == nullptr) continue;
        ++children;
        if (Impl::OnDevice(below->entry->state)) ++device_children;
      }
      if (children != slot.children || device_children != slot.device_children) {
        return Wrong(node, "counts ", slot.children, "/", slot.device_children, " children of ",
                     store.registry->Name(slot.provenance), ", has ", children, "/",
                     device_children);
      }
      if (slot.entry == nullptr) continue;
      ++with_entry;
      if (slot.entry->node != &node || slot.entry->provenance != slot.provenance ||
          store.Get(slot.entry->self) != slot.entry) {
        return Wrong(node, "its entry belongs elsewhere");
      }
    }
    if (with_entry != node.entries) {
      return Wrong(node, "counts ", node.entries, " entries, has ", with_entry);
    }
    entries_on_nodes += with_entry;
    return absl::OkStatus();
  }

  absl::Status CheckEntries() {
    const std::vector<Entry*> all = store.AllEntries();
    if (static_cast<int64_t>(all.size()) != entries_on_nodes) {
      return absl::InternalError(absl::StrCat("prefix store: ", all.size(), " entries, of which ",
                                              entries_on_nodes, " hang on nodes"));
    }
    if (all.size() + store.free_slots.size() != store.entries.size()) {
      return absl::InternalError("prefix store: slots are lost");
    }
    for (const Entry* entry : all) {
      RETURN_IF_ERROR(CheckLaw(*entry));
      RETURN_IF_ERROR(CheckPlace(*entry));
      RETURN_IF_ERROR(CheckLru(*entry));
      Sum& sum = sums[{store.TierOf(*entry), entry->provenance}];
      ++sum.blocks;
      sum.bytes += store.TierOf(*entry) == Tier::kDevice
                       ? static_cast<int64_t>(store.pool->block_bytes())
                       : static_cast<int64_t>(entry->image_bytes);
      sum.in_lru += entry->in_lru ? 1 : 0;
      if (entry->image != 0) image_bytes[entry->tier] += entry->image_bytes;
    }
    return absl::OkStatus();
  }

  // The provenance law, by induction: what an entry names covers the block in front of it.
  absl::Status CheckLaw(const Entry& entry) const {
    if (entry.node->depth == 0) {
      if (entry.parent_provenance != ProvenanceId::kNone) {
        return Wrong(entry, "is first and yet has something in front");
      }
      return absl::OkStatus();
    }
    if (entry.parent_provenance == ProvenanceId::kNone) {
      return Wrong(entry, "nobody knows what it was computed over");
    }
    if (!store.registry->Covers(entry.provenance, entry.parent_provenance)) {
      return Wrong(entry, "was computed over a block of ",
                   store.registry->Name(entry.parent_provenance));
    }
    return absl::OkStatus();
  }

  absl::Status CheckPlace(const Entry& entry) {
    const bool has_block = entry.state == State::kDevice;
    const bool has_image = entry.state != State::kDevice;
    const bool has_transfer = entry.state == State::kMovingOut || entry.state == State::kLoading;
    if (has_block != static_cast<bool>(entry.block) || has_image != (entry.image != 0) ||
        has_image != (entry.tier >= 0) || has_transfer != (entry.transfer != 0)) {
      return Wrong(entry, "state ", static_cast<int>(entry.state),
                   " does not agree with what it holds");
    }
    if (has_block) {
      ++blocks_of_entries;
      if (store.by_block[entry.block.id()] != &entry) {
        return Wrong(entry, "its block is known as another entry's");
      }
      if (entry.block.use_count() < 1 + entry.cancelled_writes) {
        return Wrong(entry, "its block has ", entry.block.use_count(), " references");
      }
    }
    if (has_transfer) {
      const auto transfer = store.transfers.find(entry.transfer);
      if (transfer == store.transfers.end() || transfer->second.entry != entry.self ||
          transfer->second.cancelled || !transfer->second.block ||
          transfer->second.tier != entry.tier ||
          transfer->second.write != (entry.state == State::kMovingOut)) {
        return Wrong(entry, "its transfer is not its own");
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckLru(const Entry& entry) const {
    const Impl::NodeSlot* slot = Impl::FindSlot(entry.node, entry.provenance);
    const bool expected =
        entry.pins == 0 && ((entry.state == State::kDevice && slot->device_children == 0) ||
                            (entry.state == State::kLower && slot->children == 0));
    if (entry.in_lru != expected) {
      return Wrong(entry, expected ? "is missing from the LRU order" : "must not be evicted");
    }
    if (entry.last_use > store.tick) return Wrong(entry, "was used in the future");
    if (!expected) return absl::OkStatus();
    const auto& of =
        *store.usage[static_cast<int>(store.TierOf(entry))][ProvenanceIndex(entry.provenance)];
    const auto it = of.lru.find({entry.last_use, entry.node->depth, entry.self.slot, nullptr});
    if (it == of.lru.end() || it->entry != &entry)
      return Wrong(entry, "has a wrong place in the LRU order");
    return absl::OkStatus();
  }

  absl::Status CheckUsage() {
    for (size_t tier = 0; tier < store.usage.size(); ++tier) {
      for (size_t i = 0; i < store.usage[tier].size(); ++i) {
        const Impl::Usage& of = *store.usage[tier][i];
        const Sum sum =
            sums[{Tier{static_cast<uint8_t>(tier)}, ProvenanceId{static_cast<int32_t>(i)}}];
        if (of.row.blocks != sum.blocks || of.row.bytes != sum.bytes ||
            static_cast<int64_t>(of.lru.size()) != sum.in_lru) {
          return absl::InternalError(
              absl::StrCat("prefix store: ", TierName(of.row.tier), " blocks of ",
                           store.registry->Name(of.row.provenance), ": counted ", of.row.blocks,
                           " blocks, ", of.row.bytes, " bytes, ", of.lru.size(),
                           " in LRU order, found ", sum.blocks, ", ", sum.bytes, ", ", sum.in_lru));
        }
      }
    }
    for (size_t i = 0; i < store.tiers.size(); ++i) {
      if (store.tiers[i]->used_bytes() != image_bytes[i]) {
        return absl::InternalError(
            absl::StrCat("prefix store: tier ", TierName(store.tiers[i]->tier()), " uses ",
                         store.tiers[i]->used_bytes(), " bytes, its images ", image_bytes[i]));
      }
      if (store.tiers[i]->used_bytes() > store.tiers[i]->budget_bytes()) {
        return absl::InternalError("prefix store: a tier is over its budget");
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckReferences() const {
    int64_t known = 0;
    for (const Entry* entry : store.by_block) known += entry != nullptr ? 1 : 0;
    if (known != blocks_of_entries) {
      return absl::InternalError(absl::StrCat("prefix store: ", known, " blocks known, ",
                                              blocks_of_entries, " held by entries"));
    }
    int freeing = 0;
    std::map<EntryRef, int, RefLess> cancelled;
    for (const auto& [id, transfer] : store.transfers) {
      if (!transfer.block) return absl::InternalError("prefix store: a transfer without a block");
      if (transfer.write && !transfer.cancelled) ++freeing;
      if (transfer.cancelled) ++cancelled[transfer.entry];
    }
    if (freeing != store.freeing) {
      return absl::InternalError(absl::StrCat("prefix store: ", store.freeing,
                                              " blocks said to be leaving, ", freeing, " are"));
    }
    std::map<EntryRef, int, RefLess> pins;
    for (const auto& [key, ref] : store.pins) {
      if (store.Get(ref) == nullptr) return absl::InternalError("prefix store: a pin on nothing");
      ++pins[ref];
    }
    for (const Entry* entry : store.AllEntries()) {
      if (entry->pins != pins[entry->self]) return Wrong(*entry, "counts ", entry->pins, " pins");
      const auto writes = cancelled.find(entry->self);
      if (entry->cancelled_writes != (writes == cancelled.end() ? 0 : writes->second)) {
        return Wrong(*entry, "counts ", entry->cancelled_writes, " cancelled writes");
      }
    }
    return absl::OkStatus();
  }

  struct RefLess {
    bool operator()(const EntryRef& a, const EntryRef& b) const {
      return std::pair(a.slot, a.generation) < std::pair(b.slot, b.generation);
    }
  };
  struct Sum {
    int64_t blocks = 0;
    int64_t bytes = 0;
    int64_t in_lru = 0;
  };
  int64_t entries_on_nodes = 0;
  int64_t blocks_of_entries = 0;
  std::map<std::pair<Tier, ProvenanceId>, Sum> sums;
  std::map<size_t, size_t> image_bytes;  // by tier
};

absl::Status PrefixStore::CheckIntegrity() const { return Checker{.store = *impl_}.Run(); }

}  // namespace carryover
