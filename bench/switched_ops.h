// The CPU backend with a switch and a clock: launches do their work, or nothing at all. With it, KV
// of a long context can be had without computing it, and a step's cost without its ops can be
// measured, or with each op by itself.
#pragma once

#include <map>
#include <string>

#include "kernels/ops.h"

namespace carryover::bench {

enum class Launches {
  kAll,           // every pass is computed
  kOnlyDecoding,  // passes in which a sequence has more than one row do nothing
  kNone,          // nothing is computed
};

// Memory that it allocates is there and zero, so that KV which nobody computed is read like any
// other. Loading, packing and copies to and from the host are CpuOps's own; logits that nobody
// computed are zeros.
const Ops& SwitchedOps();

// Takes effect with the next pass. Any thread.
void SetLaunches(Launches launches);

// While on, a pass waits before it begins: requests that came meanwhile run side by side in the
// next. Any thread.
void HoldPasses(bool on);

// Milliseconds spent in each op, products by their weights' k and n.
using OpTimes = std::map<std::string, double>;

// REQUIRES: no pass runs.
void StartTiming();
OpTimes StopTiming();

}  // namespace carryover::bench
