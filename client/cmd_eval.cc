// carryover eval: items of tasks files in every way, and the report on it. eval report, eval tasks.
#include <algorithm>
#include <ctime>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/hash.h"
#include "base/status_macros.h"
#include "carryover/v1/versions.grpc.pb.h"
#include "client/commands.h"
#include "client/eval/report.h"
#include "client/eval_run.h"
#include "client/prompt_input.h"
#include "client/terminal.h"

namespace carryover {
namespace {

using Json = nlohmann::ordered_json;

std::string Today() {
  const std::time_t now = std::time(nullptr);
  std::tm utc;
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

void PrintCells(CommandContext& context, const eval::Report& report) {
  Table table({"TASK", "PREFIX", "PLAN", "N", "OLD", "NATIVE", "CARRIED", "FLIP", "TV", "SPEEDUP",
               "VERDICT"});
  const auto percent = [](const eval::ArmSummary& arm) {
    return arm.judged > 0 ? absl::StrFormat("%.1f %%", 100 * arm.accuracy.mean) : "n/a";
  };
  for (const eval::Cell& cell : report.cells) {
    table.Row({cell.task, cell.bucket == 0 ? "all" : absl::StrCat(cell.bucket), cell.plan,
               absl::StrCat(cell.n), percent(cell.source), percent(cell.native),
               percent(cell.carried), absl::StrFormat("%.1f %%", 100 * cell.fidelity.flip.mean),
               absl::StrFormat("%.4f", cell.fidelity.tv.mean),
               absl::StrFormat("%.1f", cell.speedup.mean), cell.verdict.headline});
  }
  table.Print(context.out);
}

// Writes the report's two files; 0 or kExitFailed.
int WriteReport(CommandContext& context, const std::string& folder, const eval::Report& report,
                bool json) {
  const Json numbers = eval::ReportToJson(report);
  absl::Status status = eval::WriteWhole(
      folder + "/eval.json", numbers.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
  if (status.ok()) status = eval::WriteWhole(folder + "/eval.html", eval::ReportToHtml(report));
  if (!status.ok()) {
    context.err << "carryover eval: " << status.message() << "\n";
    return kExitFailed;
  }
  if (json) {
    Json summary = numbers;
    summary.erase("items");
    PrintJson(context.out, summary);
  } else {
    PrintCells(context, report);
  }
  context.err << absl::StrFormat("%d of %d items done, %d failed: %s/eval.html and eval.json\n",
                                 report.done, report.wanted, report.failed, folder);
  return kExitOk;
}

// Which versions the names mean, and that both have their weights.
grpc::Status FindVersions(const ConnectionOptions& connection, CommandContext& context,
                          EvalOptions* options, Json* versions) {
  v1::ListVersionsRequest request;
  request.set_model(options->model);
  v1::ListVersionsResponse response;
  CallContext call(connection, &context.interrupt);
  const grpc::Status status =
      v1::Versions::NewStub(Connect(connection.admin))->List(call.get(), request, &response);
  if (!status.ok()) return status;
  if (options->model.empty()) {
    for (const v1::Version& version : response.versions()) {
      if (!options->model.empty() && version.model() != options->model) {
        return {grpc::StatusCode::INVALID_ARGUMENT, "--model: the server has several models"};
      }
      options->model = version.model();
    }
  }
  for (const std::string* name : {&options->source, &options->target}) {
    const v1::Version* found = nullptr;
    for (const v1::Version& version : response.versions()) {
      if (version.model() == options->model && version.version() == *name) found = &version;
    }
    const char* const role = name == &options->source ? "source" : "target";
    if (found == nullptr) {
      return {grpc::StatusCode::NOT_FOUND,
              absl::StrCat("--", role, ": there is no version ", *name)};
    }
    (*versions)[role] = {{"version", found->version()},
                         {"fingerprint", found->fingerprint()},
                         {"weights_sha256", found->weights_sha256()},
                         {"tokenizer_sha256", found->tokenizer_sha256()},
                         {"kv_layout_sha256", found->kv_layout_sha256()},
                         {"weights_dtype", found->weights_dtype()},
                         {"kv_dtype", found->kv_dtype()},
                         {"max_positions", found->max_positions()}};
  }
  return grpc::Status::OK;
}

absl::StatusOr<std::vector<eval::Item>> ReadTasks(const std::vector<std::string>& paths,
                                                  std::optional<int> limit, Json* files) {
  std::vector<eval::Item> items;
  *files = Json::array();
  for (const std::string& path : paths) {
    ASSIGN_OR_RETURN(std::vector<eval::Item> more, eval::ReadItems(path));
    if (limit && static_cast<int>(more.size()) > *limit) more.resize(*limit);
    // Over what was read, so that the same items under another path are the same run.
    Hasher hasher;
    for (const eval::Item& item : more) hasher.Add(eval::ItemKey(item));
    files->push_back({{"file", std::filesystem::path(path).filename().string()},
                      {"items", more.size()},
                      {"sha256", ToHex(hasher.Finish())}});
    for (eval::Item& item : more) items.push_back(std::move(item));
  }
  return items;
}

int Evaluate(CommandContext& context) {
  ConnectionOptions connection = DefaultConnection();
  EvalOptions options;
  std::vector<std::string> tasks;
  std::string folder;
  std::optional<int> limit;
  bool restart = false, no_hit = false;
  Args args("eval",
            "Answers every item of tasks files in every way (the source natively, the target "
            "natively, the target over the source's caches) and reports: is the task kept, and is "
            "the behaviour? Also: 'eval report DIR' and 'eval tasks KIND'.");
  args.Group("What");
  args.Option("tasks", &tasks, "FILE", "items, a JSON object a line; may be repeated");
  args.Option("limit", &limit, "N", "only the first N items of each file");
  args.Option("out", &folder, "DIR", "where rows and report go; a run there goes on");
  args.Option("restart", &restart, "", "forget what DIR holds");
  args.Group("Versions");
  args.Option("model", &options.model, "NAME", "may be left out when the server has just one");
  args.Option("source", &options.source, "VERSION", "whose caches are carried");
  args.Option("target", &options.target, "VERSION", "that serves");
  args.Group("How");
  args.Option("max-tokens", &options.max_tokens, "N",
              "of an answer whose item says nothing; default 16");
  args.Option("control-rate", &options.control_rate, "RATE",
              "share of items whose native answer is computed twice, the noise floor; default 1");
  args.Option("no-hit", &no_hit, "", "leave the target over its own cache out");
  args.Option(
      "plan", &options.plans, "PLAN",
      "a way of carrying: direct, tail(32), bottom(25%), ...; may be repeated; default: the "
      "server's ladder");
  args.Option("sensitivity", &options.sensitivity, "",
              "also where the divergence comes from: layers, positions, keys or values; up to 87 "
              "short passes an item");
  args.Option("max-loss", &options.max_loss, "RATE",
              "loss of accuracy that a verdict takes for none; default 0.02");
  args.Example(
      "carryover eval tasks kv --out kv.jsonl --lengths 256,1024 --per-length 64 "
      "--text book.txt",
      "items: look-ups in a text of one's own");
  args.Example("carryover eval --source 2026-10 --target 2026-11 --tasks kv.jsonl --out kv-eval",
               "writes kv-eval/eval.html and eval.json");
  args.Example(
      "carryover eval --source 2026-10 --target 2026-11 --tasks kv.jsonl --out plans "
      "--plan direct --plan 'tail(64)'",
      "what each way of carrying costs and keeps");
  args.Example("carryover eval report kv-eval", "the report once more, without a server");
  args.Note(
      "Items are {task, prefix, suffix, answers[], stop?, id?, max_tokens?, metric?, label?},"
      "\nor lines of LongBench ({input, context, answers, ...}) or RULER ({input, outputs, "
      "...}).\nInterrupted, a run reports on what it has; the same command goes on.");
  if (auto code = ParseOrExit(&args, &connection, context)) return *code;
  options.hit = !no_hit;
  if (tasks.empty()) return UsageError(context, "eval", "--tasks is missing");
  if (folder.empty()) return UsageError(context, "eval", "--out is missing");
  if (options.source.empty()) return UsageError(context, "eval", "--source is missing");
  if (options.target.empty()) return UsageError(context, "eval", "--target is missing");
  if (options.max_tokens < 1) return UsageError(context, "eval", "--max-tokens must be at least 1");
  if (limit && *limit < 1) return UsageError(context, "eval", "--limit must be at least 1");
  if (options.control_rate < 0 || options.control_rate > 1) {
    return UsageError(context, "eval", "--control-rate must be from 0 to 1");
  }
  if (options.max_loss <= 0 || options.max_loss >= 1) {
    return UsageError(context, "eval", "--max-loss must be above 0 and below 1");
  }

  Json files;
  const absl::StatusOr<std::vector<eval::Item>> items = ReadTasks(tasks, limit, &files);
  if (!items.ok()) return UsageError(context, "eval", items.status().message());
  Json versions = Json::object();
  if (auto status = FindVersions(connection, context, &options, &versions); !status.ok()) {
    return FailedCall(context, connection, connection.admin, status);
  }
  Json run = {{"schema_version", eval::kSchemaVersion}, {"started", Today()}};
  run["identity"] = {{"model", options.model},
                     {"source", versions["source"]},
                     {"target", versions["target"]},
                     {"tasks", files},
                     {"max_tokens", options.max_tokens},
                     {"control_rate", options.control_rate},
                     {"hit", options.hit},
                     {"plans", options.plans}};
  // Not as false: runs from before it are the same.
  if (options.sensitivity) run["identity"]["sensitivity"] = true;
  run["items"] = items->size();
  run["max_loss"] = options.max_loss;
  absl::StatusOr<eval::Journal> journal = eval::Journal::Open(folder, run, restart);
  if (!journal.ok()) {
    context.err << "carryover eval: " << journal.status().message() << "\n";
    return kExitFailed;
  }
  const absl::StatusOr<RunEnd> end = EvalRun(options, connection, &context).Run(*items, &*journal);
  if (!end.ok()) {
    context.err << "carryover eval: " << end.status().message() << "\n";
    return kExitFailed;
  }
  Json recorded = journal->run();
  recorded["max_loss"] = options.max_loss;
  const int code =
      WriteReport(context, folder, eval::MakeReport(recorded, journal->rows()), connection.json);
  if (*end == RunEnd::kInterrupted) {
    context.err << "carryover eval: interrupted; the same command goes on\n";
    return kExitInterrupted;
  }
  if (*end == RunEnd::kServerGone) {
    context.err << "carryover eval: the server is gone; once it is back, the same command goes "
                   "on\n  server: "
                << connection.address << ", " << connection.admin << "\n";
    return kExitFailed;
  }
  // What some items meet is counted; what all of them meet is that the run was not possible.
  const bool any_done = std::any_of(journal->rows().begin(), journal->rows().end(),
                                    [](const auto& row) { return row.second.ok(); });
  return any_done ? code : kExitFailed;
}

int ReportAgain(CommandContext& context) {
  ConnectionOptions connection = DefaultConnection();
  std::string folder;
  std::optional<double> max_loss;
  Args args("eval report",
            "Makes eval.html and eval.json anew from a run's rows; needs no server.");
  args.Positional("DIR", &folder, "what --out of the run was");
  args.Option("max-loss", &max_loss, "RATE", "default: the run's");
  args.Example("carryover eval report kv-eval", "");
  if (auto code = ParseOrExit(&args, &connection, context)) return *code;
  if (max_loss && (*max_loss <= 0 || *max_loss >= 1)) {
    return UsageError(context, "eval report", "--max-loss must be above 0 and below 1");
  }
  absl::StatusOr<eval::Recorded> recorded = eval::ReadFolder(folder);
  if (!recorded.ok()) return UsageError(context, "eval report", recorded.status().message());
  if (max_loss) recorded->run["max_loss"] = *max_loss;
  return WriteReport(context, folder,
                     eval::MakeReport(std::move(recorded->run), std::move(recorded->rows)),
                     connection.json);
}

}  // namespace

int RunEval(CommandContext& context) {
  if (!context.arguments.empty()) {
    const std::string first = context.arguments[0];
    if (first == "report" || first == "tasks") {
      context.arguments.erase(context.arguments.begin());
      return first == "report" ? ReportAgain(context) : RunEvalTasks(context);
    }
  }
  return Evaluate(context);
}

}  // namespace carryover
