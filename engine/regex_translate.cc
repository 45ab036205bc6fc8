#include <algorithm>
#include <iterator>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "engine/regex.h"

namespace carryover {
namespace {

// Inside a class. Oniguruma's \s is Unicode's White_Space; PCRE2's also has U+180E.
constexpr char kSpace[] =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
constexpr char kNotSpace[] =
    R"(\x{0}-\x{8}\x{e}-\x{1f}\x{21}-\x{84}\x{86}-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027}\x{202a}-\x{202e}\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{10ffff})";
// Oniguruma's \w: letters, marks, decimal digits, connectors; PCRE2's leaves out some of them.
constexpr char kWord[] = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc})";
constexpr char kHex[] = "0-9A-Fa-f";

// Properties with a long name that are not scripts.
constexpr absl::string_view kBinaryProperties[] = {
    "Alphabetic",  "Any",       "Emoji",     "Extended_Pictographic",
    "Ideographic", "Lowercase", "Uppercase", "White_Space",
};

class Translator {
 public:
  explicit Translator(absl::string_view pattern) : in_(pattern) {}

  absl::StatusOr<std::string> Run() {
    if (in_.substr(0, 4) == "(?i)") Copy(4);
    while (at_ < in_.size()) {
      const char c = in_[at_];
      if (c == '\\') {
        RETURN_IF_ERROR(Escape(/*in_class=*/false));
      } else if (c == '[') {
        RETURN_IF_ERROR(Class());
      } else if (c == '(') {
        RETURN_IF_ERROR(Group());
      } else if (c == '{') {
        RETURN_IF_ERROR(Interval());
      } else {
        Copy(1);
      }
    }
    return std::move(out_);
  }

 private:
  void Copy(size_t count) {
    out_.append(in_.data() + at_, count);
    at_ += count;
  }
  char Peek(size_t ahead) const { return at_ + ahead < in_.size() ? in_[at_ + ahead] : '\0'; }
  absl::Status Refuse(absl::string_view what) const {
    return absl::InvalidArgumentError(
        absl::StrCat("the pattern \"", in_, "\" has ", what, ", which is not supported"));
  }

  // At a backslash.
  absl::Status Escape(bool in_class) {
    const char c = Peek(1);
    const auto set = [&](absl::string_view members, bool negated) {
      absl::StrAppend(&out_, in_class ? "" : negated ? "[^" : "[", members, in_class ? "" : "]");
      at_ += 2;
      return absl::OkStatus();
    };
    switch (c) {
      case '\0':
        return Refuse("a backslash at its end");
      case 's':
        return set(kSpace, false);
      case 'S':
        return set(kNotSpace, false);
      case 'w':
        return set(kWord, false);
      case 'h':
        return set(kHex, false);
      case 'W':
      case 'H':
        if (in_class) return Refuse(absl::StrCat("\\", std::string(1, c), " in a class"));
        return set(c == 'W' ? kWord : kHex, true);
      case 'b':
      case 'B': {
        if (in_class) return Refuse("\\b in a class");
        const std::string word = absl::StrCat("[", kWord, "]");
        const bool boundary = c == 'b';
        absl::StrAppend(&out_, "(?:(?<=", word, ")", boundary ? "(?!" : "(?=", word, ")|(?<!", word,
                        ")", boundary ? "(?=" : "(?!", word, "))");
        at_ += 2;
        return absl::OkStatus();
      }
      case 'p':
      case 'P':
        return Property();
      case 'v':
        out_ += "\\x{b}";
        at_ += 2;
        return absl::OkStatus();
      case 'u':
        return HexEscape(2, 4);
      case 'x':
        if (Peek(2) == '{') {
          Copy(2);
          return absl::OkStatus();
        }
        return HexEscape(2, 2);
      default:
        break;
    }
    const bool digit = absl::ascii_isdigit(c);
    if (absl::ascii_isalpha(c) && absl::string_view("dDnrtfaeAzZ").find(c) == std::string::npos) {
      return Refuse(absl::StrCat("\\", std::string(1, c)));
    }
    if (in_class && (digit || c == 'A' || c == 'z' || c == 'Z')) {
      return Refuse(absl::StrCat("\\", std::string(1, c), " in a class"));
    }
    Copy(2);
    return absl::OkStatus();
  }

  // \uHHHH, and \xHH below 80, where Oniguruma's byte is a character.
  absl::Status HexEscape(size_t skip, size_t digits) {
    const absl::string_view hex = in_.substr(std::min(in_.size(), at_ + skip), digits);
    if (hex.size() != digits || !std::all_of(hex.begin(), hex.end(), absl::ascii_isxdigit)) {
      return Refuse("a malformed hexadecimal escape");
    }
    if (digits == 2 && hex[0] >= '8') return Refuse("a \\x escape of a byte above 7F");
    absl::StrAppend(&out_, "\\x{", hex, "}");
    at_ += skip + digits;
    return absl::OkStatus();
  }

  // \p{Name}, \p{^Name}, \P{Name}. A long name is a script; PCRE2 would take the characters that
  // are used with a script for its own, Oniguruma does not.
  absl::Status Property() {
    const size_t close = in_.find('}', at_);
    if (Peek(2) != '{' || close == absl::string_view::npos) return Refuse("a malformed \\p");
    absl::string_view name = in_.substr(at_ + 3, close - at_ - 3);
    bool negated = Peek(1) == 'P';
    if (!name.empty() && name[0] == '^') {
      negated = !negated;
      name.remove_prefix(1);
    }
    for (const char c : name) {
      if (!absl::ascii_isalnum(c) && c != '_' && c != '&') return Refuse("a malformed \\p");
    }
    const bool binary = std::find(std::begin(kBinaryProperties), std::end(kBinaryProperties),
                                  name) != std::end(kBinaryProperties);
    absl::StrAppend(&out_, negated ? "\\P{" : "\\p{", name.size() > 2 && !binary ? "sc:" : "", name,
                    "}");
    at_ = close + 1;
    return absl::OkStatus();
  }

  // At "[".
  absl::Status Class() {
    Copy(1);
    if (Peek(0) == '^') Copy(1);
    if (Peek(0) == ']') {  // a member, when it comes first
      out_ += "\\]";
      ++at_;
    }
    bool after_set = false;  // so that a hyphen after \s stays a hyphen
    while (at_ < in_.size()) {
      const char c = in_[at_];
      if (c == ']') {
        Copy(1);
        return absl::OkStatus();
      }
      if (c == '[') return Refuse("a class within a class");
      if (c == '&' && Peek(1) == '&') return Refuse("an intersection of classes");
      const bool set =
          c == '\\' && absl::string_view("sSwdDhpP").find(Peek(1)) != std::string::npos;
      if (c == '\\') {
        RETURN_IF_ERROR(Escape(/*in_class=*/true));
      } else if (c == '-' && Peek(1) != ']' &&
                 (after_set || (Peek(1) == '\\' && absl::string_view("sSwdDhpP").find(Peek(2)) !=
                                                       std::string::npos))) {
        return Refuse("a range with a class as its end");
      } else {
        Copy(1);
      }
      after_set = set;
    }
    return Refuse("a class without its end");
  }

  // At "(".
  absl::Status Group() {
    if (Peek(1) == '*') return Refuse("(*");
    if (Peek(1) != '?') {
      Copy(1);
      return absl::OkStatus();
    }
    for (const absl::string_view start :
         {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!", "(?i:", "(?-i:"}) {
      if (in_.substr(at_, start.size()) == start) {
        Copy(start.size());
        return absl::OkStatus();
      }
    }
    return Refuse("a group of an unknown kind");
  }

  // At "{": a repeat count, or the character itself.
  absl::Status Interval() {
    size_t i = at_ + 1;
    const auto digits = [&] {
      const size_t start = i;
      while (i < in_.size() && absl::ascii_isdigit(in_[i])) ++i;
      return in_.substr(start, i - start);
    };
    const absl::string_view least = digits();
    const bool comma = i < in_.size() && in_[i] == ',';
    if (comma) ++i;
    const absl::string_view most = comma ? digits() : absl::string_view();
    if (i >= in_.size() || in_[i] != '}' || (least.empty() && most.empty())) {
      out_ += "\\{";
      ++at_;
      return absl::OkStatus();
    }
    absl::StrAppend(&out_, "{", least.empty() ? "0" : least, comma ? "," : "", most, "}");
    at_ = i + 1;
    // Ruby: repeats the repeat; PCRE2: makes it possessive.
    if (Peek(0) == '+') return Refuse("a + after a repeat count");
    return absl::OkStatus();
  }

  const absl::string_view in_;
  size_t at_ = 0;
  std::string out_;
};

}  // namespace

absl::StatusOr<std::string> TranslateRegex(absl::string_view pattern) {
  return Translator(pattern).Run();
}

std::string EscapeRegex(absl::string_view text) {
  std::string out;
  for (const char c : text) {
    if (absl::ascii_ispunct(c)) out.push_back('\\');
    out.push_back(c);
  }
  return out;
}

}  // namespace carryover
