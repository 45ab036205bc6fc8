// carryover versions, load, promote, unload and remove.
#include <chrono>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "carryover/v1/versions.grpc.pb.h"
#include "client/commands.h"
#include "client/message_json.h"
#include "client/terminal.h"

namespace carryover {
namespace {

using Versions = v1::Versions;

std::unique_ptr<Versions::Stub> AdminStub(const ConnectionOptions& connection) {
  return Versions::NewStub(Connect(connection.admin));
}

void PrintVersions(const google::protobuf::RepeatedPtrField<v1::Version>& versions,
                   std::ostream& out) {
  Table table({"MODEL", "VERSION", "STATE", "SHARE", "CARRIES", "WEIGHTS", "KV", "CONTEXT", "SIZE",
               "RUNNING", "CACHED", "FINGERPRINT"});
  for (const v1::Version& v : versions) {
    table.Row({v.model(), v.version(), v.state(), absl::StrFormat("%g%%", v.share()),
               v.carry_from().empty() ? "-" : absl::StrJoin(v.carry_from(), ","), v.weights_dtype(),
               v.kv_dtype(), absl::StrCat(v.max_positions()),
               HumanBytes(static_cast<double>(v.weight_bytes())),
               absl::StrCat(v.running_requests()), absl::StrCat(v.cached_tokens()),
               v.fingerprint().substr(0, 12)});
  }
  table.Print(out);
}

// Asks for the name where it was left out and there is just one model. Empty with a message in
// `error` otherwise.
grpc::Status ResolveModel(Versions::Stub* stub, const ConnectionOptions& connection,
                          CommandContext& context, std::string* model, std::string* error) {
  if (!model->empty()) return grpc::Status::OK;
  CallContext call(connection, &context.interrupt);
  v1::ListVersionsResponse response;
  const grpc::Status status = stub->List(call.get(), v1::ListVersionsRequest(), &response);
  if (!status.ok()) return status;
  std::set<std::string> models;
  for (const v1::Version& version : response.versions()) models.insert(version.model());
  if (models.size() == 1) {
    *model = *models.begin();
  } else {
    *error = models.empty() ? "the server has no model yet"
                            : absl::StrCat("give --model, one of: ", absl::StrJoin(models, ", "));
  }
  return grpc::Status::OK;
}

// What promote, unload and remove have in common.
struct Target {
  ConnectionOptions connection = DefaultConnection();
  std::string model, version;

  void AddOptions(Args* args) {
    args->Option("model", &model, "NAME", "may be left out when the server has just one");
    args->Option("version", &version, "NAME", "the version");
  }

  // Parses and finds out the model. Nothing when the command can go on.
  std::optional<int> Prepare(Args* args, CommandContext& context,
                             std::unique_ptr<Versions::Stub>* stub) {
    if (auto code = ParseOrExit(args, &connection, context)) return code;
    if (version.empty()) return UsageError(context, args->command(), "give --version");
    *stub = AdminStub(connection);
    std::string error;
    const grpc::Status status = ResolveModel(stub->get(), connection, context, &model, &error);
    if (!status.ok()) return FailedCall(context, connection, connection.admin, status);
    if (!error.empty()) return UsageError(context, args->command(), error);
    return std::nullopt;
  }
};

std::optional<v1::DType> ParseDType(absl::string_view text) {
  if (text == "auto") return v1::DTYPE_AUTO;
  if (text == "bf16") return v1::DTYPE_BF16;
  if (text == "fp32") return v1::DTYPE_FP32;
  if (text == "int8") return v1::DTYPE_INT8;
  return std::nullopt;
}

}  // namespace

int RunVersions(CommandContext& context) {
  ConnectionOptions connection = DefaultConnection();
  v1::ListVersionsRequest request;
  std::string model;
  Args args("versions", "Lists what the server holds: versions, their traffic and their caches.");
  args.Option("model", &model, "NAME", "only this model's");
  args.Example("carryover versions", "");
  args.Example("carryover versions --json | jq '.versions[] | {version, share}'", "");
  if (auto code = ParseOrExit(&args, &connection, context)) return *code;
  request.set_model(model);

  v1::ListVersionsResponse response;
  CallContext call(connection, &context.interrupt);
  const grpc::Status status = AdminStub(connection)->List(call.get(), request, &response);
  if (!status.ok()) return FailedCall(context, connection, connection.admin, status);
  if (connection.json) {
    PrintJson(context.out, MessageToJson(response));
  } else if (response.versions().empty()) {
    context.out << "no versions\n";
  } else {
    PrintVersions(response.versions(), context.out);
  }
  return kExitOk;
}

int RunLoad(CommandContext& context) {
  ConnectionOptions connection = DefaultConnection();
  std::string model, version, path, distinct, weights = "auto", kv_dtype = "auto";
  std::vector<std::string> carry_from, maps;
  std::optional<double> promote;
  Args args("load", "Loads a version from a Hugging Face folder, while the server serves.");
  args.Option("model", &model, "NAME", "name that clients ask for");
  args.Option("version", &version, "NAME", "name of this version");
  args.Option("path", &path, "FOLDER",
              "on the server's machine; a relative one is taken from here");
  args.Option("carry-from", &carry_from, "A,B",
              "versions whose caches this one may read; default: none");
  args.Option("map", &maps, "FILE",
              "a map that calibrate made, from a version that it carries from; may be repeated");
  args.Option("promote", &promote, "PERCENT", "give it this share of the traffic once loaded");
  args.Option("weights", &weights, "TYPE", "precision of the weights: auto, bf16, fp32 or int8");
  args.Option("kv-dtype", &kv_dtype, "TYPE", "precision of the cache: auto, bf16 or fp32");
  args.Option("distinct", &distinct, "TEXT",
              "for tests: count equal weights as another version, so that caches are carried");
  args.Example(
      "carryover load --model demo --version 2026-11 --path models/demo/2026-11 \\\n"
      "      --carry-from 2026-10 --promote 100",
      "an update that serves at once, over the old version's caches");
  if (auto code = ParseOrExit(&args, &connection, context)) return *code;
  if (model.empty() || version.empty() || path.empty()) {
    return UsageError(context, "load", "give --model, --version and --path");
  }
  const auto weights_type = ParseDType(weights), kv_type = ParseDType(kv_dtype);
  if (!weights_type) {
    return UsageError(context, "load", "--weights takes auto, bf16, fp32 or int8");
  }
  if (!kv_type || *kv_type == v1::DTYPE_INT8) {
    return UsageError(context, "load", "--kv-dtype takes auto, bf16 or fp32");
  }

  v1::LoadRequest request;
  request.set_model(model);
  request.set_version(version);
  const auto absolute = [](const std::string& path) {
    std::error_code error;
    const std::filesystem::path whole = std::filesystem::absolute(path, error);
    return error ? path : whole.lexically_normal().string();
  };
  request.set_path(absolute(path));
  for (const std::string& map : maps) request.add_map(absolute(map));
  for (const std::string& list : carry_from) {
    for (absl::string_view name : absl::StrSplit(list, ',', absl::SkipEmpty())) {
      request.add_carry_from(std::string(name));
    }
  }
  request.set_distinct(distinct);
  request.set_weights(*weights_type);
  request.set_kv_dtype(*kv_type);
  if (promote) request.set_promote(*promote);

  CallContext call(connection, &context.interrupt);
  const auto start = std::chrono::steady_clock::now();
  auto stub = AdminStub(connection);
  auto reader = stub->Load(call.get(), request);
  v1::LoadEvent event;
  v1::Version loaded;
  Progress progress(context.err, context.err_is_terminal);
  while (reader->Read(&event)) {
    if (event.has_version()) {
      loaded = event.version();
    } else {
      progress.Update(
          absl::StrFormat("loading %s %s: %3.0f %%", model, version, 100 * event.progress()));
    }
  }
  const grpc::Status status = reader->Finish();
  progress.Finish();
  if (!status.ok()) return FailedCall(context, connection, connection.admin, status);
  if (connection.json) {
    PrintJson(context.out, MessageToJson(loaded));
  } else {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    context.out << absl::StrFormat(
        "loaded %s %s in %s: %s of %s weights, %s cache, %d tokens of "
        "context, serves %g %% of the traffic\n",
        loaded.model(), loaded.version(), HumanSeconds(took.count()),
        HumanBytes(static_cast<double>(loaded.weight_bytes())), loaded.weights_dtype(),
        loaded.kv_dtype(), loaded.max_positions(), loaded.share());
  }
  return kExitOk;
}

int RunPromote(CommandContext& context) {
  Target target;
  std::optional<double> share;
  Args args("promote", "Changes which version serves requests that name none.");
  target.AddOptions(&args);
  args.Option("share", &share, "PERCENT",
              "of the traffic, by session; the rest stays where it was. Default 100");
  args.Example("carryover promote --version 2026-11", "all of it");
  args.Example("carryover promote --version 2026-11 --share 5", "a canary");
  std::unique_ptr<Versions::Stub> stub;
  if (auto code = target.Prepare(&args, context, &stub)) return *code;

  v1::PromoteRequest request;
  request.set_model(target.model);
  request.set_version(target.version);
  if (share) request.set_share(*share);
  v1::PromoteResponse response;
  CallContext call(target.connection, &context.interrupt);
  const grpc::Status status = stub->Promote(call.get(), request, &response);
  if (!status.ok()) return FailedCall(context, target.connection, target.connection.admin, status);
  if (target.connection.json) {
    PrintJson(context.out, MessageToJson(response));
  } else {
    PrintVersions(response.versions(), context.out);
  }
  return kExitOk;
}

int RunUnload(CommandContext& context) {
  Target target;
  Args args("unload", "Drops a version's weights once its requests are done; its caches stay.");
  target.AddOptions(&args);
  args.Example("carryover unload --version 2026-10", "versions that carry from it go on doing so");
  std::unique_ptr<Versions::Stub> stub;
  if (auto code = target.Prepare(&args, context, &stub)) return *code;

  v1::UnloadRequest request;
  request.set_model(target.model);
  request.set_version(target.version);
  v1::UnloadResponse response;
  CallContext call(target.connection, &context.interrupt);
  const grpc::Status status = stub->Unload(call.get(), request, &response);
  if (!status.ok()) return FailedCall(context, target.connection, target.connection.admin, status);
  if (target.connection.json) {
    PrintJson(context.out, MessageToJson(response));
  } else {
    context.out << absl::StrFormat("%s %s is %s; %d tokens of its caches stay\n", target.model,
                                   target.version, response.version().state(),
                                   response.version().cached_tokens());
  }
  return kExitOk;
}

int RunRemove(CommandContext& context) {
  Target target;
  Args args("remove", "Drops a version's weights and what it computed from the cache.");
  target.AddOptions(&args);
  args.Example("carryover remove --version 2026-09", "");
  std::unique_ptr<Versions::Stub> stub;
  if (auto code = target.Prepare(&args, context, &stub)) return *code;

  v1::RemoveRequest request;
  request.set_model(target.model);
  request.set_version(target.version);
  v1::RemoveResponse response;
  CallContext call(target.connection, &context.interrupt);
  const grpc::Status status = stub->Remove(call.get(), request, &response);
  if (!status.ok()) return FailedCall(context, target.connection, target.connection.admin, status);
  if (target.connection.json) {
    PrintJson(context.out, {{"removed", {{"model", target.model}, {"version", target.version}}}});
  } else {
    context.out << target.model << " " << target.version << " is removed, and so are its caches\n";
  }
  return kExitOk;
}

}  // namespace carryover
