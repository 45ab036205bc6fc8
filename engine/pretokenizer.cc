#include "engine/pretokenizer.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/status_macros.h"
#include "engine/byte_level.h"

namespace carryover {
namespace {

// GPT-2's words, from its published encoder: contractions, letters, numbers, other marks, each
// with the space before it; white space keeps its last space for the word that follows.
constexpr char kGpt2Pattern[] =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

absl::StatusOr<std::shared_ptr<const Regex>> Compile(absl::string_view pattern,
                                                     const JsonValue& field) {
  auto regex = Regex::Compile(pattern);
  if (!regex.ok()) return field.Error(regex.status().message());
  return std::make_shared<const Regex>(std::move(*regex));
}

}  // namespace

absl::StatusOr<PreTokenizer> PreTokenizer::Parse(const JsonValue& json) {
  PreTokenizer pre_tokenizer;
  RETURN_IF_ERROR(pre_tokenizer.Add(json));
  std::vector<Step>& steps = pre_tokenizer.steps_;
  if (!steps.empty() && steps.back().kind == Kind::kMapBytes) {
    steps.pop_back();
    pre_tokenizer.ends_in_bytes_ = true;
  }
  return pre_tokenizer;
}

absl::Status PreTokenizer::Add(const JsonValue& json) {
  if (json.IsNull()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::string type, json.Field("type").String());
  if (type == "Sequence") {
    const JsonValue list = json.Field("pretokenizers");
    if (!list.IsArray()) return list.Error("an array is needed");
    for (size_t i = 0; i < list.size(); ++i) RETURN_IF_ERROR(Add(list.Element(i)));
    return absl::OkStatus();
  }
  if (type == "ByteLevel") {
    ASSIGN_OR_RETURN(const bool add_prefix_space, json.Field("add_prefix_space").BoolOr(true));
    ASSIGN_OR_RETURN(const bool use_regex, json.Field("use_regex").BoolOr(true));
    if (add_prefix_space) steps_.push_back({Kind::kPrefixSpace});
    if (use_regex) {
      ASSIGN_OR_RETURN(auto regex, Compile(kGpt2Pattern, json));
      steps_.push_back({Kind::kSplit, std::move(regex)});
    }
    steps_.push_back({Kind::kMapBytes});
    return absl::OkStatus();
  }
  if (type == "Split" || type == "Digits") return AddSplit(json, type);
  if (type == "Metaspace") return AddMetaspace(json);
  return json.Field("type").Error(absl::StrCat("\"", type, "\" is not supported"));
}

absl::Status PreTokenizer::AddSplit(const JsonValue& json, absl::string_view type) {
  if (type == "Digits") {
    ASSIGN_OR_RETURN(const bool individual, json.Field("individual_digits").BoolOr(false));
    ASSIGN_OR_RETURN(auto regex, Compile(individual ? R"(\p{N})" : R"(\p{N}+)", json));
    steps_.push_back({Kind::kSplit, std::move(regex)});
    return absl::OkStatus();
  }
  Step step{Kind::kSplit};
  ASSIGN_OR_RETURN(step.invert, json.Field("invert").BoolOr(false));
  ASSIGN_OR_RETURN(const std::string behavior, json.Field("behavior").String());
  if (behavior == "Removed") {
    step.behavior = Behavior::kRemoved;
  } else if (behavior == "Isolated") {
    step.behavior = Behavior::kIsolated;
  } else if (behavior == "Contiguous") {
    step.behavior = Behavior::kContiguous;
  } else if (behavior == "MergedWithPrevious") {
    step.behavior = Behavior::kMergedWithPrevious;
  } else if (behavior == "MergedWithNext") {
    step.behavior = Behavior::kMergedWithNext;
  } else {
    return json.Field("behavior").Error(absl::StrCat("\"", behavior, "\" is not known"));
  }
  const JsonValue pattern = json.Field("pattern");
  const bool plain = !pattern.Field("String").IsNull();
  const JsonValue field = pattern.Field(plain ? "String" : "Regex");
  ASSIGN_OR_RETURN(const std::string source, field.String());
  ASSIGN_OR_RETURN(step.regex, Compile(plain ? EscapeRegex(source) : source, field));
  steps_.push_back(std::move(step));
  return absl::OkStatus();
}

absl::Status PreTokenizer::AddMetaspace(const JsonValue& json) {
  Step step{Kind::kMetaspace};
  ASSIGN_OR_RETURN(step.replacement, json.Field("replacement").StringOr("\u2581"));
  if (step.replacement.empty() || step.replacement.size() > 4) {
    return json.Field("replacement").Error("one character is needed");
  }
  ASSIGN_OR_RETURN(const bool add_prefix_space, json.Field("add_prefix_space").BoolOr(true));
  ASSIGN_OR_RETURN(const std::string scheme,
                   json.Field("prepend_scheme").StringOr(add_prefix_space ? "always" : "never"));
  if (scheme == "always") {
    step.prepend = Prepend::kAlways;
  } else if (scheme == "first") {
    step.prepend = Prepend::kFirst;
  } else if (scheme == "never") {
    step.prepend = Prepend::kNever;
  } else {
    return json.Field("prepend_scheme").Error(absl::StrCat("\"", scheme, "\" is not known"));
  }
  ASSIGN_OR_RETURN(const bool split, json.Field("split").BoolOr(true));
  Step words{Kind::kSplit};
  words.behavior = Behavior::kMergedWithNext;
  if (split) {
    ASSIGN_OR_RETURN(words.regex, Compile(EscapeRegex(step.replacement), json));
  }
  steps_.push_back(std::move(step));
  if (split) steps_.push_back(std::move(words));
  return absl::OkStatus();
}

absl::Status PreTokenizer::RunSplit(const Step& step, const std::vector<Word>& words,
                                    std::vector<Word>* out) {
  RegexMatcher matcher(*step.regex);
  struct Span {
    size_t begin, end;
    bool match;
  };
  std::vector<Span> spans;
  for (const Word& word : words) {
    const absl::string_view text = word.text;
    const auto emit = [&](size_t begin, size_t end) {
      if (begin == end) return;
      out->push_back({text.substr(begin, end - begin), word.at_start && begin == 0});
    };
    spans.clear();
    const bool isolated = step.behavior == Behavior::kIsolated;
    const auto add = [&](size_t begin, size_t end, bool match) {
      if (isolated) {
        emit(begin, end);
      } else {
        spans.push_back({begin, end, match != step.invert});
      }
    };
    size_t done = 0, from = 0, begin = 0, end = 0;
    bool any = false;
    while (from <= text.size()) {
      ASSIGN_OR_RETURN(const bool found, matcher.Find(text, from, &begin, &end));
      if (!found) break;
      const bool empty = begin == end;
      // An empty match right behind another match does not count.
      if (!empty || !any || begin != done) {
        if (done != begin) add(done, begin, false);
        add(begin, end, true);
        done = end;
        any = true;
      }
      from = end;
      if (empty) {
        ++from;
        while (from < text.size() && (text[from] & 0xC0) == 0x80) ++from;
      }
    }
    if (done != text.size()) add(done, text.size(), false);

    // A span joins its neighbour where the behaviour says so. For MergedWithNext the same is done
    // from the end.
    switch (step.behavior) {
      case Behavior::kIsolated:
        break;
      case Behavior::kRemoved:
        for (const Span& span : spans) {
          if (!span.match) emit(span.begin, span.end);
        }
        break;
      case Behavior::kContiguous:
      case Behavior::kMergedWithPrevious: {
        size_t start = 0, stop = 0;
        bool previous = false, open = false;
        for (const Span& span : spans) {
          const bool join = step.behavior == Behavior::kContiguous ? span.match == previous
                                                                   : span.match && !previous;
          if (open && !join) emit(start, stop);
          if (!open || !join) start = span.begin;
          stop = span.end;
          open = true;
          previous = span.match;
        }
        if (open) emit(start, stop);
        break;
      }
      case Behavior::kMergedWithNext: {
        // A match joins what follows it unless that is a match, too.
        size_t start = 0;
        for (size_t i = 0; i < spans.size(); ++i) {
          const bool last = i + 1 == spans.size();
          if (!last && spans[i].match && !spans[i + 1].match) continue;
          emit(spans[start].begin, spans[i].end);
          start = i + 1;
        }
        break;
      }
    }
  }
  return absl::OkStatus();
}

void PreTokenizer::RunMetaspace(const Step& step, std::vector<Word>* words,
                                std::deque<std::string>* storage) {
  for (Word& word : *words) {
    std::string text = absl::StrReplaceAll(word.text, {{" ", step.replacement}});
    const bool prepend =
        step.prepend == Prepend::kAlways || (step.prepend == Prepend::kFirst && word.at_start);
    if (prepend && !absl::StartsWith(text, step.replacement)) text.insert(0, step.replacement);
    word.text = storage->emplace_back(std::move(text));
  }
}

absl::Status PreTokenizer::Run(std::vector<Word>* words, std::deque<std::string>* storage) const {
  for (const Step& step : steps_) {
    switch (step.kind) {
      case Kind::kSplit: {
        std::vector<Word> out;
        out.reserve(words->size());
        RETURN_IF_ERROR(RunSplit(step, *words, &out));
        words->swap(out);
        break;
      }
      case Kind::kPrefixSpace:
        for (Word& word : *words) {
          if (absl::StartsWith(word.text, " ")) continue;
          word.text = storage->emplace_back(absl::StrCat(" ", word.text));
        }
        break;
      case Kind::kMapBytes:
        for (Word& word : *words) word.text = storage->emplace_back(BytesToCharacters(word.text));
        break;
      case Kind::kMetaspace:
        RunMetaspace(step, words, storage);
        break;
    }
  }
  return absl::OkStatus();
}

}  // namespace carryover
