// An engine without models: requests are kept until a test answers them, so that it decides what
// happens when. For tests of the services alone.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "engine/engine.h"

namespace carryover {

class FakeEngine final : public Engine {
 public:
  struct Pending {
    CompletionRequest request;
    std::shared_ptr<CompletionSink> sink;
  };

  absl::StatusOr<uint64_t> Submit(CompletionRequest request,
                                  std::shared_ptr<CompletionSink> sink) override {
    MutexLock lock(&mutex_);
    if (!submit_error_.ok()) return submit_error_;
    const uint64_t ticket = ++last_ticket_;
    pending_[ticket] = {std::move(request), std::move(sink)};
    changed_.SignalAll();
    return ticket;
  }
  // As the real one: the request ends from another thread's point of view, soon after.
  void Cancel(uint64_t ticket) override {
    ++cancels;
    std::shared_ptr<CompletionSink> sink;
    {
      MutexLock lock(&mutex_);
      const auto at = pending_.find(ticket);
      if (at == pending_.end()) return;
      sink = std::move(at->second.sink);
      pending_.erase(at);
    }
    sink->OnDone({.status = absl::CancelledError("cancelled")});
  }

  // Waits for the next request and gives its ticket.
  std::pair<uint64_t, Pending> WaitForRequest() {
    MutexLock lock(&mutex_);
    while (pending_.empty()) changed_.Wait(&mutex_);
    return {pending_.begin()->first, pending_.begin()->second};
  }
  // REQUIRES: the request is still pending, or was cancelled: then nothing happens.
  void Done(uint64_t ticket, const CompletionDone& done) {
    std::shared_ptr<CompletionSink> sink;
    {
      MutexLock lock(&mutex_);
      const auto at = pending_.find(ticket);
      if (at == pending_.end()) return;
      sink = std::move(at->second.sink);
      pending_.erase(at);
    }
    sink->OnDone(done);
  }
  void set_submit_error(absl::Status status) {
    MutexLock lock(&mutex_);
    submit_error_ = std::move(status);
  }
  size_t pending() {
    MutexLock lock(&mutex_);
    return pending_.size();
  }

  absl::StatusOr<std::shared_ptr<const Tokenizer>> FindTokenizer(absl::string_view,
                                                                 absl::string_view) override {
    return absl::NotFoundError("model: none");
  }
  absl::StatusOr<VersionInfo> Load(const LoadOptions& options,
                                   const std::function<void(double)>& progress) override {
    for (int i = 0; i <= 100; ++i) progress(i / 100.0);
    if (options.path == "/incompatible") {
      return absl::FailedPreconditionError(
          "version T cannot read the caches of S; these differ: layers (2 and 4), "
          "sliding_windows (0,0 and 8,8)");
    }
    VersionInfo info;
    info.model = options.model;
    info.version = options.version;
    return info;
  }
  std::vector<VersionInfo> ListVersions(absl::string_view) override { return {}; }
  absl::Status Promote(absl::string_view, absl::string_view, double) override {
    return absl::OkStatus();
  }
  absl::Status Unload(absl::string_view, absl::string_view version) override {
    return absl::FailedPreconditionError(absl::StrCat("version: ", version, " serves"));
  }
  absl::Status Remove(absl::string_view, absl::string_view) override { return absl::OkStatus(); }
  absl::StatusOr<WarmResult> Warm(const PrefixSpec&, const std::function<void(double)>&,
                                  const std::function<bool()>& cancelled) override {
    ++warms_begun;
    while (!cancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ++warms_cancelled;
    return absl::CancelledError("the caller left");
  }
  absl::StatusOr<EvictResult> Evict(absl::string_view, absl::string_view) override {
    return EvictResult{};
  }
  absl::StatusOr<EvictResult> EvictPrefix(const PrefixSpec&) override { return EvictResult{}; }
  absl::StatusOr<int> Pin(const PrefixSpec&, bool) override { return 0; }
  std::vector<CachedPrefix> ListPrefixes(absl::string_view, int) override { return {}; }
  absl::StatusOr<Evaluation> Evaluate(const EvaluateSpec&, const std::function<bool()>&) override {
    return absl::UnimplementedError("fake");
  }
  absl::StatusOr<Calibration> Calibrate(const CalibrateSpec&, const CalibrateHooks&) override {
    return absl::UnimplementedError("fake");
  }
  std::vector<CellReport> ReportGate() override { return {}; }
  absl::StatusOr<int> SetGate(CellPattern, std::optional<GateState>, absl::string_view) override {
    return absl::UnimplementedError("fake");
  }
  std::vector<GateRule> ListGateRules() override { return {}; }
  std::string SaveGate() override { return ""; }
  absl::Status RestoreGate(absl::string_view) override { return absl::UnimplementedError("fake"); }
  GateActivity gate_activity() override { return {}; }
  absl::Status CheckStore() override { return absl::InternalError("block 7 is lost"); }
  EngineSnapshot snapshot() override { return {}; }
  void StartDrain() override {}
  bool FinishDrain(double) override {
    while (true) {
      uint64_t ticket;
      {
        MutexLock lock(&mutex_);
        if (pending_.empty()) return true;
        ticket = pending_.begin()->first;
      }
      Done(ticket, {.status = absl::UnavailableError("the server is shutting down")});
    }
  }

  std::atomic<int> cancels{0};
  std::atomic<int> warms_begun{0};
  std::atomic<int> warms_cancelled{0};

 private:
  Mutex mutex_;
  CondVar changed_;
  std::map<uint64_t, Pending> pending_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_ticket_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status submit_error_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace carryover
