#include "client/args.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"

namespace carryover {
namespace {

constexpr size_t kHelpColumn = 30;
constexpr size_t kWidth = 100;

bool IsBool(const ArgTarget& target) {
  return std::holds_alternative<bool*>(target) ||
         std::holds_alternative<std::optional<bool>*>(target);
}

bool ParseValue(absl::string_view text, bool* out) {
  if (text != "true" && text != "false") return false;
  *out = text == "true";
  return true;
}
bool ParseValue(absl::string_view text, int* out) { return absl::SimpleAtoi(text, out); }
bool ParseValue(absl::string_view text, int64_t* out) { return absl::SimpleAtoi(text, out); }
bool ParseValue(absl::string_view text, uint64_t* out) { return absl::SimpleAtoi(text, out); }
bool ParseValue(absl::string_view text, double* out) {
  return absl::SimpleAtod(text, out) && std::isfinite(*out);
}
bool ParseValue(absl::string_view text, std::string* out) {
  *out = std::string(text);
  return true;
}
bool ParseValue(absl::string_view text, std::vector<std::string>* out) {
  out->emplace_back(text);
  return true;
}
bool ParseValue(absl::string_view text, std::vector<int32_t>* out) {
  for (absl::string_view part : absl::StrSplit(text, absl::ByAnyChar(", "), absl::SkipEmpty())) {
    int32_t value;
    if (!absl::SimpleAtoi(part, &value)) return false;
    out->push_back(value);
  }
  return true;
}
template <typename T>
bool ParseValue(absl::string_view text, std::optional<T>* out) {
  T value{};
  if (!ParseValue(text, &value)) return false;
  *out = std::move(value);
  return true;
}

const char* Expected(const ArgTarget& target) {
  return std::visit(
      [](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        if constexpr (std::is_same_v<T, bool> || std::is_same_v<T, std::optional<bool>>) {
          return "true or false";
        } else if constexpr (std::is_same_v<T, double> ||
                             std::is_same_v<T, std::optional<double>>) {
          return "a number";
        } else if constexpr (std::is_same_v<T, std::optional<uint64_t>>) {
          return "a whole number from 0 to 2^64 - 1";
        } else if constexpr (std::is_same_v<T, std::vector<int32_t>>) {
          return "whole numbers with commas between them";
        } else {
          return "a whole number in range";
        }
      },
      target);
}

// Breaks help into lines that start at kHelpColumn.
std::string Wrapped(absl::string_view left, absl::string_view help) {
  std::string out = absl::StrCat("  ", left);
  size_t column = out.size();
  const auto to_column = [&] {
    if (column + 1 >= kHelpColumn) {
      out += '\n';
      column = 0;
    }
    out.append(kHelpColumn - column, ' ');
    column = kHelpColumn;
  };
  to_column();
  bool first = true;
  for (absl::string_view word : absl::StrSplit(help, ' ')) {
    if (!first && column + 1 + word.size() > kWidth) {
      out += '\n';
      column = 0;
      to_column();
      first = true;
    }
    if (!first) absl::StrAppend(&out, " ");
    absl::StrAppend(&out, word);
    column += word.size() + (first ? 0 : 1);
    first = false;
  }
  return out + "\n";
}

}  // namespace

int EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<int> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

Args::Args(std::string command, std::string summary)
    : command_(std::move(command)), summary_(std::move(summary)) {}

void Args::Group(std::string heading) {
  options_.push_back({std::move(heading), static_cast<bool*>(nullptr), "", "", true});
}

void Args::Option(std::string name, ArgTarget target, std::string value, std::string help) {
  options_.push_back({std::move(name), target, std::move(value), std::move(help)});
}

void Args::Positional(std::string name, std::string* target, std::string help) {
  positionals_.push_back({std::move(name), std::move(help), target});
}

void Args::Example(std::string command, std::string help) {
  examples_.push_back({std::move(command), std::move(help)});
}

void Args::Note(std::string text) { absl::StrAppend(&note_, "\n", text, "\n"); }

const Args::Spec* Args::Find(absl::string_view name) const {
  for (const Spec& spec : options_) {
    if (!spec.is_heading && spec.name == name) return &spec;
  }
  return nullptr;
}

absl::Status Args::Unknown(absl::string_view name) const {
  std::string hint;
  int best = 3;  // more edits than that is another word
  for (const Spec& spec : options_) {
    if (spec.is_heading) continue;
    const int distance = EditDistance(name, spec.name);
    if (distance < best) {
      best = distance;
      hint = absl::StrCat("; did you mean --", spec.name, "?");
    }
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown option --", name, hint));
}

absl::Status Args::Parse(const std::vector<std::string>& arguments) {
  size_t positional = 0;
  bool options_ended = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (!options_ended && argument == "--") {
      options_ended = true;
      continue;
    }
    if (!options_ended && (argument == "--help" || argument == "-h")) {
      help_asked_ = true;
      return absl::OkStatus();
    }
    if (options_ended || argument.size() < 2 || argument[0] != '-') {
      if (positional == positionals_.size()) {
        return absl::InvalidArgumentError(absl::StrCat("unexpected argument '", argument, "'"));
      }
      *positionals_[positional++].target = argument;
      continue;
    }
    absl::string_view name = argument;
    if (!absl::ConsumePrefix(&name, "--")) {
      return absl::InvalidArgumentError(
          absl::StrCat("options begin with two dashes: '", argument, "'"));
    }
    std::optional<std::string> value;
    if (const size_t equals = name.find('='); equals != absl::string_view::npos) {
      value = std::string(name.substr(equals + 1));
      name = name.substr(0, equals);
    }
    const Spec* spec = Find(name);
    if (spec == nullptr) return Unknown(name);
    if (!value.has_value()) {
      if (IsBool(spec->target)) {
        value = "true";
      } else if (i + 1 < arguments.size()) {
        value = arguments[++i];
      } else {
        return absl::InvalidArgumentError(
            absl::StrCat("--", spec->name, " needs a value: ", spec->value));
      }
    }
    if (!std::visit([&](auto* target) { return ParseValue(*value, target); }, spec->target)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--", spec->name, " takes ", Expected(spec->target), ", not '", *value, "'"));
    }
  }
  if (positional < positionals_.size()) {
    return absl::InvalidArgumentError(absl::StrCat("missing ", positionals_[positional].left));
  }
  return absl::OkStatus();
}

std::string Args::Help() const {
  std::string out = absl::StrCat(summary_, "\n\nUsage: carryover ", command_);
  for (const Text& text : positionals_) absl::StrAppend(&out, " ", text.left);
  absl::StrAppend(&out, options_.empty() ? "\n" : " [options]\n");
  if (!positionals_.empty()) out += "\n";
  for (const Text& text : positionals_) out += Wrapped(text.left, text.help);
  for (const Spec& spec : options_) {
    if (spec.is_heading) {
      absl::StrAppend(&out, "\n", spec.name, ":\n");
    } else {
      out += Wrapped(absl::StrCat("--", spec.name, spec.value.empty() ? "" : " ", spec.value),
                     spec.help);
    }
  }
  out += "\nAn option that takes no value is turned off with --option=false.\n";
  if (!examples_.empty()) out += "\nExamples:\n";
  for (const Text& text : examples_) {
    absl::StrAppend(&out, "  ", text.left, text.help.empty() ? "" : "\n      ", text.help, "\n");
  }
  return out + note_;
}

}  // namespace carryover
