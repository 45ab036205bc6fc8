#include "client/command.h"

#include <chrono>
#include <cstdlib>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "google/rpc/status_details.pb.h"

namespace carryover {
namespace {

// Responses with log-probabilities of long prompts are large; beyond this one is an error.
constexpr int kMaxReceiveBytes = 256 << 20;
constexpr double kMaxTimeoutSeconds = 1e8;

std::string EnvironmentOr(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : fallback;
}

grpc::ChannelArguments ChannelArguments() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxReceiveBytes);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);  // the address is where to go, as it is given
  return arguments;
}

// What is packed in a status: empty where there are no details or they cannot be read.
struct StatusDetails {
  google::rpc::BadRequest bad_request;
  google::rpc::PreconditionFailure precondition;
  std::optional<double> retry_seconds;
};

StatusDetails ReadDetails(const grpc::Status& status) {
  StatusDetails details;
  google::rpc::Status packed;
  if (!packed.ParseFromString(status.error_details())) return details;
  for (const auto& any : packed.details()) {
    google::rpc::RetryInfo retry;
    if (any.Is<google::rpc::BadRequest>()) {
      any.UnpackTo(&details.bad_request);
    } else if (any.Is<google::rpc::PreconditionFailure>()) {
      any.UnpackTo(&details.precondition);
    } else if (any.UnpackTo(&retry)) {
      details.retry_seconds =
          static_cast<double>(retry.retry_delay().seconds()) + 1e-9 * retry.retry_delay().nanos();
    }
  }
  return details;
}

}  // namespace

const char* StatusCodeName(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::OK:
      return "OK";
    case grpc::StatusCode::CANCELLED:
      return "CANCELLED";
    case grpc::StatusCode::UNKNOWN:
      return "UNKNOWN";
    case grpc::StatusCode::INVALID_ARGUMENT:
      return "INVALID_ARGUMENT";
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return "DEADLINE_EXCEEDED";
    case grpc::StatusCode::NOT_FOUND:
      return "NOT_FOUND";
    case grpc::StatusCode::ALREADY_EXISTS:
      return "ALREADY_EXISTS";
    case grpc::StatusCode::PERMISSION_DENIED:
      return "PERMISSION_DENIED";
    case grpc::StatusCode::UNAUTHENTICATED:
      return "UNAUTHENTICATED";
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      return "RESOURCE_EXHAUSTED";
    case grpc::StatusCode::FAILED_PRECONDITION:
      return "FAILED_PRECONDITION";
    case grpc::StatusCode::ABORTED:
      return "ABORTED";
    case grpc::StatusCode::OUT_OF_RANGE:
      return "OUT_OF_RANGE";
    case grpc::StatusCode::UNIMPLEMENTED:
      return "UNIMPLEMENTED";
    case grpc::StatusCode::INTERNAL:
      return "INTERNAL";
    case grpc::StatusCode::UNAVAILABLE:
      return "UNAVAILABLE";
    case grpc::StatusCode::DATA_LOSS:
      return "DATA_LOSS";
    default:
      return "UNKNOWN";
  }
}

ConnectionOptions DefaultConnection() {
  ConnectionOptions options;
  options.address = EnvironmentOr("CARRYOVER_ADDRESS", "127.0.0.1:50051");
  options.admin = EnvironmentOr("CARRYOVER_ADMIN", "127.0.0.1:50052");
  return options;
}

std::optional<int> ParseOrExit(Args* args, ConnectionOptions* options, CommandContext& context) {
  args->Group("Connection and output");
  args->Option("address", &options->address, "HOST:PORT",
               "where completions are served; default $CARRYOVER_ADDRESS or 127.0.0.1:50051");
  args->Option("admin", &options->admin, "HOST:PORT",
               "where versions and the cache are managed; default $CARRYOVER_ADMIN or "
               "127.0.0.1:50052");
  args->Option("timeout", &options->timeout_seconds, "SECONDS",
               "give the request up after so long; default: wait");
  args->Option("json", &options->json, "", "print one JSON object instead of text");
  const absl::Status status = args->Parse(context.arguments);
  if (!status.ok()) return UsageError(context, args->command(), status.message());
  if (args->help_asked()) {
    context.out << args->Help();
    return kExitOk;
  }
  const double timeout = options->timeout_seconds.value_or(1);
  if (timeout <= 0 || timeout > kMaxTimeoutSeconds) {
    return UsageError(context, args->command(), "--timeout must be above 0 and at most 1e8");
  }
  return std::nullopt;
}

int RunSubcommand(absl::string_view prefix, absl::string_view summary,
                  absl::Span<const Command> commands, CommandContext& context) {
  const std::string space = prefix.empty() ? "" : " ";
  const std::string name = context.arguments.empty() ? "--help" : context.arguments[0];
  for (const Command& command : commands) {
    if (name != command.name) continue;
    context.arguments.erase(context.arguments.begin());
    return command.run(context);
  }
  if (name != "--help" && name != "-h" && name != "help") {
    std::string hint;
    for (const Command& command : commands) {
      if (EditDistance(name, command.name) <= 2)
        hint = absl::StrCat("; did you mean '", command.name, "'?");
    }
    return UsageError(context, prefix, absl::StrCat("unknown command '", name, "'", hint));
  }
  std::string help = absl::StrCat(summary, "\n\nUsage: carryover ", prefix, space,
                                  "COMMAND [options]\n\nCommands:\n");
  for (const Command& command : commands) {
    absl::StrAppendFormat(&help, "  %-12s %s\n", command.name, command.summary);
  }
  absl::StrAppend(
      &help, "\n'carryover ", prefix, space,
      "COMMAND --help' tells a command's options and gives examples.\n"
      "Exit codes: 0 done, 1 the request failed, 2 wrong arguments, 130 interrupted.\n");
  // Asked for, it is the result; otherwise it is the answer to a mistake.
  const bool asked = !context.arguments.empty();
  (asked ? context.out : context.err) << help;
  return asked ? kExitOk : kExitUsage;
}

int UsageError(CommandContext& context, absl::string_view command, absl::string_view message) {
  const std::string full = absl::StrCat("carryover", command.empty() ? "" : " ", command);
  context.err << full << ": " << std::string(message) << "\nTry '" << full << " --help'.\n";
  return kExitUsage;
}

std::shared_ptr<grpc::Channel> Connect(const std::string& address) {
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), ChannelArguments());
}

std::shared_ptr<grpc::Channel> ConnectAlone(const std::string& address) {
  grpc::ChannelArguments arguments = ChannelArguments();
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

void ConnectNow(grpc::Channel* channel, Interrupt* interrupt) {
  // The wait cannot be woken, so it is cut into pieces.
  constexpr std::chrono::milliseconds kPiece(20);
  const auto deadline = std::chrono::system_clock::now() + std::chrono::seconds(5);
  while (!interrupt->requested() && std::chrono::system_clock::now() < deadline) {
    const grpc_connectivity_state state = channel->GetState(/*try_to_connect=*/true);
    if (state == GRPC_CHANNEL_READY || state == GRPC_CHANNEL_TRANSIENT_FAILURE) return;
    channel->WaitForStateChange(state, std::chrono::system_clock::now() + kPiece);
  }
}

CallContext::CallContext(const ConnectionOptions& options, Interrupt* interrupt)
    : interrupt_(interrupt), interrupt_id_(interrupt->Add([this] { context_.TryCancel(); })) {
  if (options.timeout_seconds.has_value()) {
    context_.set_deadline(std::chrono::system_clock::now() +
                          std::chrono::duration_cast<std::chrono::system_clock::duration>(
                              std::chrono::duration<double>(*options.timeout_seconds)));
  }
}

CallContext::~CallContext() { interrupt_->Remove(interrupt_id_); }

std::string DescribeStatus(const grpc::Status& status) {
  std::string text =
      absl::StrCat(StatusCodeName(status.error_code()), ": ", status.error_message());
  const StatusDetails details = ReadDetails(status);
  for (const auto& violation : details.bad_request.field_violations()) {
    absl::StrAppend(&text, "\n  ", violation.field(), ": ", violation.description());
  }
  for (const auto& violation : details.precondition.violations()) {
    absl::StrAppend(&text, "\n  ", violation.type(), " ", violation.subject(), ": ",
                    violation.description());
  }
  if (details.retry_seconds.has_value()) {
    absl::StrAppendFormat(&text, "\n  try again in %.3g s", *details.retry_seconds);
  }
  return text;
}

nlohmann::ordered_json StatusToJson(const grpc::Status& status) {
  nlohmann::ordered_json json = {{"code", StatusCodeName(status.error_code())},
                                 {"message", status.error_message()}};
  const StatusDetails details = ReadDetails(status);
  for (const auto& violation : details.bad_request.field_violations()) {
    json["field_violations"].push_back(
        {{"field", violation.field()}, {"description", violation.description()}});
  }
  for (const auto& violation : details.precondition.violations()) {
    json["violations"].push_back({{"type", violation.type()},
                                  {"subject", violation.subject()},
                                  {"description", violation.description()}});
  }
  if (details.retry_seconds.has_value()) json["retry_after_s"] = *details.retry_seconds;
  return json;
}

int FailedCall(CommandContext& context, const ConnectionOptions& options,
               const std::string& address, const grpc::Status& status) {
  const bool interrupted =
      status.error_code() == grpc::StatusCode::CANCELLED && context.interrupt.requested();
  if (options.json) PrintJson(context.out, {{"error", StatusToJson(status)}});
  if (interrupted) {
    context.err << "carryover: interrupted; the request was cancelled\n";
    return kExitInterrupted;
  }
  context.err << "carryover: " << DescribeStatus(status) << "\n";
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
    context.err << "  server: " << address << "\n";
  }
  return kExitFailed;
}

void PrintJson(std::ostream& out, const nlohmann::ordered_json& json) {
  out << json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << std::endl;
}

}  // namespace carryover
