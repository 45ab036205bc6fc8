// tokenizer.json whose model is a BPE: normalizer, added tokens, pre-tokenizer, merges,
// post-processor and decoder, put together. Used by Tokenizer::Load alone.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/tokenizer.h"

namespace carryover {

// json: the file's contents; file: its name, for errors. "truncation" and "padding" are left to
// the request, as the reference's callers do.
absl::StatusOr<std::unique_ptr<const Tokenizer>> LoadBpeTokenizer(absl::string_view json,
                                                                  const std::string& file);

}  // namespace carryover
