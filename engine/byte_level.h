// GPT-2's alphabet: each byte has one printable character that stands for it in a vocabulary, so
// that a byte-level BPE can keep any bytes in a JSON file. Bytes that are printable in Latin-1
// stand for themselves; the other 68 are given U+0100 upwards, in order.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace carryover {

// The characters of the bytes, in UTF-8.
const std::array<std::string, 256>& ByteCharacters();

// bytes, each as its character.
std::string BytesToCharacters(absl::string_view bytes);

// The bytes that the characters stand for; nothing when one of them stands for none.
// REQUIRES: text is valid UTF-8.
std::optional<std::string> CharactersToBytes(absl::string_view text);

}  // namespace carryover
