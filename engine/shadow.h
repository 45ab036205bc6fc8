// What is kept of a request so that the arm that did not serve it can be computed afterwards and
// compared with the one that did. Plain values; engine thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/hash.h"
#include "engine/carry_plan.h"
#include "engine/comparison_waiter.h"
#include "engine/gate.h"
#include "engine/kv_cache.h"
#include "engine/request.h"
#include "engine/sensitivity.h"
#include "engine/version.h"

namespace carryover {

enum class ShadowArm : uint8_t {
  kNative,   // the target over nothing but its own blocks
  kCarried,  // the target over what a plan carries, or would have
  kControl,  // the target natively once more, nothing reused, cut into other chunks: noise floor
  kOld,      // the source natively: the answer before the update
  kRefresh,  // the target natively, for the store alone: nothing is compared
  kMixed,  // the target over a mixture of its own and carried blocks: a probe of somebody who waits
};

struct ArmToRun {
  ShadowArm kind = ShadowArm::kNative;
  // Of a carried arm; of the native one, which is compared with what served: by which that carried.
  NamedPlan plan;
  CacheProbe probe;  // of a mixed arm
};

// What was decided when the request could first have carried blocks; holds until it ends.
struct ShadowChoice {
  Digest source{};          // the version whose blocks the plan carries, most of them
  std::string source_name;  // for people and labels
  std::string task;         // a label
  CellKey cell;             // what the gate judges it by, with the plan that it judges now
  // Serves where something is carried, and would have where the request is held out.
  NamedPlan serve;
  // Ways of carrying that are compared with the native arm; each would carry something.
  std::vector<NamedPlan> compared;
  int native_levels = 0;  // blocks in front of the carried ones
  int prefix_tokens = 0;  // reused in all
  uint64_t prefix = 0;    // names what is carried: equal for requests that share it
  std::string gate;       // the cell's state then
  bool carry = false;     // serve from the carried blocks
  bool gone = false;      // less was there to carry in the end
  bool held_out = false;  // would have, but serves natively to be compared
  bool trial = false;     // chance alone chose between carry and held_out
  bool sampled = false;   // compare the arms
  bool control = false;   // and the native arm with itself; for requests served natively
  bool old = false;       // and with the source's own answer; for requests served natively
  bool probes = false;    // and over mixed caches; for somebody who waits
};

// A sampled request that has ended.
struct ShadowJob {
  ShadowChoice choice;
  bool served_carried = false;
  std::shared_ptr<const Version> version;  // the target
  std::shared_ptr<Model> weights;
  std::shared_ptr<const Version> source;  // with weights, where the `old` arm is wanted
  std::shared_ptr<KvCache> cache;
  CacheRoot root;
  std::vector<CarrySource> sources;  // that the target may carry from, most wanted first
  int prompt_tokens = 0;
  std::vector<int32_t> tokens;       // prompt, then the served tokens that are compared
  std::vector<float> served_logits;  // (compared tokens, vocab): before penalties and the like
  std::vector<int32_t> stop_tokens;
  std::vector<int32_t> answers;  // labelled, by compared position, -1: none; or empty
  bool complete = false;         // the answer has no tokens after these
  bool greedy = false;           // nothing but the raw logits chose the tokens
  bool store = true;             // what the native arm computes may be kept
  bool refresh = false;          // only tokens, of whole blocks, are there to be computed
  SteadyTime offered{};
  // Somebody who waits for the outcome, told once. Such jobs go first and do not age, and are
  // nobody's business once he has left.
  std::shared_ptr<ComparisonWaiter> waiter;

  int positions() const { return static_cast<int>(tokens.size()) - prompt_tokens; }
  // Of an arm: every token but the last, whose successor nobody compares.
  int rows() const { return static_cast<int>(tokens.size()) - (refresh ? 0 : 1); }
};

}  // namespace carryover
