// What the engine tells about itself as it happens; the server turns it into metrics. Gauges are
// read from Engine::snapshot() instead. Called from the engine thread, or from a caller's thread in
// OnRejected; implementations are thread-safe and never block.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "engine/fidelity_measures.h"
#include "engine/request.h"

namespace carryover {

// One ended request.
struct RequestRecord {
  absl::StatusCode code = absl::StatusCode::kOk;
  std::string plan;                   // by which something was carried, or "native"
  std::vector<FinishReason> reasons;  // (choices)
  Usage usage;
  Timing timing;
  bool started = false;  // it had a first token
};

// A target that may read a source's blocks: two loaded or unloaded versions of one model.
struct VersionPair {
  std::string model;
  std::string source;  // version names
  std::string target;
  int max_prefix_tokens = 0;  // of the target: prefixes are never longer
};

// An ended request of the trial: the gate would have it carry, and chance alone decided whether it
// did or was held out (FidelityOptions::hold_out_rate). Requests of both arms are alike but for
// that, so what follows may be compared without bias. The arm is the one that was drawn, also where
// a carried block was gone in the end.
struct TrialRecord {
  VersionPair pair;  // without max_prefix_tokens
  std::string plan;  // that it was to carry by
  std::string task;  // as TaskLabel makes it
  int prefix_bucket = 256;
  bool held_out = false;
  std::vector<FinishReason> reasons;  // (choices)
  std::vector<int> answer_tokens;     // (choices)
  std::optional<double> first_token;  // seconds from accepting it; absent when it got none
};

// A cell of the gate as labels.
struct GateCell {
  std::string model;
  std::string source;  // version names
  std::string target;
  std::string plan;
  std::string task;  // as TaskLabel makes it
  int prefix_bucket = 256;
  std::string answer;  // "short", "long"
};

struct GateChange {
  GateCell cell;
  std::string from;  // "learning", "open", "repaired", "closed"
  std::string to;
  std::string cause;    // one of a few words: a label
  bool hidden = false;  // an operator's state stands over the cell: what is served did not change
};

// One measure of a cell as the gate sees it.
struct GateBound {
  std::string measure;  // "flip", "tv", "stop"
  double mean = 0;
  double lower = 0;  // anytime-valid bounds
  double upper = 1;
  double limit = 0;  // above the floor
  double floor = 0;  // mean of the noise floor
};

// A cell of the gate now, for gauges.
struct GateRow {
  GateCell cell;
  std::string state;           // that is served
  std::string evidence_state;  // without the operator's word
  bool forced = false;         // by an operator
  bool borrowed = false;       // open on evidence of cells like it, too
  bool starved = false;        // too few shadows complete to judge
  double samples = 0;          // completed, of this epoch
  double dropped = 0;
  double prefixes = 0;  // distinct ones
  double controls = 0;  // samples behind the noise floor
  std::vector<GateBound> bounds;
  std::string explanation;  // why, in words
};

class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  virtual void OnRequestDone(const RequestRecord& record) = 0;
  // Why a request was refused before it was queued: "queue_requests", "queue_tokens", "draining".
  virtual void OnRejected(absl::string_view reason) = 0;
  virtual void OnInterTokenLatency(double seconds) = 0;
  virtual void OnBlockLoad(absl::string_view tier, double seconds) = 0;
  virtual void OnStoreLookup(int lookup_tokens) = 0;
  virtual void OnStoreHit(absl::string_view provenance, absl::string_view tier, int tokens) = 0;
  virtual void OnPreemption() = 0;

  // A target was loaded that declares the source, or one of them was removed.
  virtual void OnPairDeclared(const VersionPair& pair) = 0;
  virtual void OnPairRemoved(const VersionPair& pair) = 0;
  virtual void OnFidelitySample(const FidelitySample& sample) = 0;
  virtual void OnTrialDone(const TrialRecord& record) = 0;
  // An arm that was to be compared: shadow_runner.h names arms and outcomes.
  virtual void OnShadowEnded(absl::string_view arm, absl::string_view outcome) = 0;
  virtual void OnShadowLag(double seconds) = 0;  // from a request's end to the start of its arms
  virtual void OnShadowTokens(int tokens) = 0;   // that background passes computed
  // Work came and waited so long for a layer or a comparison in the background to end.
  virtual void OnShadowDelay(double seconds) = 0;
  virtual void OnRefreshEnded(absl::string_view outcome) = 0;  // of one prefix
  virtual void OnRefreshedBlocks(int blocks) = 0;  // native ones stored where carried ones served
  virtual void OnMappedAhead(int blocks) = 0;      // mapped before a request asked for them
  virtual void OnGateChange(const GateChange& change) = 0;
};

}  // namespace carryover
