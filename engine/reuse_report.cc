#include "engine/reuse_report.h"

#include <algorithm>

namespace carryover {
namespace {

// What level i will be when the sequence has renewed it: provenance and plan.
void NameCarried(const Sequence& sequence, size_t i, const ProvenanceRegistry& registry,
                 CacheSegment* segment) {
  const PlannedBlock& block = sequence.plan[i];
  CarryPlan part;
  part.calibrated = block.map;
  if (block.repair) part.bottom = sequence.carry.bottom;
  Origin origin = sequence.table[i].origin;
  if (block.map) {
    const auto repair = std::find_if(sequence.repairs.begin(), sequence.repairs.end(),
                                     [&](const auto& one) { return one.level == int(i); });
    origin = sequence.lineage->Mapped(origin, repair->map->name());
  }
  if (block.repair) {
    const int layers = sequence.request->cache->layout.geometry.layers;
    origin = sequence.lineage->Repaired(origin, BottomMap(sequence.carry, layers));
  }
  const Provenance& provenance = registry.Get(origin.provenance());
  if (provenance.sources.empty() && !provenance.map.empty()) part.calibrated = true;
  segment->source = registry.Name(origin.provenance());
  segment->plan = CarryPlanName(part);
}

}  // namespace

void ReportReuse(const Sequence& sequence, const ProvenanceRegistry& registry,
                 ActiveRequest* request) {
  const bool carries = std::any_of(sequence.plan.begin(), sequence.plan.end(),
                                   [](const PlannedBlock& block) { return block.carried; });
  const bool has_output = std::any_of(request->sequences.begin(), request->sequences.end(),
                                      [](const auto& s) { return s->output() > 0; });
  if (has_output && (request->carried || !carries)) return;
  request->carried |= carries;

  const int block_tokens = request->cache->layout.geometry.block_tokens;
  Usage usage;
  usage.prompt_tokens = request->prompt_tokens;
  usage.completion_tokens = request->usage.completion_tokens;
  request->info.segments.clear();
  int left = request->prompt_tokens;  // blocks may reach into tokens generated before a preemption
  const PlannedBlock* last = nullptr;
  for (size_t i = 0; i < sequence.plan.size(); ++i) {
    const PlannedBlock& block = sequence.plan[i];
    if (left == 0) break;
    const int tokens = std::min(left, block_tokens);
    left -= tokens;
    (block.repair    ? usage.repaired_tokens
     : block.carried ? usage.carried_tokens
                     : usage.cached_tokens) += tokens;
    if (last == nullptr || last->entry.provenance != block.entry.provenance ||
        last->entry.tier != block.entry.tier || last->repair != block.repair ||
        last->map != block.map) {
      CacheSegment segment;
      if (block.carried) {
        NameCarried(sequence, i, registry, &segment);
      } else {
        segment.source = request->info.target;
        segment.plan = "native";
      }
      segment.tier = TierName(block.entry.tier);
      request->info.segments.push_back(std::move(segment));
    }
    request->info.segments.back().tokens += tokens;
    last = &block;
  }
  const int tail = std::min(left, sequence.repaired);
  left -= tail;
  usage.repaired_tokens += tail;
  if (tail > 0) {
    request->info.segments.push_back(
        {registry.Name(sequence.lineage->provenance()), TailName(sequence.carry), "", tail});
  }
  if (left > 0) {
    request->info.segments.push_back({request->info.target, "fresh", "", left});
  }
  usage.computed_tokens = left;
  request->usage = usage;
}

}  // namespace carryover
