// Whether a request that could carry blocks does so, and whether its arms are compared. Engine
// thread only.
//
// All draws come from a keyed hash of the request's ticket, which the server makes: nothing that a
// client sends, and no load, moves the sampled set.
#pragma once

#include <string>

#include "absl/strings/string_view.h"
#include "base/hash.h"
#include "engine/fidelity_options.h"
#include "engine/gate.h"
#include "engine/reuse_policy.h"
#include "engine/sequence.h"

namespace carryover {

class CarryPolicy {
 public:
  // registry and gate outlive it.
  CarryPolicy(const FidelityOptions& options, const ProvenanceRegistry* registry, Gate* gate);

  // Fixes request->choice on the first call; later calls only follow the plan.
  // REQUIRES: plan.carried_blocks > 0.
  bool MayCarry(ActiveRequest* request, const ReusePlan& plan);

 private:
  // Uniform in [0, 1): of the ticket and what it is drawn for.
  double Draw(uint64_t ticket, absl::string_view purpose) const;

  const FidelityOptions options_;
  const ProvenanceRegistry* registry_;
  Gate* const gate_;
  const Digest key_;
};

}  // namespace carryover
