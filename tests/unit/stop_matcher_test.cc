#include "engine/stop_matcher.h"

#include <gtest/gtest.h>

namespace carryover {
namespace {

TEST(StopMatcher, NoFragmentOfAStopGetsOut) {
  StopMatcher matcher({"DEFGHIJ"}, false);
  std::string shown;
  for (const char* piece : {"ABC", "D", "EF", "GHI", "JKL"}) {
    const std::string out = matcher.Add(piece);
    EXPECT_EQ(out.find('D'), std::string::npos) << out;
    shown += out;
  }
  EXPECT_EQ(shown, "ABC");
  EXPECT_TRUE(matcher.stopped());
  EXPECT_EQ(matcher.matched(), "DEFGHIJ");
  EXPECT_EQ(matcher.Add("more"), "");
}

TEST(StopMatcher, HoldsBackNoMoreThanAPrefixOfAStop) {
  StopMatcher matcher({"\n\n"}, false);
  EXPECT_EQ(matcher.Add("a\n"), "a");
  EXPECT_EQ(matcher.Add("b"), "\nb");
  EXPECT_EQ(matcher.Add("c\n"), "c");
  EXPECT_EQ(matcher.Finish(), "\n");
}

TEST(StopMatcher, OverlappingStartsAreKept) {
  StopMatcher matcher({"aab"}, false);
  std::string shown;
  for (const char* piece : {"a", "a", "a", "b", "c"}) shown += matcher.Add(piece);
  EXPECT_EQ(shown, "a");
  EXPECT_TRUE(matcher.stopped());
}

TEST(StopMatcher, IncludeKeepsTheStopAndNothingBehindIt) {
  StopMatcher matcher({"END"}, true);
  EXPECT_EQ(matcher.Add("one E"), "one ");
  EXPECT_EQ(matcher.Add("ND two"), "END");
}

TEST(StopMatcher, FirstCompleteStopWins) {
  StopMatcher matcher({"bcd", "c"}, false);
  EXPECT_EQ(matcher.Add("abcd"), "ab");
  EXPECT_EQ(matcher.matched(), "c");
}

TEST(StopMatcher, LongestOfThoseThatEndTogether) {
  StopMatcher matcher({"c", "bc"}, false);
  EXPECT_EQ(matcher.Add("abc"), "a");
  EXPECT_EQ(matcher.matched(), "bc");
}

// However the text is cut, what is shown is what a scan of the whole text gives.
TEST(StopMatcher, EveryCutGivesTheSameText) {
  const std::string text = "xx ab abc abca abcab abcabd tail";
  for (size_t i = 0; i <= text.size(); ++i) {
    for (size_t j = i; j <= text.size(); ++j) {
      StopMatcher matcher({"abcabd", "zz"}, false);
      std::string shown = matcher.Add(text.substr(0, i));
      shown += matcher.Add(text.substr(i, j - i));
      shown += matcher.Add(text.substr(j));
      shown += matcher.Finish();
      ASSERT_EQ(shown, "xx ab abc abca abcab ") << i << " " << j;
    }
  }
}

}  // namespace
}  // namespace carryover
