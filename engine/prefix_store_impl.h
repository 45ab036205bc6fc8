// Inside of the prefix store, shared by its prefix_store*.cc only. Read prefix_store.h first.
//
// Nodes form the trees of prefixes, entries hang on nodes, transfers carry blocks between tiers.
// Invariants, all of which CheckIntegrity verifies:
//   - a node has an entry or a child, or does not exist;
//   - an entry that may be evicted stands in exactly one LRU set: on the device when no child node
//     has an entry of its provenance on the device; elsewhere when none has one at all; never when
//     it is pinned;
//   - usage rows and tiers' budgets are the sums over entries.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/prefix_store.h"

namespace carryover {

struct PrefixStore::Impl {
  struct Node;
  struct Root;

  enum class State : uint8_t {
    kDevice,     // in `block`
    kMovingOut,  // in its transfer's block, an image being written
    kLower,      // in an image
    kLoading,    // in an image, being read into its transfer's block
  };

  struct Entry {
    EntryRef self;
    Node* node = nullptr;
    ProvenanceId provenance = ProvenanceId::kNone;
    // Of the block in front of it when it was computed; kNone for a first block.
    ProvenanceId parent_provenance = ProvenanceId::kNone;
    State state = State::kDevice;
    BlockRef block;
    int tier = -1;  // into `tiers`, when there is an image
    KvTier::ImageId image = 0;
    size_t image_bytes = 0;
    uint64_t transfer = 0;     // under way, when kMovingOut or kLoading
    int cancelled_writes = 0;  // still under way, each holding the block, too
    uint64_t last_use = 0;     // a tick
    std::chrono::steady_clock::time_point last_time;
    int64_t hits = 0;
    int pins = 0;
    bool in_lru = false;
  };

  // What a node knows of one provenance.
  struct NodeSlot {
    ProvenanceId provenance = ProvenanceId::kNone;
    Entry* entry = nullptr;
    int children = 0;         // child nodes with an entry of it
    int device_children = 0;  // of these, on the device or on the way there
  };

  struct Node {
    Digest key{};
    Root* root = nullptr;
    Node* parent = nullptr;  // null for a first block
    int depth = 0;
    std::vector<int32_t> tokens;  // (block_tokens)
    std::vector<Node*> children;
    size_t index_in_parent = 0;  // into the children of parent or root
    std::vector<NodeSlot> slots;
    int entries = 0;
  };

  struct Root {
    CacheRoot root;
    std::vector<Node*> children;
  };

  // Least recently used first; of those used in one go, the deepest first.
  struct LruKey {
    uint64_t last_use;
    int depth;
    uint32_t slot;
    Entry* entry;
    bool operator<(const LruKey& other) const {
      if (last_use != other.last_use) return last_use < other.last_use;
      if (depth != other.depth) return depth > other.depth;
      return slot < other.slot;
    }
  };

  // One (tier, provenance).
  struct Usage {
    StoreStatsRow row;
    bool ever = false;
    std::set<LruKey> lru;
  };

  struct Transfer {
    EntryRef entry;
    BlockRef block;  // source of a write, destination of a read
    int tier = 0;
    bool write = false;
    bool cancelled = false;                             // a write whose entry stays on the device
    EvictionReason reason = EvictionReason::kCapacity;  // of a write
    std::vector<std::pair<LoadId, size_t>> waiters;  // of a read: loads, and which of their blocks
  };

  struct PendingLoad {
    LoadResult result;
    size_t remaining = 0;
    std::function<void(LoadResult)> done;
  };

  Impl(const PrefixStoreOptions& options, BlockPool* pool, ProvenanceRegistry* registry,
       std::vector<std::unique_ptr<KvTier>> tiers);

  // --- prefix_store.cc: the tree ---
  Root* FindRoot(const CacheRoot& root) const;
  Root* FindOrAddRoot(const CacheRoot& root);
  Digest ChildKey(const Root* root, const Node* parent, absl::Span<const int32_t> tokens) const;
  Node* FindByKey(const Digest& key, const Root* root, const Node* parent,
                  absl::Span<const int32_t> tokens) const;
  // The child with these tokens, or null. parent is null at the first level.
  Node* FindChild(const Root* root, const Node* parent, absl::Span<const int32_t> tokens) const;
  Node* FindOrAddChild(Root* root, Node* parent, absl::Span<const int32_t> tokens);
  static NodeSlot* FindSlot(Node* node, ProvenanceId provenance);
  NodeSlot* FindOrAddSlot(Node* node, ProvenanceId provenance);
  void DropSlotIfEmpty(Node* node, ProvenanceId provenance);
  // Deletes the node if it has neither entry nor child. PruneUp goes on with its parents.
  bool Prune(Node* node);
  void PruneUp(Node* node);

  // --- prefix_store.cc: entries ---
  Entry* Get(const EntryRef& ref) const;
  Entry* AddEntry(Node* node, ProvenanceId provenance, ProvenanceId parent_provenance,
                  BlockRef block);
  // Takes an entry out of every structure; its node stays for the caller to prune. A reason counts
  // as an eviction.
  void DropEntry(Entry* entry, std::optional<EvictionReason> reason);
  void SetState(Entry* entry, State state);
  // Puts the entry into the LRU set where it belongs, or takes it out of it.
  void UpdateLru(Entry* entry);
  void Touch(Entry* entry);
  bool InUse(const Entry& entry) const;
  TableBlock Share(const Entry& entry) const;
  Tier TierOf(const Entry& entry) const;
  Usage& UsageOf(Tier tier, ProvenanceId provenance);
  void Account(const Entry& entry, int sign);
  static bool OnDevice(State state) { return state == State::kDevice || state == State::kLoading; }
  void AddToParent(Entry* entry, int children, int device_children);
  void Reject(RejectReason reason) { ++rejects[static_cast<int>(reason)]; }
  // The longest chain of one provenance along tokens.
  std::vector<Entry*> Chain(const CacheRoot& root, absl::Span<const int32_t> tokens,
                            ProvenanceId provenance) const;
  std::vector<Entry*> AllEntries() const;
  // Hottest, of all provenances or, unless it is kNone, of one.
  std::vector<const Entry*> Hottest(ProvenanceId of, int limit) const;

  // --- prefix_store_eviction.cc ---
  Entry* PickVictim(Tier tier, bool keep_reserved, EvictionReason* reason);
  int64_t Reserve(Tier tier, ProvenanceId provenance) const;
  // False when no tier takes it.
  bool StartMoveOut(Entry* entry, EvictionReason reason);
  void TryEvict(Entry* entry, EvictReport* report);
  EvictReport EvictMatching(const std::function<bool(const Entry&)>& matches);

  // --- prefix_store_transfer.cc ---
  KvImageHeader HeaderOf(const Entry& entry) const;
  void CancelMoveOut(Entry* entry);
  // A block with the same content takes the place of the entry's image.
  void Adopt(Entry* entry, BlockRef block);
  void FinishWrite(uint64_t transfer, const absl::Status& status);
  void FinishRead(uint64_t transfer, const absl::Status& status);
  void FinishPart(LoadId load, size_t index, TableBlock block);

  const PrefixStoreOptions options;
  BlockPool* const pool;
  ProvenanceRegistry* const registry;
  std::vector<std::unique_ptr<KvTier>> tiers;

  std::unordered_map<Digest, std::unique_ptr<Root>, DigestHash> roots;
  std::unordered_multimap<Digest, std::unique_ptr<Node>, DigestHash> nodes;  // by key
  std::vector<std::unique_ptr<Entry>> entries;                               // by slot
  std::vector<uint32_t> generations;                                         // by slot
  std::vector<uint32_t> free_slots;
  std::vector<Entry*> by_block;  // by block id: the entry whose `block` it is
  std::array<std::vector<std::unique_ptr<Usage>>, kTierCount> usage;  // by tier and provenance
  std::vector<ProvenanceId> reserved;
  std::map<Digest, EntryRef> pins;  // by what was pinned

  std::unordered_map<uint64_t, Transfer> transfers;
  std::unordered_map<LoadId, PendingLoad> loads;
  std::vector<LoadId> finished_loads;
  uint64_t next_id = 1;  // of transfers, images and loads
  int freeing = 0;       // writes under way whose end frees a block
  std::function<void()> wakeup;

  uint64_t tick = 0;
  std::array<int64_t, kRejectReasons> rejects{};
};

}  // namespace carryover
