#include "client/load_stats.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "client/load_mix.h"
#include "client/terminal.h"

namespace carryover {
namespace {

using testing::ElementsAre;

// What numpy.percentile([15, 20, 35, 40, 50], q) says.
TEST(Quantile, InterpolatesAsNumpyDoes) {
  const std::vector<double> values = {15, 20, 35, 40, 50};
  EXPECT_DOUBLE_EQ(Quantile(values, 0), 15);
  EXPECT_DOUBLE_EQ(Quantile(values, 0.4), 29);
  EXPECT_DOUBLE_EQ(Quantile(values, 0.5), 35);
  EXPECT_DOUBLE_EQ(Quantile(values, 0.99), 49.6);
  EXPECT_DOUBLE_EQ(Quantile(values, 1), 50);
  EXPECT_DOUBLE_EQ(Quantile({3.0}, 0.99), 3);
}

TEST(Summarize, SortsFirst) {
  const Distribution d = Summarize({4, 1, 3, 2});
  EXPECT_DOUBLE_EQ(d.mean, 2.5);
  EXPECT_DOUBLE_EQ(d.median, 2.5);
  EXPECT_DOUBLE_EQ(d.std, std::sqrt(1.25));  // numpy.std: of the population
  EXPECT_DOUBLE_EQ(d.p90, 3.7);
  EXPECT_DOUBLE_EQ(Summarize({}).p99, 0);
}

RequestRecord Completed(double ttft, double e2el, int output_tokens, std::vector<double> itl) {
  RequestRecord r;
  r.completed = true;
  r.version = "v1";
  r.ttft = ttft;
  r.e2el = e2el;
  r.output_tokens = output_tokens;
  r.itl = std::move(itl);
  r.prompt_tokens = 10;
  r.cached_tokens = 4;
  r.carried_tokens = 3;
  r.computed_tokens = 3;
  return r;
}

TEST(SummarizeLoad, CountsOnlyWhatCompleted) {
  std::vector<RequestRecord> records = {Completed(0.1, 0.5, 5, {0.1, 0.1, 0.1, 0.1}),
                                        Completed(0.3, 0.3, 1, {})};
  RequestRecord refused;
  refused.code = "RESOURCE_EXHAUSTED";
  refused.error = "queue full";
  refused.e2el = 100;
  RequestRecord broken;
  broken.code = "BROKEN_STREAM";
  broken.broken = true;
  records.push_back(refused);
  records.push_back(broken);
  GoodputLimits limits;
  limits.ttft_ms = 200;
  const LoadSummary s = SummarizeLoad(records, 2, limits);
  EXPECT_EQ(s.completed, 2);
  EXPECT_EQ(s.failed, 2);
  EXPECT_EQ(s.broken_streams, 1);
  EXPECT_EQ(s.total_input_tokens, 20);
  EXPECT_EQ(s.total_output_tokens, 6);
  EXPECT_EQ(s.carried_tokens, 6);
  EXPECT_DOUBLE_EQ(s.request_throughput, 1);
  EXPECT_DOUBLE_EQ(s.output_throughput, 3);
  EXPECT_DOUBLE_EQ(s.total_token_throughput, 13);
  EXPECT_DOUBLE_EQ(*s.request_goodput, 0.5);
  EXPECT_DOUBLE_EQ(s.ttft.mean, 200);
  EXPECT_DOUBLE_EQ(s.tpot.mean, 100);  // (500 - 100) / 4; one token has none
  EXPECT_DOUBLE_EQ(s.itl.p99, 100);
  EXPECT_DOUBLE_EQ(s.e2el.mean, 400);
  EXPECT_EQ(s.errors.at("RESOURCE_EXHAUSTED"), 1);
  EXPECT_EQ(s.messages.at("RESOURCE_EXHAUSTED"), "queue full");
}

TEST(SummarizeLoad, GoodputAsksForEveryLimit) {
  const std::vector<RequestRecord> records = {Completed(0.1, 0.5, 5, {})};
  GoodputLimits limits;
  limits.ttft_ms = 150;
  limits.tpot_ms = 99;
  EXPECT_DOUBLE_EQ(*SummarizeLoad(records, 1, limits).request_goodput, 0);
  limits.tpot_ms = 101;
  EXPECT_DOUBLE_EQ(*SummarizeLoad(records, 1, limits).request_goodput, 1);
  limits.e2el_ms = 499;
  EXPECT_DOUBLE_EQ(*SummarizeLoad(records, 1, limits).request_goodput, 0);
  EXPECT_FALSE(SummarizeLoad(records, 1, {}).request_goodput.has_value());
}

TEST(LoadSummaryToJson, HasTheNamesThatVllmUses) {
  const auto json = LoadSummaryToJson(SummarizeLoad({}, 0, {}));
  for (const char* measure : {"ttft", "tpot", "itl", "e2el"}) {
    for (const char* of : {"mean", "median", "std", "p99"}) {
      EXPECT_TRUE(json.contains(std::string(of) + "_" + measure + "_ms")) << of << measure;
    }
  }
  for (const char* name :
       {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
        "request_throughput", "request_goodput", "output_throughput", "total_token_throughput"}) {
    EXPECT_TRUE(json.contains(name)) << name;
  }
}

TEST(PromptMix, SharesPrefixesAndNothingElse) {
  MixOptions options;
  options.prefixes = 3;
  options.prefix_tokens = 20;
  options.suffix_tokens = 10;
  const PromptMix mix = PromptMix::Random(options, 100, 200);
  const auto head = [](std::vector<int32_t> p) {
    return std::vector<int32_t>(p.begin(), p.begin() + 20);
  };
  const auto tail = [](std::vector<int32_t> p) {
    return std::vector<int32_t>(p.begin() + 20, p.end());
  };
  std::set<std::vector<int32_t>> heads, tails;
  for (int64_t i = -3; i < 30; ++i) {
    const std::vector<int32_t> prompt = mix.Prompt(i);
    ASSERT_EQ(prompt.size(), 30u);
    for (int32_t id : prompt) EXPECT_TRUE(id >= 100 && id < 200);
    heads.insert(head(prompt));
    tails.insert(tail(prompt));
  }
  EXPECT_EQ(heads.size(), 3u);
  EXPECT_EQ(tails.size(), 33u);
  EXPECT_EQ(head(mix.Prompt(1)), head(mix.Prompt(4)));
  EXPECT_EQ(mix.Prompt(5), PromptMix::Random(options, 100, 200).Prompt(5));
  options.seed = 1;
  EXPECT_NE(mix.Prompt(5), PromptMix::Random(options, 100, 200).Prompt(5));
}

TEST(PromptMix, CutsText) {
  MixOptions options;
  options.prefixes = 2;
  options.prefix_tokens = 3;
  options.suffix_tokens = 2;
  std::vector<int32_t> text = {0, 1, 2, 3, 4, 5};
  const auto mix = PromptMix::FromText(options, text);
  ASSERT_TRUE(mix.ok());
  for (int64_t i = 0; i < 50; ++i) {
    const std::vector<int32_t> p = mix->Prompt(i);
    ASSERT_EQ(p.size(), 5u);
    EXPECT_EQ(p[0], i % 2 == 0 ? 0 : 3);
    EXPECT_EQ(p[4], p[3] + 1);
  }
  text.pop_back();
  EXPECT_EQ(PromptMix::FromText(options, text).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(PoissonArrivals, HaveTheRateAndItsSpread) {
  const std::vector<double> arrivals = PoissonArrivals(50, 20001, 7);
  EXPECT_EQ(arrivals[0], 0);
  double squares = 0;
  for (size_t i = 1; i < arrivals.size(); ++i) {
    const double gap = arrivals[i] - arrivals[i - 1];
    ASSERT_GE(gap, 0);
    squares += gap * gap;
  }
  const double mean = arrivals.back() / 20000;
  EXPECT_NEAR(mean, 0.02, 0.0005);
  // An exponential's variance is its mean squared; even spacing would give 0.
  EXPECT_NEAR(squares / 20000 - mean * mean, mean * mean, 0.05 * mean * mean);
  EXPECT_EQ(PoissonArrivals(50, 10, 7), PoissonArrivals(50, 10, 7));
  EXPECT_NE(PoissonArrivals(50, 10, 7), PoissonArrivals(50, 10, 8));
}

TEST(Human, Units) {
  EXPECT_EQ(HumanBytes(512), "512 B");
  EXPECT_EQ(HumanBytes(1536), "1.5 KiB");
  EXPECT_EQ(HumanSeconds(0.25), "250 ms");
  EXPECT_EQ(HumanSeconds(125.2), "2 min 05 s");
}

TEST(Table, AlignsNumbersRight) {
  Table table({"NAME", "N"});
  table.Row({"a", "5"});
  table.Row({"Café", "12"});
  std::ostringstream out;
  table.Print(out);
  EXPECT_EQ(out.str(), "NAME   N\na      5\nCafé  12\n");
}

}  // namespace
}  // namespace carryover
