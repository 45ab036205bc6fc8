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

namespace carryover {

class ComparisonWaiter {
 public:
  using Samples = absl::StatusOr<std::vector<FidelitySample>>;

  // Engine thread, once.
  void Tell(Samples samples) {
    MutexLock lock(&mutex_);
    if (!samples_.has_value()) samples_.emplace(std::move(samples));
    told_.SignalAll();
  }
  bool left() {
    MutexLock lock(&mutex_);
    return left_;
  }

  // The caller: waits a little. Nothing while there is no outcome.
  std::optional<Samples> Wait() {
    MutexLock lock(&mutex_);
    if (!samples_.has_value())
      told_.WaitUntil(&mutex_, std::chrono::steady_clock::now() + kPatience);
    return samples_;
  }
  void Leave() {
    MutexLock lock(&mutex_);
    left_ = true;
  }

 private:
  static constexpr auto kPatience = std::chrono::milliseconds(50);

  Mutex mutex_;
  CondVar told_;
  std::optional<Samples> samples_ ABSL_GUARDED_BY(mutex_);
  bool left_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace carryover
