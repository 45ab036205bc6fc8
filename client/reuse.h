// The values of --reuse.
#pragma once

#include <optional>

#include "absl/strings/string_view.h"
#include "carryover/v1/completions.pb.h"

namespace carryover {

constexpr char kReuseError[] = "--reuse takes auto, native or carry";

inline std::optional<v1::CacheOptions::Reuse> ParseReuse(absl::string_view text) {
  if (text == "auto") return v1::CacheOptions::AUTO;
  if (text == "native") return v1::CacheOptions::NATIVE_ONLY;
  if (text == "carry") return v1::CacheOptions::CARRY;
  return std::nullopt;
}

}  // namespace carryover
