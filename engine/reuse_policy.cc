#include "engine/reuse_policy.h"

#include <algorithm>
#include <map>

namespace carryover {
namespace {

// Whether `id` may be carried: a source's native blocks, or what the target itself computed over
// sources.
bool MayCarry(ProvenanceId id, const ReuseQuery& query, const ProvenanceRegistry& registry) {
  if (std::find(query.sources.begin(), query.sources.end(), id) != query.sources.end()) return true;
  const Provenance& provenance = registry.Get(id);
  if (provenance.IsNative() || !provenance.map.empty()) return false;
  if (provenance.computed_by != registry.Get(query.native).computed_by) return false;
  return std::all_of(provenance.sources.begin(), provenance.sources.end(), [&](const Digest& used) {
    return std::any_of(query.sources.begin(), query.sources.end(),
                       [&](ProvenanceId source) { return registry.IsNativeOf(source, used); });
  });
}

size_t Wanted(ProvenanceId id, const ReuseQuery& query) {
  return std::find(query.sources.begin(), query.sources.end(), id) - query.sources.begin();
}

}  // namespace

int ReusePlan::NativeLevels() const {
  return static_cast<int>(
      std::find_if(blocks.begin(), blocks.end(), [](const auto& block) { return block.carried; }) -
      blocks.begin());
}

ProvenanceId ReusePlan::MainSource() const {
  std::map<ProvenanceId, int> counts;
  for (const PlannedBlock& block : blocks) {
    if (block.carried) ++counts[block.entry.provenance];
  }
  return std::max_element(counts.begin(), counts.end(),
                          [](const auto& a, const auto& b) { return a.second < b.second; })
      ->first;
}

Digest ReusePlan::MainVersion(const ProvenanceRegistry& registry) const {
  const Provenance& provenance = registry.Get(MainSource());
  return provenance.IsNative() ? provenance.computed_by : provenance.sources[0];
}

ReusePlan PlanReuse(const ChainMatch& match, const ReuseQuery& query,
                    const ProvenanceRegistry& registry) {
  ReusePlan plan;
  ProvenanceId carrying = ProvenanceId::kNone;
  size_t first_carried = 0;
  for (int i = 0; i < match.levels(); ++i) {
    const MatchEntry* native = i < query.native_levels ? match.Find(i, query.native) : nullptr;
    if (native != nullptr) {
      plan.blocks.push_back({*native, false});
      carrying = ProvenanceId::kNone;
      continue;
    }
    if (query.sources.empty()) break;
    const MatchEntry* chosen = carrying == ProvenanceId::kNone ? nullptr : match.Find(i, carrying);
    if (chosen == nullptr) {
      int best_run = 0;
      for (const MatchEntry& entry : match.level(i)) {
        if (!MayCarry(entry.provenance, query, registry)) continue;
        const int run = match.Run(i, entry.provenance);
        if (run > best_run || (run == best_run && Wanted(entry.provenance, query) <
                                                      Wanted(chosen->provenance, query))) {
          chosen = &entry;
          best_run = run;
        }
      }
    }
    if (chosen == nullptr) break;
    if (plan.carried_blocks == 0) first_carried = plan.blocks.size();
    carrying = chosen->provenance;
    plan.blocks.push_back({*chosen, true});
    ++plan.carried_blocks;
  }
  if (plan.carried_blocks > 0 &&
      plan.carried_blocks * match.block_tokens < query.min_carried_tokens) {
    plan.blocks.resize(first_carried);
    plan.carried_blocks = 0;
  }
  return plan;
}

}  // namespace carryover
