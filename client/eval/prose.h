// A real text in words, and drawing parts of it. One thread.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace carryover::eval {

// Numbers from a seed, the same on every machine.
class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(seed) {}
  uint64_t Next();
  // From 0 to n - 1. REQUIRES: n > 0.
  size_t Below(size_t n) { return static_cast<size_t>(((Next() >> 32) * n) >> 32); }
  template <typename T>
  void Shuffle(std::vector<T>* values) {
    for (size_t i = values->size(); i > 1; --i) std::swap((*values)[i - 1], (*values)[Below(i)]);
  }

 private:
  uint64_t state_;
};

class Prose {
 public:
  explicit Prose(std::string text);
  Prose(const Prose&) = delete;
  Prose& operator=(const Prose&) = delete;

  // Each word has the white space before it, so that words one after another are the text.
  size_t words() const { return words_.size(); }
  absl::string_view word(size_t i) const { return words_[i]; }
  std::string Join(size_t begin, size_t end) const;
  // Whether a sentence ends with the word.
  bool EndsSentence(size_t i) const;
  // Lower-case words of at least four letters a to z that stand at least twice, commonest first.
  std::vector<std::string> CommonWords() const;
  // Lower-case words of a part.
  std::set<std::string> WordsIn(size_t begin, size_t end) const;

 private:
  std::string text_;
  std::vector<absl::string_view> words_;
};

}  // namespace carryover::eval
