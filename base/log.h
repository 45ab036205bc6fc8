// Log lines of key=value pairs: LogInfo("version_loaded", {{"version", name}, {"ms", ms}}).
// Thread-safe. Never log user text, tenants or salts.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace carryover {

struct LogField {
  LogField(absl::string_view k, const absl::AlphaNum& v) : key(k), value(v.Piece()) {}
  absl::string_view key;
  std::string value;
};

void LogInfo(absl::string_view event, std::initializer_list<LogField> fields = {});
void LogWarning(absl::string_view event, std::initializer_list<LogField> fields = {});
void LogError(absl::string_view event, std::initializer_list<LogField> fields = {});

// level: debug, info, warning, error or off. Lines go to standard error.
void SetLogLevel(absl::string_view level);

}  // namespace carryover
