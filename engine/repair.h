// One pass of repairing carried blocks from below: the target computes keys and values of the
// lowest layers, those above are copied, into new blocks. Users' sequences and background arms
// build, run and enter it alike. Engine thread only.
#pragma once

#include <string>
#include <vector>

#include "absl/types/span.h"
#include "engine/block_pool.h"
#include "engine/model.h"
#include "engine/prefix_store.h"
#include "engine/provenance.h"
#include "kernels/ops.h"

namespace carryover {

struct RepairPass {
  int first = 0;               // level of the first block
  std::vector<BlockRef> into;  // the new blocks, of levels first, first + 1, ...
  std::vector<int32_t> from, to;
  CopyKvArgs copy;       // to run before the pass; reads from and to
  ForwardBatch forward;  // over the lowest layers; no logits

  // copy points into it.
  RepairPass() = default;
  RepairPass(const RepairPass&) = delete;
  RepairPass& operator=(const RepairPass&) = delete;

  // tokens and table are the sequence's, whole; `layers` of geometry.layers are computed. The old
  // blocks have to stay until the pass has ended.
  void Make(absl::Span<const int32_t> tokens, absl::Span<const TableBlock> table, int first_level,
            std::vector<BlockRef> new_blocks, int layers, const KvGeometry& geometry,
            void* kv_base);

  // Once it has run: puts the new blocks into the table, labelled as what the lineage's version
  // made of the old ones by `map`, and has the lineage attend to them.
  void Enter(const std::string& map, Lineage* lineage, std::vector<TableBlock>* table);
};

// How many of the levels from repairs[begin] on follow one another; at least 1, at most `most`.
int RunOfRepairs(absl::Span<const int> repairs, size_t begin, int64_t most);

}  // namespace carryover
