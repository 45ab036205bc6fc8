// carryover.v1.Completions over an Engine. Methods run on gRPC threads; those with a large text go
// to a worker, since tokenizing it takes a while.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "base/mutex.h"
#include "carryover/v1/completions.grpc.pb.h"
#include "engine/engine.h"
#include "server/call.h"
#include "server/convert.h"
#include "server/prometheus_observer.h"
#include "server/worker_pool.h"

namespace carryover {

class CompletionService final : public v1::Completions::CallbackService {
 public:
  // engine and observer outlive the service and its server.
  CompletionService(Engine* engine, PrometheusObserver* observer, const RequestLimits& limits,
                    size_t stream_queue_events);

  // Until this is called every completion gets UNAVAILABLE. Any thread.
  void Open() { open_ = true; }
  // Waits until every call has been answered, its last bytes sent, or the time has run out.
  void WaitForCalls(double seconds);

  grpc::ServerUnaryReactor* Complete(grpc::CallbackServerContext* context,
                                     const v1::CompleteRequest* request,
                                     v1::CompleteResponse* response) override;
  grpc::ServerWriteReactor<v1::CompleteEvent>* CompleteStream(
      grpc::CallbackServerContext* context, const v1::CompleteRequest* request) override;
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const v1::TokenizeRequest* request,
                                     v1::TokenizeResponse* response) override;
  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context,
                                       const v1::DetokenizeRequest* request,
                                       v1::DetokenizeResponse* response) override;

 private:
  // Submits; the sink hears of everything that goes wrong.
  void Begin(grpc::CallbackServerContext* context, const v1::CompleteRequest& request,
             std::string id, std::shared_ptr<CompletionSink> sink,
             const std::shared_ptr<CancelHandle>& cancel);
  absl::StatusOr<CompletionRequest> Read(const v1::CompleteRequest& request) const;
  CallEnd CountAs(const char* method);
  // Counts a call from now until gRPC is done with it.
  CallDone CountRunning();

  Engine* const engine_;
  PrometheusObserver* const observer_;
  const RequestLimits limits_;
  const size_t stream_queue_events_;
  std::atomic<bool> open_{false};
  Mutex mutex_;
  CondVar ended_;
  int calls_ ABSL_GUARDED_BY(mutex_) = 0;
  WorkerPool text_workers_;
};

}  // namespace carryover
