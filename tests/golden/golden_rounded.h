// What BF16 and INT8 may change of a model, on any backend. Tests only.
#pragma once

#include <string>

#include "kernels/ops.h"

namespace carryover {

// A model with weights of a type, and KV of BF16, on `ops` against our own fp32 on the CPU, which
// the golden tests tie to the reference at every position: the mean KL over all positions of the
// reference's prompts is at most 2e-3 nats (BF16) or 2e-2 (INT8), and where the two best logits are
// clearly apart, the first choice is the same.
void ExpectRoundedClose(const std::string& folder, const std::string& name, const Ops& ops,
                        DType weights);

}  // namespace carryover
