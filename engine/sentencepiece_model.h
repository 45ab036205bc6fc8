// The SentencePiece library behind an interface that has only standard types: its own header
// declares an absl::string_view that differs from absl's, so the two must not meet in one file.
// Immutable and thread-safe once loaded.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace carryover {

class SentencePieceModel {
 public:
  // serialized: the contents of tokenizer.model. Null, with the reason in *error, when the library
  // does not accept it. prefix: false to leave out the space that the model puts before a text.
  static std::unique_ptr<const SentencePieceModel> Load(std::string_view serialized, bool prefix,
                                                        std::string* error);
  virtual ~SentencePieceModel() = default;

  // False when the library reports an error. REQUIRES: text is valid UTF-8.
  virtual bool Encode(std::string_view text, std::vector<int>* ids) const = 0;
  virtual int size() const = 0;
  // By id, 0 <= id < size().
  virtual std::string Piece(int id) const = 0;
  virtual bool IsControl(int id) const = 0;
  virtual bool IsUnknown(int id) const = 0;
  // The id of the piece, or -1 when the vocabulary does not have it.
  virtual int Find(const std::string& piece) const = 0;
  virtual int bos_id() const = 0;  // -1 where there is none, as for eos_id
  virtual int eos_id() const = 0;
};

}  // namespace carryover
