// One pass of renewing carried blocks: a map changes keys and values, the target computes those of
// the lowest layers, what is left is copied; all into new blocks. Users' sequences and background
// arms build, run and enter it alike. Engine thread only.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "engine/block_pool.h"
#include "engine/device_kv_map.h"
#include "engine/model.h"
#include "engine/prefix_store.h"
#include "engine/provenance.h"
#include "engine/reuse_policy.h"
#include "engine/version.h"
#include "kernels/ops.h"

namespace carryover {

// A block of a plan that is renewed before anything else is computed.
struct BlockRepair {
  int level = 0;
  const DeviceKvMap* map = nullptr;  // null: not mapped, or mapped before
  EntryRef source;                   // the old block
};

// What of a plan is to be renewed, by level. The maps are those of `sources`.
std::vector<BlockRepair> RepairsOf(absl::Span<const PlannedBlock> plan,
                                   absl::Span<const CarrySource> sources,
                                   const ProvenanceRegistry& registry);

// Of so many layers, how many an equal number of rows of a native prefill could have instead: what
// a step's budget is charged. At least 1: a map takes about as long as one layer of 30.
int RepairCost(const BlockRepair& repair, int bottom_layers);

struct RepairPass {
  std::vector<BlockRepair> repairs;  // of levels that follow one another, with one map
  std::vector<BlockRef> into;        // the new blocks, one for each
  std::vector<int32_t> from, to;
  CopyKvArgs copy;       // where there is no map; reads from and to
  ForwardBatch forward;  // over the lowest layers; no logits. Without tokens: nothing is computed
  int bottom = 0;        // layers that the target computes

  // copy points into it.
  RepairPass() = default;
  RepairPass(const RepairPass&) = delete;
  RepairPass& operator=(const RepairPass&) = delete;

  // tokens and table are the sequence's, whole; `layers` of geometry.layers are computed. The old
  // blocks have to stay until the pass has ended.
  void Make(absl::Span<const int32_t> tokens, absl::Span<const TableBlock> table,
            absl::Span<const BlockRepair> renewed, std::vector<BlockRef> new_blocks, int layers,
            const KvGeometry& geometry, void* kv_base);

  // Copies or maps; to be followed by a pass over `forward`, where that has tokens.
  absl::Status CopyOrMap(const Ops& ops, Backend* backend, KvMapper* mapper, Model* target);

  // Once it has run: puts the new blocks into the table, labelled as what the lineage's version
  // made of the old ones, and has the lineage attend to them. Mapped ones that the target computed
  // nothing of go into the store at once, unless it is null; they are never Insert's to take.
  // Returns how many were new there.
  int Enter(const std::string& bottom_map, Lineage* lineage, std::vector<TableBlock>* table,
            PrefixStore* store);
};

// How many of repairs from `begin` on make one pass; at least 1, at most `most`.
int RunOfRepairs(absl::Span<const BlockRepair> repairs, size_t begin, int64_t most);

}  // namespace carryover
