// The background passes of an arm: chunks of its tokens, and before them repairs of what it
// carries.

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/log.h"
#include "engine/reuse_policy.h"
#include "engine/shadow_runner.h"

namespace carryover {

bool ShadowRunner::BeginChunk() {
  Arm& arm = *arm_;
  if (arm.repairs_done < arm.repairs.size()) return BeginRepair();
  const int chunk =
      arm.kind == ShadowArm::kControl ? options_.control_chunk_tokens : options_.chunk_tokens;
  const int count = std::min(chunk, job_->rows() - arm.computed);
  ForwardBatch& batch = pass_.batch;
  batch = ForwardBatch();
  batch.sequences.push_back({.row_begin = 0, .row_count = count, .kv_begin = arm.computed});
  for (int i = 0; i < count; ++i) {
    const int position = arm.computed + i;
    batch.tokens.push_back(job_->tokens[position]);
    batch.positions.push_back(position);
    if (!job_->refresh && position + 1 >= job_->prompt_tokens) batch.logit_rows.push_back(i);
  }
  for (const TableBlock& block : arm.table) batch.block_table.push_back(block.block.id());
  return Begin();
}

bool ShadowRunner::BeginRepair() {
  Arm& arm = *arm_;
  const KvGeometry& geometry = job_->cache->layout.geometry;
  const int blocks =
      RunOfRepairs(arm.repairs, arm.repairs_done, options_.chunk_tokens / geometry.block_tokens);
  std::vector<BlockRef> into(std::make_move_iterator(arm.spare.end() - blocks),
                             std::make_move_iterator(arm.spare.end()));
  arm.spare.resize(arm.spare.size() - blocks);
  arm.repair.Make(job_->tokens, arm.table,
                  absl::MakeConstSpan(arm.repairs).subspan(arm.repairs_done, blocks),
                  std::move(into), arms_.front().plan.plan.BottomLayers(geometry.layers), geometry,
                  job_->cache->pool->base());
  const absl::Status status = arm.repair.CopyOrMap(ops_, backend_, mapper_, arm.weights.get());
  if (!status.ok()) {
    Fail(status);
    return false;
  }
  if (arm.repair.bottom == 0) {
    FinishRepair();
    return false;
  }
  pass_.batch = std::move(arm.repair.forward);
  return Begin();
}

void ShadowRunner::FinishRepair() {
  Arm& arm = *arm_;
  const int layers = job_->cache->layout.geometry.layers;
  const int blocks = static_cast<int>(arm.repair.into.size());
  const int rows = blocks * job_->cache->layout.geometry.block_tokens;
  const int cost = RepairCost(arm.repairs[arm.repairs_done], arm.repair.bottom);
  arm.in_pass = false;
  arm.repairs_done += blocks;
  arm.mapped_stored +=
      arm.repair.Enter(BottomMap(arms_.front().plan.plan, layers), &*arm.lineage, &arm.table,
                       job_->store ? job_->cache->store.get() : nullptr);
  // In tokens of all layers.
  hooks_.computed((rows * cost + layers - 1) / layers);
}

bool ShadowRunner::Begin() {
  Arm& arm = *arm_;
  const absl::Status begun = arm.weights->Begin(&pass_);
  if (!begun.ok()) {
    Fail(begun);
    return false;
  }
  arm.in_pass = true;
  return true;
}

void ShadowRunner::FinishChunk() {
  Arm& arm = *arm_;
  if (pass_.batch.kv_layers > 0) return FinishRepair();
  const int count = static_cast<int>(pass_.batch.tokens.size());
  const int block_tokens = job_->cache->layout.geometry.block_tokens;
  arm.in_pass = false;
  for (int i = arm.computed / block_tokens; i < (arm.computed + count) / block_tokens; ++i) {
    arm.table[i].origin = arm.lineage->current();
  }
  arm.computed += count;
  arm.logits.insert(arm.logits.end(), pass_logits_.begin(), pass_logits_.end());
  hooks_.computed(count);
  const int full = arm.computed / block_tokens;
  const bool keep =
      job_->refresh || (arm.kind == ShadowArm::kNative && options_.store_native && job_->store);
  if (keep && full > arm.stored) {
    const InsertResult result = job_->cache->store->Insert(
        job_->root, absl::MakeConstSpan(job_->tokens).first(full * block_tokens),
        absl::MakeConstSpan(arm.table).first(full));
    arm.stored = full;
    hooks_.stored(result.inserted);
  }
  if (job_->refresh) {
    if (arm.computed == job_->rows()) {
      FinishRefresh();
    } else if (!queue_.empty()) {  // what is to be compared goes first
      Pause();
    }
  } else if (arm.computed == job_->rows()) {
    StartCompare();
  }
}

}  // namespace carryover
