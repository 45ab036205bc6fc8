// Hands the outcome of a comparison from the engine thread to a caller that waits, and tells the
// engine when the caller has left.
#pragma once

#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "engine/fidelity_measures.h"
#include "engine/sensitivity.h"

namespace carryover {

class ComparisonWaiter {
 public:
  struct Compared {
    std::vector<FidelitySample> samples;
    std::vector<ProbeOutcome> probes;  // of mixed caches, in the order of ProbesOf
  };
  using Outcome = absl::StatusOr<Compared>;

  // Engine thread, once.
  void Tell(Outcome outcome) {
    MutexLock lock(&mutex_);
    if (!outcome_.has_value()) outcome_.emplace(std::move(outcome));
    told_.SignalAll();
  }
  bool left() {
    MutexLock lock(&mutex_);
    return left_;
  }

  // The caller: waits a little. Nothing while there is no outcome.
  std::optional<Outcome> Wait() {
    MutexLock lock(&mutex_);
    if (!outcome_.has_value())
      told_.WaitUntil(&mutex_, std::chrono::steady_clock::now() + kPatience);
    return outcome_;
  }
  void Leave() {
    MutexLock lock(&mutex_);
    left_ = true;
  }

 private:
  static constexpr auto kPatience = std::chrono::milliseconds(50);

  Mutex mutex_;
  CondVar told_;
  std::optional<Outcome> outcome_ ABSL_GUARDED_BY(mutex_);
  bool left_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace carryover
