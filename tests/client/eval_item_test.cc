// Reading tasks files, and whether an answer is right.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>

#include "client/eval/item.h"
#include "client/eval/scoring.h"

namespace carryover::eval {
namespace {

using testing::HasSubstr;

std::string Problem(const std::string& line) {
  const auto item = ParseItem(line, "f.jsonl:7", "f");
  return item.ok() ? "" : std::string(item.status().message());
}

TEST(EvalItemTest, OursComesBackAsItWas) {
  const std::string line =
      R"({"id":"a","task":"kv","metric":"qa","prefix":"Once é","suffix":" a","answers":["x","y"],)"
      R"("classes":["c"],"stop":["\n"],"max_tokens":5,"label":" x"})";
  const auto item = ParseItem(line, "f:1", "f");
  ASSERT_TRUE(item.ok()) << item.status();
  EXPECT_EQ(item->metric, Metric::kQa);
  EXPECT_EQ(item->max_tokens, 5);
  EXPECT_EQ(nlohmann::json::parse(ItemToJson(*item).dump()), nlohmann::json::parse(line));
}

TEST(EvalItemTest, IdsStandForTexts) {
  const auto item = ParseItem(
      R"({"task":"t","prefix_tokens":[1,2,3],"suffix_tokens":[4],"answers":[]})", "f:1", "f");
  ASSERT_TRUE(item.ok()) << item.status();
  EXPECT_EQ(item->prefix_ids, (std::vector<int32_t>{1, 2, 3}));
  EXPECT_EQ(item->metric, Metric::kNone) << "no answers";
  EXPECT_EQ(item->id, "f:1");
}

TEST(EvalItemTest, LongBench) {
  const auto item =
      ParseItem(R"({"input":"Who?","context":"A text.","answers":["Ann","Anne"],"length":3,)"
                R"("dataset":"hotpotqa","language":"en","all_classes":null,"_id":"x1"})",
                "f:1", "f");
  ASSERT_TRUE(item.ok()) << item.status();
  EXPECT_EQ(item->task, "hotpotqa");
  EXPECT_EQ(item->metric, Metric::kQa);
  EXPECT_EQ(item->id, "x1");
  EXPECT_EQ(item->prefix, "Read the text and answer the question.\n\nA text.");
  EXPECT_EQ(item->suffix, "\n\nQuestion: Who?\nAnswer:");
}

TEST(EvalItemTest, Ruler) {
  const auto item = ParseItem(
      R"({"index":3,"input":"Text.\nMore.\nWhat are the numbers? They are","outputs":["1","2"],)"
      R"("length":90})",
      "f:1", "niah_multi");
  ASSERT_TRUE(item.ok()) << item.status();
  EXPECT_EQ(item->task, "niah_multi");
  EXPECT_EQ(item->id, "3");
  EXPECT_EQ(item->prefix, "Text.\nMore.");
  EXPECT_EQ(item->suffix, "\nWhat are the numbers? They are");
  EXPECT_EQ(item->metric, Metric::kShare);
}

TEST(EvalItemTest, AnErrorNamesTheLineAndTheField) {
  EXPECT_EQ(Problem("{"), "f.jsonl:7: not a JSON object");
  EXPECT_EQ(Problem("[1]"), "f.jsonl:7: not a JSON object");
  EXPECT_EQ(Problem("{\"task\":\"a b\",\"prefix\":\"x\"}").substr(0, 15), "f.jsonl:7: task");
  EXPECT_EQ(Problem("{\"task\":\"a\"}"), "f.jsonl:7: prefix is missing");
  EXPECT_THAT(Problem("{\"task\":\"a\",\"prefix\":1}"), HasSubstr("prefix must be a string"));
  EXPECT_THAT(Problem("{\"task\":\"a\",\"prefix\":\"x\",\"answers\":\"y\"}"),
              HasSubstr("answers must be a list"));
  EXPECT_THAT(Problem("{\"task\":\"a\",\"prefix\":\"x\",\"max_tokens\":0}"),
              HasSubstr("max_tokens must be"));
  EXPECT_THAT(Problem("{\"task\":\"a\",\"prefix\":\"x\",\"max_tokens\":1e99}"),
              HasSubstr("max_tokens must be"));
  EXPECT_THAT(Problem("{\"task\":\"a\",\"prefix\":\"x\",\"metric\":\"best\"}"),
              HasSubstr("metric must be"));
  EXPECT_THAT(Problem("{\"task\":\"a\",\"prefix\":\"x\",\"metric\":\"qa\"}"),
              HasSubstr("answers is empty"));
  EXPECT_THAT(Problem("{\"task\":\"a\",\"prefix_tokens\":[1,-2],\"suffix_tokens\":[1]}"),
              HasSubstr("prefix_tokens must be"));
  EXPECT_THAT(Problem("{\"input\":\"one line\",\"outputs\":[\"x\"]}"), HasSubstr("input needs"));
  EXPECT_THAT(Problem("{\"a\":1}"), HasSubstr("task is missing"));
  EXPECT_THAT(Problem("\"\xff\""), HasSubstr("not UTF-8"));
  EXPECT_THAT(Problem(std::string(100000, '[')), HasSubstr("nested too deeply"));
}

TEST(EvalItemTest, AFileIsReadLineByLine) {
  const std::string path = testing::TempDir() + "/eval_items.jsonl";
  std::ofstream(path) << "{\"task\":\"a\",\"prefix\":\"x\"}\n\n{\"task\":\"a\",\"prefix\":\"y\"}";
  const auto items = ReadItems(path);
  ASSERT_TRUE(items.ok()) << items.status();
  ASSERT_EQ(items->size(), 2u);
  EXPECT_EQ((*items)[1].id, "eval_items:3");
  std::ofstream(path, std::ios::app) << "\nno";
  EXPECT_THAT(std::string(ReadItems(path).status().message()), HasSubstr(path + ":4: not a JSON"));
  std::ofstream(path) << std::string(kMaxLineBytes + 10, ' ') << "\n";
  EXPECT_FALSE(ReadItems(path).ok());
  std::ofstream(path) << "\n";
  EXPECT_THAT(std::string(ReadItems(path).status().message()), HasSubstr("holds no items"));
  std::remove(path.c_str());
  EXPECT_EQ(ReadItems(path).status().code(), absl::StatusCode::kNotFound);
}

Item With(Metric metric, std::vector<std::string> answers, std::vector<std::string> classes = {}) {
  Item item;
  item.metric = metric;
  item.answers = std::move(answers);
  item.classes = std::move(classes);
  return item;
}

TEST(EvalScoringTest, StartsMeansWholeWordsAtTheBeginning) {
  const Item item = With(Metric::kStarts, {"stone"});
  EXPECT_TRUE(*ScoreAnswer(item, " Stone.\n- river").right);
  EXPECT_TRUE(*ScoreAnswer(item, "the stone").right);
  EXPECT_FALSE(*ScoreAnswer(item, " stones").right);
  EXPECT_FALSE(*ScoreAnswer(item, " a red stone").right);
  EXPECT_FALSE(*ScoreAnswer(item, "").right);
}

TEST(EvalScoringTest, TokenLooksAtTheFirstTokenAlone) {
  EXPECT_TRUE(*ScoreToken(7, {7, 8, 9}).right);
  EXPECT_FALSE(*ScoreToken(7, {8, 7}).right);
  EXPECT_FALSE(*ScoreToken(7, {}).right);
  EXPECT_FALSE(ScoreToken(-1, {7}).right.has_value()) << "nobody labelled it";
}

TEST(EvalScoringTest, ShareCountsWhatIsThere) {
  const Item item = With(Metric::kShare, {"12", "34", "56"});
  EXPECT_NEAR(*ScoreAnswer(item, "12 and 56").value, 2.0 / 3, 1e-12);
  EXPECT_FALSE(*ScoreAnswer(item, "12 and 56").right);
  EXPECT_TRUE(*ScoreAnswer(item, "56, 34, 12").right);
}

TEST(EvalScoringTest, QaTakesTheBestAnswer) {
  const Item item = With(Metric::kQa, {"the old bridge", "bridge of stone"});
  const Score score = ScoreAnswer(item, "An old bridge, he said");
  EXPECT_NEAR(*score.value, 2.0 * 2 / (4 + 2), 1e-12);  // {old, bridge, he, said}, {old, bridge}
  EXPECT_TRUE(*score.right);
  EXPECT_FALSE(*ScoreAnswer(item, "old bridges").right) << "not as whole words";
  EXPECT_EQ(WordF1("x x y", "x y y"), 2.0 * 2 / 6);
}

TEST(EvalScoringTest, ClassesAndSummaries) {
  const Item item = With(Metric::kClass, {"City"}, {"City", "Cit", "Person", "Date"});
  EXPECT_TRUE(*ScoreAnswer(item, "city").right);
  EXPECT_EQ(*ScoreAnswer(item, "City or Person").value, 0.5);
  EXPECT_EQ(*ScoreAnswer(item, "Person").value, 0);
  const Score summary = ScoreAnswer(With(Metric::kSummary, {"b c d"}), "a b x c");
  EXPECT_NEAR(*summary.value, 2.0 * 2 / 6, 1e-12);  // "a" is an article
  EXPECT_FALSE(summary.right.has_value());
  EXPECT_FALSE(ScoreAnswer(With(Metric::kNone, {}), "x").value.has_value());
}

}  // namespace
}  // namespace carryover::eval
