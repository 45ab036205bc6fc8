#include "engine/sensitivity.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace carryover {
namespace {

constexpr int kMaxLayerGroups = 32;
constexpr int kMaxRuns = 8;

bool ByBlock(const CachePart& part) {
  return part.kind == CachePart::Kind::kAll || part.kind == CachePart::Kind::kPositions;
}

}  // namespace

std::vector<CachePart> PartsOf(int layers, int prefix_blocks, int block_tokens) {
  using Kind = CachePart::Kind;
  std::vector<CachePart> parts = {{Kind::kAll, "all", 0, layers}};
  const int group = (layers + kMaxLayerGroups - 1) / kMaxLayerGroups;
  for (int begin = 0; begin < layers; begin += group) {
    const int end = std::min(begin + group, layers);
    parts.push_back({Kind::kLayers,
                     end - begin == 1 ? absl::StrCat("layer ", begin)
                                      : absl::StrCat("layers ", begin, "-", end - 1),
                     begin, end});
  }
  parts.push_back({Kind::kKeys, "keys", 0, layers});
  parts.push_back({Kind::kValues, "values", 0, layers});
  const auto run = [&](const std::string& name, int begin, int end) {
    parts.push_back({Kind::kPositions, name, begin * block_tokens, end * block_tokens});
  };
  if (prefix_blocks > 0) run("first block", 0, 1);
  const int between = prefix_blocks - 2, runs = std::min(kMaxRuns, between);
  for (int i = 0; i < runs; ++i) {
    run(absl::StrCat(i + 1, "/", runs), 1 + between * i / runs, 1 + between * (i + 1) / runs);
  }
  if (prefix_blocks > 1) run("last block", prefix_blocks - 1, prefix_blocks);
  return parts;
}

std::vector<CacheProbe> ProbesOf(absl::Span<const CachePart> parts) {
  std::vector<CacheProbe> probes;
  for (const CachePart& part : parts) {
    probes.push_back({part, true});
    // All native is the native arm; native keys are carried values.
    if (part.kind == CachePart::Kind::kLayers || part.kind == CachePart::Kind::kPositions) {
      probes.push_back({part, false});
    }
  }
  return probes;
}

ProbeOutcome OutcomeOf(const CacheProbe& probe, const FidelitySample& sample) {
  ProbeOutcome outcome;
  outcome.probe = probe;
  outcome.valid = sample.valid && !sample.positions.empty();
  if (!outcome.valid) return outcome;
  for (const PositionFidelity& position : sample.positions) {
    outcome.kl += position.kl;
    outcome.tv += position.tv;
    outcome.flips += position.flip ? 1 : 0;
  }
  const double n = static_cast<double>(sample.positions.size());
  outcome.kl /= n;
  outcome.tv /= n;
  outcome.flips /= n;
  outcome.first_token_flip = sample.first_token_flip;
  return outcome;
}

Sensitivity MakeSensitivity(absl::Span<const ProbeOutcome> outcomes) {
  using Kind = CachePart::Kind;
  Sensitivity out;
  for (const ProbeOutcome& outcome : outcomes) {
    const CacheProbe& probe = outcome.probe;
    if (probe.carried) {
      out.rows.push_back({probe.part, outcome, std::nullopt});
    } else {
      out.rows.back().native = outcome;
    }
  }
  Sensitivity::Row* planes[2] = {};
  for (Sensitivity::Row& row : out.rows) {
    if (row.part.kind == Kind::kAll) out.layers = row.part.end;
    if (row.part.kind == Kind::kPositions) out.prefix_tokens = row.part.end;
    if (row.part.kind == Kind::kKeys) planes[0] = &row;
    if (row.part.kind == Kind::kValues) planes[1] = &row;
  }
  CHECK(planes[0] != nullptr && planes[1] != nullptr);
  planes[0]->native = planes[1]->carried;
  planes[1]->native = planes[0]->carried;
  return out;
}

int MixedCache::NewBlocks(const CachePart& part, int prefix_blocks) {
  return ByBlock(part) ? 0 : prefix_blocks;
}

void MixedCache::Make(const CacheProbe& probe, std::vector<TableBlock> native,
                      std::vector<TableBlock> carried, std::vector<BlockRef> new_blocks,
                      const KvGeometry& geometry, void* kv_base, Lineage* lineage) {
  const CachePart& part = probe.part;
  const int blocks = static_cast<int>(native.size());
  CHECK(carried.size() == native.size());
  CHECK(static_cast<int>(new_blocks.size()) == NewBlocks(part, blocks));
  for (const TableBlock& block : native) lineage->Attend(block.origin);
  for (const TableBlock& block : carried) lineage->Attend(block.origin);
  std::vector<TableBlock>& base = probe.carried ? native : carried;
  std::vector<TableBlock>& of_part = probe.carried ? carried : native;
  copies.clear();
  if (ByBlock(part)) {
    const bool all = part.kind == CachePart::Kind::kAll;
    const int begin = all ? 0 : part.begin / geometry.block_tokens;
    const int end = all ? blocks : part.end / geometry.block_tokens;
    for (int i = begin; i < end; ++i) base[i] = std::move(of_part[i]);
    table = std::move(base);
    return;
  }
  base_ids_.clear(), part_ids_.clear(), new_ids_.clear(), table.clear();
  for (int i = 0; i < blocks; ++i) {
    base_ids_.push_back(base[i].block.id());
    part_ids_.push_back(of_part[i].block.id());
    new_ids_.push_back(new_blocks[i].id());
    TableBlock mixed;  // and no origin
    mixed.block = std::move(new_blocks[i]);
    table.push_back(std::move(mixed));
  }
  CopyKvArgs copy = {.from = base_ids_,
                     .to = new_ids_,
                     .layer_begin = 0,
                     .layer_end = geometry.layers,
                     .kv_base = kv_base,
                     .geometry = geometry};
  copies.push_back(copy);
  copy.from = part_ids_;
  copy.layer_begin = part.begin;
  copy.layer_end = part.end;
  if (part.kind == CachePart::Kind::kKeys) copy.planes = KvPlanes::kKeys;
  if (part.kind == CachePart::Kind::kValues) copy.planes = KvPlanes::kValues;
  copies.push_back(copy);
  read_ = std::move(native);
  for (TableBlock& block : carried) read_.push_back(std::move(block));
}

}  // namespace carryover
