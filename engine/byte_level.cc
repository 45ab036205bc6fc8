#include "engine/byte_level.h"

namespace carryover {
namespace {

constexpr int kCodePoints = 256 + 68;

struct Alphabet {
  std::array<std::string, 256> characters;
  std::array<int16_t, kCodePoints> bytes;  // by code point; -1 where there is none
};

bool StandsForItself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

Alphabet MakeAlphabet() {
  Alphabet alphabet;
  alphabet.bytes.fill(-1);
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const int code = StandsForItself(byte) ? byte : next++;
    alphabet.bytes[code] = static_cast<int16_t>(byte);
    std::string& out = alphabet.characters[byte];
    if (code < 0x80) {
      out.push_back(static_cast<char>(code));
    } else {
      out.push_back(static_cast<char>(0xC0 | (code >> 6)));
      out.push_back(static_cast<char>(0x80 | (code & 0x3F)));
    }
  }
  return alphabet;
}

const Alphabet& GetAlphabet() {
  static const Alphabet& alphabet = *new Alphabet(MakeAlphabet());
  return alphabet;
}

}  // namespace

const std::array<std::string, 256>& ByteCharacters() { return GetAlphabet().characters; }

std::string BytesToCharacters(absl::string_view bytes) {
  const auto& characters = ByteCharacters();
  std::string out;
  out.reserve(bytes.size() * 2);
  for (const char c : bytes) out += characters[static_cast<uint8_t>(c)];
  return out;
}

std::optional<std::string> CharactersToBytes(absl::string_view text) {
  const auto& bytes = GetAlphabet().bytes;
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    int code = static_cast<uint8_t>(text[i]);
    if (code >= 0x80) {
      if (code >= 0xE0 || i + 1 >= text.size()) return std::nullopt;  // above U+07FF
      code = ((code & 0x1F) << 6) | (static_cast<uint8_t>(text[++i]) & 0x3F);
    }
    if (code >= kCodePoints || bytes[code] < 0) return std::nullopt;
    out.push_back(static_cast<char>(bytes[code]));
  }
  return out;
}

}  // namespace carryover
