#include "base/log.h"

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "absl/strings/escaping.h"
#include "base/status_macros.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace carryover {
namespace {

spdlog::logger& Logger() {
  static auto* logger = [] {
    auto* made = new spdlog::logger("carryover", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("time=%Y-%m-%dT%H:%M:%S.%e%z level=%l %v");
    made->flush_on(spdlog::level::info);
    return made;
  }();
  return *logger;
}

std::string Line(absl::string_view event, std::initializer_list<LogField> fields) {
  std::string line = absl::StrCat("event=", event);
  for (const LogField& field : fields) {
    const bool plain =
        !field.value.empty() && field.value.find_first_of(" \t\r\n\"=\\") == std::string::npos;
    if (plain) {
      absl::StrAppend(&line, " ", field.key, "=", field.value);
    } else {
      absl::StrAppend(&line, " ", field.key, "=\"", absl::Utf8SafeCEscape(field.value), "\"");
    }
  }
  return line;
}

}  // namespace

void LogInfo(absl::string_view event, std::initializer_list<LogField> fields) {
  Logger().info("{}", Line(event, fields));
}
void LogWarning(absl::string_view event, std::initializer_list<LogField> fields) {
  Logger().warn("{}", Line(event, fields));
}
void LogError(absl::string_view event, std::initializer_list<LogField> fields) {
  Logger().error("{}", Line(event, fields));
}

void SetLogLevel(absl::string_view level) {
  Logger().set_level(spdlog::level::from_str(std::string(level)));
}

void CheckFailed(const char* file, int line, const char* condition) {
  LogError("check_failed", {{"file", file}, {"line", line}, {"condition", condition}});
  std::abort();
}

}  // namespace carryover
