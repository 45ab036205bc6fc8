// Options of one command: declared once, they give parsing, --help and the error messages.
//
//   Args args("promote", "Changes which version serves.");
//   args.Option("share", &share, "PERCENT", "part of the traffic");
//   args.Example("carryover promote --version 2026-11", "all traffic at once");
//   absl::Status status = args.Parse(argc, argv);
//
// An option is given as --name VALUE or --name=VALUE; a bool as --name or --name=false. A list may
// be repeated. `--` ends the options. One thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace carryover {

// Where a value goes. An optional stays empty when the option is not given, so that a zero that
// was given differs from a default. int and int64 refuse fractions and values out of their range.
using ArgTarget =
    std::variant<bool*, std::optional<bool>*, int*, std::optional<int>*, int64_t*,
                 std::optional<uint64_t>*, double*, std::optional<double>*, std::string*,
                 std::optional<std::string>*, std::vector<std::string>*, std::vector<int32_t>*>;

class Args {
 public:
  Args(std::string command, std::string summary);

  // A heading in the help above the options that follow.
  void Group(std::string heading);
  // value names the value in the help; empty for a bool.
  void Option(std::string name, ArgTarget target, std::string value, std::string help);
  // A word without dashes that must be given, in this order.
  void Positional(std::string name, std::string* target, std::string help);
  void Example(std::string command, std::string help);
  // Free text at the end of the help.
  void Note(std::string text);

  // arguments: what follows the command's name. Does not look at the targets' old values. Errors
  // are INVALID_ARGUMENT and name the option. Sets help_asked at --help or -h and then stops.
  absl::Status Parse(const std::vector<std::string>& arguments);
  const std::string& command() const { return command_; }
  bool help_asked() const { return help_asked_; }
  std::string Help() const;

 private:
  struct Spec {
    std::string name;
    ArgTarget target;
    std::string value;
    std::string help;
    bool is_heading = false;
  };
  struct Text {
    std::string left;
    std::string help;
    std::string* target = nullptr;
  };

  const Spec* Find(absl::string_view name) const;
  absl::Status Unknown(absl::string_view name) const;

  std::string command_;
  std::string summary_;
  std::vector<Spec> options_;
  std::vector<Text> positionals_;
  std::vector<Text> examples_;
  std::string note_;
  bool help_asked_ = false;
};

// How many single-letter edits lie between two words. For "did you mean".
int EditDistance(absl::string_view a, absl::string_view b);

}  // namespace carryover
