// How much is compared, and at what cost. Plain values, fixed when the engine is made.
#pragma once

#include <string>
#include <vector>

#include "base/hash.h"

namespace carryover {

struct FidelityOptions {
  // Probabilities. sample: that a request which could carry blocks has its arms compared.
  double sample_rate = 0.1;
  double learning_sample_rate = 0.5;  // the same, of cells that have proved nothing yet
  double hold_out_rate = 0.05;  // of requests that would carry: served natively instead, compared
  double control_rate = 0.1;    // of compared requests that were served natively; all held out ones
  // Of compared requests: those that also compare the other plans of the ladder that have not
  // failed, so that the gate knows them before it needs them.
  double rungs_rate = 0.1;
  double old_rate = 0.1;  // the same, while the source's weights are loaded
  Digest sampling_key{};  // secret; drawn when all zero

  std::vector<std::string> tasks;  // the labels that requests may have; others become "other"

  int positions = 16;             // generated tokens that are compared, at most
  int max_queue = 64;             // jobs; each holds `positions` rows of logits
  double max_age_seconds = 60;    // from the request's end to the start of its job
  double kv_share = 0.25;         // of the blocks, that an arm may take for itself
  double time_share = 0.02;       // of users' time, for jobs that found no spare time for long
  int chunk_tokens = 128;         // of a background pass
  int control_chunk_tokens = 48;  // the control's: other chunks than any user's
  bool store_native = true;       // keep what a native arm computes: carried prefixes heal
  // Compute what is carried most natively when nobody has work, and keep it.
  bool refresh_when_idle = false;
};

}  // namespace carryover
