// The prefix store: which KV blocks exist for which token prefix, computed by whom, and where.
//
// A tree of nodes, one for each full block of tokens behind a given prefix. The key of a node is
// SHA-256(parent key, tokens); the first parent is a root that tenant, salt, tokenizer and KV
// layout make up. A node holds one entry for each provenance, so that one walk answers for all
// versions. The hash only finds candidates: a hit also has the same parent node and the same
// tokens.
//
// An entry is in one tier at a time. Under pressure it moves from device to host memory, tail of
// the chain first and least recently used first, and from there out. Pinned entries stay, and with
// them the chain that leads to them; blocks that sequences hold stay, too.
//
// Usual course of a request:
//   ChainMatch match = store.Find(root, the first MaxReusableBlocks() blocks of tokens);
//   ... choose an entry for each level: a plan ...
//   device entries: Use() gives a block to put into the table; entries elsewhere: Load(), wait;
//   lineage.Attend(block.origin) for each; compute the rest, labelling with lineage.current();
//   store.Insert(root, tokens, table).
//
// One store for each KvLayout. Everything belongs to the engine thread, and nothing here blocks it.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/hash.h"
#include "engine/block_pool.h"
#include "engine/kv_tier.h"
#include "engine/provenance.h"

namespace carryover {

// What separates caches that must never meet. Equal roots are equal keys.
struct CacheRoot {
  Digest key{};
  Digest tokenizer_sha256{};
  Digest kv_layout_sha256{};
};
// tenant comes from the authenticated identity, salt from the request.
CacheRoot RootKey(absl::string_view tenant, absl::string_view salt, const Digest& tokenizer_sha256,
                  const Digest& kv_layout_sha256);

// How many tokens of a prompt may come from the store: whole blocks, and never the last token,
// whose logits have to be computed.
constexpr int MaxReusableBlocks(int64_t prompt_tokens, int block_tokens) {
  return prompt_tokens <= 0 ? 0 : static_cast<int>((prompt_tokens - 1) / block_tokens);
}

// Names an entry for as long as it exists; afterwards Use and Load treat it as absent.
struct EntryRef {
  uint32_t slot = 0;
  uint32_t generation = 0;  // 0: none
  bool operator==(const EntryRef&) const = default;
};

// One entry as Find saw it.
struct MatchEntry {
  ProvenanceId provenance = ProvenanceId::kNone;
  Tier tier = Tier::kDevice;
  bool ready = false;  // on the device and usable at once; else Load
  EntryRef entry;
};

struct ChainMatch {
  int block_tokens = 0;
  std::vector<MatchEntry> entries;    // of all levels, one after another
  std::vector<uint32_t> level_begin;  // (levels() + 1), into entries; empty when nothing matched

  // Level i covers tokens i * block_tokens ... (i + 1) * block_tokens - 1. Never an empty level.
  int levels() const { return level_begin.empty() ? 0 : static_cast<int>(level_begin.size()) - 1; }
  absl::Span<const MatchEntry> level(int i) const {
    return absl::MakeConstSpan(entries).subspan(level_begin[i],
                                                level_begin[i + 1] - level_begin[i]);
  }
  // The entry of one provenance, or null.
  const MatchEntry* Find(int i, ProvenanceId provenance) const;
  // How many levels from `begin` on have an entry of this provenance without a gap.
  int Run(int begin, ProvenanceId provenance) const;

  int64_t matched_tokens() const { return int64_t{levels()} * block_tokens; }
  // Up to where computing may go on. Equal to the matched length for plain K and V; layouts that
  // keep a tail extent can resume at fewer places.
  int64_t resumable_tokens() const { return matched_tokens(); }
};

// One block of a sequence's table.
struct TableBlock {
  BlockRef block;
  Origin origin;        // from Use or Load, or Lineage::current()
  bool reused = false;  // came from the store; Insert leaves it as it is
};

struct InsertResult {
  int inserted = 0;  // entries that are new
  int existing = 0;  // kept the old entry
  int refused = 0;   // counted as a reject, see RejectReason
};

enum class EvictionReason : uint8_t {
  kCapacity,        // least recently used, as blocks or bytes were needed
  kBudget,          // the same, but a less recently used one was passed over under its reserve
  kRequest,         // Evict
  kVersionRemoved,  // RemoveVersion
};
inline constexpr int kEvictionReasons = 4;
const char* EvictionReasonName(EvictionReason reason);  // "capacity", ...

enum class RejectReason : uint8_t {
  kViolation,  // an insert under a provenance that hides what the block attended to
  kOrphan,     // an insert behind a block that the store no longer has
  kCorrupt,    // a moved block whose header or checksum disagreed
  kLost,       // a moved block that its tier no longer had
  kTransfer,   // a copy that failed
};
inline constexpr int kRejectReasons = 5;
const char* RejectReasonName(RejectReason reason);  // "violation", ...

// Blocks of this (tier, provenance). Counters only grow.
struct StoreStatsRow {
  Tier tier = Tier::kDevice;
  ProvenanceId provenance = ProvenanceId::kNone;
  int64_t blocks = 0;
  int64_t bytes = 0;
  int64_t hit_blocks = 0;
  std::array<int64_t, kEvictionReasons> evictions{};  // blocks; a move to the next tier counts
};

struct StoreStats {
  std::vector<StoreStatsRow> rows;  // those that ever held a block
  std::array<int64_t, kRejectReasons> rejects{};
  int64_t provenance_violations = 0;
  int64_t nodes = 0;
  int64_t moving_out = 0;  // device blocks being written to a tier
  int64_t loading = 0;     // device blocks being read from one
};

struct EvictOptions {
  // Give the content up instead of moving it to the next tier: the blocks are free on return.
  bool drop = false;
  // Leave reserves alone even when there is nothing else: for background work.
  bool keep_reserved = false;
};
struct EvictOutcome {
  int free = 0;     // blocks of the pool that are free now
  int pending = 0;  // that become free by later calls of Poll
};

// What a request to evict did, in blocks over all tiers.
struct EvictReport {
  int64_t evicted = 0;
  int64_t evicted_bytes = 0;
  int64_t in_use = 0;  // sequences hold them: left where they are, still found
  int64_t pinned = 0;  // pinned, or ahead of a pinned or used block: left likewise
};

struct PrefixListing {  // never any text
  Digest key{};         // of its last block
  ProvenanceId provenance = ProvenanceId::kNone;
  Tier tier = Tier::kDevice;  // of its last block
  int64_t tokens = 0;
  int64_t hits = 0;  // of its last block
  double idle_seconds = 0;
  bool pinned = false;
};

struct LoadResult {
  // As the entries that were asked for; without a block where an entry failed or was gone.
  std::vector<TableBlock> blocks;
  int failed = 0;
};

struct PrefixStoreOptions {
  int block_tokens = 16;
  // Shared among the provenances of SetReserved: the part of each tier that they keep against
  // others' blocks.
  double reserved_share = 0.5;
  uint32_t shard = 0;
  uint32_t shards = 1;
  // Of parent key and tokens. Null: SHA-256. Tests force collisions with a weak one.
  std::function<Digest(const Digest& parent, absl::Span<const int32_t> tokens)> hash;
};

class PrefixStore {
 public:
  using LoadId = uint64_t;

  // pool and registry outlive the store.
  PrefixStore(const PrefixStoreOptions& options, BlockPool* pool, ProvenanceRegistry* registry,
              std::vector<std::unique_ptr<KvTier>> tiers);
  // Waits for transfers under way. Callbacks of loads that did not finish never run.
  ~PrefixStore();
  PrefixStore(const PrefixStore&) = delete;
  PrefixStore& operator=(const PrefixStore&) = delete;

  // Walks the chain of full blocks of tokens, up to the first that nobody has. Counts no hit and
  // makes nothing more recently used, Use and Load do: what a plan leaves aside must not stay warm.
  ChainMatch Find(const CacheRoot& root, absl::Span<const int32_t> tokens);

  // Takes an entry for a sequence: counts a hit and makes it the most recently used. Nothing when
  // it is gone or not on the device. A move to another tier that is under way is called off.
  std::optional<TableBlock> Use(const EntryRef& entry);

  // Brings entries to the device, all or none: RESOURCE_EXHAUSTED when the pool lacks blocks for
  // those that are elsewhere. done runs inside a later Poll, never at once, with every block that
  // is good, held for the caller; counts hits as Use does. Entries that are gone count as failed.
  absl::StatusOr<LoadId> Load(absl::Span<const EntryRef> entries,
                              std::function<void(LoadResult)> done);
  // done will not run. What is loaded stays in the store. Unknown and finished ids are ignored.
  void CancelLoad(LoadId id);
  // Blocks that Load would allocate for these entries.
  int BlocksToLoad(absl::Span<const EntryRef> entries) const;

  // Stores the full blocks of `tokens`, whose K and V lie in table[0 ... tokens / block_tokens).
  // Takes all that are not reused; stops at the first that it refuses. The law is checked against
  // what the store itself knows of the blocks in the table, whatever their labels say: a block
  // whose provenance does not name everything in front of it is refused and counted.
  InsertResult Insert(const CacheRoot& root, absl::Span<const int32_t> tokens,
                      absl::Span<const TableBlock> table);

  // Stores a copy of a block that a KV map has changed beside the entry that it was made of;
  // nothing when that is gone. REQUIRES: mapped.origin is Lineage::Mapped of that entry's.
  InsertResult InsertMapped(const EntryRef& source, const TableBlock& mapped);

  // Frees device blocks until n are free, or on their way to be. May end with fewer.
  EvictOutcome EvictUntilFree(int n, const EvictOptions& options = {});
  // Which provenances share the reserve (the sources that versions carry from): as long as one has
  // no more than its part, blocks of others go first. Replaces the former list.
  void SetReserved(absl::Span<const ProvenanceId> provenances);

  // Keeps the longest chain of this provenance along tokens, in whatever tier it is, until Unpin
  // with the same chain. Pinning twice is pinning once. Both return the tokens concerned.
  int64_t Pin(const CacheRoot& root, absl::Span<const int32_t> tokens, ProvenanceId provenance);
  int64_t Unpin(const CacheRoot& root, absl::Span<const int32_t> tokens, ProvenanceId provenance);

  // Everything, in every tier.
  EvictReport EvictAll();
  // What a version computed, over whatever sources.
  EvictReport EvictVersion(const Digest& version);
  // A prefix: its blocks and all that follow it, of every provenance. Blocks in front that other
  // prefixes share stay.
  EvictReport EvictPrefix(const CacheRoot& root, absl::Span<const int32_t> tokens);
  // Everything that a version computed or went into, used and pinned blocks, too: these are no
  // longer found, and their memory follows when their sequences end (told as in_use). For
  // versions whose sequences have ended: what one of them inserts later stays until evicted.
  EvictReport RemoveVersion(const Digest& version);

  // Finishes transfers; to be called whenever the wake-up hook ran. Returns how many.
  int Poll();
  // Called from tiers' threads when Poll has something to do. Set before anything else.
  void SetWakeup(std::function<void()> wakeup);

  StoreStats stats() const;
  // Device blocks that the store holds: with entries, and under way from or to tiers.
  int64_t device_blocks() const;
  // The most used prefixes: each is a chain whose last block was used more often than any that
  // follows it. By hits, then by last use.
  std::vector<PrefixListing> Hottest(int limit) const;
  // The last entries of those of one provenance, in the same order.
  std::vector<EntryRef> HottestOf(ProvenanceId provenance, int limit) const;

  // A block and its level.
  using LeveledEntry = std::pair<int, EntryRef>;
  // Along the chain that leads to `last`, first level first: entries of its provenance on the
  // device with no entry of `mapped` beside them, in whatever tier. Empty when `last` is gone.
  std::vector<LeveledEntry> Unmapped(const EntryRef& last, ProvenanceId mapped) const;
  // As Use, but it is no use: counts and changes nothing. Nothing, too, when it is about to leave
  // the device.
  std::optional<TableBlock> Hold(const EntryRef& entry) const;

  // Walks everything: links, keys against tokens, LRU order, accounting, references, and the
  // provenance law for each entry. INTERNAL with the first thing that is wrong. O(blocks).
  absl::Status CheckIntegrity() const;

 private:
  struct Impl;
  struct Checker;
  std::unique_ptr<Impl> impl_;
};

}  // namespace carryover
