// "added_tokens" of tokenizer.json: tokens that are looked for in the text before anything else.
// Immutable and thread-safe once built.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/json_value.h"

namespace carryover {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;      // left out by Decode with skip_special
  bool normalized = false;   // looked for in normalized text
  bool single_word = false;  // only where no word character stands next to it
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // and after it
};

// Part of a text: an added token, or text between them (id -1).
struct TextPart {
  absl::string_view text;
  int32_t id = -1;
};

// Finds tokens, the leftmost first and of those that start at one place the longest.
class AddedTokenMatcher {
 public:
  // Where contents are equal, the first token counts. REQUIRES: no content is empty.
  explicit AddedTokenMatcher(std::vector<AddedToken> tokens);

  // Appends the parts of text in order; parts without text are left out.
  // REQUIRES: text is valid UTF-8.
  void Split(absl::string_view text, std::vector<TextPart>* parts) const;
  bool empty() const { return tokens_.empty(); }

 private:
  std::vector<AddedToken> tokens_;
  // A trie of the contents. Node 0 is its root.
  absl::flat_hash_map<uint64_t, uint32_t> children_;  // node << 8 | byte → node
  std::vector<int32_t> ends_;                         // node → index of a token, or -1
  bool starts_[256] = {};
};

// Reads the array; ids are bounded by max_id.
absl::StatusOr<std::vector<AddedToken>> ParseAddedTokens(const JsonValue& json, int64_t max_id);

// Unicode's White_Space, as the reference's \s has it.
bool IsUnicodeSpace(uint32_t code);

}  // namespace carryover
