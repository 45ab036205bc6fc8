#include "client/eval/prose.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace carryover::eval {
namespace {

// The letters of a word, in lower case; signs around them fall away.
std::string Bare(absl::string_view word) {
  std::string out;
  for (const char c : word) {
    if (absl::ascii_isalpha(c) || static_cast<unsigned char>(c) >= 0x80) {
      out += absl::ascii_tolower(c);
    }
  }
  return out;
}

}  // namespace

uint64_t Draw::Next() {
  state_ += 0x9e3779b97f4a7c15u;  // SplitMix64
  uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

Prose::Prose(std::string text) : text_(std::move(text)) {
  size_t begin = 0;
  while (begin < text_.size()) {
    size_t end = begin;
    while (end < text_.size() && absl::ascii_isspace(text_[end])) ++end;
    if (end == text_.size()) break;
    while (end < text_.size() && !absl::ascii_isspace(text_[end])) ++end;
    words_.push_back(absl::string_view(text_).substr(begin, end - begin));
    begin = end;
  }
}

std::string Prose::Join(size_t begin, size_t end) const {
  std::string out;
  for (size_t i = begin; i < end; ++i) absl::StrAppend(&out, words_[i]);
  return out;
}

bool Prose::EndsSentence(size_t i) const {
  const char last = words_[i].back();
  return last == '.' || last == '!' || last == '?';
}

std::vector<std::string> Prose::CommonWords() const {
  std::map<std::string, int> counts;
  for (absl::string_view word : words_) {
    word = absl::StripAsciiWhitespace(word);
    if (word.size() >= 4 && std::all_of(word.begin(), word.end(), absl::ascii_islower)) {
      ++counts[std::string(word)];
    }
  }
  std::vector<std::pair<int, std::string>> order;
  for (const auto& [word, count] : counts) {
    if (count >= 2) order.emplace_back(-count, word);
  }
  std::sort(order.begin(), order.end());
  std::vector<std::string> out;
  for (const auto& [count, word] : order) out.push_back(word);
  return out;
}

std::set<std::string> Prose::WordsIn(size_t begin, size_t end) const {
  std::set<std::string> out;
  for (size_t i = begin; i < end; ++i) out.insert(Bare(words_[i]));
  return out;
}

}  // namespace carryover::eval
