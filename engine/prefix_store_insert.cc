// What enters the store, and the law that it is checked against.
#include <algorithm>

#include "base/log.h"
#include "base/status_macros.h"
#include "engine/prefix_store_impl.h"

namespace carryover {

InsertResult PrefixStore::Insert(const CacheRoot& root_key, absl::Span<const int32_t> tokens,
                                 absl::Span<const TableBlock> table) {
  ++impl_->tick;
  InsertResult result;
  const size_t block = impl_->options.block_tokens;
  const size_t full = tokens.size() / block;
  CHECK(table.size() >= full);
  if (full == 0) return result;

  const auto refuse = [&](size_t from, RejectReason reason) {
    impl_->Reject(reason);
    for (size_t i = from; i < full; ++i) result.refused += table[i].reused ? 0 : 1;
  };
  Impl::Root* root = impl_->FindRoot(root_key);
  Impl::Node* node = nullptr;
  std::vector<ProvenanceId> attended;  // distinct, of the blocks in front
  ProvenanceId previous = ProvenanceId::kNone;
  for (size_t i = 0; i < full; ++i) {
    const TableBlock& own = table[i];
    const absl::Span<const int32_t> chunk = tokens.subspan(i * block, block);
    const Impl::Entry* known = own.block ? impl_->by_block[own.block.id()] : nullptr;
    const ProvenanceId label = own.origin.provenance();
    // What the store knows of a block outweighs its label.
    const ProvenanceId actual = known != nullptr ? known->provenance : label;
    bool lawful = actual != ProvenanceId::kNone && own.block;
    if (!own.reused) {
      lawful &= label == actual;
      for (ProvenanceId one : attended) lawful = lawful && impl_->registry->Covers(label, one);
    }
    if (!lawful) {
      LogError("provenance_violation", {{"block", i},
                                        {"label", impl_->registry->Name(label)},
                                        {"actual", impl_->registry->Name(actual)}});
      refuse(i, RejectReason::kViolation);
      break;
    }

    if (own.reused) {
      node = root == nullptr ? nullptr : impl_->FindChild(root, node, chunk);
      if (node == nullptr || node->entries == 0) {
        refuse(i, RejectReason::kOrphan);
        break;
      }
      if (known != nullptr) impl_->Touch(impl_->by_block[own.block.id()]);
    } else {
      if (root == nullptr) root = impl_->FindOrAddRoot(root_key);
      node = impl_->FindOrAddChild(root, node, chunk);
      const Impl::NodeSlot* slot = Impl::FindSlot(node, actual);
      Impl::Entry* entry = slot == nullptr ? nullptr : slot->entry;
      if (known != nullptr && known != entry) {
        // The very block is stored already, under another prefix: these tokens cannot be right.
        impl_->PruneUp(node);
        refuse(i, RejectReason::kViolation);
        break;
      }
      if (entry == nullptr) {
        impl_->AddEntry(node, actual, previous, own.block);
        ++result.inserted;
      } else {
        ++result.existing;
        impl_->Touch(entry);
        if (entry->state == Impl::State::kLower) impl_->Adopt(entry, own.block);
      }
    }
    if (std::find(attended.begin(), attended.end(), actual) == attended.end()) {
      attended.push_back(actual);
    }
    previous = actual;
  }
  return result;
}

InsertResult PrefixStore::InsertMapped(const EntryRef& source, const TableBlock& mapped) {
  ++impl_->tick;
  InsertResult result;
  const Impl::Entry* from = impl_->Get(source);
  if (from == nullptr) return result;
  const ProvenanceId label = mapped.origin.provenance();
  // A map adds to what its source depends on, and hides nothing of it.
  const bool lawful = mapped.block && impl_->by_block[mapped.block.id()] == nullptr &&
                      label != from->provenance &&
                      impl_->registry->Get(label).computed_by ==
                          impl_->registry->Get(from->provenance).computed_by &&
                      impl_->registry->Covers(label, from->provenance);
  if (!lawful) {
    LogError("provenance_violation", {{"label", impl_->registry->Name(label)},
                                      {"actual", impl_->registry->Name(from->provenance)}});
    impl_->Reject(RejectReason::kViolation);
    result.refused = 1;
    return result;
  }
  Impl::Node* node = from->node;
  const Impl::NodeSlot* slot = Impl::FindSlot(node, label);
  Impl::Entry* entry = slot == nullptr ? nullptr : slot->entry;
  if (entry == nullptr) {
    impl_->AddEntry(node, label, from->parent_provenance, mapped.block);
    result.inserted = 1;
  } else {
    result.existing = 1;
    impl_->Touch(entry);
    if (entry->state == Impl::State::kLower) impl_->Adopt(entry, mapped.block);
  }
  return result;
}

}  // namespace carryover
