// The SentencePiece library behind SentencePieceModel. A shared object of its own: see
// engine/sentencepiece_model.cc.
#include <sentencepiece_processor.h>

#include <exception>

#include "engine/sentencepiece_model.h"

namespace carryover {
namespace {

class LibraryModel : public SentencePieceModel {
 public:
  bool Encode(std::string_view text, std::vector<int>* ids) const override {
    return processor.Encode(text, ids).ok();
  }
  int size() const override { return processor.GetPieceSize(); }
  std::string Piece(int id) const override { return processor.IdToPiece(id); }
  bool IsControl(int id) const override { return processor.IsControl(id); }
  bool IsUnknown(int id) const override { return processor.IsUnknown(id); }
  int Find(const std::string& piece) const override {
    const int id = processor.PieceToId(piece);
    return processor.IdToPiece(id) == piece ? id : -1;
  }
  int bos_id() const override { return processor.bos_id(); }
  int eos_id() const override { return processor.eos_id(); }

  sentencepiece::SentencePieceProcessor processor;
};

}  // namespace

// What engine/sentencepiece_model.cc looks up. Null, with the reason in *error, when the library
// does not accept the bytes; else the caller deletes it.
extern "C" __attribute__((visibility("default"))) const SentencePieceModel*
CarryoverLoadSentencePiece(const char* data, size_t size, bool prefix, std::string* error) {
  std::string bytes(data, size);
  // Protobuf merges a field that comes again: normalizer_spec (3) { add_dummy_prefix (3): false }.
  if (!prefix) bytes.append("\x1a\x02\x18\x00", 4);
  try {
    auto model = std::make_unique<LibraryModel>();
    const auto status = model->processor.LoadFromSerializedProto(bytes);
    if (!status.ok()) {
      *error = status.ToString();
      return nullptr;
    }
    if (model->size() <= 0) {
      *error = "the vocabulary is empty";
      return nullptr;
    }
    return model.release();
  } catch (const std::exception& failure) {
    *error = failure.what();
    return nullptr;
  }
}

}  // namespace carryover
