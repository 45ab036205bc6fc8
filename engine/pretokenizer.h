// The "pre_tokenizer" of tokenizer.json: how text is cut into the words that merges never cross.
// Immutable and thread-safe.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/json_value.h"
#include "engine/regex.h"

namespace carryover {

struct Word {
  absl::string_view text;
  bool at_start = false;  // of the whole input, which Metaspace's "first" asks for
};

class PreTokenizer {
 public:
  // ByteLevel, Split, Digits, Metaspace, Sequence or null. INVALID_ARGUMENT names any other type
  // and every field that cannot be followed.
  static absl::StatusOr<PreTokenizer> Parse(const JsonValue& json);

  // Cuts words further, in place. Text that had to be changed is kept in *storage, which must
  // outlive the words. INVALID_ARGUMENT when a pattern gives up on the text.
  // REQUIRES: the words are valid UTF-8.
  absl::Status Run(std::vector<Word>* words, std::deque<std::string>* storage) const;

  // The last step maps bytes to characters. Run leaves that to the model, which knows the ids of
  // bytes: its words are bytes then, and valid UTF-8 only as a whole.
  bool ends_in_bytes() const { return ends_in_bytes_; }

 private:
  enum class Behavior { kRemoved, kIsolated, kContiguous, kMergedWithPrevious, kMergedWithNext };
  enum class Kind { kSplit, kPrefixSpace, kMapBytes, kMetaspace };
  enum class Prepend { kAlways, kFirst, kNever };
  struct Step {
    Kind kind;
    std::shared_ptr<const Regex> regex;  // kSplit
    Behavior behavior = Behavior::kIsolated;
    bool invert = false;
    std::string replacement;  // kMetaspace
    Prepend prepend = Prepend::kAlways;
  };
  absl::Status Add(const JsonValue& json);
  absl::Status AddSplit(const JsonValue& json, absl::string_view type);
  absl::Status AddMetaspace(const JsonValue& json);
  static absl::Status RunSplit(const Step& step, const std::vector<Word>& words,
                               std::vector<Word>* out);
  static void RunMetaspace(const Step& step, std::vector<Word>* words,
                           std::deque<std::string>* storage);

  std::vector<Step> steps_;
  bool ends_in_bytes_ = false;
};

}  // namespace carryover
