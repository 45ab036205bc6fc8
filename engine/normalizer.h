// The "normalizer" of tokenizer.json: what is done to text before it is split into words.
// Immutable and thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/json_value.h"
#include "engine/regex.h"

namespace carryover {

// Unicode's normalization form C, in O(n log n) at worst.
// REQUIRES: text is valid UTF-8.
std::string NormalizeNfc(absl::string_view text);

class Normalizer {
 public:
  // NFC, Prepend, Replace, Sequence or null. INVALID_ARGUMENT names any other type.
  static absl::StatusOr<Normalizer> Parse(const JsonValue& json);

  // INVALID_ARGUMENT when a Replace pattern gives up on the text.
  // REQUIRES: text is valid UTF-8.
  absl::StatusOr<std::string> Apply(absl::string_view text) const;
  bool empty() const { return steps_.empty(); }

 private:
  enum class Kind { kNfc, kPrepend, kReplaceText, kReplaceRegex };
  struct Step {
    Kind kind;
    std::string pattern;  // what kReplaceText looks for
    std::string content;  // what is put before or instead
    std::shared_ptr<const Regex> regex;
  };
  absl::Status Add(const JsonValue& json);
  std::vector<Step> steps_;
};

}  // namespace carryover
