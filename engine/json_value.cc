#include "engine/json_value.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace carryover {

JsonValue JsonValue::Field(absl::string_view key) const {
  // "FILE: " is followed by the first name without a dot.
  const bool top = path.size() >= 2 && path.compare(path.size() - 2, 2, ": ") == 0;
  JsonValue field{nullptr, absl::StrCat(path, top ? "" : ".", key)};
  if (IsObject()) {
    const auto it = json->find(std::string(key));
    if (it != json->end()) field.json = &*it;
  }
  return field;
}

JsonValue JsonValue::Element(size_t index) const {
  CHECK(IsArray() && index < json->size());
  return {&(*json)[index], absl::StrCat(path, "[", index, "]")};
}

absl::StatusOr<std::string> JsonValue::String() const {
  if (!IsString()) return Error("a string is needed");
  return json->get_ref<const std::string&>();
}

absl::StatusOr<std::string> JsonValue::StringOr(absl::string_view default_value) const {
  return IsNull() ? absl::StatusOr<std::string>(std::string(default_value)) : String();
}

absl::StatusOr<bool> JsonValue::BoolOr(bool default_value) const {
  if (IsNull()) return default_value;
  if (!json->is_boolean()) return Error("true or false is needed");
  return json->get<bool>();
}

absl::StatusOr<int64_t> JsonValue::Int(int64_t least, int64_t most) const {
  if (json == nullptr || !json->is_number_integer()) return Error("a whole number is needed");
  // An unsigned number above int64_t's range would turn negative.
  if (json->is_number_unsigned() && json->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
    return Error(absl::StrCat("must be at most ", most));
  }
  const int64_t value = json->get<int64_t>();
  if (value < least || value > most) {
    return Error(absl::StrCat("is ", value, ", must be ", least, " to ", most));
  }
  return value;
}

absl::Status JsonValue::Error(absl::string_view message) const {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", message));
}

}  // namespace carryover
