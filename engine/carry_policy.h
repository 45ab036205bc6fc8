// Whether a request that could carry blocks does so, by which plan, and which arms are compared.
// Engine thread only.
//
// All draws come from a keyed hash of the request's ticket, which the server makes: nothing that a
// client sends, and no load, moves the sampled set.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/hash.h"
#include "engine/carry_plan.h"
#include "engine/fidelity_options.h"
#include "engine/gate.h"
#include "engine/reuse_policy.h"
#include "engine/sequence.h"

namespace carryover {

class CarryPolicy {
 public:
  // registry and gate outlive it. REQUIRES: every name of the ladder, which is the gate's, is a
  // plan's.
  CarryPolicy(const FidelityOptions& options, absl::Span<const std::string> ladder,
              const ProvenanceRegistry* registry, Gate* gate);

  // By which plan to serve the request. Fixes request->choice on the first call, by `all`, the
  // most that could be carried; later calls only follow.
  // REQUIRES: all.carried_blocks > 0.
  CarryPlan Choose(ActiveRequest* request, const ReusePlan& all, const ReuseByPlan& by_plan);

 private:
  // Uniform in [0, 1): of the ticket and what it is drawn for.
  double Draw(uint64_t ticket, absl::string_view purpose) const;
  // Of a name on the ladder.
  const NamedPlan& Rung(absl::string_view name) const;
  // The last on the ladder that carries something here; the last, where none does.
  const NamedPlan& MostFaithful(const std::function<bool(const NamedPlan&)>& carries) const;
  void ChooseJudged(ActiveRequest* request, const ReusePlan& all, const ReuseByPlan& by_plan);

  const FidelityOptions options_;
  std::vector<NamedPlan> ladder_;
  const ProvenanceRegistry* registry_;
  Gate* const gate_;
  const Digest key_;
};

}  // namespace carryover
