// Text to token ids and back, as the model folder's tokenizer.json (byte-level BPE) or
// tokenizer.model (SentencePiece) says. Immutable and thread-safe once loaded.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/hash.h"

namespace carryover {

struct EncodeOptions {
  bool add_special_tokens = true;  // BOS and the like, as the folder's post-processor asks
};

// Decodes a stream of tokens. The pieces that Add and Finish return, joined, are what
// Tokenizer::Decode gives for all tokens at once, and each piece is valid UTF-8: a character that
// is split over tokens is held back until it is whole.
class StreamDecoder {
 public:
  virtual ~StreamDecoder() = default;
  virtual std::string Add(int32_t token) = 0;
  virtual std::string Finish() = 0;
};

class Tokenizer {
 public:
  // Reads a model folder. Errors name the file and the field.
  static absl::StatusOr<std::unique_ptr<const Tokenizer>> Load(const std::string& folder);
  virtual ~Tokenizer() = default;

  // INVALID_ARGUMENT when text is not valid UTF-8. Special tokens that stand in the text are
  // recognised, as the reference tokenizers do.
  virtual absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view text,
                                                      const EncodeOptions& options) const = 0;
  // Ids outside the vocabulary decode to nothing.
  virtual std::string Decode(absl::Span<const int32_t> tokens, bool skip_special) const = 0;
  virtual std::unique_ptr<StreamDecoder> NewStreamDecoder(bool skip_special) const = 0;

  virtual int32_t vocab_size() const = 0;  // the largest id plus one
  virtual bool IsSpecial(int32_t token) const = 0;
  // The vocabulary's own spelling of a token, for logprobs; "" outside the vocabulary.
  virtual std::string TokenText(int32_t token) const = 0;
  // Of everything that decides ids and text. Part of the identity of KV blocks.
  virtual const Digest& sha256() const = 0;
};

}  // namespace carryover
