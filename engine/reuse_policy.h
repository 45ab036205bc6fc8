// Decides which stored blocks a sequence reuses. Pure: no state, no clock.
#pragma once

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "engine/carry_plan.h"
#include "engine/prefix_store.h"
#include "engine/provenance.h"
#include "engine/request.h"
#include "engine/version.h"

namespace carryover {

struct ReuseQuery {
  ProvenanceId native = ProvenanceId::kNone;  // of the version that serves
  // Of other versions' native blocks that it may read, most wanted first. Empty: nothing is
  // carried.
  std::vector<ProvenanceId> sources;
  // Names of the maps from these to the version, "" where there is none: (sources), or empty. A
  // calibrated plan carries from no other sources.
  std::vector<std::string> maps;
  int min_carried_tokens = 0;
  CarryPlan carry;  // how what is carried is repaired; a native one carries nothing
  int layers = 0;   // of the model; needed for a plan with a bottom
  // Native blocks are seen only in so many leading levels. A shadow asks for what there was when
  // its request came: the arm that served has made blocks since.
  int native_levels = std::numeric_limits<int>::max();
};

// One reused block: level i of the match.
struct PlannedBlock {
  MatchEntry entry;
  bool carried = false;
  // What the plan does to it first, in a new block: changes it by the source's map; has the target
  // compute its lowest layers.
  bool map = false;
  bool repair = false;
  bool renewed() const { return map || repair; }
};

// Enters a version's sources, with their maps.
void AddSources(absl::Span<const CarrySource> sources, ProvenanceRegistry* registry,
                ReuseQuery* query);

// Provenance::map of blocks whose lowest layers were computed by the target: "bottom(2)", or ""
// where the plan has no bottom.
std::string BottomMap(const CarryPlan& carry, int layers);

struct ReusePlan {
  std::vector<PlannedBlock> blocks;  // of levels 0, 1, ...
  int carried_blocks = 0;
  // Levels behind those blocks that could have been carried, too, and that the plan has the target
  // compute over them.
  int repaired_blocks = 0;

  // Blocks in front of the first carried one; all of them where nothing is carried.
  int NativeLevels() const;
  // Of which most carried blocks are. REQUIRES: carried_blocks > 0.
  ProvenanceId MainSource() const;
  // Its version; of a block that the target computed over carried ones, what it was computed over.
  Digest MainVersion(const ProvenanceRegistry& registry) const;
};

// What would be reused by another plan, all else being equal.
using ReuseByPlan = std::function<ReusePlan(const CarryPlan&)>;

// Native blocks wherever there are some; between and behind them carried ones, from the source
// whose run is longest (the more wanted one where runs are equal), if they add min_carried_tokens
// in all. A tainted block counts as carried, and only the version that computed it reads it, and
// only when every version it was computed over is among the sources.
//
// A calibrated plan maps every carried block of a source, unless that was done before. With a
// bottom every carried block of a source, mapped or not, is repaired, unless the target did that
// before. A bottom of all layers is a native prefill, and carries nothing. What other plans have
// made of a source's blocks, and what was computed over that, is not carried.
//
// With a tail the last TailBlocks() of these levels have to be what the target itself computed,
// from its own blocks or over carried ones. Where the last one is native there is nothing to
// repair. Elsewhere, too, a block of its own over carried ones goes before a source's; all behind
// the first level of the tail that has neither is computed. A tail over all carried blocks leaves
// the native ones in front alone, and nothing is carried or repaired then.
ReusePlan PlanReuse(const ChainMatch& match, const ReuseQuery& query,
                    const ProvenanceRegistry& registry);

}  // namespace carryover
