// Tells the client what was reused from whom.
#pragma once

#include "engine/provenance.h"
#include "engine/sequence.h"

namespace carryover {

// Fills usage and cache info of `request` from what `sequence` reused when it started. After a
// preemption the first report stands when output already depends on it, unless the new start
// carries and the first did not: a response is never called more native than it was.
void ReportReuse(const Sequence& sequence, const ProvenanceRegistry& registry,
                 ActiveRequest* request);

}  // namespace carryover
