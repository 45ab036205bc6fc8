#include "engine/added_tokens.h"

#include <utf8proc.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace carryover {
namespace {

// Keeps the search linear in the text whatever the file says.
constexpr size_t kMaxContentBytes = 512;

uint32_t CodeAt(absl::string_view text, size_t at) {
  utf8proc_int32_t code = 0;
  utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()) + at, text.size() - at,
                   &code);
  return static_cast<uint32_t>(code);
}

// Where the character that ends at end starts. REQUIRES: end > 0.
size_t Before(absl::string_view text, size_t end) {
  do --end;
  while (end > 0 && (text[end] & 0xC0) == 0x80);
  return end;
}

// The reference's \w: letters, marks, decimal digits, connectors and joiners.
bool IsWordCharacter(uint32_t code) {
  if (code == 0x200C || code == 0x200D) return true;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(code))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      break;
  }
  // The symbols that are alphabetic: circled and squared letters.
  return (code >= 0x24B6 && code <= 0x24E9) || (code >= 0x1F130 && code <= 0x1F149) ||
         (code >= 0x1F150 && code <= 0x1F169) || (code >= 0x1F170 && code <= 0x1F189);
}

}  // namespace

bool IsUnicodeSpace(uint32_t code) {
  return (code >= 0x9 && code <= 0xD) || code == 0x20 || code == 0x85 || code == 0xA0 ||
         code == 0x1680 || (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 ||
         code == 0x202F || code == 0x205F || code == 0x3000;
}

AddedTokenMatcher::AddedTokenMatcher(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  ends_.push_back(-1);
  for (size_t i = 0; i < tokens_.size(); ++i) {
    CHECK(!tokens_[i].content.empty());
    uint32_t node = 0;
    for (const char c : tokens_[i].content) {
      const uint64_t key = static_cast<uint64_t>(node) << 8 | static_cast<uint8_t>(c);
      const auto [it, inserted] = children_.try_emplace(key, static_cast<uint32_t>(ends_.size()));
      if (inserted) ends_.push_back(-1);
      node = it->second;
    }
    if (ends_[node] < 0) ends_[node] = static_cast<int32_t>(i);
    starts_[static_cast<uint8_t>(tokens_[i].content[0])] = true;
  }
}

void AddedTokenMatcher::Split(absl::string_view text, std::vector<TextPart>* parts) const {
  size_t done = 0;  // up to here text is in parts
  size_t at = tokens_.empty() ? text.size() : 0;
  while (at < text.size()) {
    if (!starts_[static_cast<uint8_t>(text[at])]) {
      ++at;
      continue;
    }
    int32_t best = -1;
    uint32_t node = 0;
    for (size_t i = at; i < text.size(); ++i) {
      const auto it =
          children_.find(static_cast<uint64_t>(node) << 8 | static_cast<uint8_t>(text[i]));
      if (it == children_.end()) break;
      node = it->second;
      if (ends_[node] >= 0) best = ends_[node];
    }
    if (best < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[best];
    size_t begin = at;
    size_t end = at + token.content.size();
    at = end;  // the search goes on behind the content, even where white space is taken along
    if (token.single_word && ((begin > 0 && IsWordCharacter(CodeAt(text, Before(text, begin)))) ||
                              (end < text.size() && IsWordCharacter(CodeAt(text, end))))) {
      continue;
    }
    if (token.lstrip) {
      while (begin > done && IsUnicodeSpace(CodeAt(text, Before(text, begin)))) {
        begin = Before(text, begin);
      }
    }
    if (token.rstrip) {
      while (end < text.size() && IsUnicodeSpace(CodeAt(text, end))) {
        ++end;
        while (end < text.size() && (text[end] & 0xC0) == 0x80) ++end;
      }
    }
    if (begin > done) parts->push_back({text.substr(done, begin - done)});
    parts->push_back({text.substr(begin, end - begin), token.id});
    done = end;
  }
  if (done < text.size()) parts->push_back({text.substr(done)});
}

absl::StatusOr<std::vector<AddedToken>> ParseAddedTokens(const JsonValue& json, int64_t max_id) {
  std::vector<AddedToken> tokens;
  if (json.IsNull()) return tokens;
  if (!json.IsArray()) return json.Error("an array is needed");
  for (size_t i = 0; i < json.size(); ++i) {
    const JsonValue item = json.Element(i);
    AddedToken token;
    ASSIGN_OR_RETURN(const int64_t id, item.Field("id").Int(0, max_id));
    token.id = static_cast<int32_t>(id);
    ASSIGN_OR_RETURN(token.content, item.Field("content").String());
    if (token.content.empty()) continue;  // the reference leaves them out, too
    if (token.content.size() > kMaxContentBytes) {
      return item.Field("content").Error(
          absl::StrCat(token.content.size(), " bytes, the limit is ", kMaxContentBytes));
    }
    ASSIGN_OR_RETURN(token.special, item.Field("special").BoolOr(false));
    ASSIGN_OR_RETURN(token.normalized, item.Field("normalized").BoolOr(!token.special));
    ASSIGN_OR_RETURN(token.single_word, item.Field("single_word").BoolOr(false));
    ASSIGN_OR_RETURN(token.lstrip, item.Field("lstrip").BoolOr(false));
    ASSIGN_OR_RETURN(token.rstrip, item.Field("rstrip").BoolOr(false));
    tokens.push_back(std::move(token));
  }
  return tokens;
}

}  // namespace carryover
