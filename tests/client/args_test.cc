#include "client/args.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace carryover {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

struct Parsed {
  bool json = false;
  std::optional<bool> store;
  int count = 7;
  std::optional<int> top_k;
  int64_t requests = 0;
  std::optional<uint64_t> seed;
  double rate = 0;
  std::optional<double> temperature;
  std::string model;
  std::optional<std::string> prompt;
  std::vector<std::string> stop;
  std::vector<int32_t> tokens;
  std::string name;

  Args args{"test", "A test."};

  Parsed() {
    args.Option("json", &json, "", "");
    args.Option("store", &store, "", "");
    args.Option("count", &count, "N", "");
    args.Option("top-k", &top_k, "N", "");
    args.Option("requests", &requests, "N", "");
    args.Option("seed", &seed, "N", "");
    args.Option("rate", &rate, "X", "");
    args.Option("temperature", &temperature, "X", "");
    args.Option("model", &model, "NAME", "the model's name");
    args.Option("prompt", &prompt, "TEXT", "");
    args.Option("stop", &stop, "TEXT", "");
    args.Option("tokens", &tokens, "ID,ID", "");
  }
};

TEST(Args, BothWaysToGiveAValue) {
  Parsed p;
  ASSERT_TRUE(p.args.Parse({"--model", "a b", "--count=-3", "--temperature", "-0.5"}).ok());
  EXPECT_EQ(p.model, "a b");
  EXPECT_EQ(p.count, -3);
  EXPECT_EQ(p.temperature, -0.5);
}

TEST(Args, ZeroThatWasGivenDiffersFromNothing) {
  Parsed p;
  ASSERT_TRUE(p.args.Parse({"--top-k=0", "--prompt="}).ok());
  EXPECT_EQ(p.top_k, 0);
  EXPECT_EQ(p.prompt, "");
  EXPECT_FALSE(p.temperature.has_value());
  EXPECT_FALSE(p.store.has_value());
  EXPECT_EQ(p.count, 7);
}

TEST(Args, BoolsTakeNoNextWord) {
  Parsed p;
  p.args.Positional("NAME", &p.name, "a name");
  ASSERT_TRUE(p.args.Parse({"--json", "false", "--store=false"}).ok());
  EXPECT_TRUE(p.json);
  EXPECT_EQ(p.store, false);
  EXPECT_EQ(p.name, "false");
}

TEST(Args, ListsGrow) {
  Parsed p;
  ASSERT_TRUE(
      p.args.Parse({"--stop=a,b", "--stop", "--json", "--tokens=1,2", "--tokens", "-3"}).ok());
  EXPECT_THAT(p.stop, ElementsAre("a,b", "--json"));
  EXPECT_FALSE(p.json);
  EXPECT_THAT(p.tokens, ElementsAre(1, 2, -3));
}

TEST(Args, RangesAreKept) {
  Parsed p;
  ASSERT_TRUE(p.args.Parse({"--seed=18446744073709551615", "--requests=9223372036854775807"}).ok());
  EXPECT_EQ(p.seed, UINT64_MAX);
  EXPECT_EQ(p.requests, INT64_MAX);
  for (const char* bad :
       {"--count=2147483648", "--count=1.5", "--count=", "--count=x", "--seed=-1", "--rate=nan",
        "--rate=inf", "--json=yes", "--tokens=1,x", "--tokens=99999999999"}) {
    const absl::Status status = Parsed().args.Parse({bad});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(std::string(bad, std::string(bad).find('='))))
        << bad;
  }
}

TEST(Args, ErrorsNameTheOption) {
  EXPECT_THAT(std::string(Parsed().args.Parse({"--modle", "x"}).message()),
              HasSubstr("unknown option --modle; did you mean --model?"));
  EXPECT_THAT(std::string(Parsed().args.Parse({"--zebra", "x"}).message()),
              testing::Eq("unknown option --zebra"));
  EXPECT_THAT(std::string(Parsed().args.Parse({"--model"}).message()),
              HasSubstr("--model needs a value: NAME"));
  EXPECT_THAT(std::string(Parsed().args.Parse({"-m", "x"}).message()), HasSubstr("two dashes"));
  EXPECT_THAT(std::string(Parsed().args.Parse({"word"}).message()), HasSubstr("'word'"));
}

TEST(Args, PositionalsAndTheEndOfOptions) {
  Parsed p;
  p.args.Positional("NAME", &p.name, "a name");
  ASSERT_TRUE(p.args.Parse({"--json", "--", "--model"}).ok());
  EXPECT_EQ(p.name, "--model");
  Parsed q;
  q.args.Positional("NAME", &q.name, "a name");
  EXPECT_THAT(std::string(q.args.Parse({}).message()), HasSubstr("missing NAME"));
}

TEST(Args, HelpStopsParsingAndListsEverything) {
  Parsed p;
  ASSERT_TRUE(p.args.Parse({"--help", "--nonsense"}).ok());
  EXPECT_TRUE(p.args.help_asked());
  p.args.Example("carryover test --json", "as JSON");
  EXPECT_THAT(p.args.Help(), HasSubstr("--model NAME                the model's name"));
  EXPECT_THAT(p.args.Help(), HasSubstr("carryover test --json"));
}

TEST(EditDistance, CountsEdits) {
  EXPECT_EQ(EditDistance("", "abc"), 3);
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3);
  EXPECT_EQ(EditDistance("same", "same"), 0);
}

}  // namespace
}  // namespace carryover
