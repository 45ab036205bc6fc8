#include "engine/tokenizer_bpe.h"

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/hash.h"
#include "base/status_macros.h"
#include "base/utf8.h"
#include "engine/added_tokens.h"
#include "engine/bounded_json.h"
#include "engine/bpe.h"
#include "engine/json_value.h"
#include "engine/normalizer.h"
#include "engine/pretokenizer.h"
#include "engine/token_table.h"

namespace carryover {
namespace {

// Words of one call that were merged before are copied, not merged again; longer ones are rare.
constexpr size_t kMaxCachedWord = 64;

// Of the JSON. The largest vocabularies in use make about a million values.
constexpr size_t kMaxDepth = 32;
constexpr size_t kMaxValues = 8 << 20;

struct Template {
  std::vector<int32_t> before, after;  // ids around the text when special tokens are asked for
};

// Reads "post_processor". ByteLevel only moves offsets, which nothing here has.
absl::Status ParsePostProcessor(const JsonValue& json, const TokenTable& table, Template* out) {
  if (json.IsNull()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::string type, json.Field("type").String());
  if (type == "ByteLevel") return absl::OkStatus();
  if (type == "Sequence") {
    const JsonValue list = json.Field("processors");
    if (!list.IsArray()) return list.Error("an array is needed");
    for (size_t i = 0; i < list.size(); ++i) {
      RETURN_IF_ERROR(ParsePostProcessor(list.Element(i), table, out));
    }
    return absl::OkStatus();
  }
  if (type != "TemplateProcessing") {
    return json.Field("type").Error(absl::StrCat("\"", type, "\" is not supported"));
  }
  const JsonValue single = json.Field("single");
  if (!single.IsArray()) return single.Error("an array is needed");
  std::vector<int32_t> before, after;
  int texts = 0;
  for (size_t i = 0; i < single.size(); ++i) {
    const JsonValue part = single.Element(i);
    if (!part.Field("Sequence").IsNull()) {
      ++texts;
      continue;
    }
    const JsonValue name = part.Field("SpecialToken").Field("id");
    ASSIGN_OR_RETURN(const std::string token, name.String());
    const JsonValue ids = json.Field("special_tokens").Field(token).Field("ids");
    if (!ids.IsArray()) return ids.Error("an array is needed");
    for (size_t k = 0; k < ids.size(); ++k) {
      const JsonValue element = ids.Element(k);
      ASSIGN_OR_RETURN(const int64_t id, element.Int(0, INT32_MAX));
      if (!table.Contains(static_cast<int32_t>(id))) {
        return element.Error(absl::StrCat(id, " is not in the vocabulary"));
      }
      (texts == 0 ? before : after).push_back(static_cast<int32_t>(id));
    }
  }
  if (texts != 1) return single.Error("the text must stand in it exactly once");
  // A later template wraps what an earlier one made.
  out->before.insert(out->before.begin(), before.begin(), before.end());
  out->after.insert(out->after.end(), after.begin(), after.end());
  return absl::OkStatus();
}

class BpeTokenizer : public Tokenizer {
 public:
  BpeTokenizer(Bpe bpe, Normalizer normalizer, PreTokenizer pre_tokenizer,
               const std::vector<AddedToken>& verbatim, const std::vector<AddedToken>& normalized,
               TokenTable table, Template wrap, const Digest& sha256)
      : bpe_(std::move(bpe)),
        normalizer_(std::move(normalizer)),
        pre_tokenizer_(std::move(pre_tokenizer)),
        verbatim_(verbatim),
        normalized_(normalized),
        table_(std::move(table)),
        wrap_(std::move(wrap)),
        sha256_(sha256) {}

  absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view text,
                                              const EncodeOptions& options) const override;
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
  // What one call to Encode keeps.
  struct Call {
    std::deque<std::string> storage;  // of text that was changed
    absl::flat_hash_map<absl::string_view, std::pair<size_t, size_t>> words;  // → range of ids
    std::vector<int32_t> ids;
  };
  absl::Status EncodeText(absl::string_view text, bool at_start, Call* call) const;

  const Bpe bpe_;
  const Normalizer normalizer_;
  const PreTokenizer pre_tokenizer_;
  const AddedTokenMatcher verbatim_, normalized_;  // matched before and after the normalizer
  const TokenTable table_;
  const Template wrap_;
  const Digest sha256_;
};

absl::StatusOr<std::vector<int32_t>> BpeTokenizer::Encode(absl::string_view text,
                                                          const EncodeOptions& options) const {
  if (const size_t at = FirstInvalidUtf8(text); at != text.size()) {
    return absl::InvalidArgumentError(absl::StrCat("the text is not valid UTF-8 at byte ", at));
  }
  Call call;
  call.ids.reserve(text.size() / 3 + 8);
  if (options.add_special_tokens) call.ids = wrap_.before;
  std::vector<TextPart> parts, inner;
  verbatim_.Split(text, &parts);
  for (const TextPart& part : parts) {
    if (part.id >= 0) {
      call.ids.push_back(part.id);
      continue;
    }
    absl::string_view current = part.text;
    const bool at_start = current.data() == text.data();
    if (!normalizer_.empty()) {
      ASSIGN_OR_RETURN(std::string changed, normalizer_.Apply(current));
      current = call.storage.emplace_back(std::move(changed));
    }
    inner.clear();
    normalized_.Split(current, &inner);
    for (const TextPart& piece : inner) {
      if (piece.id >= 0) {
        call.ids.push_back(piece.id);
      } else {
        RETURN_IF_ERROR(
            EncodeText(piece.text, at_start && piece.text.data() == current.data(), &call));
      }
    }
  }
  if (options.add_special_tokens) {
    call.ids.insert(call.ids.end(), wrap_.after.begin(), wrap_.after.end());
  }
  return std::move(call.ids);
}

absl::Status BpeTokenizer::EncodeText(absl::string_view text, bool at_start, Call* call) const {
  std::vector<Word> words = {{text, at_start}};
  RETURN_IF_ERROR(pre_tokenizer_.Run(&words, &call->storage));
  for (const Word& word : words) {
    const size_t from = call->ids.size();
    if (word.text.size() < 2 || word.text.size() > kMaxCachedWord) {
      bpe_.Encode(word.text, &call->ids);
      continue;
    }
    const auto [it, inserted] = call->words.try_emplace(word.text, from, 0);
    if (inserted) {
      bpe_.Encode(word.text, &call->ids);
      it->second.second = call->ids.size();
    } else {
      const auto [begin, end] = it->second;
      for (size_t i = begin; i < end; ++i) call->ids.push_back(call->ids[i]);
    }
  }
  return absl::OkStatus();
}

// Of everything that decides ids and text, however the file is laid out: the vocabulary by id, the
// merges by ids, and the rest as canonical JSON (keys sorted, no white space).
Digest HashTokenizer(const nlohmann::json& root, const Bpe& bpe) {
  Hasher hasher;
  hasher.Add("carryover-tokenizer-json-1");
  hasher.AddInt(bpe.tokens().size());
  for (const std::string& token : bpe.tokens()) hasher.Add(token);
  std::vector<std::pair<uint32_t, uint64_t>> merges;
  merges.reserve(bpe.merges().size());
  for (const auto& [pair, merge] : bpe.merges()) merges.emplace_back(merge.rank, pair);
  std::sort(merges.begin(), merges.end());
  hasher.AddInt(merges.size());
  for (const auto& [rank, pair] : merges) hasher.AddInt(pair);
  for (const auto& [key, value] : root.items()) {
    if (key == "version" || key == "truncation" || key == "padding") continue;
    hasher.Add(key);
    if (key != "model" || !value.is_object()) {
      hasher.Add(value.dump());
      continue;
    }
    for (const auto& [name, field] : value.items()) {
      if (name == "vocab" || name == "merges") continue;
      hasher.Add(name);
      hasher.Add(field.dump());
    }
  }
  return hasher.Finish();
}

}  // namespace

absl::StatusOr<std::unique_ptr<const Tokenizer>> LoadBpeTokenizer(absl::string_view json,
                                                                  const std::string& file) {
  const auto parsed = ParseBoundedJson(json, {kMaxDepth, kMaxValues});
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": ", parsed.status().message()));
  }
  const nlohmann::json& document = *parsed;
  const JsonValue root{&document, absl::StrCat(file, ": ")};
  if (!root.IsObject()) return root.Error("an object is needed");

  ASSIGN_OR_RETURN(Normalizer normalizer, Normalizer::Parse(root.Field("normalizer")));
  ASSIGN_OR_RETURN(PreTokenizer pre_tokenizer, PreTokenizer::Parse(root.Field("pre_tokenizer")));
  ASSIGN_OR_RETURN(Bpe bpe, Bpe::Parse(root.Field("model"), pre_tokenizer.ends_in_bytes()));
  TokenTable table;
  ASSIGN_OR_RETURN(table.decoder, TokenDecoder::Parse(root.Field("decoder")));
  table.spellings = bpe.tokens();
  table.special.resize(table.spellings.size());

  const JsonValue added = root.Field("added_tokens");
  ASSIGN_OR_RETURN(std::vector<AddedToken> tokens,
                   ParseAddedTokens(added, Bpe::MaxId(bpe.tokens().size() +
                                                      (added.IsArray() ? added.size() : 0))));
  std::vector<AddedToken> verbatim, normalized;
  absl::flat_hash_map<std::string, int32_t> known;
  for (AddedToken& token : tokens) {
    const int32_t in_model = bpe.Find(token.content);
    if (in_model >= 0 && in_model != token.id) {
      return added.Error(absl::StrCat("\"", token.content, "\" has id ", token.id,
                                      ", but model.vocab gives it ", in_model));
    }
    if (!known.try_emplace(token.content, token.id).second) continue;  // the first one counts
    if (table.Contains(token.id) && table.spellings[token.id] != token.content) {
      return added.Error(absl::StrCat("\"", token.content, "\" and \"", table.spellings[token.id],
                                      "\" have the same id ", token.id));
    }
    table.Set(token.id, token.content, token.special);
    if (token.normalized) {
      ASSIGN_OR_RETURN(token.content, normalizer.Apply(token.content));
      if (!token.content.empty()) normalized.push_back(std::move(token));
    } else {
      verbatim.push_back(std::move(token));
    }
  }
  Template wrap;
  RETURN_IF_ERROR(ParsePostProcessor(root.Field("post_processor"), table, &wrap));
  const Digest sha256 = HashTokenizer(document, bpe);
  return std::make_unique<const BpeTokenizer>(std::move(bpe), std::move(normalizer),
                                              std::move(pre_tokenizer), verbatim, normalized,
                                              std::move(table), std::move(wrap), sha256);
}

}  // namespace carryover
