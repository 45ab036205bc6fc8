#include "base/utf8.h"

#include <algorithm>
#include <cstdint>

namespace carryover {
namespace {

// How long the character at the start of text is, 0 when it is ill-formed or cut; *subpart is then
// the length of the maximal subpart and *cut says that more bytes could complete it.
size_t CharacterLength(absl::string_view text, size_t* subpart, bool* cut) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  *cut = false;
  *subpart = 1;
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  size_t length = 0;
  uint8_t low = 0x80, high = 0xBF;  // the range of the second byte
  if (first >= 0xC2 && first <= 0xDF) {
    length = 2;
  } else if (first >= 0xE0 && first <= 0xEF) {
    length = 3;
    if (first == 0xE0) low = 0xA0;
    if (first == 0xED) high = 0x9F;
  } else if (first >= 0xF0 && first <= 0xF4) {
    length = 4;
    if (first == 0xF0) low = 0x90;
    if (first == 0xF4) high = 0x8F;
  } else {
    return 0;
  }
  for (size_t i = 1; i < length; ++i) {
    if (i >= text.size()) {
      *subpart = i;
      *cut = true;
      return 0;
    }
    if (byte(i) < low || byte(i) > high) {
      *subpart = i;
      return 0;
    }
    low = 0x80;
    high = 0xBF;
  }
  return length;
}

}  // namespace

size_t FirstInvalidUtf8(absl::string_view text) {
  size_t at = 0, subpart = 0;
  bool cut = false;
  while (at < text.size()) {
    const size_t length = CharacterLength(text.substr(at), &subpart, &cut);
    if (length == 0) return at;
    at += length;
  }
  return at;
}

size_t IncompleteUtf8Suffix(absl::string_view text) {
  for (size_t back = 1; back <= std::min<size_t>(3, text.size()); ++back) {
    const absl::string_view tail = text.substr(text.size() - back);
    if ((static_cast<uint8_t>(tail[0]) & 0xC0) == 0x80) continue;  // a continuation byte
    size_t subpart = 0;
    bool cut = false;
    return CharacterLength(tail, &subpart, &cut) == 0 && cut ? back : 0;
  }
  return 0;
}

std::string ReplaceInvalidUtf8(absl::string_view text) {
  std::string out;
  out.reserve(text.size());
  size_t at = 0, subpart = 0;
  bool cut = false;
  while (at < text.size()) {
    const size_t length = CharacterLength(text.substr(at), &subpart, &cut);
    if (length > 0) {
      out.append(text.data() + at, length);
      at += length;
    } else {
      out.append("\xEF\xBF\xBD");
      at += subpart;
    }
  }
  return out;
}

}  // namespace carryover
