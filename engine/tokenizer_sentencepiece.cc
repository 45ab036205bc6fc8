#include "engine/tokenizer_sentencepiece.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/hash.h"
#include "base/mapped_file.h"
#include "base/status_macros.h"
#include "base/utf8.h"
#include "engine/added_tokens.h"
#include "engine/bounded_json.h"
#include "engine/bpe.h"
#include "engine/json_value.h"
#include "engine/sentencepiece_model.h"
#include "engine/token_table.h"

namespace carryover {
namespace {

constexpr size_t kMaxModelBytes = 64 << 20;
constexpr size_t kMaxConfigBytes = 16 << 20;

struct Settings {
  bool add_bos = true;
  bool add_eos = false;
  bool legacy = true;
  int32_t bos = -1, eos = -1;
  std::vector<AddedToken> added;
};

std::string_view ToStd(absl::string_view text) { return {text.data(), text.size()}; }

// A special token of tokenizer_config.json is a string or an object with its content.
absl::StatusOr<std::string> TokenContent(const JsonValue& json) {
  return json.IsObject() ? json.Field("content").String() : json.StringOr("");
}

absl::Status ReadConfig(const std::string& file, const SentencePieceModel& model,
                        Settings* settings) {
  auto text = ReadFile(file, kMaxConfigBytes);
  if (absl::IsNotFound(text.status())) return absl::OkStatus();
  RETURN_IF_ERROR(text.status());
  const auto document = ParseBoundedJson(*text, {/*max_depth=*/32, /*max_values=*/1 << 20});
  if (!document.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": ", document.status().message()));
  }
  const JsonValue root{&*document, absl::StrCat(file, ": ")};
  if (!root.IsObject()) return root.Error("an object is needed");
  ASSIGN_OR_RETURN(settings->add_bos, root.Field("add_bos_token").BoolOr(true));
  ASSIGN_OR_RETURN(settings->add_eos, root.Field("add_eos_token").BoolOr(false));
  ASSIGN_OR_RETURN(settings->legacy, root.Field("legacy").BoolOr(true));

  const JsonValue added = root.Field("added_tokens_decoder");
  if (!added.IsNull()) {
    if (!added.IsObject()) return added.Error("an object is needed");
    // Its keys are the ids; as an array with ids it reads like tokenizer.json's.
    nlohmann::json list = nlohmann::json::array();
    for (const auto& [key, value] : added.json->items()) {
      int32_t id = 0;
      const JsonValue item = added.Field(key);
      if (!absl::SimpleAtoi(key, &id)) return item.Error("the key must be an id");
      if (!item.IsObject()) return item.Error("an object is needed");
      list.push_back(value);
      list.back()["id"] = id;
    }
    ASSIGN_OR_RETURN(settings->added,
                     ParseAddedTokens({&list, added.path}, Bpe::MaxId(model.size() + list.size())));
  }
  const std::pair<const char*, int32_t*> ends[] = {{"bos_token", &settings->bos},
                                                   {"eos_token", &settings->eos}};
  for (const auto& [name, id] : ends) {
    const JsonValue field = root.Field(name);
    ASSIGN_OR_RETURN(const std::string content, TokenContent(field));
    if (content.empty()) continue;
    *id = model.Find(content);
    for (const AddedToken& token : settings->added) {
      if (token.content == content) *id = token.id;
    }
    if (*id < 0) return field.Error(absl::StrCat("\"", content, "\" is not in the vocabulary"));
  }
  return absl::OkStatus();
}

class SentencePieceTokenizer : public Tokenizer {
 public:
  SentencePieceTokenizer(std::unique_ptr<const SentencePieceModel> model,
                         std::unique_ptr<const SentencePieceModel> without_prefix,
                         const Settings& settings, TokenTable table, const Digest& sha256)
      : model_(std::move(model)),
        without_prefix_(std::move(without_prefix)),
        settings_(settings),
        matcher_(settings.added),
        table_(std::move(table)),
        sha256_(sha256) {}

  absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view text,
                                              const EncodeOptions& options) const override {
    if (const size_t at = FirstInvalidUtf8(text); at != text.size()) {
      return absl::InvalidArgumentError(absl::StrCat("the text is not valid UTF-8 at byte ", at));
    }
    std::vector<int32_t> ids;
    if (options.add_special_tokens && settings_.add_bos && settings_.bos >= 0) {
      ids.push_back(settings_.bos);
    }
    std::vector<TextPart> parts;
    matcher_.Split(text, &parts);
    std::vector<int> pieces;
    for (const TextPart& part : parts) {
      if (part.id >= 0) {
        ids.push_back(part.id);
        continue;
      }
      // Outside of legacy mode only a text's start gets a space, and only where none is there.
      const bool prefix = part.text.data() == text.data() && !absl::StartsWith(part.text, " ") &&
                          !absl::StartsWith(part.text, "\u2581");
      const SentencePieceModel& model =
          prefix || without_prefix_ == nullptr ? *model_ : *without_prefix_;
      if (!model.Encode(ToStd(part.text), &pieces)) {
        return absl::InternalError("the SentencePiece library failed to encode the text");
      }
      ids.insert(ids.end(), pieces.begin(), pieces.end());
    }
    if (options.add_special_tokens && settings_.add_eos && settings_.eos >= 0) {
      ids.push_back(settings_.eos);
    }
    return ids;
  }

  std::string Decode(absl::Span<const int32_t> tokens, bool skip_special) const override {
    return table_.Decode(tokens, skip_special);
  }
  std::unique_ptr<StreamDecoder> NewStreamDecoder(bool skip_special) const override {
    return table_.NewStreamDecoder(skip_special);
  }
  int32_t vocab_size() const override { return static_cast<int32_t>(table_.spellings.size()); }
  bool IsSpecial(int32_t token) const override {
    return table_.Contains(token) && table_.special[token];
  }
  std::string TokenText(int32_t token) const override {
    return table_.Contains(token) ? table_.spellings[token] : "";
  }
  const Digest& sha256() const override { return sha256_; }

 private:
  const std::unique_ptr<const SentencePieceModel> model_;
  const std::unique_ptr<const SentencePieceModel> without_prefix_;  // null in legacy mode
  const Settings settings_;
  const AddedTokenMatcher matcher_;
  const TokenTable table_;
  const Digest sha256_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<const Tokenizer>> LoadSentencePieceTokenizer(
    const std::string& folder) {
  const std::string file = absl::StrCat(folder, "/tokenizer.model");
  ASSIGN_OR_RETURN(const std::string bytes, ReadFile(file, kMaxModelBytes));
  std::string error;
  auto model = SentencePieceModel::Load(bytes, /*prefix=*/true, &error);
  if (model == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        file, ": not a SentencePiece model (other formats need a tokenizer.json): ", error));
  }
  Settings settings;
  settings.bos = model->bos_id();
  settings.eos = model->eos_id();
  const std::string config = absl::StrCat(folder, "/tokenizer_config.json");
  RETURN_IF_ERROR(ReadConfig(config, *model, &settings));

  TokenTable table;
  for (int32_t id = 0; id < model->size(); ++id) {
    const std::string piece = model->Piece(id);
    if (FirstInvalidUtf8(piece) != piece.size()) {
      return absl::InvalidArgumentError(absl::StrCat(file, ": piece ", id, " is not valid UTF-8"));
    }
    // Control pieces and the unknown piece are special tokens to the reference.
    const bool special = model->IsControl(id) || model->IsUnknown(id);
    table.Set(id, piece, special);
    const bool listed = std::any_of(settings.added.begin(), settings.added.end(),
                                    [&](const AddedToken& token) { return token.id == id; });
    if (special && !listed && !piece.empty()) {
      settings.added.push_back({id, piece, /*special=*/true});
    }
  }
  for (const AddedToken& token : settings.added) {
    if (table.Contains(token.id) && table.spellings[token.id] != token.content) {
      return absl::InvalidArgumentError(
          absl::StrCat(config, ": added_tokens_decoder.", token.id, ": \"", token.content,
                       "\", but tokenizer.model has \"", table.spellings[token.id], "\""));
    }
    table.Set(token.id, token.content, token.special);
  }
  // Whether the model puts a space before a text shows in what it makes of one.
  std::vector<int> probe;
  const bool prefix = model->Encode("a", &probe) && !probe.empty() &&
                      absl::StartsWith(table.spellings[probe[0]], "\u2581");
  table.decoder = TokenDecoder::ForSentencePiece(prefix);
  std::unique_ptr<const SentencePieceModel> without_prefix;
  if (!settings.legacy && prefix) {
    without_prefix = SentencePieceModel::Load(bytes, /*prefix=*/false, &error);
    if (without_prefix == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(file, ": ", error));
    }
  }

  Hasher hasher;
  hasher.Add("carryover-tokenizer-model-1").Add(bytes);
  hasher.AddInt(settings.add_bos).AddInt(settings.add_eos).AddInt(settings.legacy);
  hasher.AddInt(settings.bos).AddInt(settings.eos).AddInt(settings.added.size());
  for (const AddedToken& token : settings.added) {
    hasher.AddInt(token.id).Add(token.content).AddInt(token.special).AddInt(token.single_word);
    hasher.AddInt(token.lstrip).AddInt(token.rstrip);
  }
  const Digest sha256 = hasher.Finish();
  return std::make_unique<const SentencePieceTokenizer>(std::move(model), std::move(without_prefix),
                                                        settings, std::move(table), sha256);
}

}  // namespace carryover
