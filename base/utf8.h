// UTF-8 checks for text that comes in and text that goes out.
#pragma once

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace carryover {

// The offset of the first byte that does not belong to well-formed UTF-8 (Unicode 15, table 3-7:
// no surrogates, no overlong forms, at most U+10FFFF), or text.size() when all of it does.
size_t FirstInvalidUtf8(absl::string_view text);

// How many bytes at the end of text are the start of a character whose rest may still come: 0 to 3.
size_t IncompleteUtf8Suffix(absl::string_view text);

// text with each ill-formed part replaced by U+FFFD, as Unicode recommends (maximal subparts) and
// as Rust's and Python's decoders do.
std::string ReplaceInvalidUtf8(absl::string_view text);

}  // namespace carryover
