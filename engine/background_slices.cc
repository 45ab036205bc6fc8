#include "engine/background_slices.h"

#include <algorithm>
#include <chrono>

namespace carryover {
namespace {
constexpr auto kWait = std::chrono::milliseconds(50);
}  // namespace

std::optional<absl::Status> SliceJob::Wait() {
  const auto end = std::chrono::steady_clock::now() + kWait;
  MutexLock lock(&mutex_);
  while (!status_.has_value() && ended_.WaitUntil(&mutex_, end)) {
  }
  return status_;
}

void SliceJob::End(absl::Status status) {
  slice_ = nullptr;  // what it holds goes here, on the engine thread
  MutexLock lock(&mutex_);
  status_ = std::move(status);
  ended_.SignalAll();
}

void BackgroundSlices::Add(std::shared_ptr<SliceJob> job) {
  if (closed_) return job->End(absl::UnavailableError("the server is shutting down"));
  jobs_.push_back(std::move(job));
}

void BackgroundSlices::Cancel(const std::shared_ptr<SliceJob>& job) {
  const auto found = std::find(jobs_.begin(), jobs_.end(), job);
  if (found == jobs_.end()) return;
  jobs_.erase(found);
  job->End(absl::CancelledError("cancelled"));
}

void BackgroundSlices::Run(const std::function<bool()>& yield) {
  while (!jobs_.empty()) {
    const absl::StatusOr<bool> done = jobs_.front()->slice_(yield);
    if (!done.ok() || *done) {
      const std::shared_ptr<SliceJob> job = std::move(jobs_.front());
      jobs_.pop_front();
      job->End(done.status());
    }
    if (yield()) return;
  }
}

void BackgroundSlices::Close() {
  closed_ = true;
  for (const auto& job : jobs_) job->End(absl::UnavailableError("the server is shutting down"));
  jobs_.clear();
}

}  // namespace carryover
