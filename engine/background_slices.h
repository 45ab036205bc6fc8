// Long work of administration on the device, in slices: the engine thread runs them when nobody
// else wants the device, after comparisons and refreshes, and asks between two layers.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"

namespace carryover {

// Goes on with some work, until it is done (true) or yield says so (false; to be called again).
// yield is cheap and is to be asked every few milliseconds.
using Slice = std::function<absl::StatusOr<bool>(const std::function<bool()>& yield)>;

// One piece of work on its way: made by any thread, run by the engine thread.
class SliceJob {
 public:
  explicit SliceJob(Slice slice) : slice_(std::move(slice)) {}

  // Nothing until it has ended; waits for a few tens of milliseconds. Any thread.
  std::optional<absl::Status> Wait();

 private:
  friend class BackgroundSlices;
  void End(absl::Status status);

  Slice slice_;  // engine thread
  Mutex mutex_;
  CondVar ended_;
  std::optional<absl::Status> status_ ABSL_GUARDED_BY(mutex_);
};

// Engine thread only.
class BackgroundSlices {
 public:
  ~BackgroundSlices() { Close(); }
  void Add(std::shared_ptr<SliceJob> job);
  // Ends it with CANCELLED, unless it has ended. Its slice is not run again.
  void Cancel(const std::shared_ptr<SliceJob>& job);
  bool HasWork() const { return !jobs_.empty(); }
  // Until yield returns true or nothing is left.
  void Run(const std::function<bool()>& yield);
  // Ends all with UNAVAILABLE, and those added from now on.
  void Close();

 private:
  std::deque<std::shared_ptr<SliceJob>> jobs_;
  bool closed_ = false;
};

}  // namespace carryover
