// carryover warm, and carryover cache list|stats|evict|pin|unpin|check.
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "carryover/v1/cache.grpc.pb.h"
#include "client/commands.h"
#include "client/message_json.h"
#include "client/prompt_input.h"
#include "client/terminal.h"

namespace carryover {
namespace {

using CacheStub = v1::Cache::Stub;

std::unique_ptr<CacheStub> AdminStub(const ConnectionOptions& connection) {
  return v1::Cache::NewStub(Connect(connection.admin));
}

// A prefix as warm, evict, pin and unpin take it.
struct PrefixOptions {
  PromptInput input;
  std::string model, version, salt;

  void AddOptions(Args* args) {
    input.AddOptions(args);
    args->Group("Model and cache");
    args->Option("model", &model, "NAME", "may be left out when the server has just one");
    args->Option("version", &version, "NAME", "default: the promoted one");
    args->Option("salt", &salt, "TEXT", "as the requests say that shall find it");
  }
  absl::Status Fill(v1::Prefix* prefix) {
    if (absl::Status status = input.Resolve(); !status.ok()) return status;
    input.Fill(prefix);
    prefix->set_model(model);
    prefix->set_version(version);
    prefix->set_salt(salt);
    return absl::OkStatus();
  }
};

int List(CommandContext& context) {
  ConnectionOptions connection = DefaultConnection();
  std::string model;
  std::optional<int> limit;
  Args args("cache list",
            "Lists cached prefixes, longest chains, hottest first; never their text.");
  args.Option("model", &model, "NAME", "only this model's");
  args.Option("limit", &limit, "N", "at most so many; default 100");
  args.Example("carryover cache list --limit 10", "");
  if (auto code = ParseOrExit(&args, &connection, context)) return *code;

  v1::ListCacheRequest request;
  request.set_model(model);
  if (limit) request.set_limit(*limit);
  v1::ListCacheResponse response;
  CallContext call(connection, &context.interrupt);
  const grpc::Status status = AdminStub(connection)->List(call.get(), request, &response);
  if (!status.ok()) return FailedCall(context, connection, connection.admin, status);
  if (connection.json) {
    PrintJson(context.out, MessageToJson(response));
    return kExitOk;
  }
  Table table({"KEY", "COMPUTED BY", "TIER", "TOKENS", "HITS", "IDLE", "PINNED"});
  for (const v1::CachedPrefix& p : response.prefixes()) {
    table.Row({p.key().substr(0, 12), p.provenance(), p.tier(), absl::StrCat(p.tokens()),
               absl::StrCat(p.hits()), HumanSeconds(p.idle_seconds()), p.pinned() ? "yes" : "no"});
  }
  table.Print(context.out);
  return kExitOk;
}

int Stats(CommandContext& context) {
  ConnectionOptions connection = DefaultConnection();
  Args args("cache stats", "Shows what the cache holds and what the engine is doing.");
  args.Example("carryover cache stats --json | jq .provenance_violations", "must be 0");
  if (auto code = ParseOrExit(&args, &connection, context)) return *code;

  v1::StatsResponse stats;
  CallContext call(connection, &context.interrupt);
  const grpc::Status status = AdminStub(connection)->Stats(call.get(), v1::StatsRequest(), &stats);
  if (!status.ok()) return FailedCall(context, connection, connection.admin, status);
  if (connection.json) {
    PrintJson(context.out, MessageToJson(stats));
    return kExitOk;
  }
  context.out << absl::StrFormat(
      "requests  %d running, %d waiting with %d tokens%s\n"
      "blocks    %d on the device, %d used, %d by running requests\n"
      "engine    %d steps, %d preemptions, %d provenance violations\n",
      stats.running(), stats.waiting(), stats.waiting_tokens(),
      stats.draining() ? ", draining" : "", stats.device_blocks(), stats.device_blocks_used(),
      stats.device_blocks_active(), stats.steps(), stats.preemptions(),
      stats.provenance_violations());
  if (stats.store().empty()) return kExitOk;
  context.out << "\n";
  Table table({"MODEL", "TIER", "COMPUTED BY", "BLOCKS", "SIZE", "HIT TOKENS"});
  for (const v1::StoreStats& row : stats.store()) {
    table.Row({row.model(), row.tier(), row.provenance(), absl::StrCat(row.blocks()),
               HumanBytes(static_cast<double>(row.bytes())), absl::StrCat(row.hit_tokens())});
  }
  table.Print(context.out);
  return kExitOk;
}

int Evict(CommandContext& context) {
  ConnectionOptions connection = DefaultConnection();
  PrefixOptions prefix;
  bool all = false;
  Args args("cache evict", "Drops blocks: of a version, of one prefix, or all.");
  prefix.AddOptions(&args);
  args.Group("Scope");
  args.Option("all", &all, "", "everything; without it a model, a version or a prompt is needed");
  args.Example("carryover cache evict --model demo --version 2026-10",
               "what that version computed");
  args.Example("carryover cache evict --prompt-file system.txt", "one prefix");
  args.Note("Blocks that running requests or pins hold stay, and are told.");
  if (auto code = ParseOrExit(&args, &connection, context)) return *code;

  v1::EvictRequest request;
  if (prefix.input.given()) {
    if (all) return UsageError(context, "cache evict", "give --all or a prompt, not both");
    if (absl::Status status = prefix.Fill(request.mutable_prefix()); !status.ok()) {
      return UsageError(context, "cache evict", status.message());
    }
  } else {
    const bool scoped = !prefix.model.empty() || !prefix.version.empty();
    if (scoped == all) {
      return UsageError(context, "cache evict", "give --model or --version, or a prompt, or --all");
    }
    request.mutable_scope()->set_model(prefix.model);
    request.mutable_scope()->set_version(prefix.version);
  }
  v1::EvictResponse response;
  CallContext call(connection, &context.interrupt);
  const grpc::Status status = AdminStub(connection)->Evict(call.get(), request, &response);
  if (!status.ok()) return FailedCall(context, connection, connection.admin, status);
  if (connection.json) {
    PrintJson(context.out, MessageToJson(response));
  } else {
    context.out << absl::StrFormat("%d blocks evicted; %d in use and %d pinned stay\n",
                                   response.blocks_evicted(), response.blocks_in_use(),
                                   response.blocks_pinned());
  }
  return kExitOk;
}

int SetPin(CommandContext& context, bool pinned) {
  const char* command = pinned ? "cache pin" : "cache unpin";
  ConnectionOptions connection = DefaultConnection();
  PrefixOptions prefix;
  Args args(command, pinned ? "Keeps a cached prefix from eviction." : "Lets a pinned prefix go.");
  prefix.AddOptions(&args);
  args.Example(absl::StrCat("carryover ", command, " --prompt-file system.txt"), "");
  if (auto code = ParseOrExit(&args, &connection, context)) return *code;

  v1::PinRequest request;
  if (absl::Status status = prefix.Fill(request.mutable_prefix()); !status.ok()) {
    return UsageError(context, command, status.message());
  }
  request.set_pinned(pinned);
  v1::PinResponse response;
  CallContext call(connection, &context.interrupt);
  const grpc::Status status = AdminStub(connection)->Pin(call.get(), request, &response);
  if (!status.ok()) return FailedCall(context, connection, connection.admin, status);
  if (connection.json) {
    PrintJson(context.out, MessageToJson(response));
  } else {
    context.out << response.tokens() << (pinned ? " tokens are pinned\n" : " tokens are let go\n");
  }
  return kExitOk;
}

int Pin(CommandContext& context) { return SetPin(context, true); }
int Unpin(CommandContext& context) { return SetPin(context, false); }

int Check(CommandContext& context) {
  ConnectionOptions connection = DefaultConnection();
  Args args("cache check", "Walks the whole store and fails if anything in it is wrong.");
  args.Note("Requests wait meanwhile.");
  if (auto code = ParseOrExit(&args, &connection, context)) return *code;

  v1::CheckResponse response;
  CallContext call(connection, &context.interrupt);
  const grpc::Status status =
      AdminStub(connection)->Check(call.get(), v1::CheckRequest(), &response);
  if (!status.ok()) return FailedCall(context, connection, connection.admin, status);
  if (connection.json) {
    PrintJson(context.out, {{"sound", true}});
  } else {
    context.out << "the store is sound\n";
  }
  return kExitOk;
}

constexpr Command kCacheCommands[] = {
    {"list", "cached prefixes, hottest first", List},
    {"stats", "blocks, bytes and hits by version and tier", Stats},
    {"evict", "drop blocks of a version, a prefix, or all", Evict},
    {"pin", "keep a prefix from eviction", Pin},
    {"unpin", "let a pinned prefix go", Unpin},
    {"check", "walk the store and prove it sound", Check},
};

}  // namespace

int RunWarm(CommandContext& context) {
  ConnectionOptions connection = DefaultConnection();
  PrefixOptions prefix;
  bool pin = false;
  Args args("warm", "Computes a prefix with a version and keeps it, ahead of the requests.");
  prefix.AddOptions(&args);
  args.Option("pin", &pin, "", "keep it from eviction afterwards");
  args.Example("carryover warm --prompt-file system.txt --version 2026-10 --pin", "");
  if (auto code = ParseOrExit(&args, &connection, context)) return *code;

  v1::WarmRequest request;
  if (absl::Status status = prefix.Fill(request.mutable_prefix()); !status.ok()) {
    return UsageError(context, "warm", status.message());
  }
  request.set_pin(pin);
  CallContext call(connection, &context.interrupt);
  auto stub = AdminStub(connection);
  auto reader = stub->Warm(call.get(), request);
  v1::WarmEvent event;
  v1::WarmResult result;
  Progress progress(context.err, context.err_is_terminal);
  while (reader->Read(&event)) {
    if (event.has_result()) {
      result = event.result();
    } else {
      progress.Update(absl::StrFormat("warming: %3.0f %%", 100 * event.progress()));
    }
  }
  const grpc::Status status = reader->Finish();
  progress.Finish();
  if (!status.ok()) return FailedCall(context, connection, connection.admin, status);
  if (connection.json) {
    PrintJson(context.out, MessageToJson(result));
  } else {
    context.out << absl::StrFormat(
        "warmed %d tokens with %s: %d were there, %d computed, %d stored in full blocks\n",
        result.tokens(), result.version(), result.cached_tokens(), result.computed_tokens(),
        result.stored_tokens());
  }
  return kExitOk;
}

int RunCache(CommandContext& context) {
  return RunSubcommand("cache", "Looks at the prefix cache and manages it.", kCacheCommands,
                       context);
}

}  // namespace carryover
