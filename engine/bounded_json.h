// JSON that an outsider may have written (config.json, a safetensors header, a shard index), parsed
// under limits: so deep, so many values, no key twice in one object. nlohmann's own parser keeps
// the last of two equal keys, which lets two readers of one file see two different things.
// Thread-safe: no state.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carryover {

struct JsonLimits {
  size_t max_depth = 16;         // objects and arrays within one another
  size_t max_values = 1u << 20;  // objects, arrays and scalars together
};

// INVALID_ARGUMENT says what is wrong and at which byte, but not in which file: that is the
// caller's to add.
absl::StatusOr<nlohmann::json> ParseBoundedJson(absl::string_view text, const JsonLimits& limits);

}  // namespace carryover
