#include "engine/repair.h"

#include <utility>

namespace carryover {

void RepairPass::Make(absl::Span<const int32_t> tokens, absl::Span<const TableBlock> table,
                      int first_level, std::vector<BlockRef> new_blocks, int layers,
                      const KvGeometry& geometry, void* kv_base) {
  first = first_level;
  into = std::move(new_blocks);
  const int begin = first * geometry.block_tokens;
  const int count = static_cast<int>(into.size()) * geometry.block_tokens;
  forward = ForwardBatch();
  forward.kv_layers = layers;
  forward.sequences.push_back({.row_begin = 0, .row_count = count, .kv_begin = begin});
  for (int i = begin; i < begin + count; ++i) {
    forward.tokens.push_back(tokens[i]);
    forward.positions.push_back(i);
  }
  for (const TableBlock& block : table) forward.block_table.push_back(block.block.id());
  from.clear();
  to.clear();
  for (size_t i = 0; i < into.size(); ++i) {
    int32_t& entry = forward.block_table[first + i];
    from.push_back(entry);
    to.push_back(into[i].id());
    entry = into[i].id();
  }
  copy = {.from = from,
          .to = to,
          .layer_begin = layers,
          .layer_end = geometry.layers,
          .kv_base = kv_base,
          .geometry = geometry};
}

void RepairPass::Enter(const std::string& map, Lineage* lineage, std::vector<TableBlock>* table) {
  for (size_t i = 0; i < into.size(); ++i) {
    TableBlock& block = (*table)[first + i];
    TableBlock repaired;
    repaired.block = std::move(into[i]);
    repaired.origin = lineage->Repaired(block.origin, map);
    lineage->Attend(repaired.origin);
    block = std::move(repaired);
  }
  into.clear();
}

int RunOfRepairs(absl::Span<const int> repairs, size_t begin, int64_t most) {
  size_t end = begin + 1;
  while (end < repairs.size() && static_cast<int64_t>(end - begin) < most &&
         repairs[end] == repairs[end - 1] + 1) {
    ++end;
  }
  return static_cast<int>(end - begin);
}

}  // namespace carryover
