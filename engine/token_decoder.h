// The "decoder" of tokenizer.json: how the vocabulary's spellings become text again. A decoder is
// immutable and thread-safe; a run over a sequence of tokens is a DecodeRun of its own.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/json_value.h"

namespace carryover {

// Takes a sequence's tokens one by one. What Push and Finish append, joined, is the text, and each
// part is valid UTF-8. REQUIRES: Finish is called last, once.
class DecodeRun {
 public:
  virtual ~DecodeRun() = default;
  virtual void Push(absl::string_view token, std::string* text) = 0;
  virtual void Finish(std::string* text) = 0;
};

class TokenDecoder {
 public:
  // ByteLevel, Replace of a text, ByteFallback, Fuse, Strip, Metaspace, Sequence or null.
  // INVALID_ARGUMENT names any other type, and an order that cannot be streamed.
  static absl::StatusOr<TokenDecoder> Parse(const JsonValue& json);

  // What tokenizer.model calls for: U+2581 is a space, runs of <0xHH> are bytes, and the first
  // space goes where the model puts one before a text.
  static TokenDecoder ForSentencePiece(bool strip_first_space);

  std::unique_ptr<DecodeRun> NewRun() const;

 private:
  enum class Kind { kByteLevel, kReplace, kByteFallback, kFuse, kStrip, kMetaspace };
  struct Step {
    Kind kind;
    std::string pattern;         // kReplace, kStrip (one character), kMetaspace (its replacement)
    std::string content;         // kReplace
    size_t start = 0, stop = 0;  // kStrip: how many characters at most
    bool drop_first = true;      // kMetaspace: spaces of the first token go
  };
  friend class StepsRun;
  absl::Status Add(const JsonValue& json);
  bool Has(Kind kind) const;
  std::vector<Step> steps_;
  bool join_with_spaces_ = false;  // no decoder: the reference puts a space between tokens
};

}  // namespace carryover
