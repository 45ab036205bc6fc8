// How the admin services run their calls: on workers, counted, with errors as gRPC statuses.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "server/call.h"
#include "server/prometheus_observer.h"
#include "server/rpc_status.h"
#include "server/worker_pool.h"

namespace carryover {

inline CallEnd CountAs(PrometheusObserver* observer, const char* method) {
  return [observer, method](grpc::StatusCode code) {
    observer->OnCall(method, static_cast<absl::StatusCode>(code));
  };
}

inline absl::Status TooManyAdminCalls() {
  return absl::ResourceExhaustedError("too many admin calls are waiting");
}

inline grpc::ServerUnaryReactor* RunUnary(WorkerPool* workers, CallEnd on_end,
                                          std::function<absl::Status()> job) {
  auto call = UnaryCall::Make(nullptr, std::move(on_end));
  const bool started =
      workers->Run([call, job = std::move(job)] { call->Close(ToGrpc(WithDetails(job()))); });
  if (!started) call->Close(ToGrpc(WithDetails(TooManyAdminCalls())));
  return call.get();
}

// A call with progress: job pushes its own last event. Progress goes out at most ten times a
// second, so that a slow client does not fall behind.
template <class Event>
grpc::ServerWriteReactor<Event>* RunWithProgress(
    grpc::CallbackServerContext* context, WorkerPool* workers, CallEnd on_end,
    std::function<absl::Status(StreamCall<Event>*, const std::function<void(double)>&)> job) {
  constexpr size_t kQueuedEvents = 1024;
  constexpr auto kInterval = std::chrono::milliseconds(100);
  auto call = StreamCall<Event>::Make(context, kQueuedEvents, nullptr, std::move(on_end));
  const bool started = workers->Run([call, kInterval, job = std::move(job)] {
    auto next = std::chrono::steady_clock::now();
    const std::function<void(double)> progress = [&](double share) {
      const auto now = std::chrono::steady_clock::now();
      if (now < next) return;
      next = now + kInterval;
      Event event;
      event.set_progress(share);
      call->Push(std::move(event));
    };
    call->Close(ToGrpc(WithDetails(job(call.get(), progress))));
  });
  if (!started) call->Close(ToGrpc(WithDetails(TooManyAdminCalls())));
  return call.get();
}

}  // namespace carryover
