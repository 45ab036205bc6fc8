// Mixed arms of the shadow runner: the target over a cache of which one part is carried, for
// somebody who waits for a sensitivity profile.

#include <iterator>
#include <utility>

#include "engine/reuse_policy.h"
#include "engine/shadow_runner.h"

namespace carryover {

bool ShadowRunner::StartMixed() {
  const ShadowJob& job = *job_;
  // A profile is many arms; nobody else would notice that he has left.
  if (job.waiter->left()) {
    DropJob(ShadowOutcome::kCancelled);
    return false;
  }
  Arm& arm = *arm_;
  const int block_tokens = job.cache->layout.geometry.block_tokens;
  const int blocks = job.choice.prefix_tokens / block_tokens;
  PrefixStore& store = *job.cache->store;
  const ChainMatch match =
      store.Find(job.root, absl::MakeConstSpan(job.tokens).first(job.choice.prefix_tokens));

  const ProvenanceId native = registry_->Native(arm.version->fingerprint);
  const ProvenanceId carried = registry_->Native(job.choice.source);
  if (match.Run(0, native) < blocks || match.Run(0, carried) < blocks) {
    DropArm(ShadowOutcome::kEvicted);
    return false;
  }
  arm.own_blocks = (job.rows() + block_tokens - 1) / block_tokens - blocks;
  arm.mixed_blocks = MixedCache::NewBlocks(arms_.front().probe.part, blocks);
  if (arm.own_blocks + arm.mixed_blocks > options_.kv_share * job.cache->pool->capacity()) {
    DropArm(ShadowOutcome::kNoBlocks);
    return false;
  }
  for (const ProvenanceId of : {native, carried}) {
    for (int i = 0; i < blocks; ++i) {
      const MatchEntry& entry = *match.Find(i, of);
      std::optional<TableBlock> block = entry.ready ? store.Use(entry.entry) : std::nullopt;
      if (!block.has_value()) arm.slow.emplace_back(arm.table.size(), entry.entry);
      arm.table.push_back(block.has_value() ? *std::move(block) : TableBlock());
    }
  }
  return true;
}

void ShadowRunner::Mix() {
  Arm& arm = *arm_;
  KvCache& cache = *job_->cache;
  const auto half = arm.table.begin() + static_cast<int>(arm.table.size() / 2);
  std::vector<TableBlock> native(std::make_move_iterator(arm.table.begin()),
                                 std::make_move_iterator(half));
  std::vector<TableBlock> carried(std::make_move_iterator(half),
                                  std::make_move_iterator(arm.table.end()));
  std::vector<BlockRef> fresh;
  for (int i = 0; i < arm.mixed_blocks; ++i) fresh.push_back(*cache.pool->Allocate());
  arm.mixed = std::make_unique<MixedCache>();
  arm.mixed->Make(arms_.front().probe, std::move(native), std::move(carried), std::move(fresh),
                  cache.layout.geometry, cache.pool->base(), &*arm.lineage);
  for (const CopyKvArgs& copy : arm.mixed->copies) ops_.copy_kv(backend_, copy);
  arm.table = std::move(arm.mixed->table);
}

}  // namespace carryover
