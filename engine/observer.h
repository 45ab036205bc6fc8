// What the engine tells about itself as it happens; the server turns it into metrics. Gauges are
// read from Engine::snapshot() instead. Called from the engine thread, or from a caller's thread in
// OnRejected; implementations are thread-safe and never block.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "engine/fidelity_measures.h"
#include "engine/request.h"

namespace carryover {

// One ended request.
struct RequestRecord {
  absl::StatusCode code = absl::StatusCode::kOk;
  std::string plan;                   // "native" or "direct": whether anything was carried
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
  virtual void OnPairDeclared(const VersionPair& /*pair*/) {}
  virtual void OnPairRemoved(const VersionPair& /*pair*/) {}
  virtual void OnFidelitySample(const FidelitySample& /*sample*/) {}
  // An arm that was to be compared: shadow_runner.h names arms and outcomes.
  virtual void OnShadowEnded(absl::string_view /*arm*/, absl::string_view /*outcome*/) {}
  virtual void OnShadowLag(double /*seconds*/) {}  // from a request's end to the start of its arms
  virtual void OnShadowTokens(int /*tokens*/) {}   // that background passes computed
  virtual void OnRefreshedBlocks(int /*blocks*/) {}  // native ones stored where carried ones served
  virtual void OnGateChange(const GateChange& /*change*/) {}
};

}  // namespace carryover
