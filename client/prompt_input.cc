#include "client/prompt_input.h"

#include <fstream>
#include <iostream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/utf8.h"

namespace carryover {
namespace {

constexpr size_t kMaxFileBytes = size_t{1} << 30;

template <typename Message>
void FillInput(const PromptInput& input, Message* message) {
  if (input.prompt.has_value()) {
    message->set_prompt(*input.prompt);
  } else {
    message->mutable_tokens()->mutable_ids()->Assign(input.tokens.begin(), input.tokens.end());
  }
  if (input.add_special_tokens.has_value()) {
    message->set_add_special_tokens(*input.add_special_tokens);
  }
}

}  // namespace

absl::Status ReadFile(const std::string& path, std::string* content) {
  std::ifstream file;
  if (path != "-") {
    file.open(path, std::ios::binary);
    if (!file) return absl::InvalidArgumentError(absl::StrCat("cannot open '", path, "'"));
  }
  std::istream& in = path == "-" ? std::cin : file;
  content->clear();
  char buffer[1 << 16];
  while (in.read(buffer, sizeof(buffer)), in.gcount() > 0) {
    content->append(buffer, in.gcount());
    if (content->size() > kMaxFileBytes) {
      return absl::InvalidArgumentError(absl::StrCat("'", path, "' is over 1 GiB"));
    }
  }
  if (in.bad()) return absl::InvalidArgumentError(absl::StrCat("cannot read '", path, "'"));
  return absl::OkStatus();
}

void PromptInput::AddOptions(Args* args) {
  args->Group("Prompt (one of them)");
  args->Option("prompt", &prompt, "TEXT", "the text itself");
  args->Option("prompt-file", &prompt_file, "FILE", "a file's text; - for standard input");
  args->Option("tokens", &tokens, "ID,ID,...", "token ids, used as they are");
  args->Option("add-special-tokens", &add_special_tokens, "",
               "let the tokenizer add its first token and the like; default true");
}

absl::Status PromptInput::Resolve() {
  const int given =
      (prompt.has_value() ? 1 : 0) + (prompt_file.has_value() ? 1 : 0) + (tokens.empty() ? 0 : 1);
  if (given != 1) {
    return absl::InvalidArgumentError("give exactly one of --prompt, --prompt-file and --tokens");
  }
  if (prompt_file.has_value()) {
    std::string text;
    RETURN_IF_ERROR(ReadFile(*prompt_file, &text));
    prompt = std::move(text);
    prompt_file.reset();
  }
  if (prompt.has_value()) {
    if (const size_t bad = FirstInvalidUtf8(*prompt); bad != prompt->size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the prompt is not valid UTF-8 at byte ", bad));
    }
  }
  return absl::OkStatus();
}

void PromptInput::Fill(v1::CompleteRequest* request) const { FillInput(*this, request); }
void PromptInput::Fill(v1::Prefix* prefix) const { FillInput(*this, prefix); }

}  // namespace carryover
