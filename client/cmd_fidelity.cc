// carryover fidelity report|watch|set|evaluate.
#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "carryover/v1/fidelity.grpc.pb.h"
#include "client/commands.h"
#include "client/message_json.h"
#include "client/prompt_input.h"
#include "client/terminal.h"

namespace carryover {
namespace {

std::unique_ptr<v1::Fidelity::Stub> AdminStub(const ConnectionOptions& connection) {
  return v1::Fidelity::NewStub(Connect(connection.admin));
}

std::string Lower(const std::string& name) { return absl::AsciiStrToLower(name); }

std::string OrAny(const std::string& name) { return name.empty() ? "any" : name; }

void PrintRules(std::ostream& out, const v1::FidelityReportResponse& response) {
  if (response.rules().empty()) return;
  out << "\nSet by operators, the last that matches holds:\n";
  Table table({"SOURCE", "TARGET", "TASK", "PREFIX", "ANSWER", "STATE", "WHO"});
  for (const v1::GateRule& rule : response.rules()) {
    const v1::GateCell& cell = rule.pattern();
    table.Row({OrAny(cell.source()), OrAny(cell.target()), OrAny(cell.task()),
               cell.prefix_bucket() == 0 ? "any" : absl::StrCat(cell.prefix_bucket()),
               Lower(v1::GateCell::Answer_Name(cell.answer())),
               Lower(v1::GateState_Name(rule.state())), rule.who()});
  }
  table.Print(out);
}

int Report(CommandContext& context) {
  ConnectionOptions connection = DefaultConnection();
  Args args("fidelity report",
            "Shows every cell of the gate: its state, the evidence and what it says.");
  args.Example("carryover fidelity report", "");
  args.Example("carryover fidelity report --json | jq '.cells[] | select(.state == \"CLOSED\")'",
               "what is closed, and why");
  if (auto code = ParseOrExit(&args, &connection, context)) return *code;

  v1::FidelityReportResponse response;
  CallContext call(connection, &context.interrupt);
  const grpc::Status status =
      AdminStub(connection)->Report(call.get(), v1::FidelityReportRequest(), &response);
  if (!status.ok()) return FailedCall(context, connection, connection.admin, status);
  if (connection.json) {
    PrintJson(context.out, MessageToJson(response));
    return kExitOk;
  }
  Table table({"SOURCE", "TARGET", "PLAN", "TASK", "PREFIX", "ANSWER", "STATE", "SAMPLES", "FLIPS",
               "TV", "STOPS"});
  for (const v1::GateCellReport& cell : response.cells()) {
    std::vector<std::string> row = {
        cell.cell().source(),
        cell.cell().target(),
        cell.cell().plan(),
        cell.cell().task(),
        absl::StrCat(cell.cell().prefix_bucket()),
        Lower(v1::GateCell::Answer_Name(cell.cell().answer())),
        Lower(v1::GateState_Name(cell.state())) + (cell.forced() ? " (forced)" : ""),
        absl::StrCat(cell.samples())};
    for (const v1::GateMeasure& measure : cell.measures()) {
      row.push_back(absl::StrFormat("%.2f %% (%.2f to %.2f)", 100 * measure.mean(),
                                    100 * measure.lower(), 100 * measure.upper()));
    }
    row.resize(11);
    table.Row(row);
  }
  table.Print(context.out);
  for (const v1::GateCellReport& cell : response.cells()) {
    context.out << "\n"
                << cell.cell().source() << " -> " << cell.cell().target() << ", "
                << cell.cell().task() << ", " << cell.cell().prefix_bucket() << ": "
                << cell.explanation() << "\n";
  }
  PrintRules(context.out, response);
  return kExitOk;
}

void PrintSample(CommandContext& context, const v1::WatchedSample& event) {
  if (event.dropped() > 0) {
    context.err << "(" << event.dropped() << " samples lost: they come faster than this reads)\n";
  }
  if (!event.has_sample()) return;
  const v1::FidelitySample& sample = event.sample();
  double kl = 0, tv = 0;
  int flips = 0;
  for (const v1::PositionFidelity& position : sample.positions()) {
    kl += position.kl();
    tv += position.tv();
    flips += position.flip();
  }
  const int n = std::max(1, sample.positions_size());
  context.out << absl::StrFormat(
                     "%-7s %s -> %s  %s  %s %d  along %s  KL %.3g  TV %.3g  flips %d of %d%s  %s",
                     sample.comparison(), sample.source(), sample.target(), sample.plan(),
                     sample.task(), sample.prefix_bucket(), sample.along(), kl / n, tv / n, flips,
                     n, sample.first_token_flip() ? ", the first" : "",
                     sample.valid() ? sample.continuation() : "not comparable")
              << std::endl;
}

int Watch(CommandContext& context) {
  ConnectionOptions connection = DefaultConnection();
  v1::WatchSamplesRequest request;
  std::string model, source, target, task;
  std::optional<int> count;
  Args args("fidelity watch",
            "Prints each comparison of a sampled request as it is made, until Ctrl-C: means over "
            "its positions, or all of it with --json, one object a line.");
  args.Group("Which samples; without any of these, all");
  args.Option("model", &model, "NAME", "");
  args.Option("source", &source, "VERSION", "whose caches are carried");
  args.Option("target", &target, "VERSION", "the version that serves");
  args.Option("task", &task, "NAME", "a configured one, or other");
  args.Group("How many");
  args.Option("count", &count, "N", "ends after so many; default: never");
  args.Example("carryover fidelity watch --target 2026-11", "");
  args.Example("carryover fidelity watch --json | jq '.sample | select(.first_token_flip)'",
               "where carrying changed the first token");
  if (auto code = ParseOrExit(&args, &connection, context)) return *code;
  if (count && *count < 1) return UsageError(context, "fidelity watch", "--count is from 1");
  request.set_model(model);
  request.set_source(source);
  request.set_target(target);
  request.set_task(task);

  CallContext call(connection, &context.interrupt);
  const auto reader = AdminStub(connection)->WatchSamples(call.get(), request);
  v1::WatchedSample event;
  int seen = 0;
  while ((!count || seen < *count) && reader->Read(&event)) {
    if (connection.json) {
      context.out << MessageToJson(event).dump(-1, ' ', false,
                                               nlohmann::ordered_json::error_handler_t::replace)
                  << std::endl;
    } else {
      PrintSample(context, event);
    }
    seen += event.has_sample();
  }
  if (count && seen == *count) {
    call.get()->TryCancel();
    reader->Finish();
    return kExitOk;
  }
  const grpc::Status status = reader->Finish();
  return status.ok() ? kExitOk : FailedCall(context, connection, connection.admin, status);
}

int Set(CommandContext& context) {
  ConnectionOptions connection = DefaultConnection();
  v1::SetGateRequest request;
  std::string source, target, task, state, answer, who;
  std::optional<int> bucket;
  Args args("fidelity set",
            "Puts a state over the gate's cells, whatever the evidence says, or lets the evidence "
            "speak again.");
  args.Group("Which cells; without any of these, all");
  args.Option("source", &source, "VERSION", "whose caches are carried");
  args.Option("target", &target, "VERSION", "the version that serves");
  args.Option("task", &task, "NAME", "a configured one, or other");
  args.Option("prefix-bucket", &bucket, "N", "a power of two from 256");
  args.Option("answer", &answer, "CLASS", "short or long");
  args.Group("What");
  args.Option("state", &state, "STATE", "open, closed, learning, repaired; or evidence");
  args.Option("who", &who, "NAME", "stands in the server's log");
  args.Example("carryover fidelity set --source 2026-10 --state closed --who anna",
               "nothing of 2026-10 is carried any more");
  args.Example("carryover fidelity set --source 2026-10 --state evidence",
               "the gate decides again");
  if (auto code = ParseOrExit(&args, &connection, context)) return *code;

  v1::GateState parsed = v1::GATE_STATE_UNSPECIFIED;
  if (state != "evidence" && (!v1::GateState_Parse(absl::AsciiStrToUpper(state), &parsed) ||
                              parsed == v1::GATE_STATE_UNSPECIFIED)) {
    return UsageError(context, "fidelity set",
                      "--state must be open, closed, learning, repaired or evidence");
  }
  request.set_state(parsed);
  v1::GateCell* pattern = request.mutable_pattern();
  if (answer == "short" || answer == "long") {
    pattern->set_answer(answer == "short" ? v1::GateCell::SHORT : v1::GateCell::LONG);
  } else if (!answer.empty()) {
    return UsageError(context, "fidelity set", "--answer must be short or long");
  }
  pattern->set_source(source);
  pattern->set_target(target);
  pattern->set_task(task);
  if (bucket) pattern->set_prefix_bucket(*bucket);
  request.set_who(who);
  v1::SetGateResponse response;
  CallContext call(connection, &context.interrupt);
  const grpc::Status status = AdminStub(connection)->SetGate(call.get(), request, &response);
  if (!status.ok()) return FailedCall(context, connection, connection.admin, status);
  if (connection.json) {
    PrintJson(context.out, MessageToJson(response));
  } else {
    context.out << response.changed_cells() << " cells changed\n";
  }
  return kExitOk;
}

void PrintAnswer(std::ostream& out, const std::string& how, const v1::EvaluatedAnswer& answer) {
  out << absl::StrFormat("%-24s %8.1f ms  ", how, 1000 * answer.timing().first_token())
      << MessageToJson(answer.choice()).value("text", "") << "\n";
}

void PrintSensitivity(std::ostream& out, const v1::Sensitivity& sensitivity) {
  out << "\nWhere the divergence of " << sensitivity.prefix_tokens()
      << " directly carried tokens comes from: parts that are carried alone, all else native; and "
         "the other way round\n";
  Table table({"PART", "CARRIED: TV", "KL", "FLIPS", "NATIVE: TV", "KL", "FLIPS"});
  for (const v1::CachePart& part : sensitivity.parts()) {
    std::vector<std::string> row = {
        part.kind() == v1::CachePart::POSITIONS
            ? absl::StrFormat("%s (tokens %d-%d)", part.name(), part.begin(), part.end() - 1)
            : part.name()};
    for (const v1::MixedOutcome* outcome : {&part.carried(), &part.native()}) {
      if (outcome == &part.native() && !part.has_native()) continue;
      if (!outcome->valid()) {
        row.insert(row.end(), {"not comparable", "", ""});
        continue;
      }
      row.push_back(absl::StrFormat("%.4f", outcome->tv()));
      row.push_back(absl::StrFormat("%.3g", outcome->kl()));
      row.push_back(absl::StrFormat("%.0f %%", 100 * outcome->flips()));
    }
    row.resize(7);
    table.Row(row);
  }
  table.Print(out);
}

int Evaluate(CommandContext& context) {
  ConnectionOptions connection = DefaultConnection();
  PromptInput input;
  std::string model, source, target;
  std::optional<int> max_tokens;
  bool control = false, ignore_eos = false, sensitivity = false;
  std::vector<std::string> plans;
  Args args("fidelity evaluate",
            "Answers one prompt in every way now and compares: the source natively, the target "
            "natively, the target over the source's caches.");
  input.AddOptions(&args);
  args.Group("Versions");
  args.Option("model", &model, "NAME", "may be left out when the server has just one");
  args.Option("source", &source, "VERSION", "whose caches are carried");
  args.Option("target", &target, "VERSION", "default: the promoted one");
  args.Group("Answer");
  args.Option("max-tokens", &max_tokens, "N", "default 16");
  args.Option("ignore-eos", &ignore_eos, "", "go on after the model's end tokens");
  args.Option("control", &control, "", "also compute the native arm once more: the noise floor");
  args.Option("plan", &plans, "PLAN",
              "a way of carrying: direct, tail(32), ...; may be repeated; default: the server's "
              "ladder");
  args.Option("sensitivity", &sensitivity, "",
              "also where the divergence comes from: layers, positions, keys or values");
  args.Example("carryover fidelity evaluate --source 2026-10 --prompt-file long.txt", "");
  if (auto code = ParseOrExit(&args, &connection, context)) return *code;

  v1::EvaluateRequest request;
  if (absl::Status status = input.Resolve(); !status.ok()) {
    return UsageError(context, "fidelity evaluate", status.message());
  }
  if (source.empty()) return UsageError(context, "fidelity evaluate", "--source is missing");
  input.Fill(request.mutable_prompt());
  request.mutable_prompt()->set_model(model);
  request.mutable_prompt()->set_version(target);
  request.set_source(source);
  if (max_tokens) request.set_max_tokens(*max_tokens);
  request.set_ignore_eos(ignore_eos);
  request.set_control(control);
  request.set_sensitivity(sensitivity);
  request.mutable_plans()->Assign(plans.begin(), plans.end());
  v1::EvaluateResponse response;
  CallContext call(connection, &context.interrupt);
  const grpc::Status status = AdminStub(connection)->Evaluate(call.get(), request, &response);
  if (!status.ok()) return FailedCall(context, connection, connection.admin, status);
  if (connection.json) {
    PrintJson(context.out, MessageToJson(response));
    return kExitOk;
  }
  context.out << "                         to first token\n";
  PrintAnswer(context.out, absl::StrCat(response.source().version(), " (over its cache)"),
              response.source());
  PrintAnswer(context.out, absl::StrCat(response.native().version(), " natively"),
              response.native());
  for (const v1::EvaluatedAnswer& answer : response.carried()) {
    PrintAnswer(context.out, absl::StrCat(answer.version(), " carried, ", answer.plan()), answer);
  }
  Table table({"COMPARED WITH", "PLAN", "POSITIONS", "MEAN KL", "MEAN TV", "FLIPS", "FIRST FLIPS",
               "GOES ON"});
  for (const v1::FidelitySample& sample : response.samples()) {
    double kl = 0, tv = 0;
    int flips = 0;
    for (const v1::PositionFidelity& position : sample.positions()) {
      kl += position.kl();
      tv += position.tv();
      flips += position.flip();
    }
    const int n = std::max(1, sample.positions_size());
    const std::string plan = sample.comparison() == "carried" ? sample.plan() : "";
    table.Row({sample.comparison(), plan, absl::StrCat(n), absl::StrFormat("%.3g", kl / n),
               absl::StrFormat("%.3g", tv / n), absl::StrCat(flips),
               sample.first_token_flip() ? "yes" : "no", sample.continuation()});
  }
  context.out << "\n";
  table.Print(context.out);
  if (response.has_sensitivity()) PrintSensitivity(context.out, response.sensitivity());
  return kExitOk;
}

constexpr Command kFidelityCommands[] = {
    {"report", "every cell of the gate, and why", Report},
    {"watch", "each comparison as it is made", Watch},
    {"set", "put a state over cells", Set},
    {"evaluate", "one prompt in every way", Evaluate},
};

}  // namespace

int RunFidelity(CommandContext& context) {
  return RunSubcommand("fidelity", "Looks at what carrying does to answers, and at the gate.",
                       kFidelityCommands, context);
}

}  // namespace carryover
