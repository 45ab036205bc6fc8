#include "engine/map_ahead.h"

#include <algorithm>
#include <utility>

#include "base/status_macros.h"
#include "engine/repair.h"

namespace carryover {
namespace {

constexpr int kMaxChains = 4096;
// At a time: a few milliseconds, so that a user's request is not kept waiting for longer.
constexpr int kTokens = 64;

}  // namespace

void MapAhead::List(absl::Span<const CarrySource> sources, const PrefixStore& store) {
  for (const CarrySource& source : sources) {
    if (source.map == nullptr) continue;
    const Provenance native = NativeOf(source.fingerprint);
    const ProvenanceId mapped = registry_->Intern(MappedBy(native, source.map->name()));
    for (const EntryRef& last : store.HottestOf(registry_->Intern(native), kMaxChains)) {
      chains_.push_back({source, mapped, last});
    }
  }
  // Each source's are in order; of several sources the first is the most wanted.
  std::reverse(chains_.begin(), chains_.end());
  listed_ = true;
}

absl::StatusOr<bool> MapAhead::Run(const Version& target, absl::Span<const CarrySource> sources,
                                   KvCache* cache, const std::function<bool()>& yield) {
  if (!listed_) List(sources, *cache->store);
  waiting_ = false;
  while (!chains_.empty() && !full_) {
    ASSIGN_OR_RETURN(const bool more, MapSome(target, cache));
    if (waiting_) return false;
    if (!more) chains_.pop_back();
    if (yield()) return false;
  }
  return true;
}

absl::StatusOr<bool> MapAhead::MapSome(const Version& target, KvCache* cache) {
  const Chain& chain = chains_.back();
  const KvGeometry& geometry = cache->layout.geometry;
  PrefixStore& store = *cache->store;
  const auto unmapped = store.Unmapped(chain.last, chain.mapped);
  if (unmapped.empty()) return false;
  std::vector<BlockRepair> repairs;
  for (const auto& [level, entry] : unmapped) {
    repairs.push_back({level, chain.source.map.get(), entry});
  }
  const int most = std::max(1, kTokens / geometry.block_tokens);
  repairs.resize(RunOfRepairs(repairs, 0, most));

  std::vector<TableBlock> table(repairs.back().level + 1);
  for (const BlockRepair& repair : repairs) {
    table[repair.level] = *store.Hold(repair.source);
  }
  const int count = static_cast<int>(repairs.size());
  full_ = blocks_ + count > share_ * cache->pool->capacity();
  if (full_) return false;
  if (cache->pool->free() < count) {
    const EvictOutcome outcome = store.EvictUntilFree(count, {.keep_reserved = true});
    if (outcome.free < count) {
      waiting_ = outcome.free + outcome.pending >= count;
      full_ = !waiting_;
      return true;
    }
  }
  std::vector<BlockRef> into;
  for (int i = 0; i < count; ++i) into.push_back(*cache->pool->Allocate());

  RepairPass pass;
  pass.Make(/*tokens=*/{}, table, repairs, std::move(into), /*layers=*/0, geometry,
            cache->pool->base());
  RETURN_IF_ERROR(pass.CopyOrMap(*ops_, backend_, mapper_, target.weights.get()));
  Lineage lineage(registry_, target.fingerprint);
  blocks_ += pass.Enter(/*bottom_map=*/"", &lineage, &table, &store);
  return true;
}

}  // namespace carryover
