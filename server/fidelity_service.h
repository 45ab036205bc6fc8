// carryover.v1.Fidelity over an Engine. What may wait runs on workers.
#pragma once

#include "carryover/v1/fidelity.grpc.pb.h"
#include "engine/engine.h"
#include "server/convert.h"
#include "server/prometheus_observer.h"
#include "server/worker_pool.h"

namespace carryover {

class FidelityService final : public v1::Fidelity::CallbackService {
 public:
  // All outlive the service and its server.
  FidelityService(Engine* engine, PrometheusObserver* observer, const AdminWorkers& workers,
                  const RequestLimits& limits)
      : engine_(engine), observer_(observer), workers_(workers), limits_(limits) {}

  grpc::ServerUnaryReactor* Report(grpc::CallbackServerContext* context,
                                   const v1::FidelityReportRequest* request,
                                   v1::FidelityReportResponse* response) override;
  grpc::ServerWriteReactor<v1::WatchedSample>* WatchSamples(
      grpc::CallbackServerContext* context, const v1::WatchSamplesRequest* request) override;
  grpc::ServerUnaryReactor* SetGate(grpc::CallbackServerContext* context,
                                    const v1::SetGateRequest* request,
                                    v1::SetGateResponse* response) override;
  grpc::ServerUnaryReactor* Evaluate(grpc::CallbackServerContext* context,
                                     const v1::EvaluateRequest* request,
                                     v1::EvaluateResponse* response) override;

 private:
  Engine* const engine_;
  PrometheusObserver* const observer_;
  const AdminWorkers workers_;
  const RequestLimits limits_;
};

}  // namespace carryover
