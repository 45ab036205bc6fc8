// What every command of the client gets, and how it says what went wrong.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/args.h"
#include "client/interrupt.h"
#include "nlohmann/json.hpp"

namespace carryover {

// Exit codes of the program; the help lists them.
enum ExitCode : int {
  kExitOk = 0,
  kExitFailed = 1,        // the server refused or the request failed
  kExitUsage = 2,         // wrong arguments; nothing was sent
  kExitInterrupted = 130  // Ctrl-C; the request was cancelled
};

struct CommandContext {
  std::vector<std::string> arguments;  // after the command's name
  std::ostream& out;                   // results
  std::ostream& err;                   // progress, summaries and errors
  bool out_is_terminal = false;
  bool err_is_terminal = false;
  Interrupt& interrupt;
};

struct Command {
  const char* name;
  const char* summary;
  int (*run)(CommandContext& context);
};

// Runs the command that the first argument names; on --help, nothing or an unknown name prints the
// list. prefix: what comes before the name, "" or "cache".
int RunSubcommand(absl::string_view prefix, absl::string_view summary,
                  absl::Span<const Command> commands, CommandContext& context);

// Options that every command has.
struct ConnectionOptions {
  std::string address;  // completions
  std::string admin;    // versions and cache
  std::optional<double> timeout_seconds;
  bool json = false;
};

// Defaults come from CARRYOVER_ADDRESS and CARRYOVER_ADMIN where those are set.
ConnectionOptions DefaultConnection();

// Adds the connection's options to the command's own and parses. On --help or an error prints and
// returns the exit code, else nothing.
std::optional<int> ParseOrExit(Args* args, ConnectionOptions* options, CommandContext& context);

// Says `message` with the way to the help. Returns kExitUsage.
int UsageError(CommandContext& context, absl::string_view command, absl::string_view message);

// A channel to host:port, [ipv6]:port or unix:path. Connects on first use.
std::shared_ptr<grpc::Channel> Connect(const std::string& address);
// The same on a connection that no other channel shares.
std::shared_ptr<grpc::Channel> ConnectAlone(const std::string& address);

// Connects before the clock starts, so that times are the request's own, as a client that stays
// connected sees them. Returns at the first failure and at Ctrl-C too: the call then says what is
// wrong.
void ConnectNow(grpc::Channel* channel, Interrupt* interrupt);

// One call's context: its deadline, and cancelled by Ctrl-C while it lives. Not movable.
class CallContext {
 public:
  CallContext(const ConnectionOptions& options, Interrupt* interrupt);
  ~CallContext();
  CallContext(const CallContext&) = delete;
  CallContext& operator=(const CallContext&) = delete;
  grpc::ClientContext* get() { return &context_; }

 private:
  grpc::ClientContext context_;
  Interrupt* interrupt_;
  int interrupt_id_;
};

const char* StatusCodeName(grpc::StatusCode code);

// A status with its details: field violations, preconditions, when to retry.
std::string DescribeStatus(const grpc::Status& status);
nlohmann::ordered_json StatusToJson(const grpc::Status& status);

// Prints a failed call and returns the exit code: on `err` as text, with json also on `out` as
// {"error": {...}}.
int FailedCall(CommandContext& context, const ConnectionOptions& options,
               const std::string& address, const grpc::Status& status);

void PrintJson(std::ostream& out, const nlohmann::ordered_json& json);

}  // namespace carryover
