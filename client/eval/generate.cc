#include "client/eval/generate.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/eval/phrasing.h"
#include "client/eval/prose.h"

namespace carryover::eval {
namespace {

constexpr int kMostTries = 60;       // to meet a length exactly
constexpr size_t kMostWords = 6000;  // whose tokens are looked at
constexpr size_t kWantedWords = 1200;

// Words that are one token after a blank, and where the style needs it, at the start of a line,
// too.
struct Vocabulary {
  std::vector<std::string> keys, values;
};

absl::StatusOr<Vocabulary> SingleTokenWords(const GenerateOptions& options, const Prose& prose,
                                            Tokens* tokens) {
  Vocabulary out;
  if (!options.keys.empty()) return Vocabulary{options.keys, options.values};
  std::vector<std::string> words;
  std::vector<std::string> candidates = prose.CommonWords();
  candidates.resize(std::min(candidates.size(), kMostWords));
  const bool bare = options.style == Style::kChat;
  for (const std::string& word : candidates) {
    if (words.size() == kWantedWords) break;
    ASSIGN_OR_RETURN(const std::vector<int32_t> spaced, tokens->Encode(" " + word, false));
    if (spaced.size() != 1) continue;
    if (bare) {
      ASSIGN_OR_RETURN(const std::vector<int32_t> alone, tokens->Encode(word, false));
      if (alone.size() != 1) continue;
    }
    words.push_back(word);
  }
  // The commonest words stand in every passage, and a key must stand in the facts alone.
  Draw draw(options.seed ^ 0x776f726473u);
  draw.Shuffle(&words);
  const size_t half = words.size() / 2;
  out.keys.assign(words.begin(), words.begin() + half);
  out.values.assign(words.begin() + half, words.end());
  return out;
}

// A passage of the text with facts in it, one way to ask about it for each question.
class Maker {
 public:
  Maker(const GenerateOptions& options, const Prose& prose, Tokens* tokens, Vocabulary vocabulary)
      : options_(options), prose_(prose), tokens_(*tokens), vocabulary_(std::move(vocabulary)) {}

  absl::StatusOr<std::vector<Item>> MakePrefix(int length, int number, int count) {
    Draw draw(options_.seed * 1000003 + static_cast<uint64_t>(length) * 8191 + number);
    absl::Status last;
    // A part of the text may lack what is needed; then another is tried.
    for (int i = 0; i < 20; ++i) {
      absl::StatusOr<std::vector<Item>> items = Try(length, number, count, &draw);
      if (items.ok() || !absl::IsInvalidArgument(items.status())) return items;
      last = items.status();
    }
    return last;
  }

 private:
  struct Passage {
    size_t begin = 0, end = 0;  // words
  };

  absl::StatusOr<std::vector<Item>> Try(int length, int number, int count, Draw* draw) {
    const Phrasing phrasing = PhrasingOf(options_.kind, options_.style);
    Passage passage;
    // Words for a start; what they give in tokens is seen then.
    size_t words = std::max<size_t>(8, static_cast<size_t>(length * words_per_token_));
    if (prose_.words() < words + 400) {
      return absl::InvalidArgumentError(
          absl::StrCat("text: its ", prose_.words(), " words are too few for ", length, " tokens"));
    }
    passage.begin = draw->Below(prose_.words() - words - 300);
    ASSIGN_OR_RETURN(const Facts facts, DrawFacts(length, passage.begin, words + 300, draw));
    const std::vector<double> places = Places(facts.sentences.size(), draw);
    std::string prefix;
    for (int attempt = 0; attempt < kMostTries; ++attempt) {
      passage.end = passage.begin + words;
      prefix = absl::StrCat(phrasing.head, Body(passage, facts, places), phrasing.tail);
      ASSIGN_OR_RETURN(const std::vector<int32_t> ids, tokens_.Encode(prefix, true));
      const int missing = length - static_cast<int>(ids.size());
      if (missing == 0) {
        ASSIGN_OR_RETURN(std::vector<Item> items,
                         Ask(prefix, ids, passage, facts, number, count, draw));
        if (!items.empty()) return items;
      }
      // Away from where it was: towards the length, or to another beginning nearby.
      const auto step = static_cast<int64_t>(std::lround(missing * words_per_token_));
      if (attempt == 0 && missing != 0) {
        words_per_token_ =
            std::clamp(static_cast<double>(words) / std::max<size_t>(1, ids.size()), 0.1, 2.0);
      }
      const int64_t next = static_cast<int64_t>(words) + (step != 0 ? step : missing > 0 ? 1 : -1);
      if (next < 1) {
        return absl::InvalidArgumentError(absl::StrCat(
            "--lengths: ", length, " tokens are too few for ", facts.sentences.size(), " facts"));
      }
      words = static_cast<size_t>(next);
      if (attempt % 6 == 5) ++passage.begin;
      if (passage.begin + words + 200 > prose_.words()) passage.begin = draw->Below(100);
      if (passage.begin + words + 200 > prose_.words()) {
        return absl::InvalidArgumentError("text: it is too short for this length");
      }
    }
    return absl::InvalidArgumentError(
        absl::StrCat("--lengths: no passage of exactly ", length, " tokens was found"));
  }

  absl::StatusOr<Facts> DrawFacts(int length, size_t begin, size_t words, Draw* draw) {
    if (options_.kind == Kind::kQa || options_.kind == Kind::kText) return Facts();
    const bool demo = options_.style == Style::kDemoOld || options_.style == Style::kDemoNew;
    const int wanted = options_.facts > 0
                           ? options_.facts
                           : std::clamp(length / (demo ? 32 : 128), options_.per_prefix, 256);
    const std::set<std::string> taken = prose_.WordsIn(begin, begin + words);
    std::vector<std::string> keys, values = vocabulary_.values;
    for (const std::string& word : vocabulary_.keys) {
      if (taken.count(word) == 0) keys.push_back(word);
    }
    draw->Shuffle(&keys);
    draw->Shuffle(&values);
    return MakeFacts(options_, wanted, keys, values);
  }

  static std::vector<double> Places(size_t count, Draw* draw) {
    std::vector<double> places(count);
    for (double& place : places) place = static_cast<double>(draw->Next() >> 11) * 0x1p-53;
    std::sort(places.begin(), places.end());
    return places;
  }

  // The facts keep their order and move to the nearest end of a sentence, where the style wants it.
  std::string Body(const Passage& passage, const Facts& facts, const std::vector<double>& places) {
    const bool anywhere = options_.style == Style::kDemoOld || options_.style == Style::kDemoNew;
    std::string out;
    size_t next = 0;
    const size_t words = passage.end - passage.begin;
    const auto due = [&](size_t i) {
      return next < places.size() && places[next] * static_cast<double>(words) <= i;
    };
    for (size_t i = 0; i < words; ++i) {
      const bool here = anywhere || i == 0 || prose_.EndsSentence(passage.begin + i - 1) ||
                        (due(i) && places[next] * static_cast<double>(words) + 40 <= i);
      while (here && due(i)) out += facts.sentences[next++];
      absl::StrAppend(&out, prose_.word(passage.begin + i));
    }
    while (next < places.size()) out += facts.sentences[next++];
    return out;
  }

  // Empty when a question's tokens melt into the prefix.
  absl::StatusOr<std::vector<Item>> Ask(const std::string& prefix, const std::vector<int32_t>& ids,
                                        const Passage& passage, const Facts& facts, int number,
                                        int count, Draw* draw) {
    std::vector<Question> questions;
    if (options_.kind == Kind::kQa) {
      questions = ClozeQuestions(options_.style, prose_, passage.begin, passage.end, count, draw);
    } else if (options_.kind == Kind::kText) {
      questions = ContinuationQuestions(options_.style, prose_, passage.end, count);
    } else {
      questions = facts.questions;
      draw->Shuffle(&questions);
    }
    if (static_cast<int>(questions.size()) < count) {
      return absl::InvalidArgumentError(
          absl::StrCat("--per-prefix: a passage gives only ", questions.size(), " questions"));
    }
    std::vector<Item> items;
    for (int i = 0; i < count; ++i) {
      ASSIGN_OR_RETURN(const std::vector<int32_t> whole,
                       tokens_.Encode(prefix + questions[i].suffix, true));
      if (whole.size() <= ids.size() || !std::equal(ids.begin(), ids.end(), whole.begin())) {
        return std::vector<Item>();
      }
      Item item = ItemOf(options_, questions[i]);
      item.prefix = prefix;
      item.id = absl::StrCat(item.task, "-", ids.size(), "-", number, "-", i);
      items.push_back(std::move(item));
    }
    return items;
  }

  const GenerateOptions& options_;
  const Prose& prose_;
  Tokens& tokens_;
  const Vocabulary vocabulary_;
  double words_per_token_ = 0.7;
};

}  // namespace

absl::StatusOr<std::vector<Item>> GenerateItems(const GenerateOptions& options,
                                                const std::string& text, Tokens* tokens) {
  const Prose prose(text);
  Vocabulary vocabulary;
  if (options.kind != Kind::kQa && options.kind != Kind::kText) {
    ASSIGN_OR_RETURN(vocabulary, SingleTokenWords(options, prose, tokens));
  }
  std::vector<Item> items;
  for (const int32_t length : options.lengths) {
    // For each length anew, so that the others do not move its items.
    Maker maker(options, prose, tokens, vocabulary);
    int made = 0;
    for (int number = 0; made < options.per_length; ++number) {
      const int count = std::min(options.per_prefix, options.per_length - made);
      ASSIGN_OR_RETURN(std::vector<Item> more, maker.MakePrefix(length, number, count));
      made += count;
      for (Item& item : more) items.push_back(std::move(item));
    }
  }
  return items;
}

}  // namespace carryover::eval
