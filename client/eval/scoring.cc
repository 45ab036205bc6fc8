#include "client/eval/scoring.h"

#include <algorithm>
#include <map>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace carryover::eval {
namespace {

using Words = std::vector<absl::string_view>;

Words WordsOf(absl::string_view text) { return absl::StrSplit(text, ' ', absl::SkipEmpty()); }

double Harmonic(double common, size_t a, size_t b) {
  return common == 0 ? 0 : 2 * common / static_cast<double>(a + b);
}

bool ContainsAnyCase(absl::string_view text, absl::string_view part) {
  return absl::StrContains(absl::AsciiStrToLower(text), absl::AsciiStrToLower(part));
}

// Both normalised: words are between blanks.
bool ContainsWords(absl::string_view text, absl::string_view words) {
  return !words.empty() &&
         absl::StrContains(absl::StrCat(" ", text, " "), absl::StrCat(" ", words, " "));
}

Score ByClass(const Item& item, absl::string_view answer) {
  std::vector<std::string> named;
  for (const std::string& one : item.classes) {
    if (ContainsAnyCase(answer, one)) named.push_back(one);
  }
  // A name within the right one is not another class.
  const auto is_part = [&](const std::string& one) {
    return std::any_of(item.answers.begin(), item.answers.end(), [&](const std::string& right) {
      return one != right && ContainsAnyCase(right, one);
    });
  };
  named.erase(std::remove_if(named.begin(), named.end(), is_part), named.end());
  const bool found =
      std::any_of(item.answers.begin(), item.answers.end(), [&](const std::string& right) {
        return item.classes.empty() ? ContainsAnyCase(answer, right)
                                    : std::count(named.begin(), named.end(), right) > 0;
      });
  Score score;
  score.value = !found ? 0 : named.empty() ? 1 : 1.0 / static_cast<double>(named.size());
  score.right = *score.value == 1;
  return score;
}

}  // namespace

std::string Normalized(absl::string_view text) {
  std::string plain;
  for (const char c : text) {
    if (absl::ascii_ispunct(c)) continue;
    plain += absl::ascii_isspace(c) ? ' ' : absl::ascii_tolower(c);
  }
  Words words = WordsOf(plain);
  words.erase(
      std::remove_if(words.begin(), words.end(),
                     [](absl::string_view w) { return w == "a" || w == "an" || w == "the"; }),
      words.end());
  return absl::StrJoin(words, " ");
}

double WordF1(absl::string_view answer, absl::string_view truth) {
  const Words a = WordsOf(answer), b = WordsOf(truth);
  std::map<absl::string_view, int> left;
  for (absl::string_view word : b) ++left[word];
  double common = 0;
  for (absl::string_view word : a) {
    if (left[word]-- > 0) ++common;
  }
  return Harmonic(common, a.size(), b.size());
}

double RougeL(absl::string_view answer, absl::string_view truth) {
  constexpr size_t kMostWords = 2000;
  Words a = WordsOf(answer), b = WordsOf(truth);
  a.resize(std::min(a.size(), kMostWords));
  b.resize(std::min(b.size(), kMostWords));
  std::vector<int> row(b.size() + 1);
  for (absl::string_view word : a) {
    int diagonal = 0;
    for (size_t j = 1; j <= b.size(); ++j) {
      const int above = row[j];
      row[j] = word == b[j - 1] ? diagonal + 1 : std::max(above, row[j - 1]);
      diagonal = above;
    }
  }
  return Harmonic(row[b.size()], a.size(), b.size());
}

Score ScoreAnswer(const Item& item, absl::string_view answer) {
  Score score;
  const std::string normal = Normalized(answer);
  switch (item.metric) {
    case Metric::kNone:
    case Metric::kToken:
      return score;
    case Metric::kClass:
      return ByClass(item, answer);
    case Metric::kStarts: {
      score.right = std::any_of(item.answers.begin(), item.answers.end(), [&](const auto& right) {
        const std::string words = Normalized(right);
        // A right answer of signs alone has no words to compare.
        if (words.empty()) {
          return absl::StartsWith(absl::StripLeadingAsciiWhitespace(answer),
                                  absl::StripAsciiWhitespace(right));
        }
        return absl::StartsWith(absl::StrCat(normal, " "), absl::StrCat(words, " "));
      });
      score.value = *score.right ? 1 : 0;
      return score;
    }
    case Metric::kShare: {
      double found = 0;
      for (const std::string& right : item.answers) {
        found += ContainsAnyCase(answer, right);
      }
      score.value = found / static_cast<double>(item.answers.size());
      score.right = *score.value == 1;
      return score;
    }
    case Metric::kQa:
    case Metric::kSummary: {
      double best = 0;
      bool contained = false;
      for (const std::string& right : item.answers) {
        const std::string words = Normalized(right);
        best = std::max(best,
                        item.metric == Metric::kQa ? WordF1(normal, words) : RougeL(normal, words));
        contained |= ContainsWords(normal, words);
      }
      score.value = best;
      if (item.metric == Metric::kQa) score.right = contained;
      return score;
    }
  }
  return score;
}

Score ScoreToken(int32_t labelled, const std::vector<int32_t>& tokens) {
  Score score;
  if (labelled < 0) return score;
  score.right = !tokens.empty() && tokens[0] == labelled;
  score.value = *score.right ? 1 : 0;
  return score;
}

}  // namespace carryover::eval
