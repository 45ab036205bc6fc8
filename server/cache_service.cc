#include "server/cache_service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "server/admin_call.h"
#include "server/rpc_status.h"

namespace carryover {
namespace {

constexpr int kDefaultListLimit = 100;
constexpr int kMaxListLimit = 10000;

}  // namespace

grpc::ServerWriteReactor<v1::WarmEvent>* CacheService::Warm(grpc::CallbackServerContext* context,
                                                            const v1::WarmRequest* request) {
  return RunWithProgress<v1::WarmEvent>(
      context, workers_.slow, CountAs(observer_, "Warm"),
      [this, request](StreamCall<v1::WarmEvent>* call,
                      const std::function<void(double)>& progress) -> absl::Status {
        ASSIGN_OR_RETURN(PrefixSpec prefix, FromProto(request->prefix(), limits_));
        ASSIGN_OR_RETURN(WarmResult result,
                         engine_->Warm(prefix, progress, [call] { return call->gone(); }));
        if (request->pin()) RETURN_IF_ERROR(engine_->Pin(prefix, true).status());
        v1::WarmEvent event;
        ToProto(result, event.mutable_result());
        call->Push(std::move(event));
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* CacheService::List(grpc::CallbackServerContext* context,
                                             const v1::ListCacheRequest* request,
                                             v1::ListCacheResponse* response) {
  return RunUnary(
      workers_.quick, CountAs(observer_, "ListCache"), [this, request, response]() -> absl::Status {
        const int limit = request->has_limit() ? request->limit() : kDefaultListLimit;
        if (limit < 1 || limit > kMaxListLimit) {
          return FieldError("limit", absl::StrCat("must be from 1 to ", kMaxListLimit));
        }
        for (const CachedPrefix& prefix : engine_->ListPrefixes(request->model(), limit)) {
          ToProto(prefix, response->add_prefixes());
        }
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* CacheService::Stats(grpc::CallbackServerContext* context,
                                              const v1::StatsRequest* request,
                                              v1::StatsResponse* response) {
  return RunUnary(workers_.quick, CountAs(observer_, "Stats"), [this, response] {
    ToProto(engine_->snapshot(), response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* CacheService::Evict(grpc::CallbackServerContext* context,
                                              const v1::EvictRequest* request,
                                              v1::EvictResponse* response) {
  return RunUnary(
      workers_.quick, CountAs(observer_, "Evict"), [this, request, response]() -> absl::Status {
        EvictResult result;
        switch (request->what_case()) {
          case v1::EvictRequest::kScope: {
            ASSIGN_OR_RETURN(result,
                             engine_->Evict(request->scope().model(), request->scope().version()));
            break;
          }
          case v1::EvictRequest::kPrefix: {
            ASSIGN_OR_RETURN(PrefixSpec prefix, FromProto(request->prefix(), limits_));
            ASSIGN_OR_RETURN(result, engine_->EvictPrefix(prefix));
            break;
          }
          case v1::EvictRequest::WHAT_NOT_SET:
            return FieldError("scope", "either scope or prefix must be set");
        }
        LogInfo("cache_evicted", {{"blocks", result.blocks_evicted},
                                  {"in_use", result.blocks_in_use},
                                  {"pinned", result.blocks_pinned}});
        ToProto(result, response);
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* CacheService::Pin(grpc::CallbackServerContext* context,
                                            const v1::PinRequest* request,
                                            v1::PinResponse* response) {
  return RunUnary(workers_.quick, CountAs(observer_, "Pin"),
                  [this, request, response]() -> absl::Status {
                    ASSIGN_OR_RETURN(PrefixSpec prefix, FromProto(request->prefix(), limits_));
                    const bool pinned = !request->has_pinned() || request->pinned();
                    ASSIGN_OR_RETURN(const int tokens, engine_->Pin(prefix, pinned));
                    response->set_tokens(tokens);
                    return absl::OkStatus();
                  });
}

grpc::ServerUnaryReactor* CacheService::Check(grpc::CallbackServerContext* context,
                                              const v1::CheckRequest* request,
                                              v1::CheckResponse* response) {
  return RunUnary(workers_.quick, CountAs(observer_, "CheckCache"),
                  [this] { return engine_->CheckStore(); });
}

}  // namespace carryover
