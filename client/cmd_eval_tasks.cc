// carryover eval tasks: writes items for eval from a text of one's own.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/utf8.h"
#include "carryover/v1/completions.grpc.pb.h"
#include "client/commands.h"
#include "client/eval/generate.h"
#include "client/eval/journal.h"
#include "client/prompt_input.h"

namespace carryover {
namespace {

// The server's tokenizer. The first failed call stays in `failed`.
class ServerTokens : public eval::Tokens {
 public:
  ServerTokens(const ConnectionOptions& connection, Interrupt* interrupt, std::string model,
               std::string version)
      : connection_(connection),
        interrupt_(interrupt),
        model_(std::move(model)),
        version_(std::move(version)),
        stub_(v1::Completions::NewStub(Connect(connection.address))) {}

  absl::StatusOr<std::vector<int32_t>> Encode(const std::string& text, bool special) override {
    v1::TokenizeRequest request;
    request.set_model(model_);
    request.set_version(version_);
    request.set_text(text);
    request.set_add_special_tokens(special);
    v1::TokenizeResponse response;
    CallContext call(connection_, interrupt_);
    failed = stub_->Tokenize(call.get(), request, &response);
    if (!failed.ok()) return absl::UnavailableError(failed.error_message());
    return std::vector<int32_t>(response.tokens().begin(), response.tokens().end());
  }

  grpc::Status failed;

 private:
  const ConnectionOptions& connection_;
  Interrupt* interrupt_;
  const std::string model_, version_;
  std::unique_ptr<v1::Completions::Stub> stub_;
};

// Words that are the same for every text, such as those that a small model was trained to look up.
absl::Status ReadWords(const std::string& path, eval::GenerateOptions* options) {
  std::string text;
  RETURN_IF_ERROR(ReadFile(path, &text));
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  for (const auto& [field, words] :
       {std::pair("keys", &options->keys), std::pair("values", &options->values)}) {
    const auto at = json.is_object() ? json.find(field) : json.end();
    const bool good =
        at != json.end() && at->is_array() && !at->empty() &&
        std::all_of(at->begin(), at->end(), [](const auto& word) {
          return word.is_string() && !word.template get_ref<const std::string&>().empty();
        });
    if (!good) {
      return absl::InvalidArgumentError(
          absl::StrCat("--words: ", path, ": ", field, " must be a list of words"));
    }
    *words = at->template get<std::vector<std::string>>();
  }
  return absl::OkStatus();
}

}  // namespace

int RunEvalTasks(CommandContext& context) {
  ConnectionOptions connection = DefaultConnection();
  eval::GenerateOptions options;
  std::string kind, style = "plain", text_path, words_path, out, model, version;
  std::vector<int32_t> lengths;
  std::optional<uint64_t> seed;
  Args args("eval tasks",
            "Writes items for eval: facts strewn over a text of one's own, and questions about "
            "them; with exact token counts by the server's tokenizer.");
  args.Positional("KIND", &kind,
                  "kv: the value of a key, one token each; hops: a key's value is another's; "
                  "needles: all values of a key; qa: how a sentence of the text goes on; text: how "
                  "the text goes on");
  args.Group("What");
  args.Option("text", &text_path, "FILE", "a real text, UTF-8; some 20 words for each 10 tokens");
  args.Option("out", &out, "FILE", "where the items go");
  args.Option("style", &style, "STYLE",
              "plain (default), chat (<|im_start|> turns), demo-2026-10, demo-2026-11 (what the "
              "demo pair was trained on)");
  args.Option("lengths", &lengths, "N,N,...",
              "prefixes of exactly so many tokens; default 256,512,1024,2048,4096");
  args.Option("per-length", &options.per_length, "N", "items of each; default 32");
  args.Option("per-prefix", &options.per_prefix, "N", "questions that share a prefix; default 4");
  args.Option("facts", &options.facts, "N",
              "in a prefix; default one for 128 tokens, in the demo's styles for 32");
  args.Option("words", &words_path, "FILE",
              "{\"keys\": [...], \"values\": [...]}: words that facts are made of; default: "
              "single-token words of the text");
  args.Option("hops", &options.hops, "N", "keys in a chain; default 2");
  args.Option("needles", &options.needles, "N", "values of a key; default 3");
  args.Option("max-tokens", &options.max_tokens, "N", "of an answer; default: as the kind needs");
  args.Option("task", &options.task, "NAME", "default: the kind and the style");
  args.Option("seed", &seed, "N", "default 1");
  args.Group("Whose tokenizer");
  args.Option("model", &model, "NAME", "may be left out when the server has just one");
  args.Option("version", &version, "NAME", "default: the promoted one");
  args.Example("carryover eval tasks kv --text book.txt --out kv.jsonl", "");
  args.Example(
      "carryover eval tasks kv --style demo-2026-11 --words models/demo/words.json --text book.txt "
      "--out new.jsonl --lengths 256,1024 --per-length 64",
      "for the demo pair");
  if (auto code = ParseOrExit(&args, &connection, context)) return *code;

  const auto kind_of = eval::KindFromName(kind);
  const auto style_of = eval::StyleFromName(style);
  const auto wrong = [&](absl::string_view message) {
    return UsageError(context, "eval tasks", message);
  };
  if (!kind_of.ok()) return wrong(kind_of.status().message());
  if (!style_of.ok()) return wrong(style_of.status().message());
  options.kind = *kind_of;
  options.style = *style_of;
  if (!lengths.empty()) options.lengths = lengths;
  if (seed) options.seed = *seed;
  if (text_path.empty()) return wrong("--text is missing");
  if (out.empty()) return wrong("--out is missing");
  for (const int32_t length : options.lengths) {
    if (length < 64 || length > 1 << 20) return wrong("--lengths must be from 64 to 1048576");
  }
  if (options.per_length < 1 || options.per_length > 100000) {
    return wrong("--per-length must be from 1 to 100000");
  }
  if (options.per_prefix < 1 || options.per_prefix > 256) {
    return wrong("--per-prefix must be from 1 to 256");
  }
  if (options.facts < 0 || options.facts > 4096) return wrong("--facts must be from 0 to 4096");
  if (options.facts > 0 && options.facts < options.per_prefix) {
    return wrong("--facts must not be fewer than --per-prefix");
  }
  if (options.hops < 2 || options.hops > 16) return wrong("--hops must be from 2 to 16");
  if (options.needles < 2 || options.needles > 16) return wrong("--needles must be from 2 to 16");

  std::string text;
  if (absl::Status status = ReadFile(text_path, &text); !status.ok()) {
    return wrong(status.message());
  }
  if (FirstInvalidUtf8(text) != text.size()) return wrong("--text: the file is not UTF-8");
  if (!words_path.empty()) {
    if (absl::Status status = ReadWords(words_path, &options); !status.ok()) {
      return wrong(status.message());
    }
  }
  ServerTokens tokens(connection, &context.interrupt, model, version);
  const auto items = eval::GenerateItems(options, text, &tokens);
  if (!items.ok()) {
    if (!tokens.failed.ok()) {
      return FailedCall(context, connection, connection.address, tokens.failed);
    }
    return wrong(items.status().message());
  }
  std::string lines;
  for (const eval::Item& item : *items) absl::StrAppend(&lines, ItemToJson(item).dump(), "\n");
  if (absl::Status status = eval::WriteWhole(out, lines); !status.ok()) {
    context.err << "carryover eval tasks: " << status.message() << "\n";
    return kExitFailed;
  }
  if (connection.json) {
    PrintJson(context.out, {{"items", items->size()}, {"file", out}});
  } else {
    context.out << items->size() << " items in " << out << "\n";
  }
  return kExitOk;
}

}  // namespace carryover
