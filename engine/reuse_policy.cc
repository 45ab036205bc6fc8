#include "engine/reuse_policy.h"

#include <algorithm>
#include <limits>
#include <map>

namespace carryover {
namespace {

// The map from that version, or "".
std::string MapFrom(const Digest& version, const ReuseQuery& query,
                    const ProvenanceRegistry& registry) {
  for (size_t i = 0; i < query.maps.size(); ++i) {
    if (registry.IsNativeOf(query.sources[i], version)) return query.maps[i];
  }
  return "";
}

bool IsSource(const Digest& version, const ReuseQuery& query, const ProvenanceRegistry& registry) {
  return std::any_of(query.sources.begin(), query.sources.end(),
                     [&](ProvenanceId source) { return registry.IsNativeOf(source, version); });
}

// Whether `id` may be carried: a source's blocks, mapped or not, or what the target itself computed
// over sources by such a plan.
bool MayCarry(ProvenanceId id, const ReuseQuery& query, const ProvenanceRegistry& registry) {
  const Provenance& provenance = registry.Get(id);
  const bool own = provenance.computed_by == registry.Get(query.native).computed_by;
  std::vector<Digest> sources = provenance.sources;
  if (!own) {
    if (!sources.empty()) return false;
    sources.push_back(provenance.computed_by);
  } else if (sources.empty()) {
    return false;
  }
  std::vector<std::string> changes;  // by this plan
  for (const Digest& source : sources) {
    if (!IsSource(source, query, registry)) return false;
    if (!query.carry.calibrated) continue;
    changes.push_back(MapFrom(source, query, registry));
    if (changes.back().empty()) return false;
  }
  if (!own) return provenance.map.empty() || (!changes.empty() && provenance.map == changes[0]);
  if (query.carry.bottom.any()) changes.push_back(BottomMap(query.carry, query.layers));
  std::sort(changes.begin(), changes.end());
  return ChangesIn(provenance) == changes;
}

// Whether the target itself computed it, from its own keys and values or over sources': what a tail
// is made of.
bool IsOwn(ProvenanceId id, const ReuseQuery& query, const ProvenanceRegistry& registry) {
  const Provenance& provenance = registry.Get(id);
  return provenance.computed_by == registry.Get(query.native).computed_by && !IsChanged(provenance);
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

// How much of what the plan does to a source's blocks was done to this one.
int StepsDone(ProvenanceId id, const ReuseQuery& query, const ProvenanceRegistry& registry) {
  const Provenance& provenance = registry.Get(id);
  if (!IsChanged(provenance)) return 0;
  return provenance.computed_by == registry.Get(query.native).computed_by ? 2 : 1;
}

// Marks what is to be mapped or repaired from below, or takes what was.
void ApplyChanges(const ChainMatch& match, const ReuseQuery& query,
                  const ProvenanceRegistry& registry, ReusePlan* plan) {
  if (!query.carry.calibrated && !query.carry.bottom.any()) return;
  for (size_t i = 0; i < plan->blocks.size(); ++i) {
    PlannedBlock& block = plan->blocks[i];
    if (!block.carried || IsOwn(block.entry.provenance, query, registry)) continue;
    const Digest source = registry.Get(block.entry.provenance).computed_by;
    for (const MatchEntry& entry : match.level(static_cast<int>(i))) {
      if (MayCarry(entry.provenance, query, registry) &&
          registry.Get(entry.provenance).Involves(source) &&
          StepsDone(entry.provenance, query, registry) >
              StepsDone(block.entry.provenance, query, registry)) {
        block.entry = entry;
      }
    }
    const int done = StepsDone(block.entry.provenance, query, registry);
    block.map = query.carry.calibrated && done < 1;
    block.repair = query.carry.bottom.any() && done < 2;
  }
}

// The place of a source's blocks in the order of wishes; behind all of them what the target made.
size_t Wanted(ProvenanceId id, const ReuseQuery& query, const ProvenanceRegistry& registry) {
  return std::find_if(query.sources.begin(), query.sources.end(),
                      [&](ProvenanceId source) {
                        return registry.IsNativeOf(source, registry.Get(id).computed_by);
                      }) -
         query.sources.begin();
}

}  // namespace

void AddSources(absl::Span<const CarrySource> sources, ProvenanceRegistry* registry,
                ReuseQuery* query) {
  for (const CarrySource& source : sources) {
    query->sources.push_back(registry->Native(source.fingerprint));
    query->maps.push_back(source.map == nullptr ? "" : source.map->name());
  }
}

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
  return provenance.sources.empty() ? provenance.computed_by : provenance.sources[0];
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
        if (run > best_run ||
            (run == best_run && Wanted(entry.provenance, query, registry) <
                                    Wanted(chosen->provenance, query, registry))) {
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
  ApplyChanges(match, query, registry, &plan);
  const bool too_few = plan.carried_blocks * match.block_tokens < query.min_carried_tokens;
  if (plan.carried_blocks == 0 || too_few) {
    plan.blocks.resize(std::min(plan.blocks.size(), first_carried));
    plan.carried_blocks = plan.repaired_blocks = 0;
  }
  return plan;
}

}  // namespace carryover
