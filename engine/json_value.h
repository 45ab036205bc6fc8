// A place in a JSON document that knows the way to it, so that an error names the file and the
// field ("/m/tokenizer.json: model.merges[3]: ..."). For the tokenizers' loaders; must not outlive
// the document, which bounded_json.h parses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace carryover {

// A value and the way to it. A missing field is a JsonValue whose json is null.
struct JsonValue {
  const nlohmann::json* json = nullptr;
  std::string path;  // "FILE: a.b[3]"

  bool IsNull() const { return json == nullptr || json->is_null(); }
  bool IsObject() const { return json != nullptr && json->is_object(); }
  bool IsArray() const { return json != nullptr && json->is_array(); }
  bool IsString() const { return json != nullptr && json->is_string(); }

  // Null unless this is an object that has the key.
  JsonValue Field(absl::string_view key) const;
  // REQUIRES: IsArray() and index < size().
  JsonValue Element(size_t index) const;
  size_t size() const { return json == nullptr ? 0 : json->size(); }

  // INVALID_ARGUMENT when the value has another type; Or: the default where it is null.
  absl::StatusOr<std::string> String() const;
  absl::StatusOr<std::string> StringOr(absl::string_view default_value) const;
  absl::StatusOr<bool> BoolOr(bool default_value) const;
  absl::StatusOr<int64_t> Int(int64_t least, int64_t most) const;

  // INVALID_ARGUMENT that names the place.
  absl::Status Error(absl::string_view message) const;
};

}  // namespace carryover
