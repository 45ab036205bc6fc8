// What the engine tells about itself as it happens; the server turns it into metrics. Gauges are
// read from Engine::snapshot() instead. Called from the engine thread, or from a caller's thread in
// OnRejected; implementations are thread-safe and never block.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
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
};

}  // namespace carryover
