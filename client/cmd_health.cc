// carryover health: whether the server serves.
#include <chrono>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "client/commands.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace carryover {
namespace {

using grpc::health::v1::HealthCheckResponse;

constexpr std::chrono::milliseconds kPoll(200);

}  // namespace

int RunHealth(CommandContext& context) {
  ConnectionOptions connection = DefaultConnection();
  std::string service;
  std::optional<double> wait;
  Args args("health", "Tells whether the server serves; exit code 0 only if it does.");
  args.Option("service", &service, "NAME", "a gRPC service's full name; default: the server");
  args.Option("wait", &wait, "SECONDS", "wait up to so long for it to serve");
  args.Example("carryover health --wait 60", "for scripts that have just started a server");
  if (auto code = ParseOrExit(&args, &connection, context)) return *code;
  if (wait && (*wait < 0 || *wait > 1e6)) {
    return UsageError(context, "health", "--wait must be from 0 to 1e6");
  }

  const auto start = std::chrono::steady_clock::now();
  auto channel = Connect(connection.address);
  auto stub = grpc::health::v1::Health::NewStub(channel);
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  HealthCheckResponse response;
  grpc::Status status;
  while (true) {
    CallContext call(connection, &context.interrupt);
    status = stub->Check(call.get(), request, &response);
    const bool serves = status.ok() && response.status() == HealthCheckResponse::SERVING;
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    if (serves || context.interrupt.requested() || waited.count() >= wait.value_or(0)) break;
    std::this_thread::sleep_for(kPoll);
    // A refused connection is otherwise tried again only after a second or more.
    if (!status.ok()) stub = grpc::health::v1::Health::NewStub(Connect(connection.address));
  }
  if (!status.ok()) return FailedCall(context, connection, connection.address, status);
  const std::string name = HealthCheckResponse::ServingStatus_Name(response.status());
  if (connection.json) {
    PrintJson(context.out, {{"status", name}});
  } else {
    context.out << name << "\n";
  }
  return response.status() == HealthCheckResponse::SERVING ? kExitOk : kExitFailed;
}

}  // namespace carryover
