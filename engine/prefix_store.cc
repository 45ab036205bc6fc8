#include "engine/prefix_store.h"

#include <algorithm>
#include <utility>

#include "base/status_macros.h"
#include "engine/prefix_store_impl.h"

namespace carryover {

CacheRoot RootKey(absl::string_view tenant, absl::string_view salt, const Digest& tokenizer_sha256,
                  const Digest& kv_layout_sha256) {
  CacheRoot root;
  root.key = Hasher()
                 .Add("carryover root 1")
                 .Add(tenant)
                 .Add(salt)
                 .AddDigest(tokenizer_sha256)
                 .AddDigest(kv_layout_sha256)
                 .Finish();
  root.tokenizer_sha256 = tokenizer_sha256;
  root.kv_layout_sha256 = kv_layout_sha256;
  return root;
}

const MatchEntry* ChainMatch::Find(int i, ProvenanceId provenance) const {
  for (const MatchEntry& entry : level(i)) {
    if (entry.provenance == provenance) return &entry;
  }
  return nullptr;
}

int ChainMatch::Run(int begin, ProvenanceId provenance) const {
  int end = begin;
  while (end < levels() && Find(end, provenance) != nullptr) ++end;
  return end - begin;
}

PrefixStore::Impl::Impl(const PrefixStoreOptions& store_options, BlockPool* block_pool,
                        ProvenanceRegistry* provenance_registry,
                        std::vector<std::unique_ptr<KvTier>> lower_tiers)
    : options(store_options),
      pool(block_pool),
      registry(provenance_registry),
      tiers(std::move(lower_tiers)),
      by_block(block_pool->capacity(), nullptr) {
  CHECK(options.block_tokens > 0);
}

// --- The tree ---

PrefixStore::Impl::Root* PrefixStore::Impl::FindRoot(const CacheRoot& root) const {
  const auto it = roots.find(root.key);
  return it == roots.end() ? nullptr : it->second.get();
}

PrefixStore::Impl::Root* PrefixStore::Impl::FindOrAddRoot(const CacheRoot& root) {
  std::unique_ptr<Root>& slot = roots[root.key];
  if (slot == nullptr) {
    slot = std::make_unique<Root>();
    slot->root = root;
  }
  return slot.get();
}

Digest PrefixStore::Impl::ChildKey(const Root* root, const Node* parent,
                                   absl::Span<const int32_t> tokens) const {
  const Digest& parent_key = parent == nullptr ? root->root.key : parent->key;
  if (options.hash) return options.hash(parent_key, tokens);
  return Hasher().AddDigest(parent_key).AddTokens(tokens).Finish();
}

PrefixStore::Impl::Node* PrefixStore::Impl::FindByKey(const Digest& key, const Root* root,
                                                      const Node* parent,
                                                      absl::Span<const int32_t> tokens) const {
  const auto [begin, end] = nodes.equal_range(key);
  for (auto it = begin; it != end; ++it) {
    Node* node = it->second.get();
    if (node->parent == parent && node->root == root && tokens == absl::MakeSpan(node->tokens)) {
      return node;
    }
  }
  return nullptr;
}

PrefixStore::Impl::Node* PrefixStore::Impl::FindChild(const Root* root, const Node* parent,
                                                      absl::Span<const int32_t> tokens) const {
  return FindByKey(ChildKey(root, parent, tokens), root, parent, tokens);
}

PrefixStore::Impl::Node* PrefixStore::Impl::FindOrAddChild(Root* root, Node* parent,
                                                           absl::Span<const int32_t> tokens) {
  const Digest key = ChildKey(root, parent, tokens);
  if (Node* node = FindByKey(key, root, parent, tokens); node != nullptr) return node;
  auto node = std::make_unique<Node>();
  Node* added = node.get();
  added->key = key;
  added->root = root;
  added->parent = parent;
  added->depth = parent == nullptr ? 0 : parent->depth + 1;
  added->tokens.assign(tokens.begin(), tokens.end());
  std::vector<Node*>& siblings = parent == nullptr ? root->children : parent->children;
  added->index_in_parent = siblings.size();
  siblings.push_back(added);
  nodes.emplace(key, std::move(node));
  return added;
}

PrefixStore::Impl::NodeSlot* PrefixStore::Impl::FindSlot(Node* node, ProvenanceId provenance) {
  for (NodeSlot& slot : node->slots) {
    if (slot.provenance == provenance) return &slot;
  }
  return nullptr;
}

PrefixStore::Impl::NodeSlot* PrefixStore::Impl::FindOrAddSlot(Node* node, ProvenanceId provenance) {
  if (NodeSlot* slot = FindSlot(node, provenance); slot != nullptr) return slot;
  node->slots.push_back({.provenance = provenance});
  return &node->slots.back();
}

void PrefixStore::Impl::DropSlotIfEmpty(Node* node, ProvenanceId provenance) {
  NodeSlot* slot = FindSlot(node, provenance);
  if (slot == nullptr || slot->entry != nullptr || slot->children > 0) return;
  *slot = node->slots.back();
  node->slots.pop_back();
}

bool PrefixStore::Impl::Prune(Node* node) {
  if (node->entries > 0 || !node->children.empty()) return false;
  std::vector<Node*>& siblings =
      node->parent == nullptr ? node->root->children : node->parent->children;
  siblings[node->index_in_parent] = siblings.back();
  siblings[node->index_in_parent]->index_in_parent = node->index_in_parent;
  siblings.pop_back();
  if (node->root->children.empty()) roots.erase(node->root->root.key);
  const auto [begin, end] = nodes.equal_range(node->key);
  nodes.erase(std::find_if(begin, end, [&](const auto& it) { return it.second.get() == node; }));
  return true;
}

void PrefixStore::Impl::PruneUp(Node* node) {
  while (node != nullptr) {
    Node* parent = node->parent;
    if (!Prune(node)) return;
    node = parent;
  }
}

// --- Entries ---

PrefixStore::Impl::Entry* PrefixStore::Impl::Get(const EntryRef& ref) const {
  if (ref.slot >= entries.size() || generations[ref.slot] != ref.generation) return nullptr;
  return entries[ref.slot].get();
}

Tier PrefixStore::Impl::TierOf(const Entry& entry) const {
  const bool lower = entry.state == State::kLower || entry.state == State::kLoading;
  return lower ? tiers[entry.tier]->tier() : Tier::kDevice;
}

PrefixStore::Impl::Usage& PrefixStore::Impl::UsageOf(Tier tier, ProvenanceId provenance) {
  auto& of_tier = usage[static_cast<int>(tier)];
  const size_t index = ProvenanceIndex(provenance);
  while (of_tier.size() <= index) {
    of_tier.push_back(std::make_unique<Usage>());
    of_tier.back()->row.tier = tier;
    of_tier.back()->row.provenance = ProvenanceId{static_cast<int32_t>(of_tier.size()) - 1};
  }
  return *of_tier[index];
}

void PrefixStore::Impl::Account(const Entry& entry, int sign) {
  const Tier tier = TierOf(entry);
  Usage& of = UsageOf(tier, entry.provenance);
  const int64_t bytes = tier == Tier::kDevice ? pool->block_bytes() : entry.image_bytes;
  of.ever = true;
  of.row.blocks += sign;
  of.row.bytes += sign * bytes;
}

void PrefixStore::Impl::UpdateLru(Entry* entry) {
  const NodeSlot* slot = FindSlot(entry->node, entry->provenance);
  bool wanted = entry->pins == 0;
  if (entry->state == State::kDevice) {
    wanted &= slot->device_children == 0;
  } else {
    wanted &= entry->state == State::kLower && slot->children == 0;
  }
  if (wanted == entry->in_lru) return;
  std::set<LruKey>& lru = UsageOf(TierOf(*entry), entry->provenance).lru;
  const LruKey key{entry->last_use, entry->node->depth, entry->self.slot, entry};
  if (wanted) {
    lru.insert(key);
  } else {
    lru.erase(key);
  }
  entry->in_lru = wanted;
}

void PrefixStore::Impl::Touch(Entry* entry) {
  entry->last_time = std::chrono::steady_clock::now();
  if (entry->last_use == tick) return;
  if (!entry->in_lru) {
    entry->last_use = tick;
    return;
  }
  std::set<LruKey>& lru = UsageOf(TierOf(*entry), entry->provenance).lru;
  LruKey key{entry->last_use, entry->node->depth, entry->self.slot, entry};
  lru.erase(key);
  entry->last_use = key.last_use = tick;
  lru.insert(key);
}

void PrefixStore::Impl::AddToParent(Entry* entry, int children, int device_children) {
  Node* parent = entry->node->parent;
  if (parent == nullptr) return;
  NodeSlot* slot = FindOrAddSlot(parent, entry->provenance);
  slot->children += children;
  slot->device_children += device_children;
  if (slot->entry != nullptr) {
    UpdateLru(slot->entry);
  } else {
    DropSlotIfEmpty(parent, entry->provenance);
  }
}

// Leaves the LRU set and the books of the old state, enters those of the new one. What the new
// state needs (block or image) is set by the caller: before, where the new tier depends on it;
// nothing that the old one is accounted by may be cleared before.
void PrefixStore::Impl::SetState(Entry* entry, State state) {
  if (entry->in_lru) {
    UsageOf(TierOf(*entry), entry->provenance)
        .lru.erase({entry->last_use, entry->node->depth, entry->self.slot, entry});
    entry->in_lru = false;
  }
  Account(*entry, -1);
  const bool was_on_device = OnDevice(entry->state);
  entry->state = state;
  Account(*entry, +1);
  UpdateLru(entry);
  AddToParent(entry, 0, int{OnDevice(state)} - int{was_on_device});
}

PrefixStore::Impl::Entry* PrefixStore::Impl::AddEntry(Node* node, ProvenanceId provenance,
                                                      ProvenanceId parent_provenance,
                                                      BlockRef block) {
  uint32_t index;
  if (free_slots.empty()) {
    index = static_cast<uint32_t>(entries.size());
    entries.emplace_back();
    generations.push_back(1);
  } else {
    index = free_slots.back();
    free_slots.pop_back();
  }
  entries[index] = std::make_unique<Entry>();
  Entry* entry = entries[index].get();
  entry->self = {index, generations[index]};
  entry->node = node;
  entry->provenance = provenance;
  entry->parent_provenance = parent_provenance;
  by_block[block.id()] = entry;
  entry->block = std::move(block);
  entry->last_use = tick;
  entry->last_time = std::chrono::steady_clock::now();
  FindOrAddSlot(node, provenance)->entry = entry;
  ++node->entries;
  Account(*entry, +1);
  UpdateLru(entry);
  AddToParent(entry, +1, +1);
  return entry;
}

void PrefixStore::Impl::DropEntry(Entry* entry, std::optional<EvictionReason> reason) {
  Usage& of = UsageOf(TierOf(*entry), entry->provenance);
  if (entry->in_lru) {
    of.lru.erase({entry->last_use, entry->node->depth, entry->self.slot, entry});
  }
  Account(*entry, -1);
  if (reason.has_value()) ++of.row.evictions[static_cast<int>(*reason)];
  // A transfer under way keeps its block and finds out by the entry's generation.
  if (entry->image != 0) tiers[entry->tier]->Remove(entry->image);
  if (entry->block) by_block[entry->block.id()] = nullptr;
  if (entry->pins > 0) {
    std::erase_if(pins, [&](const auto& pin) { return pin.second == entry->self; });
  }
  Node* node = entry->node;
  FindSlot(node, entry->provenance)->entry = nullptr;
  --node->entries;
  AddToParent(entry, -1, OnDevice(entry->state) ? -1 : 0);
  DropSlotIfEmpty(node, entry->provenance);
  const uint32_t index = entry->self.slot;
  if (++generations[index] == 0) generations[index] = 1;
  free_slots.push_back(index);
  entries[index].reset();
}

bool PrefixStore::Impl::InUse(const Entry& entry) const {
  if (entry.state == State::kLoading) return true;
  return entry.block && entry.block.use_count() > 1 + entry.cancelled_writes;
}

TableBlock PrefixStore::Impl::Share(const Entry& entry) const {
  return {.block = entry.block, .origin = Origin(entry.provenance), .reused = true};
}

std::vector<PrefixStore::Impl::Entry*> PrefixStore::Impl::Chain(const CacheRoot& root_key,
                                                                absl::Span<const int32_t> tokens,
                                                                ProvenanceId provenance) const {
  std::vector<Entry*> chain;
  const Root* root = FindRoot(root_key);
  if (root == nullptr) return chain;
  const size_t block = options.block_tokens;
  Node* node = nullptr;
  for (size_t begin = 0; begin + block <= tokens.size(); begin += block) {
    node = FindChild(root, node, tokens.subspan(begin, block));
    if (node == nullptr) break;
    const NodeSlot* slot = FindSlot(node, provenance);
    if (slot == nullptr || slot->entry == nullptr) break;
    chain.push_back(slot->entry);
  }
  return chain;
}

std::vector<PrefixStore::Impl::Entry*> PrefixStore::Impl::AllEntries() const {
  std::vector<Entry*> all;
  all.reserve(entries.size());
  for (const std::unique_ptr<Entry>& entry : entries) {
    if (entry != nullptr) all.push_back(entry.get());
  }
  return all;
}

// --- The store ---

PrefixStore::PrefixStore(const PrefixStoreOptions& options, BlockPool* pool,
                         ProvenanceRegistry* registry, std::vector<std::unique_ptr<KvTier>> tiers)
    : impl_(std::make_unique<Impl>(options, pool, registry, std::move(tiers))) {}

PrefixStore::~PrefixStore() {
  // Ends the tiers' workers before the blocks that they copy from and to are given back.
  impl_->tiers.clear();
}

ChainMatch PrefixStore::Find(const CacheRoot& root_key, absl::Span<const int32_t> tokens) {
  ++impl_->tick;
  ChainMatch match;
  const size_t block = impl_->options.block_tokens;
  match.block_tokens = impl_->options.block_tokens;
  const Impl::Root* root = impl_->FindRoot(root_key);
  if (root == nullptr) return match;
  const Impl::Node* node = nullptr;
  for (size_t begin = 0; begin + block <= tokens.size(); begin += block) {
    node = impl_->FindChild(root, node, tokens.subspan(begin, block));
    if (node == nullptr || node->entries == 0) break;
    match.level_begin.push_back(static_cast<uint32_t>(match.entries.size()));
    for (const Impl::NodeSlot& slot : node->slots) {
      if (slot.entry == nullptr) continue;
      const Impl::State state = slot.entry->state;
      match.entries.push_back(
          {.provenance = slot.provenance,
           .tier = impl_->TierOf(*slot.entry),
           .ready = state == Impl::State::kDevice || state == Impl::State::kMovingOut,
           .entry = slot.entry->self});
    }
  }
  if (!match.level_begin.empty()) {
    match.level_begin.push_back(static_cast<uint32_t>(match.entries.size()));
  }
  return match;
}

std::optional<TableBlock> PrefixStore::Use(const EntryRef& ref) {
  Impl::Entry* entry = impl_->Get(ref);
  if (entry == nullptr) return std::nullopt;
  if (entry->state == Impl::State::kMovingOut) impl_->CancelMoveOut(entry);
  if (entry->state != Impl::State::kDevice) return std::nullopt;
  impl_->Touch(entry);
  ++entry->hits;
  ++impl_->UsageOf(Tier::kDevice, entry->provenance).row.hit_blocks;
  return impl_->Share(*entry);
}

std::optional<TableBlock> PrefixStore::Hold(const EntryRef& ref) const {
  const Impl::Entry* entry = impl_->Get(ref);
  if (entry == nullptr || entry->state != Impl::State::kDevice) return std::nullopt;
  return impl_->Share(*entry);
}

std::vector<PrefixStore::LeveledEntry> PrefixStore::Unmapped(const EntryRef& last,
                                                             ProvenanceId mapped) const {
  std::vector<LeveledEntry> found;
  const Impl::Entry* end = impl_->Get(last);
  if (end == nullptr) return found;
  for (Impl::Node* node = end->node; node != nullptr; node = node->parent) {
    const Impl::NodeSlot* own = Impl::FindSlot(node, end->provenance);
    if (own == nullptr || own->entry == nullptr) continue;
    if (own->entry->state != Impl::State::kDevice) continue;
    const Impl::NodeSlot* other = Impl::FindSlot(node, mapped);
    if (other != nullptr && other->entry != nullptr) continue;
    found.emplace_back(node->depth, own->entry->self);
  }
  std::reverse(found.begin(), found.end());
  return found;
}

namespace {

Digest PinKey(const CacheRoot& root, absl::Span<const int32_t> tokens, ProvenanceId provenance) {
  return Hasher()
      .AddDigest(root.key)
      .AddTokens(tokens)
      .AddInt(ProvenanceIndex(provenance))
      .Finish();
}

}  // namespace

int64_t PrefixStore::Pin(const CacheRoot& root, absl::Span<const int32_t> tokens,
                         ProvenanceId provenance) {
  const std::vector<Impl::Entry*> chain = impl_->Chain(root, tokens, provenance);
  if (chain.empty()) return 0;
  // Holding the last block holds the chain: an entry with children of its provenance never goes.
  Unpin(root, tokens, provenance);
  Impl::Entry* last = chain.back();
  impl_->pins[PinKey(root, tokens, provenance)] = last->self;
  ++last->pins;
  impl_->UpdateLru(last);
  return static_cast<int64_t>(chain.size()) * impl_->options.block_tokens;
}

int64_t PrefixStore::Unpin(const CacheRoot& root, absl::Span<const int32_t> tokens,
                           ProvenanceId provenance) {
  const auto pin = impl_->pins.find(PinKey(root, tokens, provenance));
  if (pin == impl_->pins.end()) return 0;
  Impl::Entry* entry = impl_->Get(pin->second);
  impl_->pins.erase(pin);
  CHECK(entry != nullptr && entry->pins > 0);
  --entry->pins;
  impl_->UpdateLru(entry);
  return int64_t{entry->node->depth + 1} * impl_->options.block_tokens;
}

}  // namespace carryover
