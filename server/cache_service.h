// carryover.v1.Cache over an Engine. Every method may wait, so all run on workers.
#pragma once

#include "carryover/v1/cache.grpc.pb.h"
#include "engine/engine.h"
#include "server/call.h"
#include "server/convert.h"
#include "server/prometheus_observer.h"
#include "server/worker_pool.h"

namespace carryover {

class CacheService final : public v1::Cache::CallbackService {
 public:
  // All outlive the service and its server.
  CacheService(Engine* engine, PrometheusObserver* observer, const AdminWorkers& workers,
               const RequestLimits& limits)
      : engine_(engine), observer_(observer), workers_(workers), limits_(limits) {}

  grpc::ServerWriteReactor<v1::WarmEvent>* Warm(grpc::CallbackServerContext* context,
                                                const v1::WarmRequest* request) override;
  grpc::ServerUnaryReactor* List(grpc::CallbackServerContext* context,
                                 const v1::ListCacheRequest* request,
                                 v1::ListCacheResponse* response) override;
  grpc::ServerUnaryReactor* Stats(grpc::CallbackServerContext* context,
                                  const v1::StatsRequest* request,
                                  v1::StatsResponse* response) override;
  grpc::ServerUnaryReactor* Evict(grpc::CallbackServerContext* context,
                                  const v1::EvictRequest* request,
                                  v1::EvictResponse* response) override;
  grpc::ServerUnaryReactor* Pin(grpc::CallbackServerContext* context, const v1::PinRequest* request,
                                v1::PinResponse* response) override;
  grpc::ServerUnaryReactor* Check(grpc::CallbackServerContext* context,
                                  const v1::CheckRequest* request,
                                  v1::CheckResponse* response) override;

 private:
  Engine* const engine_;
  PrometheusObserver* const observer_;
  const AdminWorkers workers_;
  const RequestLimits limits_;
};

}  // namespace carryover
