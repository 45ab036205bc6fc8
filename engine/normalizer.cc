#include "engine/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/status_macros.h"

namespace carryover {
namespace {

int CombiningClass(utf8proc_int32_t code) { return utf8proc_get_property(code)->combining_class; }

bool IsAscii(absl::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c & 0x80) == 0; });
}

}  // namespace

std::string NormalizeNfc(absl::string_view text) {
  if (IsAscii(text)) return std::string(text);
  // utf8proc's own ordering of marks takes quadratic time on a long run of them, which a request
  // could bring; its steps are called one by one here, with a sort between.
  std::vector<utf8proc_int32_t> codes;
  codes.reserve(text.size());
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  for (size_t at = 0; at < text.size();) {
    utf8proc_int32_t code = 0;
    const utf8proc_ssize_t length = utf8proc_iterate(bytes + at, text.size() - at, &code);
    CHECK(length > 0);
    at += length;
    if (code < 0xC0) {
      codes.push_back(code);
      continue;
    }
    utf8proc_int32_t parts[8];  // Unicode promises at most 4
    int boundary = 0;
    const utf8proc_ssize_t count = utf8proc_decompose_char(
        code, parts, 8, static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | UTF8PROC_STABLE),
        &boundary);
    CHECK(count > 0 && count <= 8);
    codes.insert(codes.end(), parts, parts + count);
  }
  for (size_t at = 0; at < codes.size();) {
    if (codes[at] < 0x300 || CombiningClass(codes[at]) == 0) {
      ++at;
      continue;
    }
    size_t end = at + 1;
    while (end < codes.size() && CombiningClass(codes[end]) != 0) ++end;
    std::stable_sort(codes.begin() + at, codes.begin() + end,
                     [](utf8proc_int32_t a, utf8proc_int32_t b) {
                       return CombiningClass(a) < CombiningClass(b);
                     });
    at = end;
  }
  const utf8proc_ssize_t composed =
      utf8proc_normalize_utf32(codes.data(), codes.size(),
                               static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
  CHECK(composed >= 0);
  std::string out;
  out.reserve(text.size());
  for (utf8proc_ssize_t i = 0; i < composed; ++i) {
    utf8proc_uint8_t buffer[4];
    const utf8proc_ssize_t length = utf8proc_encode_char(codes[i], buffer);
    out.append(reinterpret_cast<const char*>(buffer), length);
  }
  return out;
}

absl::StatusOr<Normalizer> Normalizer::Parse(const JsonValue& json) {
  Normalizer normalizer;
  RETURN_IF_ERROR(normalizer.Add(json));
  return normalizer;
}

absl::Status Normalizer::Add(const JsonValue& json) {
  if (json.IsNull()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::string type, json.Field("type").String());
  if (type == "Sequence") {
    const JsonValue list = json.Field("normalizers");
    if (!list.IsArray()) return list.Error("an array is needed");
    for (size_t i = 0; i < list.size(); ++i) RETURN_IF_ERROR(Add(list.Element(i)));
    return absl::OkStatus();
  }
  if (type == "NFC") {
    steps_.push_back({Kind::kNfc});
    return absl::OkStatus();
  }
  if (type == "Prepend") {
    ASSIGN_OR_RETURN(std::string content, json.Field("prepend").String());
    steps_.push_back({Kind::kPrepend, "", std::move(content)});
    return absl::OkStatus();
  }
  if (type == "Replace") {
    ASSIGN_OR_RETURN(std::string content, json.Field("content").String());
    const JsonValue pattern = json.Field("pattern");
    if (const JsonValue text = pattern.Field("String"); !text.IsNull()) {
      ASSIGN_OR_RETURN(std::string wanted, text.String());
      if (wanted.empty()) return text.Error("must not be empty");
      steps_.push_back({Kind::kReplaceText, std::move(wanted), std::move(content)});
      return absl::OkStatus();
    }
    const JsonValue field = pattern.Field("Regex");
    ASSIGN_OR_RETURN(const std::string source, field.String());
    auto regex = Regex::Compile(source);
    if (!regex.ok()) return field.Error(regex.status().message());
    steps_.push_back({Kind::kReplaceRegex, "", std::move(content),
                      std::make_shared<const Regex>(std::move(*regex))});
    return absl::OkStatus();
  }
  return json.Field("type").Error(absl::StrCat("\"", type, "\" is not supported"));
}

absl::StatusOr<std::string> Normalizer::Apply(absl::string_view text) const {
  std::string current(text);
  for (const Step& step : steps_) {
    switch (step.kind) {
      case Kind::kNfc:
        current = NormalizeNfc(current);
        break;
      case Kind::kPrepend:
        if (!current.empty()) current.insert(0, step.content);
        break;
      case Kind::kReplaceText:
        current = absl::StrReplaceAll(current, {{step.pattern, step.content}});
        break;
      case Kind::kReplaceRegex: {
        RegexMatcher matcher(*step.regex);
        std::string replaced;
        size_t copied = 0, from = 0, begin = 0, end = 0;
        while (from <= current.size()) {
          ASSIGN_OR_RETURN(const bool found, matcher.Find(current, from, &begin, &end));
          if (!found) break;
          replaced.append(current, copied, begin - copied);
          replaced += step.content;
          copied = end;
          from = end;
          if (begin == end) {  // an empty match: the next one starts a character later
            ++from;
            while (from < current.size() && (current[from] & 0xC0) == 0x80) ++from;
          }
        }
        replaced.append(current, copied, std::string::npos);
        current = std::move(replaced);
        break;
      }
    }
  }
  return current;
}

}  // namespace carryover
