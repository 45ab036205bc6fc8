// What a loaded tokenizer knows of each id, and decoding, which is the same for all kinds.
// Immutable and thread-safe once built.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "engine/token_decoder.h"
#include "engine/tokenizer.h"

namespace carryover {

struct TokenTable {
  std::vector<std::string> spellings;  // by id; "" where there is none
  std::vector<bool> special;           // by id, as long as spellings
  TokenDecoder decoder;

  bool Contains(int32_t id) const {
    return id >= 0 && static_cast<size_t>(id) < spellings.size() && !spellings[id].empty();
  }
  // Makes room where the id lies behind the end.
  void Set(int32_t id, const std::string& spelling, bool is_special);

  std::string Decode(absl::Span<const int32_t> tokens, bool skip_special) const;
  // REQUIRES: the table outlives the decoder.
  std::unique_ptr<StreamDecoder> NewStreamDecoder(bool skip_special) const;
};

}  // namespace carryover
