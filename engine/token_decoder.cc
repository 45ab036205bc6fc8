#include "engine/token_decoder.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/status_macros.h"
#include "base/utf8.h"
#include "engine/byte_level.h"

namespace carryover {
namespace {

// The byte that a token like <0x0A> stands for, or -1.
int FallbackByte(absl::string_view token) {
  if (token.size() != 6 || !absl::StartsWith(token, "<0x") || token[5] != '>') return -1;
  if (!absl::ascii_isxdigit(token[3]) || !absl::ascii_isxdigit(token[4])) return -1;
  const std::string byte = absl::HexStringToBytes(token.substr(3, 2));
  return static_cast<uint8_t>(byte[0]);
}

}  // namespace

absl::StatusOr<TokenDecoder> TokenDecoder::Parse(const JsonValue& json) {
  TokenDecoder decoder;
  if (json.IsNull()) {
    decoder.join_with_spaces_ = true;
    return decoder;
  }
  RETURN_IF_ERROR(decoder.Add(json));
  return decoder;
}

TokenDecoder TokenDecoder::ForSentencePiece(bool strip_first_space) {
  TokenDecoder decoder;
  decoder.steps_.push_back({Kind::kReplace, "\u2581", " "});
  decoder.steps_.push_back({Kind::kByteFallback});
  decoder.steps_.push_back({Kind::kFuse});
  if (strip_first_space) decoder.steps_.push_back({Kind::kStrip, " ", "", 1, 0});
  return decoder;
}

bool TokenDecoder::Has(Kind kind) const {
  return std::any_of(steps_.begin(), steps_.end(),
                     [&](const Step& step) { return step.kind == kind; });
}

absl::Status TokenDecoder::Add(const JsonValue& json) {
  ASSIGN_OR_RETURN(const std::string type, json.Field("type").String());
  if (type == "Sequence") {
    const JsonValue list = json.Field("decoders");
    if (!list.IsArray()) return list.Error("an array is needed");
    for (size_t i = 0; i < list.size(); ++i) RETURN_IF_ERROR(Add(list.Element(i)));
    return absl::OkStatus();
  }
  // Behind a step that joins tokens there are no tokens any more to work on, only text.
  if ((Has(Kind::kFuse) || Has(Kind::kByteLevel)) && type != "Strip" && type != "Fuse") {
    return json.Error(absl::StrCat("\"", type, "\" is not supported behind Fuse or ByteLevel"));
  }
  if (type == "ByteLevel") {
    steps_.push_back({Kind::kByteLevel});
    return absl::OkStatus();
  }
  if (type == "ByteFallback") {
    steps_.push_back({Kind::kByteFallback});
    return absl::OkStatus();
  }
  if (type == "Fuse") {
    steps_.push_back({Kind::kFuse});
    return absl::OkStatus();
  }
  if (type == "Replace") {
    Step step{Kind::kReplace};
    const JsonValue pattern = json.Field("pattern").Field("String");
    ASSIGN_OR_RETURN(step.pattern, pattern.String());
    if (step.pattern.empty()) return pattern.Error("must not be empty");
    ASSIGN_OR_RETURN(step.content, json.Field("content").String());
    steps_.push_back(std::move(step));
    return absl::OkStatus();
  }
  if (type == "Strip") {
    Step step{Kind::kStrip};
    ASSIGN_OR_RETURN(step.pattern, json.Field("content").String());
    if (step.pattern.size() != 1)
      return json.Field("content").Error("one ASCII character is needed");
    ASSIGN_OR_RETURN(step.start, json.Field("start").Int(0, 1 << 20));
    ASSIGN_OR_RETURN(step.stop, json.Field("stop").Int(0, 1 << 20));
    steps_.push_back(std::move(step));
    return absl::OkStatus();
  }
  if (type == "Metaspace") {
    Step step{Kind::kMetaspace};
    ASSIGN_OR_RETURN(step.pattern, json.Field("replacement").StringOr("\u2581"));
    if (step.pattern.empty()) return json.Field("replacement").Error("one character is needed");
    ASSIGN_OR_RETURN(const bool add_prefix_space, json.Field("add_prefix_space").BoolOr(true));
    ASSIGN_OR_RETURN(const std::string scheme,
                     json.Field("prepend_scheme").StringOr(add_prefix_space ? "always" : "never"));
    step.drop_first = scheme != "never";
    steps_.push_back(std::move(step));
    return absl::OkStatus();
  }
  return json.Field("type").Error(absl::StrCat("\"", type, "\" is not supported"));
}

// One state a step; a step hands what it makes to the next.
class StepsRun : public DecodeRun {
 public:
  explicit StepsRun(const TokenDecoder& decoder)
      : steps_(decoder.steps_),
        join_with_spaces_(decoder.join_with_spaces_),
        states_(decoder.steps_.size()) {
    bool fused = false;
    for (size_t i = 0; i < steps_.size(); ++i) {
      states_[i].fused = fused;
      states_[i].left = steps_[i].start;
      fused |= steps_[i].kind == Kind::kFuse || steps_[i].kind == Kind::kByteLevel;
    }
  }

  void Push(absl::string_view token, std::string* text) override {
    if (join_with_spaces_ && any_) text->push_back(' ');
    any_ = true;
    Step(0, token, text);
  }

  void Finish(std::string* text) override {
    for (size_t i = 0; i < steps_.size(); ++i) FinishStep(i, text);
  }

 private:
  using Kind = TokenDecoder::Kind;
  struct State {
    bool fused = false;  // the tokens before this step were joined to one
    bool any = false;    // a token went through
    size_t left = 0;     // kStrip when fused: characters that may still go at the start
    std::string held;    // bytes of a run or of a split character; what may be stripped at the end
  };

  void Step(size_t i, absl::string_view token, std::string* text) {
    if (i == steps_.size()) {
      text->append(token.data(), token.size());
      return;
    }
    const TokenDecoder::Step& step = steps_[i];
    State& state = states_[i];
    switch (step.kind) {
      case Kind::kFuse:
        return Step(i + 1, token, text);
      case Kind::kReplace:
        return Step(i + 1, absl::StrReplaceAll(token, {{step.pattern, step.content}}), text);
      case Kind::kByteLevel: {
        if (const auto bytes = CharactersToBytes(token)) {
          state.held += *bytes;
        } else {
          state.held.append(token.data(), token.size());
        }
        const size_t whole = state.held.size() - IncompleteUtf8Suffix(state.held);
        if (whole == 0) return;
        const std::string part = ReplaceInvalidUtf8(absl::string_view(state.held).substr(0, whole));
        state.held.erase(0, whole);
        return Step(i + 1, part, text);
      }
      case Kind::kByteFallback: {
        if (const int byte = FallbackByte(token); byte >= 0) {
          state.held.push_back(static_cast<char>(byte));
          return;
        }
        FlushBytes(i, text);
        return Step(i + 1, token, text);
      }
      case Kind::kMetaspace: {
        const bool drop = !state.any && step.drop_first;
        state.any = true;
        return Step(i + 1, absl::StrReplaceAll(token, {{step.pattern, drop ? "" : " "}}), text);
      }
      case Kind::kStrip:
        return Strip(i, token, text);
    }
  }

  void FinishStep(size_t i, std::string* text) {
    State& state = states_[i];
    switch (steps_[i].kind) {
      case Kind::kByteFallback:
        return FlushBytes(i, text);
      case Kind::kByteLevel:
        if (!state.held.empty()) Step(i + 1, ReplaceInvalidUtf8(state.held), text);
        state.held.clear();
        return;
      default:
        return;  // what a Strip holds back at the end is what it strips
    }
  }

  // A run of bytes is text when all of it is UTF-8, and else a mark for every byte of it: only at
  // its end can one tell.
  void FlushBytes(size_t i, std::string* text) {
    std::string run = std::move(states_[i].held);
    states_[i].held.clear();
    if (run.empty()) return;
    if (FirstInvalidUtf8(run) == run.size()) return Step(i + 1, run, text);
    for (size_t n = 0; n < run.size(); ++n) Step(i + 1, "\uFFFD", text);
  }

  void Strip(size_t i, absl::string_view token, std::string* text) {
    const TokenDecoder::Step& step = steps_[i];
    State& state = states_[i];
    const char content = step.pattern[0];
    if (!state.fused) {
      size_t begin = 0, end = token.size();
      while (begin < std::min(step.start, token.size()) && token[begin] == content) ++begin;
      while (token.size() - end < step.stop && end > begin && token[end - 1] == content) --end;
      return Step(i + 1, token.substr(begin, end - begin), text);
    }
    while (state.left > 0 && !token.empty()) {
      if (token[0] != content) {
        state.left = 0;
        break;
      }
      token.remove_prefix(1);
      --state.left;
    }
    // Up to `stop` of the content's characters at the end may still be the text's last.
    state.held.append(token.data(), token.size());
    size_t tail = 0;
    while (tail < std::min(step.stop, state.held.size()) &&
           state.held[state.held.size() - 1 - tail] == content) {
      ++tail;
    }
    const std::string out = state.held.substr(0, state.held.size() - tail);
    state.held.erase(0, out.size());
    if (!out.empty()) Step(i + 1, out, text);
  }

  const std::vector<TokenDecoder::Step>& steps_;
  const bool join_with_spaces_;
  bool any_ = false;
  std::vector<State> states_;
};

std::unique_ptr<DecodeRun> TokenDecoder::NewRun() const {
  return std::make_unique<StepsRun>(*this);
}

}  // namespace carryover
