#include "engine/tokenizer.h"

#include "absl/strings/str_cat.h"
#include "base/mapped_file.h"
#include "base/status_macros.h"
#include "engine/tokenizer_bpe.h"
#include "engine/tokenizer_sentencepiece.h"

namespace carryover {
namespace {

// The largest in use, with its vocabulary spelled out, has about 35 MB.
constexpr size_t kMaxTokenizerBytes = 64 << 20;

}  // namespace

absl::StatusOr<std::unique_ptr<const Tokenizer>> Tokenizer::Load(const std::string& folder) {
  const std::string file = absl::StrCat(folder, "/tokenizer.json");
  const auto json = ReadFile(file, kMaxTokenizerBytes);
  if (json.ok()) return LoadBpeTokenizer(*json, file);
  if (!absl::IsNotFound(json.status())) return json.status();
  auto tokenizer = LoadSentencePieceTokenizer(folder);
  if (absl::IsNotFound(tokenizer.status())) {
    return absl::NotFoundError(
        absl::StrCat(folder, ": neither tokenizer.json nor tokenizer.model is there"));
  }
  return tokenizer;
}

}  // namespace carryover
