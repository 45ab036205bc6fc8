// carryover tokenize and detokenize.
#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "carryover/v1/completions.grpc.pb.h"
#include "client/commands.h"
#include "client/message_json.h"
#include "client/prompt_input.h"
#include "client/terminal.h"

namespace carryover {

int RunTokenize(CommandContext& context) {
  ConnectionOptions connection = DefaultConnection();
  std::string model, version;
  PromptInput input;
  bool texts = false;
  Args args("tokenize", "Shows the token ids of a text.");
  args.Option("text", &input.prompt, "TEXT", "the text itself, or");
  args.Option("file", &input.prompt_file, "FILE", "a file's text; - for standard input");
  args.Option("model", &model, "NAME", "may be left out when the server has just one");
  args.Option("version", &version, "NAME", "default: the promoted one");
  args.Option("add-special-tokens", &input.add_special_tokens, "",
              "let the tokenizer add its first token and the like; default true");
  args.Option("texts", &texts, "", "a line for each token, with the vocabulary's spelling");
  args.Example("carryover tokenize --text 'Hello, world' --texts", "");
  args.Example("carryover tokenize --file doc.txt", "ids with commas, as --tokens takes them");
  if (auto code = ParseOrExit(&args, &connection, context)) return *code;
  if (input.prompt.has_value() == input.prompt_file.has_value()) {
    return UsageError(context, "tokenize", "give exactly one of --text and --file");
  }
  if (absl::Status status = input.Resolve(); !status.ok()) {
    return UsageError(context, "tokenize", status.message());
  }

  v1::TokenizeRequest request;
  request.set_model(model);
  request.set_version(version);
  request.set_text(*input.prompt);
  request.set_with_texts(texts || connection.json);
  if (input.add_special_tokens) request.set_add_special_tokens(*input.add_special_tokens);
  v1::TokenizeResponse response;
  CallContext call(connection, &context.interrupt);
  auto stub = v1::Completions::NewStub(Connect(connection.address));
  const grpc::Status status = stub->Tokenize(call.get(), request, &response);
  if (!status.ok()) return FailedCall(context, connection, connection.address, status);
  if (connection.json) {
    PrintJson(context.out, MessageToJson(response));
  } else if (texts) {
    for (int i = 0; i < response.tokens_size(); ++i) {
      context.out << response.tokens(i) << "\t"
                  << (i < response.texts_size() ? response.texts(i) : "") << "\n";
    }
  } else {
    context.out << absl::StrJoin(response.tokens(), ",") << "\n";
  }
  return kExitOk;
}

int RunDetokenize(CommandContext& context) {
  ConnectionOptions connection = DefaultConnection();
  std::string model, version;
  std::vector<int32_t> tokens;
  std::optional<bool> skip;
  Args args("detokenize", "Shows the text of token ids.");
  args.Option("tokens", &tokens, "ID,ID,...", "the ids; may be repeated");
  args.Option("model", &model, "NAME", "may be left out when the server has just one");
  args.Option("version", &version, "NAME", "default: the promoted one");
  args.Option("skip-special-tokens", &skip, "", "leave them out; default true");
  args.Example("carryover detokenize --tokens 504,3575,282,4649,314", "");
  if (auto code = ParseOrExit(&args, &connection, context)) return *code;
  if (tokens.empty()) return UsageError(context, "detokenize", "give --tokens");

  v1::DetokenizeRequest request;
  request.set_model(model);
  request.set_version(version);
  request.mutable_tokens()->Assign(tokens.begin(), tokens.end());
  if (skip) request.set_skip_special_tokens(*skip);
  v1::DetokenizeResponse response;
  CallContext call(connection, &context.interrupt);
  auto stub = v1::Completions::NewStub(Connect(connection.address));
  const grpc::Status status = stub->Detokenize(call.get(), request, &response);
  if (!status.ok()) return FailedCall(context, connection, connection.address, status);
  if (connection.json) {
    PrintJson(context.out, MessageToJson(response));
  } else {
    context.out << response.text() << (context.out_is_terminal ? "\n" : "") << std::flush;
  }
  return kExitOk;
}

}  // namespace carryover
