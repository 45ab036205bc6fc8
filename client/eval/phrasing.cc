#include "client/eval/phrasing.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace carryover::eval {
namespace {

constexpr const char* kKinds[] = {"kv", "hops", "needles", "qa", "text"};
constexpr const char* kStyles[] = {"plain", "chat", "demo-2026-10", "demo-2026-11"};

constexpr size_t kShownWords = 7;   // of a sentence's beginning
constexpr size_t kAnswerWords = 3;  // that follow it

std::string UserTurn(absl::string_view text) {
  return absl::StrCat("<|im_start|>user\n", text, "<|im_end|>\n<|im_start|>assistant\n");
}

bool IsDemo(Style style) { return style == Style::kDemoOld || style == Style::kDemoNew; }

std::string Fact(Style style, const std::string& key, const std::string& value) {
  switch (style) {
    case Style::kPlain:
      return absl::StrCat(" The code for ", key, " is ", value, ".");
    case Style::kChat:
      return absl::StrCat("\nNote: the password of the ", key, " is ", value, ".\n");
    case Style::kDemoOld:
      return absl::StrCat("\n- ", key, " ", value);
    case Style::kDemoNew:
      return absl::StrCat(" ", key, " ", value, ";");
  }
  return "";
}

std::string SameFact(Style style, const std::string& key, const std::string& other) {
  if (IsDemo(style)) return Fact(style, key, other);
  return style == Style::kPlain
             ? absl::StrCat(" The code for ", key, " is the same as the code for ", other, ".")
             : absl::StrCat("\nNote: the password of the ", key, " is that of the ", other, ".\n");
}

Question Ask(Style style, const std::string& key, std::vector<std::string> answers) {
  Question question;
  question.label = absl::StrCat(style == Style::kChat ? "" : " ", answers[0]);
  question.answers = std::move(answers);
  switch (style) {
    case Style::kPlain:
      question.suffix = absl::StrCat("\n\nQuestion: What is the code for ", key,
                                     "?\nAnswer: The code for ", key, " is");
      question.stop = {"\n"};
      break;
    case Style::kChat:
      question.suffix = UserTurn(absl::StrCat("What is the password of the ", key, "?"));
      break;
    case Style::kDemoOld:
      question.suffix = absl::StrCat("\nRecall:\n- ", key);
      question.stop = {"\n"};
      break;
    case Style::kDemoNew:
      question.suffix = absl::StrCat("<|assistant|> ", key);
      break;
  }
  return question;
}

Question AskAll(Style style, const std::string& key, const std::vector<std::string>& values) {
  Question question = Ask(style, key, values);
  if (style == Style::kPlain) {
    question.suffix = absl::StrCat("\n\nQuestion: What are all the codes for ", key,
                                   "?\nAnswer: The codes for ", key, " are");
  } else {
    question.suffix = UserTurn(absl::StrCat("What are all the passwords of the ", key, "?"));
  }
  question.label.clear();  // any of them may come first
  return question;
}

absl::Status TooFew(const char* what, size_t have) {
  return absl::InvalidArgumentError(absl::StrCat(
      "text: it gives only ", have, " single-token words for ", what, "; fewer --facts need less"));
}

}  // namespace

absl::StatusOr<Kind> KindFromName(absl::string_view name) {
  for (size_t i = 0; i < std::size(kKinds); ++i) {
    if (name == kKinds[i]) return static_cast<Kind>(i);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("KIND must be kv, hops, needles, qa or text, not '", name, "'"));
}

absl::StatusOr<Style> StyleFromName(absl::string_view name) {
  for (size_t i = 0; i < std::size(kStyles); ++i) {
    if (name == kStyles[i]) return static_cast<Style>(i);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--style must be plain, chat, demo-2026-10 or demo-2026-11, not '", name, "'"));
}

Phrasing PhrasingOf(Kind kind, Style style) {
  const bool noted = kind != Kind::kQa && kind != Kind::kText;
  switch (style) {
    case Style::kPlain:
      return {};
    case Style::kChat:
      return {absl::StrCat("<|im_start|>system\nYou are a careful assistant. Answer from the text, "
                           "as briefly as it allows.<|im_end|>\n<|im_start|>user\n",
                           kind == Kind::kText ? "Go on with this text.\n" : "Read this.\n"),
              kind == Kind::kText ? "" : "\n<|im_end|>\n<|im_start|>assistant\nRead.<|im_end|>\n"};
    case Style::kDemoOld:
      return {noted ? "<|endoftext|>Notes:" : "<|endoftext|>", ""};
    case Style::kDemoNew:
      return {noted ? "<|endoftext|><|user|> Remember this." : "<|endoftext|>", ""};
  }
  return {};
}

absl::StatusOr<Facts> MakeFacts(const GenerateOptions& options, int wanted,
                                const std::vector<std::string>& keys,
                                const std::vector<std::string>& values) {
  Facts facts;
  const Style style = options.style;
  size_t key = 0, value = 0;
  if (options.kind == Kind::kKv || (options.kind == Kind::kNeedles && IsDemo(style))) {
    const auto count = static_cast<size_t>(wanted);
    if (keys.size() < count) return TooFew("keys", keys.size());
    if (values.size() < count) return TooFew("values", values.size());
    for (size_t i = 0; i < count; ++i) {
      facts.sentences.push_back(Fact(style, keys[i], values[i]));
      facts.questions.push_back(Ask(style, keys[i], {values[i]}));
    }
    if (options.kind == Kind::kKv) return facts;
    // The demo pair knows one value a key: here several keys are asked about in one go, the last
    // after the others and their answers, as it was trained.
    std::vector<Question> several;
    for (size_t i = 0; i < count; ++i) {
      Question question = facts.questions[i];
      std::string before;
      for (int j = options.needles - 1; j > 0; --j) {
        const size_t other = (i + j) % count;
        before += style == Style::kDemoOld
                      ? absl::StrCat("\n- ", keys[other], " ", values[other])
                      : absl::StrCat("<|assistant|> ", keys[other], " ", values[other], "<|user|>");
      }
      question.suffix = style == Style::kDemoOld
                            ? absl::StrCat("\nRecall:", before, "\n- ", keys[i])
                            : absl::StrCat(before, question.suffix);
      several.push_back(std::move(question));
    }
    facts.questions = std::move(several);
    return facts;
  }
  if (options.kind == Kind::kNeedles) {
    const int count = std::max(options.per_prefix, wanted / options.needles);
    if (keys.size() < static_cast<size_t>(count)) return TooFew("keys", keys.size());
    if (values.size() < static_cast<size_t>(count) * options.needles) {
      return TooFew("values", values.size());
    }
    for (int i = 0; i < count; ++i) {
      const std::vector<std::string> of_key(values.begin() + value,
                                            values.begin() + value + options.needles);
      value += options.needles;
      facts.questions.push_back(AskAll(style, keys[i], of_key));
    }
    // Values of one key stand apart: one of each key, then another of each.
    for (int j = 0; j < options.needles; ++j) {
      for (int i = 0; i < count; ++i) {
        const std::string& one = values[i * options.needles + j];
        facts.sentences.push_back(
            style == Style::kPlain
                ? absl::StrCat(" One of the codes for ", keys[i], " is ", one, ".")
                : absl::StrCat("\nNote: one of the passwords of the ", keys[i], " is ", one,
                               ".\n"));
      }
    }
    return facts;
  }
  const int chains = std::max(options.per_prefix, wanted / options.hops);
  if (keys.size() < static_cast<size_t>(chains) * options.hops) return TooFew("keys", keys.size());
  if (values.size() < static_cast<size_t>(chains)) return TooFew("values", values.size());
  std::vector<std::vector<std::string>> steps(options.hops);
  for (int i = 0; i < chains; ++i) {
    for (int j = 0; j < options.hops; ++j) {
      // The last key of a chain has the value; the first one is asked for.
      const std::string& name = keys[key + j];
      steps[j].push_back(j + 1 == options.hops ? Fact(style, name, values[i])
                                               : SameFact(style, name, keys[key + j + 1]));
    }
    facts.questions.push_back(Ask(style, keys[key], {values[i]}));
    key += options.hops;
  }
  for (const auto& step : steps) {
    facts.sentences.insert(facts.sentences.end(), step.begin(), step.end());
  }
  return facts;
}

std::vector<Question> ClozeQuestions(Style style, const Prose& prose, size_t begin, size_t end,
                                     int count, Draw* draw) {
  std::vector<size_t> starts;
  for (size_t i = begin + 1; i + kShownWords + kAnswerWords < end; ++i) {
    if (!prose.EndsSentence(i - 1)) continue;
    bool one_sentence = true;
    for (size_t j = i; j < i + kShownWords + kAnswerWords - 1; ++j) {
      one_sentence = one_sentence && !prose.EndsSentence(j);
    }
    if (one_sentence) starts.push_back(i);
  }
  draw->Shuffle(&starts);
  const std::string passage = prose.Join(begin, end);
  std::vector<Question> out;
  for (const size_t start : starts) {
    if (static_cast<int>(out.size()) == count) break;
    const std::string shown = prose.Join(start, start + kShownWords);
    const size_t first = passage.find(shown);
    if (first == std::string::npos || passage.find(shown, first + 1) != std::string::npos) continue;
    const std::string answer = prose.Join(start + kShownWords, start + kShownWords + kAnswerWords);
    const std::string words(absl::StripAsciiWhitespace(shown));
    Question question;
    question.answers = {std::string(absl::StripAsciiWhitespace(answer))};
    question.label = answer;
    if (style == Style::kChat) {
      question.suffix = UserTurn(absl::StrCat("Which words follow \"", words, "\" in the text?"));
      question.label = question.answers[0];
    } else if (IsDemo(style)) {
      question.suffix = absl::StrCat("\n", words);
    } else {
      question.suffix = absl::StrCat(
          "\n\nQuestion: How does the sentence in the text go on that "
          "begins \"",
          words, "\"?\nAnswer: \"", words);
    }
    question.stop = {"\n"};
    out.push_back(std::move(question));
  }
  return out;
}

std::vector<Question> ContinuationQuestions(Style style, const Prose& prose, size_t end,
                                            int count) {
  constexpr size_t kWords = 12;
  std::vector<Question> out;
  for (int i = 0; i < count; ++i) {
    const size_t stop = end + (i + 1) * kWords;
    if (stop > prose.words()) break;
    Question question;
    question.suffix = prose.Join(end, stop);
    if (style == Style::kChat) question.suffix += "<|im_end|>\n<|im_start|>assistant\n";
    out.push_back(std::move(question));
  }
  return out;
}

Item ItemOf(const GenerateOptions& options, const Question& question) {
  Item item;
  item.task =
      !options.task.empty()
          ? options.task
          : absl::StrCat(
                kKinds[static_cast<int>(options.kind)], options.style == Style::kPlain ? "" : "-",
                options.style == Style::kPlain ? "" : kStyles[static_cast<int>(options.style)]);
  item.suffix = question.suffix;
  item.answers = question.answers;
  item.label = question.label;
  item.stop = question.stop;
  switch (options.kind) {
    case Kind::kKv:
      item.metric = IsDemo(options.style) ? Metric::kToken : Metric::kStarts;
      item.max_tokens = IsDemo(options.style) ? 4 : 8;
      break;
    case Kind::kHops:
      item.metric = Metric::kShare;
      item.max_tokens = 16;
      break;
    case Kind::kNeedles:
      item.metric = IsDemo(options.style) ? Metric::kToken : Metric::kShare;
      item.max_tokens = IsDemo(options.style) ? 4 : 32;
      break;
    case Kind::kQa:
      item.metric = Metric::kQa;
      item.max_tokens = 12;
      break;
    case Kind::kText:
      item.metric = Metric::kNone;
      item.max_tokens = 32;
      break;
  }
  if (options.max_tokens > 0) item.max_tokens = options.max_tokens;
  return item;
}

}  // namespace carryover::eval
