#include "client/calibrate_texts.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "base/utf8.h"
#include "client/prompt_input.h"
#include "nlohmann/json.hpp"

namespace carryover {
namespace {

using nlohmann::json;

// "" when the line has no text.
std::string TextOf(const json& line) {
  if (line.is_string()) return line.get<std::string>();
  if (!line.is_object()) return "";
  const auto field = [&](const char* name) -> std::string {
    const auto found = line.find(name);
    return found != line.end() && found->is_string() ? found->get<std::string>() : "";
  };
  for (const char* name : {"text", "prompt"}) {
    if (std::string text = field(name); !text.empty()) return text;
  }
  return field("prefix") + field("suffix");
}

absl::Status AddFile(const std::string& path, int64_t max_bytes, CalibrateTexts* out) {
  std::string content;
  RETURN_IF_ERROR(ReadFile(path, &content));
  const auto add = [&](std::string text) -> absl::Status {
    out->bytes += static_cast<int64_t>(text.size());
    if (out->bytes > max_bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": the texts are over ", max_bytes, " bytes"));
    }
    out->texts.push_back(std::move(text));
    return absl::OkStatus();
  };
  if (!absl::EndsWith(path, ".jsonl")) {
    if (FirstInvalidUtf8(content) != content.size()) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": not UTF-8"));
    }
    return content.empty() ? absl::OkStatus() : add(std::move(content));
  }
  int number = 0;
  for (absl::string_view line : absl::StrSplit(content, '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line);
    if (line.empty()) continue;
    std::string text = TextOf(json::parse(line.begin(), line.end(), nullptr, false));
    if (text.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ":", number, ": neither a string nor an object with text, prompt or prefix"));
    }
    RETURN_IF_ERROR(add(std::move(text)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CalibrateTexts> ReadCalibrateTexts(const std::string& path, int64_t max_bytes) {
  CalibrateTexts out;
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    std::vector<std::string> files;
    for (auto entry = std::filesystem::directory_iterator(path, error);
         !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
      const std::string ending = entry->path().extension().string();
      if (ending == ".txt" || ending == ".md" || ending == ".jsonl") {
        files.push_back(entry->path().string());
      }
    }
    if (error) return absl::InvalidArgumentError(absl::StrCat(path, ": ", error.message()));
    std::sort(files.begin(), files.end());
    for (const std::string& file : files) RETURN_IF_ERROR(AddFile(file, max_bytes, &out));
  } else {
    RETURN_IF_ERROR(AddFile(path, max_bytes, &out));
  }
  if (out.texts.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": holds no text"));
  return out;
}

}  // namespace carryover
