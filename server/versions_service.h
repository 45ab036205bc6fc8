// carryover.v1.Versions over an Engine. Every method may wait, so all run on workers.
#pragma once

#include "carryover/v1/versions.grpc.pb.h"
#include "engine/engine.h"
#include "server/call.h"
#include "server/prometheus_observer.h"
#include "server/worker_pool.h"

namespace carryover {

class VersionsService final : public v1::Versions::CallbackService {
 public:
  // All outlive the service and its server.
  VersionsService(Engine* engine, PrometheusObserver* observer, const AdminWorkers& workers)
      : engine_(engine), observer_(observer), workers_(workers) {}

  grpc::ServerWriteReactor<v1::LoadEvent>* Load(grpc::CallbackServerContext* context,
                                                const v1::LoadRequest* request) override;
  grpc::ServerUnaryReactor* List(grpc::CallbackServerContext* context,
                                 const v1::ListVersionsRequest* request,
                                 v1::ListVersionsResponse* response) override;
  grpc::ServerUnaryReactor* Promote(grpc::CallbackServerContext* context,
                                    const v1::PromoteRequest* request,
                                    v1::PromoteResponse* response) override;
  grpc::ServerUnaryReactor* Unload(grpc::CallbackServerContext* context,
                                   const v1::UnloadRequest* request,
                                   v1::UnloadResponse* response) override;
  grpc::ServerUnaryReactor* Remove(grpc::CallbackServerContext* context,
                                   const v1::RemoveRequest* request,
                                   v1::RemoveResponse* response) override;
  grpc::ServerWriteReactor<v1::CalibrateEvent>* Calibrate(
      grpc::CallbackServerContext* context, const v1::CalibrateRequest* request) override;

 private:
  Engine* const engine_;
  PrometheusObserver* const observer_;
  const AdminWorkers workers_;
};

}  // namespace carryover
