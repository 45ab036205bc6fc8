// What bf16 may change of a model, on any backend. Tests only.
#pragma once

#include <string>

#include "kernels/ops.h"

namespace carryover {

// A model in bf16, weights and KV, on `ops` against our own fp32 on the CPU, which the golden tests
// tie to the reference at every position: the mean KL over all positions of the reference's prompts
// is at most 2e-3 nats, and where the two best logits are clearly apart, the first choice is the
// same.
void ExpectBf16Close(const std::string& folder, const std::string& name, const Ops& ops);

}  // namespace carryover
