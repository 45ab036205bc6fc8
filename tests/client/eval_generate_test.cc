// Generated tasks: exact lengths, answers that stand in the text, the same from the same seed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/eval/generate.h"
#include "client/eval/prose.h"
#include "client/eval/scoring.h"

namespace carryover::eval {
namespace {

// A word of letters with the blank before it is a token, but a long one is two; <|...|> is one;
// all else one a character. Begins with a token of its own.
class WordTokens : public Tokens {
 public:
  absl::StatusOr<std::vector<int32_t>> Encode(const std::string& text, bool special) override {
    std::vector<int32_t> out;
    if (special) out.push_back(0);
    for (size_t i = 0; i < text.size();) {
      size_t end = i + 1;
      if (absl::StartsWith(absl::string_view(text).substr(i), "<|")) {
        end = text.find("|>", i) + 2;
      } else if (absl::ascii_isalpha(text[i]) || text[i] == ' ') {
        while (end < text.size() && end < i + 9 && absl::ascii_isalpha(text[end])) ++end;
      }
      out.push_back(ids_.emplace(text.substr(i, end - i), static_cast<int32_t>(ids_.size()) + 1)
                        .first->second);
      i = end;
    }
    return out;
  }

 private:
  std::map<std::string, int32_t> ids_;
};

// Sentences of made-up words of different lengths. As in a real text, a few words stand everywhere
// and many stand here and there: those can be keys.
std::string Text() {
  Draw draw(5);
  std::string text;
  for (int i = 0; i < 30000; ++i) {
    uint64_t code = draw.Below(3) > 0 ? draw.Below(150) : 150 + draw.Below(1500);
    const size_t length = 4 + code % 6;
    std::string word;
    for (size_t j = 0; j < length; ++j, code /= 26) {
      word += static_cast<char>('a' + (code + j * 5) % 26);
    }
    const bool ends = draw.Below(14) == 0;
    absl::StrAppend(&text, i == 0 ? "" : " ", word, ends ? "." : "",
                    ends && i % 3 == 0 ? "\n" : "");
  }
  return text;
}

class EvalGenerateTest : public testing::TestWithParam<std::tuple<const char*, const char*>> {};

TEST_P(EvalGenerateTest, LengthsAreExactAndAnswersThere) {
  const auto& [kind, style] = GetParam();
  GenerateOptions options;
  options.kind = *KindFromName(kind);
  options.style = *StyleFromName(style);
  options.lengths = {300, 512, 1100};
  options.per_length = 6;
  options.per_prefix = 3;
  WordTokens tokens;
  const std::string text = Text();
  const auto items = GenerateItems(options, text, &tokens);
  ASSERT_TRUE(items.ok()) << items.status();
  ASSERT_EQ(items->size(), 18u);
  std::map<std::string, int> by_prefix;
  std::set<std::string> ids;
  for (size_t i = 0; i < items->size(); ++i) {
    const Item& item = (*items)[i];
    const std::vector<int32_t> prefix = *tokens.Encode(item.prefix, true);
    EXPECT_EQ(static_cast<int>(prefix.size()), options.lengths[i / 6]);
    const std::vector<int32_t> whole = *tokens.Encode(item.prefix + item.suffix, true);
    ASSERT_GT(whole.size(), prefix.size());
    EXPECT_TRUE(std::equal(prefix.begin(), prefix.end(), whole.begin()));
    ++by_prefix[item.prefix];
    EXPECT_TRUE(ids.insert(item.id).second);
    for (const std::string& answer : item.answers) {
      EXPECT_TRUE(absl::StrContains(item.prefix, answer)) << answer;
    }
    if (item.metric == Metric::kToken) {
      EXPECT_EQ(tokens.Encode(item.label, false)->size(), 1u) << item.label;
    } else if (item.metric != Metric::kNone) {
      std::string said = item.label;
      if (said.empty()) {
        for (const std::string& answer : item.answers) absl::StrAppend(&said, answer, " ");
      }
      EXPECT_TRUE(*ScoreAnswer(item, said).right) << said;
      EXPECT_FALSE(*ScoreAnswer(item, "nothing of the kind").right);
    } else {
      EXPECT_STREQ(kind, "text");
    }
    const auto again = ParseItem(ItemToJson(item).dump(), "f:1", "f");
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(ItemKey(*again), ItemKey(item));
  }
  EXPECT_EQ(by_prefix.size(), 6u);
  for (const auto& [prefix, count] : by_prefix) EXPECT_EQ(count, 3);

  const auto same = GenerateItems(options, text, &tokens);
  ASSERT_TRUE(same.ok());
  EXPECT_EQ(ItemKey((*same)[17]), ItemKey((*items)[17]));
  options.lengths = {1100};
  const auto alone = GenerateItems(options, text, &tokens);
  ASSERT_TRUE(alone.ok());
  EXPECT_EQ(ItemKey((*alone)[0]), ItemKey((*items)[12])) << "lengths do not move one another";
  options.seed = 2;
  const auto other = GenerateItems(options, text, &tokens);
  ASSERT_TRUE(other.ok());
  EXPECT_NE(PrefixKey((*other)[0]), PrefixKey((*alone)[0]));
}

INSTANTIATE_TEST_SUITE_P(All, EvalGenerateTest,
                         testing::Combine(testing::Values("kv", "hops", "needles", "qa", "text"),
                                          testing::Values("plain", "chat", "demo-2026-10",
                                                          "demo-2026-11")),
                         [](const auto& info) {
                           std::string name =
                               absl::StrCat(std::get<0>(info.param), "_", std::get<1>(info.param));
                           for (char& c : name) c = absl::ascii_isalnum(c) ? c : '_';
                           return name;
                         });

TEST(EvalGenerateErrorsTest, TooLittleTextAndTooManyFacts) {
  WordTokens tokens;
  GenerateOptions options;
  options.lengths = {512};
  EXPECT_FALSE(GenerateItems(options, "a few words and no more", &tokens).ok());
  options.facts = 4000;
  const auto items = GenerateItems(options, Text(), &tokens);
  ASSERT_FALSE(items.ok());
  EXPECT_THAT(std::string(items.status().message()), testing::HasSubstr("fewer --facts"));
}

}  // namespace
}  // namespace carryover::eval
