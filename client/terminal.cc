#include "client/terminal.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace carryover {
namespace {

constexpr std::chrono::seconds kQuiet(5);
constexpr std::chrono::milliseconds kRedraw(100);

// Characters on the screen, good enough for our tables: code points.
size_t Width(absl::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
}

bool IsNumber(absl::string_view text) {
  double value;
  return text.empty() || text == "-" || absl::SimpleAtod(text, &value);
}

}  // namespace

void Table::Print(std::ostream& out) const {
  const size_t columns = rows_[0].size();
  std::vector<size_t> width(columns, 0);
  std::vector<bool> right(columns, rows_.size() > 1);
  for (size_t r = 0; r < rows_.size(); ++r) {
    for (size_t c = 0; c < columns; ++c) {
      width[c] = std::max(width[c], Width(rows_[r][c]));
      if (r > 0 && !IsNumber(rows_[r][c])) right[c] = false;
    }
  }
  for (const std::vector<std::string>& row : rows_) {
    std::string line;
    for (size_t c = 0; c < columns; ++c) {
      const std::string padding(width[c] - Width(row[c]), ' ');
      absl::StrAppend(&line, c > 0 ? "  " : "", right[c] ? padding : "", row[c],
                      right[c] ? "" : padding);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out << line << "\n";
  }
}

void Progress::Update(absl::string_view text) {
  const auto now = std::chrono::steady_clock::now();
  if (is_terminal_) {
    if (shown_ && now - last_ < kRedraw) {
      pending_ = std::string(text);
      return;
    }
    out_ << "\r\033[K" << std::string(text) << std::flush;
    shown_ = true;
  } else {
    if (now - last_ < kQuiet) {
      pending_ = std::string(text);
      return;
    }
    out_ << std::string(text) << std::endl;
  }
  pending_.clear();
  last_ = now;
}

void Progress::Finish() {
  if (!pending_.empty()) out_ << (is_terminal_ ? "\r\033[K" : "") << pending_;
  if (shown_ || !pending_.empty()) out_ << std::endl;
  pending_.clear();
  shown_ = false;
}

std::string HumanBytes(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (std::abs(bytes) >= 1024 && unit < 4) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? absl::StrFormat("%.0f B", bytes)
                   : absl::StrFormat("%.1f %s", bytes, units[unit]);
}

std::string HumanSeconds(double seconds) {
  if (seconds < 1) return absl::StrFormat("%.0f ms", seconds * 1e3);
  if (seconds < 60) return absl::StrFormat("%.1f s", seconds);
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  return absl::StrFormat("%d min %02d s", whole / 60, whole % 60);
}

}  // namespace carryover
