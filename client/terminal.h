// Tables and progress for people.
#pragma once

#include <chrono>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace carryover {

// Columns padded to their widest cell, two spaces apart; a column whose cells are all numbers is
// set to the right. The first row is the heading.
class Table {
 public:
  explicit Table(std::vector<std::string> heading) : rows_{std::move(heading)} {}
  // As many cells as the heading has.
  void Row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  void Print(std::ostream& out) const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// A line that is overwritten on a terminal; elsewhere one line every few seconds, and the last.
class Progress {
 public:
  Progress(std::ostream& out, bool is_terminal) : out_(out), is_terminal_(is_terminal) {}
  // Ends the line, so that an error after it starts on its own.
  ~Progress() { Finish(); }
  void Update(absl::string_view text);
  void Finish();

 private:
  std::ostream& out_;
  bool is_terminal_;
  std::string pending_;  // not shown yet
  bool shown_ = false;   // an open line is on the terminal
  std::chrono::steady_clock::time_point last_{};
};

std::string HumanBytes(double bytes);      // "12.3 MiB"
std::string HumanSeconds(double seconds);  // "850 ms", "12.3 s", "3 min 05 s"

}  // namespace carryover
