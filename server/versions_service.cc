#include "server/versions_service.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/admin_call.h"
#include "server/convert.h"
#include "server/rpc_status.h"

namespace carryover {
namespace {

absl::Status CheckNames(const std::string& model, const std::string& version) {
  FieldErrors errors;
  if (std::string problem = NameProblem(model); !problem.empty()) errors.Add("model", problem);
  if (std::string problem = NameProblem(version); !problem.empty()) errors.Add("version", problem);
  return errors.ToStatus();
}

}  // namespace

grpc::ServerWriteReactor<v1::LoadEvent>* VersionsService::Load(grpc::CallbackServerContext* context,
                                                               const v1::LoadRequest* request) {
  return RunWithProgress<v1::LoadEvent>(
      context, workers_.slow, CountAs(observer_, "Load"),
      [this, request](StreamCall<v1::LoadEvent>* call,
                      const std::function<void(double)>& progress) -> absl::Status {
        RETURN_IF_ERROR(Check(*request));
        ASSIGN_OR_RETURN(VersionInfo info, engine_->Load(ToLoadOptions(*request), progress));
        if (request->has_promote()) {
          RETURN_IF_ERROR(
              engine_->Promote(request->model(), request->version(), request->promote()));
        }
        v1::LoadEvent event;
        ToProto(info, event.mutable_version());
        if (request->has_promote()) event.mutable_version()->set_share(request->promote());
        call->Push(std::move(event));
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* VersionsService::List(grpc::CallbackServerContext* context,
                                                const v1::ListVersionsRequest* request,
                                                v1::ListVersionsResponse* response) {
  return RunUnary(workers_.quick, CountAs(observer_, "ListVersions"), [this, request, response] {
    for (const VersionInfo& info : engine_->ListVersions(request->model())) {
      ToProto(info, response->add_versions());
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* VersionsService::Promote(grpc::CallbackServerContext* context,
                                                   const v1::PromoteRequest* request,
                                                   v1::PromoteResponse* response) {
  return RunUnary(
      workers_.quick, CountAs(observer_, "Promote"), [this, request, response]() -> absl::Status {
        RETURN_IF_ERROR(CheckNames(request->model(), request->version()));
        const double share = request->has_share() ? request->share() : 100;
        if (!(share >= 0 && share <= 100)) {
          return FieldError("share", absl::StrCat("must be from 0 to 100; it is ", share));
        }
        RETURN_IF_ERROR(engine_->Promote(request->model(), request->version(), share));
        for (const VersionInfo& info : engine_->ListVersions(request->model())) {
          ToProto(info, response->add_versions());
        }
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* VersionsService::Unload(grpc::CallbackServerContext* context,
                                                  const v1::UnloadRequest* request,
                                                  v1::UnloadResponse* response) {
  return RunUnary(workers_.slow, CountAs(observer_, "Unload"),
                  [this, request, response]() -> absl::Status {
                    RETURN_IF_ERROR(CheckNames(request->model(), request->version()));
                    RETURN_IF_ERROR(engine_->Unload(request->model(), request->version()));
                    for (const VersionInfo& info : engine_->ListVersions(request->model())) {
                      if (info.version == request->version())
                        ToProto(info, response->mutable_version());
                    }
                    return absl::OkStatus();
                  });
}

grpc::ServerUnaryReactor* VersionsService::Remove(grpc::CallbackServerContext* context,
                                                  const v1::RemoveRequest* request,
                                                  v1::RemoveResponse* response) {
  return RunUnary(workers_.slow, CountAs(observer_, "Remove"), [this, request]() -> absl::Status {
    RETURN_IF_ERROR(CheckNames(request->model(), request->version()));
    RETURN_IF_ERROR(engine_->Remove(request->model(), request->version()));
    return absl::OkStatus();
  });
}

}  // namespace carryover
