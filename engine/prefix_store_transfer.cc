// Moves between the device and the tiers below it.
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "engine/prefix_store_impl.h"

namespace carryover {

KvImageHeader PrefixStore::Impl::HeaderOf(const Entry& entry) const {
  const Node& node = *entry.node;
  KvImageHeader header;
  header.tokenizer_sha256 = node.root->root.tokenizer_sha256;
  header.kv_layout_sha256 = node.root->root.kv_layout_sha256;
  header.shard = options.shard;
  header.shards = options.shards;
  header.provenance = registry->Get(entry.provenance);
  header.root = node.root->root.key;
  header.parent = node.parent == nullptr ? header.root : node.parent->key;
  header.key = node.key;
  header.tokens = node.tokens;
  header.payload_bytes = pool->block_bytes();
  return header;
}

bool PrefixStore::Impl::StartMoveOut(Entry* entry, EvictionReason reason) {
  const KvImageHeader header = HeaderOf(*entry);
  for (size_t i = 0; i < tiers.size(); ++i) {
    KvTier* tier = tiers[i].get();
    const size_t bytes = tier->ImageBytes(header);
    if (bytes > tier->budget_bytes()) continue;
    while (tier->used_bytes() + bytes > tier->budget_bytes()) {
      EvictionReason lower_reason;
      Entry* victim = PickVictim(tier->tier(), /*keep_reserved=*/true, &lower_reason);
      if (victim == nullptr) break;
      Node* node = victim->node;
      DropEntry(victim, lower_reason);
      PruneUp(node);
    }
    const uint64_t id = next_id++;
    const KvTier::ImageId image = next_id++;
    const absl::Status started =
        tier->StartWrite(image, header, entry->block.data(),
                         [this, id](const absl::Status& status) { FinishWrite(id, status); });
    if (!started.ok()) continue;
    Transfer& transfer = transfers[id];
    transfer = {.entry = entry->self, .tier = static_cast<int>(i), .write = true, .reason = reason};
    by_block[entry->block.id()] = nullptr;
    transfer.block = std::move(entry->block);
    entry->tier = static_cast<int>(i);
    entry->image = image;
    entry->image_bytes = bytes;
    entry->transfer = id;
    ++freeing;
    SetState(entry, State::kMovingOut);
    return true;
  }
  return false;
}

void PrefixStore::Impl::CancelMoveOut(Entry* entry) {
  Transfer& transfer = transfers.at(entry->transfer);
  transfer.cancelled = true;
  ++entry->cancelled_writes;
  --freeing;
  tiers[entry->tier]->Remove(entry->image);
  entry->block = transfer.block;
  by_block[entry->block.id()] = entry;
  SetState(entry, State::kDevice);
  entry->image = 0;
  entry->image_bytes = 0;
  entry->tier = -1;
  entry->transfer = 0;
}

void PrefixStore::Impl::Adopt(Entry* entry, BlockRef block) {
  CHECK(entry->state == State::kLower);
  tiers[entry->tier]->Remove(entry->image);
  by_block[block.id()] = entry;
  entry->block = std::move(block);
  SetState(entry, State::kDevice);
  entry->image = 0;
  entry->image_bytes = 0;
  entry->tier = -1;
}

void PrefixStore::Impl::FinishWrite(uint64_t id, const absl::Status& status) {
  const auto it = transfers.find(id);
  CHECK(it != transfers.end());
  const Transfer transfer = std::move(it->second);
  transfers.erase(it);
  if (!transfer.cancelled) --freeing;
  Entry* entry = Get(transfer.entry);
  if (!status.ok()) {
    Reject(RejectReason::kTransfer);
    LogWarning("kv_write_failed", {{"status", status.ToString()}});
  }
  if (entry == nullptr) return;
  if (transfer.cancelled) {
    --entry->cancelled_writes;
    return;
  }
  if (!status.ok()) {
    Node* node = entry->node;
    DropEntry(entry, transfer.reason);
    PruneUp(node);
    return;
  }
  ++UsageOf(Tier::kDevice, entry->provenance).row.evictions[static_cast<int>(transfer.reason)];
  entry->transfer = 0;
  SetState(entry, State::kLower);
}

int PrefixStore::BlocksToLoad(absl::Span<const EntryRef> refs) const {
  std::set<const Impl::Entry*> lower;
  for (const EntryRef& ref : refs) {
    const Impl::Entry* entry = impl_->Get(ref);
    if (entry != nullptr && entry->state == Impl::State::kLower) lower.insert(entry);
  }
  return static_cast<int>(lower.size());
}

absl::StatusOr<PrefixStore::LoadId> PrefixStore::Load(absl::Span<const EntryRef> refs,
                                                      std::function<void(LoadResult)> done) {
  const int needed = BlocksToLoad(refs);
  if (needed > impl_->pool->free()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "loading cached blocks takes ", needed, " free blocks, there are ", impl_->pool->free()));
  }
  const LoadId id = impl_->next_id++;
  Impl::PendingLoad& load = impl_->loads[id];
  load.done = std::move(done);
  load.result.blocks.resize(refs.size());
  for (size_t i = 0; i < refs.size(); ++i) {
    Impl::Entry* entry = impl_->Get(refs[i]);
    if (entry == nullptr) {
      ++load.result.failed;
      continue;
    }
    if (std::optional<TableBlock> block = Use(refs[i]); block.has_value()) {
      load.result.blocks[i] = *std::move(block);
      continue;
    }
    ++load.remaining;
    ++entry->hits;
    ++impl_->UsageOf(impl_->TierOf(*entry), entry->provenance).row.hit_blocks;
    impl_->Touch(entry);
    if (entry->state == Impl::State::kLower) {
      std::optional<BlockRef> block = impl_->pool->Allocate();
      CHECK(block.has_value());
      const uint64_t transfer = impl_->next_id++;
      impl_->transfers[transfer] = {
          .entry = entry->self, .block = *block, .tier = entry->tier, .write = false};
      entry->transfer = transfer;
      impl_->SetState(entry, Impl::State::kLoading);
      impl_->tiers[entry->tier]->StartRead(
          entry->image, impl_->HeaderOf(*entry), block->data(),
          [impl = impl_.get(), transfer](const absl::Status& status) {
            impl->FinishRead(transfer, status);
          });
    }
    impl_->transfers.at(entry->transfer).waiters.emplace_back(id, i);
  }
  if (load.remaining == 0) {
    impl_->finished_loads.push_back(id);
    if (impl_->wakeup) impl_->wakeup();
  }
  return id;
}

void PrefixStore::CancelLoad(LoadId id) { impl_->loads.erase(id); }

void PrefixStore::Impl::FinishRead(uint64_t id, const absl::Status& status) {
  const auto it = transfers.find(id);
  CHECK(it != transfers.end());
  const Transfer transfer = std::move(it->second);
  transfers.erase(it);
  Entry* entry = Get(transfer.entry);
  if (!status.ok() && entry != nullptr) {
    Reject(absl::IsDataLoss(status)   ? RejectReason::kCorrupt
           : absl::IsNotFound(status) ? RejectReason::kLost
                                      : RejectReason::kTransfer);
    LogWarning("kv_read_rejected", {{"status", status.ToString()}});
    Node* node = entry->node;
    DropEntry(entry, std::nullopt);
    PruneUp(node);
    entry = nullptr;
  }
  if (entry != nullptr) {
    tiers[entry->tier]->Remove(entry->image);
    by_block[transfer.block.id()] = entry;
    entry->block = transfer.block;
    entry->transfer = 0;
    SetState(entry, State::kDevice);
    entry->image = 0;
    entry->image_bytes = 0;
    entry->tier = -1;
  }
  for (const auto& [load, index] : transfer.waiters) {
    FinishPart(load, index, entry == nullptr ? TableBlock{} : Share(*entry));
  }
}

void PrefixStore::Impl::FinishPart(LoadId id, size_t index, TableBlock block) {
  const auto it = loads.find(id);
  if (it == loads.end()) return;  // cancelled
  PendingLoad& load = it->second;
  if (!block.block) ++load.result.failed;
  load.result.blocks[index] = std::move(block);
  if (--load.remaining == 0) finished_loads.push_back(id);
}

int PrefixStore::Poll() {
  int count = 0;
  for (const std::unique_ptr<KvTier>& tier : impl_->tiers) count += tier->Poll();
  // What a callback starts is for the next call.
  const std::vector<LoadId> finished = std::exchange(impl_->finished_loads, {});
  for (LoadId id : finished) {
    const auto it = impl_->loads.find(id);
    if (it == impl_->loads.end()) continue;
    Impl::PendingLoad load = std::move(it->second);
    impl_->loads.erase(it);
    load.done(std::move(load.result));
  }
  return count;
}

void PrefixStore::SetWakeup(std::function<void()> wakeup) {
  for (const std::unique_ptr<KvTier>& tier : impl_->tiers) tier->SetWakeup(wakeup);
  impl_->wakeup = std::move(wakeup);
}

}  // namespace carryover
