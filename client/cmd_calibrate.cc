// carryover calibrate: fits a map from one version's cache to another's.
#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/atomic_file.h"
#include "carryover/v1/versions.grpc.pb.h"
#include "client/calibrate_texts.h"
#include "client/commands.h"
#include "client/message_json.h"
#include "client/terminal.h"

namespace carryover {
namespace {

constexpr int64_t kMaxTextBytes = 48 << 20;  // as the server has it
constexpr int kBarWidth = 24;

std::string Bar(const v1::CalibrateProgress& progress, double seconds) {
  const double share =
      progress.total() > 0 ? static_cast<double>(progress.done()) / progress.total() : 0;
  const int full = static_cast<int>(share * kBarWidth + 0.5);
  std::string text =
      absl::StrFormat("%-8s [%s%s] %d of %d", progress.phase(), std::string(full, '#'),
                      std::string(kBarWidth - full, '.'), progress.done(), progress.total());
  if (share > 0.02 && share < 1) {
    absl::StrAppend(&text, ", ", HumanSeconds(seconds * (1 - share) / share), " left");
  }
  return text;
}

std::string Kind(const v1::CalibrateCandidate& candidate) {
  return candidate.rank() > 0 ? absl::StrCat(candidate.variant(), " ", candidate.rank())
                              : candidate.variant();
}

std::vector<std::string> QualityCells(const v1::MapQuality& quality) {
  return {absl::StrFormat("%.4f", quality.tv()), absl::StrFormat("%.5f", quality.kl()),
          absl::StrFormat("%.1f %%", 100 * quality.flips())};
}

// The tables of what was tried, and how much text is enough.
void PrintCandidates(CommandContext& context, const std::vector<v1::CalibrateCandidate>& candidates,
                     int64_t tokens) {
  Table kinds({"MAP", "LAMBDA", "TV", "KL", "FLIPS"});
  Table amounts({"TOKENS", "TV", "KL", "FLIPS"});
  const v1::CalibrateCandidate* same_kind = nullptr;
  for (const v1::CalibrateCandidate& candidate : candidates) {
    std::vector<std::string> cells = QualityCells(candidate.quality());
    if (candidate.tokens() == 0 || candidate.tokens() == tokens) {
      cells.insert(cells.begin(),
                   {Kind(candidate),
                    candidate.tokens() == 0 ? "-" : absl::StrFormat("%g", candidate.lambda())});
      kinds.Row(cells);
    }
    if (candidate.tokens() < tokens) {
      if (candidate.tokens() > 0) same_kind = &candidate;
      cells = QualityCells(candidate.quality());
      cells.insert(cells.begin(), absl::StrCat(candidate.tokens()));
      amounts.Row(cells);
    } else if (same_kind != nullptr && candidate.variant() == same_kind->variant() &&
               candidate.lambda() == same_kind->lambda()) {
      cells = QualityCells(candidate.quality());
      cells.insert(cells.begin(), absl::StrCat(candidate.tokens()));
      amounts.Row(cells);
    }
  }
  kinds.Print(context.out);
  if (same_kind != nullptr) {
    context.out << "\nhow much text is enough (" << Kind(*same_kind)
                << absl::StrFormat(", lambda %g):\n", same_kind->lambda());
    amounts.Print(context.out);
  }
}

}  // namespace

int RunCalibrate(CommandContext& context) {
  ConnectionOptions connection = DefaultConnection();
  v1::CalibrateRequest request;
  std::string model, source, target, texts, out;
  std::optional<int> piece_tokens;
  int64_t max_tokens = 0;
  Args args("calibrate",
            "Fits a map that makes a version's cached keys and values resemble another's, and "
            "writes it to a file for load --map. Both versions must be loaded with their weights; "
            "the server works on it while it has nothing else to do.");
  args.Option("model", &model, "NAME", "their model");
  args.Option("source", &source, "VERSION", "whose cache is carried");
  args.Option("target", &target, "VERSION", "who reads it");
  args.Option("texts", &texts, "PATH",
              "a folder of .txt, .md and .jsonl files, or one of them; like the prompts that the "
              "server gets. In a .jsonl file a line is a string or has text, prompt or prefix");
  args.Option("out", &out, "FILE", "where the map goes, a .safetensors file");
  args.Option("piece-tokens", &piece_tokens, "N",
              "cut texts into pieces of so many tokens; as long as prefixes are. Default 1024");
  args.Option("max-tokens", &max_tokens, "N", "of text to fit on. Default 49152");
  args.Example(
      "carryover calibrate --model demo --source 2026-10 --target 2026-11 \\\n"
      "      --texts prompts/ --out 2026-11-from-2026-10.safetensors",
      "then give the file to load, or to a version in the server's configuration");
  args.Example(
      "carryover load --model demo --version 2026-11 --path models/demo/2026-11 \\\n"
      "      --carry-from 2026-10 --map 2026-11-from-2026-10.safetensors",
      "");
  args.Note(
      "A fifth of the text is held out. Maps of several kinds are judged by what the target says "
      "over mapped caches of the held-out text: TV is the total variation to what it says natively "
      "(0 to 1), KL in nats, FLIPS how often its first choice differs. Ctrl-C ends the work on the "
      "server, too, and writes nothing.");
  if (auto code = ParseOrExit(&args, &connection, context)) return *code;
  if (model.empty() || source.empty() || target.empty() || texts.empty() || out.empty()) {
    return UsageError(context, "calibrate", "give --model, --source, --target, --texts and --out");
  }
  absl::StatusOr<CalibrateTexts> read = ReadCalibrateTexts(texts, kMaxTextBytes);
  if (!read.ok()) return UsageError(context, "calibrate", read.status().message());
  request.set_model(model);
  request.set_source(source);
  request.set_target(target);
  for (std::string& text : read->texts) request.add_texts(std::move(text));
  if (piece_tokens) request.set_piece_tokens(*piece_tokens);
  if (max_tokens != 0) request.set_max_tokens(max_tokens);

  CallContext call(connection, &context.interrupt);
  const auto start = std::chrono::steady_clock::now();
  const auto seconds_since = [](std::chrono::steady_clock::time_point from) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - from).count();
  };
  auto stub = v1::Versions::NewStub(Connect(connection.admin));
  auto reader = stub->Calibrate(call.get(), request);
  v1::CalibrateEvent event;
  std::vector<v1::CalibrateCandidate> candidates;
  v1::KvMap map;
  std::string file, phase;
  auto phase_start = start;
  {
    Progress line(context.err, context.err_is_terminal);
    while (reader->Read(&event)) {
      switch (event.event_case()) {
        case v1::CalibrateEvent::kProgress:
          if (event.progress().phase() != phase) {
            phase = event.progress().phase();
            phase_start = std::chrono::steady_clock::now();
          }
          line.Update(Bar(event.progress(), seconds_since(phase_start)));
          break;
        case v1::CalibrateEvent::kCandidate:
          candidates.push_back(event.candidate());
          break;
        case v1::CalibrateEvent::kMap:
          map = event.map();
          break;
        case v1::CalibrateEvent::kPiece:
          file += event.piece();
          break;
        default:
          break;  // of a newer server
      }
    }
  }
  const grpc::Status status = reader->Finish();
  if (!status.ok()) return FailedCall(context, connection, connection.admin, status);
  if (const absl::Status written = WriteFileAtomically(out, file); !written.ok()) {
    context.err << "carryover calibrate: " << std::string(written.message()) << "\n";
    return kExitFailed;
  }
  const double seconds = seconds_since(start);
  if (connection.json) {
    nlohmann::ordered_json json = {{"file", out}, {"bytes", file.size()}, {"seconds", seconds}};
    json["map"] = MessageToJson(map);
    json["candidates"] = nlohmann::ordered_json::array();
    for (const auto& candidate : candidates) json["candidates"].push_back(MessageToJson(candidate));
    PrintJson(context.out, json);
    return kExitOk;
  }
  PrintCandidates(context, candidates, map.tokens());
  context.out << absl::StrFormat(
      "\nTV %.4f without a map, %.4f with this one (%s%s, fitted on %d tokens, judged on %d "
      "positions)\n%s: %s, in %s\n",
      map.direct().tv(), map.mapped().tv(), map.variant(),
      map.rank() > 0 ? absl::StrCat(" ", map.rank()) : "", map.tokens(), map.held_positions(), out,
      HumanBytes(static_cast<double>(file.size())), HumanSeconds(seconds));
  return kExitOk;
}

}  // namespace carryover
