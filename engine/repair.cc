#include "engine/repair.h"

#include <algorithm>
#include <utility>

#include "base/status_macros.h"

namespace carryover {

std::vector<BlockRepair> RepairsOf(absl::Span<const PlannedBlock> plan,
                                   absl::Span<const CarrySource> sources,
                                   const ProvenanceRegistry& registry) {
  std::vector<BlockRepair> repairs;
  for (size_t i = 0; i < plan.size(); ++i) {
    if (!plan[i].renewed()) continue;
    BlockRepair repair;
    repair.level = static_cast<int>(i);
    repair.source = plan[i].entry.entry;
    if (plan[i].map) {
      const auto source = std::find_if(sources.begin(), sources.end(), [&](const auto& one) {
        return registry.IsNativeOf(plan[i].entry.provenance, one.fingerprint);
      });
      CHECK(source != sources.end() && source->map != nullptr);
      repair.map = source->map.get();
    }
    repairs.push_back(repair);
  }
  return repairs;
}

int RepairCost(const BlockRepair& repair, int bottom_layers) {
  return std::max(1, bottom_layers + (repair.map != nullptr ? 1 : 0));
}

void RepairPass::Make(absl::Span<const int32_t> tokens, absl::Span<const TableBlock> table,
                      absl::Span<const BlockRepair> renewed, std::vector<BlockRef> new_blocks,
                      int layers, const KvGeometry& geometry, void* kv_base) {
  repairs.assign(renewed.begin(), renewed.end());
  into = std::move(new_blocks);
  bottom = layers;
  const int first = repairs[0].level;
  const int begin = first * geometry.block_tokens;
  const int count = static_cast<int>(into.size()) * geometry.block_tokens;
  forward = ForwardBatch();
  forward.kv_layers = layers;
  if (layers > 0) {
    forward.sequences.push_back({.row_begin = 0, .row_count = count, .kv_begin = begin});
    for (int i = begin; i < begin + count; ++i) {
      forward.tokens.push_back(tokens[i]);
      forward.positions.push_back(i);
    }
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

absl::Status RepairPass::CopyOrMap(const Ops& ops, Backend* backend, KvMapper* mapper,
                                   Model* target) {
  if (repairs[0].map == nullptr) {
    ops.copy_kv(backend, copy);
    return ops.sync(backend);
  }
  KvMapper::Blocks blocks;
  blocks.from = from;
  blocks.to = to;
  blocks.begin = repairs[0].level * copy.geometry.block_tokens;
  blocks.layer_begin = copy.layer_begin;
  blocks.layer_end = copy.layer_end;
  return mapper->Map(*repairs[0].map, blocks, target, copy.kv_base);
}

int RepairPass::Enter(const std::string& bottom_map, Lineage* lineage,
                      std::vector<TableBlock>* table, PrefixStore* store) {
  int stored = 0;
  for (size_t i = 0; i < into.size(); ++i) {
    TableBlock& block = (*table)[repairs[i].level];
    TableBlock renewed;
    renewed.block = std::move(into[i]);
    renewed.origin = block.origin;
    if (repairs[i].map != nullptr) {
      renewed.origin = lineage->Mapped(renewed.origin, repairs[i].map->name());
    }
    if (bottom > 0) {
      renewed.origin = lineage->Repaired(renewed.origin, bottom_map);
    } else {
      if (store != nullptr) stored += store->InsertMapped(repairs[i].source, renewed).inserted;
      renewed.reused = true;
    }
    lineage->Attend(renewed.origin);
    block = std::move(renewed);
  }
  into.clear();
  return stored;
}

int RunOfRepairs(absl::Span<const BlockRepair> repairs, size_t begin, int64_t most) {
  size_t end = begin + 1;
  while (end < repairs.size() && static_cast<int64_t>(end - begin) < most &&
         repairs[end].level == repairs[end - 1].level + 1 &&
         repairs[end].map == repairs[begin].map) {
    ++end;
  }
  return static_cast<int>(end - begin);
}

}  // namespace carryover
