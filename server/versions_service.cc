#include "server/versions_service.h"

#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/admin_call.h"
#include "server/convert.h"
#include "server/rpc_status.h"

namespace carryover {
namespace {

constexpr size_t kQueuedCalibrateEvents = 1024;
constexpr auto kCalibrateProgress = std::chrono::milliseconds(100);
constexpr size_t kPieceBytes = 1 << 20;
constexpr size_t kPiecesAhead = 8;

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

grpc::ServerWriteReactor<v1::CalibrateEvent>* VersionsService::Calibrate(
    grpc::CallbackServerContext* context, const v1::CalibrateRequest* request) {
  using Call = StreamCall<v1::CalibrateEvent>;
  auto call = Call::Make(context, kQueuedCalibrateEvents, nullptr, CountAs(observer_, "Calibrate"));
  const auto job = [this, context, request](Call* call) -> absl::Status {
    ASSIGN_OR_RETURN(const CalibrateSpec spec, FromProto(*request));
    CalibrateHooks hooks;
    hooks.cancelled = [context] { return context->IsCancelled(); };
    auto next = std::chrono::steady_clock::now();
    hooks.progress = [&](const char* phase, int64_t done, int64_t total) {
      const auto now = std::chrono::steady_clock::now();
      if (now < next && done < total) return;
      next = now + kCalibrateProgress;
      v1::CalibrateEvent event;
      event.mutable_progress()->set_phase(phase);
      event.mutable_progress()->set_done(done);
      event.mutable_progress()->set_total(total);
      call->Push(std::move(event));
    };
    hooks.candidate = [&](const CalibrationCandidate& candidate) {
      v1::CalibrateEvent event;
      ToProto(candidate, event.mutable_candidate());
      call->Push(std::move(event));
    };
    ASSIGN_OR_RETURN(const Calibration calibration, engine_->Calibrate(spec, hooks));
    ASSIGN_OR_RETURN(const std::string file, WriteKvMap(calibration.map));
    v1::CalibrateEvent event;
    ToProto(calibration.map.info, calibration.map.Name(), event.mutable_map());
    call->Push(std::move(event));
    // A slow reader is waited for: a large map is more than the queue may hold.
    for (size_t begin = 0; begin < file.size(); begin += kPieceBytes) {
      while (call->waiting() > kPiecesAhead) {
        if (context->IsCancelled()) return absl::CancelledError("cancelled");
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      event.set_piece(file.substr(begin, kPieceBytes));
      if (!call->Push(event)) return absl::CancelledError("the client is gone");
    }
    return absl::OkStatus();
  };
  const bool started =
      workers_.slow->Run([call, job] { call->Close(ToGrpc(WithDetails(job(call.get())))); });
  if (!started) call->Close(ToGrpc(WithDetails(TooManyAdminCalls())));
  return call.get();
}

}  // namespace carryover
