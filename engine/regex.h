// Regular expressions of tokenizer.json. The reference runs them through Oniguruma with Ruby's
// syntax; here they are translated to PCRE2, compiled with its JIT and bounded, and what cannot be
// translated faithfully is refused. A Regex is immutable and thread-safe; a Matcher belongs to one
// thread.
//
// Character classes follow Unicode 14 (PCRE2 10.42); a character assigned since then counts as
// unassigned.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carryover {

// PCRE2's spelling of an Oniguruma pattern. INVALID_ARGUMENT for what has another meaning there
// or none: nested classes and intersections, POSIX brackets, inline flags in mid-pattern.
absl::StatusOr<std::string> TranslateRegex(absl::string_view pattern);

// A pattern that matches text itself.
std::string EscapeRegex(absl::string_view text);

class Regex {
 public:
  // pattern: in Oniguruma's syntax. INVALID_ARGUMENT when it does not compile.
  static absl::StatusOr<Regex> Compile(absl::string_view pattern);

  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;
  ~Regex();

 private:
  friend class RegexMatcher;
  struct Program;
  explicit Regex(std::unique_ptr<const Program> program);
  std::unique_ptr<const Program> program_;
};

class RegexMatcher {
 public:
  // REQUIRES: regex outlives the matcher.
  explicit RegexMatcher(const Regex& regex);
  ~RegexMatcher();
  RegexMatcher(const RegexMatcher&) = delete;
  RegexMatcher& operator=(const RegexMatcher&) = delete;

  // The first match that starts at from or later; false when there is none. INVALID_ARGUMENT when
  // the text makes the pattern backtrack beyond the limits.
  // REQUIRES: text is valid UTF-8 and from stands at a character's start or at the end.
  absl::StatusOr<bool> Find(absl::string_view text, size_t from, size_t* begin, size_t* end);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace carryover
