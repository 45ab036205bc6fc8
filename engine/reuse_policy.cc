#include "engine/reuse_policy.h"

#include <algorithm>
#include <limits>
#include <map>

namespace carryover {
namespace {

// Whether `id` may be carried: a source's native blocks, or what the target itself computed over
// sources.
bool MayCarry(ProvenanceId id, const ReuseQuery& query, const ProvenanceRegistry& registry) {
  if (std::find(query.sources.begin(), query.sources.end(), id) != query.sources.end()) return true;
  const Provenance& provenance = registry.Get(id);
  if (provenance.IsNative()) return false;
  if (!provenance.map.empty() && provenance.map != BottomMap(query.carry, query.layers)) {
    return false;
  }
  if (provenance.computed_by != registry.Get(query.native).computed_by) return false;
  return std::all_of(provenance.sources.begin(), provenance.sources.end(), [&](const Digest& used) {
    return std::any_of(query.sources.begin(), query.sources.end(),
                       [&](ProvenanceId source) { return registry.IsNativeOf(source, used); });
  });
}

// Whether the target itself computed it, from its own keys and values or over sources': what a tail
// is made of.
bool IsOwn(ProvenanceId id, const ReuseQuery& query, const ProvenanceRegistry& registry) {
  const Provenance& provenance = registry.Get(id);
  return provenance.map.empty() && provenance.computed_by == registry.Get(query.native).computed_by;
}

// Makes the last blocks of the plan the target's own, see PlanReuse.
void ApplyTail(const ChainMatch& match, const ReuseQuery& query, const ProvenanceRegistry& registry,
               ReusePlan* plan) {
  const int levels = static_cast<int>(plan->blocks.size());
  if (plan->carried_blocks == 0 || !plan->blocks.back().carried) return;
  const int tail = levels - query.carry.TailBlocks(levels, match.block_tokens);
  int kept = 0;
  for (; kept < levels; ++kept) {
    PlannedBlock& block = plan->blocks[kept];
    if (!block.carried || IsOwn(block.entry.provenance, query, registry)) continue;
    const auto entries = match.level(kept);
    const auto own = std::find_if(entries.begin(), entries.end(), [&](const MatchEntry& entry) {
      return entry.provenance != query.native && IsOwn(entry.provenance, query, registry) &&
             MayCarry(entry.provenance, query, registry);
    });
    if (own != entries.end()) {
      block.entry = *own;
    } else if (kept >= tail) {
      break;
    }
  }
  plan->repaired_blocks = levels - kept;
  for (int i = kept; i < levels; ++i) plan->carried_blocks -= plan->blocks[i].carried ? 1 : 0;
  plan->blocks.resize(kept);
}

// Marks what is to be repaired from below, or takes what was.
void ApplyBottom(const ChainMatch& match, const ReuseQuery& query,
                 const ProvenanceRegistry& registry, ReusePlan* plan) {
  for (size_t i = 0; i < plan->blocks.size(); ++i) {
    PlannedBlock& block = plan->blocks[i];
    if (!block.carried || !registry.Get(block.entry.provenance).IsNative()) continue;
    const auto entries = match.level(static_cast<int>(i));
    const auto done = std::find_if(entries.begin(), entries.end(), [&](const MatchEntry& entry) {
      return !registry.Get(entry.provenance).map.empty() &&
             MayCarry(entry.provenance, query, registry);
    });
    if (done != entries.end()) {
      block.entry = *done;
    } else {
      block.repair = true;
    }
  }
}

size_t Wanted(ProvenanceId id, const ReuseQuery& query) {
  return std::find(query.sources.begin(), query.sources.end(), id) - query.sources.begin();
}

}  // namespace

std::string BottomMap(const CarryPlan& carry, int layers) {
  if (!carry.bottom.any()) return "";
  CarryPlan counted;
  counted.bottom.count = carry.BottomLayers(layers);
  return BottomName(counted);
}

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
  const bool may_carry =
      !query.sources.empty() && query.carry.carries &&
      !(query.carry.bottom.any() && query.carry.BottomLayers(query.layers) >= query.layers);
  ProvenanceId carrying = ProvenanceId::kNone;
  size_t first_carried = std::numeric_limits<size_t>::max();
  for (int i = 0; i < match.levels(); ++i) {
    const MatchEntry* native = i < query.native_levels ? match.Find(i, query.native) : nullptr;
    if (native != nullptr) {
      plan.blocks.push_back({*native, false});
      carrying = ProvenanceId::kNone;
      continue;
    }
    if (!may_carry) break;
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
    first_carried = std::min(first_carried, plan.blocks.size());
    carrying = chosen->provenance;
    plan.blocks.push_back({*chosen, true});
    ++plan.carried_blocks;
  }
  if (query.carry.tail.any()) ApplyTail(match, query, registry, &plan);
  if (query.carry.bottom.any()) ApplyBottom(match, query, registry, &plan);
  const bool too_few = plan.carried_blocks * match.block_tokens < query.min_carried_tokens;
  if (plan.carried_blocks == 0 || too_few) {
    plan.blocks.resize(std::min(plan.blocks.size(), first_carried));
    plan.carried_blocks = plan.repaired_blocks = 0;
  }
  return plan;
}

}  // namespace carryover
