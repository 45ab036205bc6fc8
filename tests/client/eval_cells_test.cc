// From rows to cells and verdicts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>

#include "client/eval/cells.h"
#include "client/eval/report.h"

namespace carryover::eval {
namespace {

using testing::HasSubstr;

Comparison Compared(const char* name, bool flip, double tv) {
  Comparison one;
  one.comparison = name;
  one.plan = "direct";
  one.valid = true;
  one.first_token_flip = flip;
  one.continuation = flip ? "diverged" : "same";
  one.divergence = flip ? 0 : -1;
  one.gate_flip = flip;
  one.gate_tv = tv;
  Position position;
  position.valid = true;
  position.flip = flip;
  position.tv = tv;
  position.kl = tv * 2;
  position.native_margin = 3;
  position.carried_margin = flip ? -1 : 2.5;
  one.positions = {position, position};
  return one;
}

// Item i, on a prefix of its own: right or not natively and carried, and how far apart they are.
ItemResult Row(int i, bool native, bool carried, bool flip = false, double tv = 0,
               double floor_tv = 0) {
  ItemResult row;
  row.index = i;
  row.id = std::to_string(i);
  row.task = "kv";
  row.metric = Metric::kStarts;
  row.prefix_key = std::to_string(i);
  row.prompt_tokens = 600;
  row.prefix_tokens = 590;
  row.bucket = 512;
  row.answer_token = 7;
  row.source.right = row.native.right = native;
  row.source.score = row.native.score = native;
  row.native.tokens = {1, 2};
  row.native.ttft = 0.4;
  Arm arm;
  arm.plan = "direct";
  arm.right = carried;
  arm.score = carried;
  arm.tokens = {flip ? 3 : 1, 2};
  arm.ttft = 0.1;
  arm.carried = 576;
  row.carried = {arm};
  row.comparisons = {Compared("carried", flip, tv), Compared("control", false, floor_tv),
                     Compared("old", true, 0.5)};
  return row;
}

std::map<int, ItemResult> Rows(int n, const std::function<ItemResult(int)>& make) {
  std::map<int, ItemResult> rows;
  for (int i = 0; i < n; ++i) rows[i] = make(i);
  return rows;
}

const Cell& AllLengths(const std::vector<Cell>& cells) {
  EXPECT_EQ(cells.size(), 2u);
  EXPECT_EQ(cells[0].bucket, 0);
  return cells[0];
}

TEST(EvalCellsTest, EqualArmsKeepBoth) {
  const auto cells = MakeCells(Rows(400, [](int i) { return Row(i, true, true); }), Limits());
  const Cell& cell = AllLengths(cells);
  EXPECT_EQ(cell.n, 400);
  EXPECT_EQ(cell.prefixes, 400);
  EXPECT_EQ(cell.paired.both, 400);
  EXPECT_EQ(cell.mcnemar, 1);
  EXPECT_EQ(cell.fidelity.flip.mean, 0);
  EXPECT_EQ(cell.verdict.headline, "keeps the task, keeps the behaviour");
  EXPECT_EQ(cell.verdict.more_items, 0);
  EXPECT_NEAR(cell.speedup.mean, 4, 1e-9);
  EXPECT_NEAR(cell.carried_share, 0.96, 1e-9);
  EXPECT_NEAR(*cell.recovered, 1, 1e-9);
}

TEST(EvalCellsTest, FewItemsProveNothingAndSayHowManyMore) {
  const auto cells = MakeCells(Rows(30, [](int i) { return Row(i, true, true); }), Limits());
  const Cell& cell = AllLengths(cells);
  EXPECT_EQ(cell.verdict.headline, "task undecided, behaviour undecided");
  EXPECT_THAT(cell.verdict.utility_text, HasSubstr("n is too small: about 159 more items"));
  EXPECT_EQ(cell.verdict.more_items, 159);
}

// Items that share a prefix may say no more than one of them: the promise is about items.
TEST(EvalCellsTest, HowManyMoreCountsWhatPrefixesShare) {
  const auto rows = [](int n) {
    return Rows(n, [](int i) {
      ItemResult row = Row(i, true, true);
      row.prefix_key = std::to_string(i / 4);
      return row;
    });
  };
  const auto judged = [&](int n) { return AllLengths(MakeCells(rows(n), Limits())).verdict; };
  // 189 prefixes without a flip prove under 2 % of them.
  EXPECT_EQ(judged(200).fidelity, Finding::kUndecided);
  EXPECT_EQ(judged(200).more_items, 4 * 189 - 200);
  EXPECT_EQ(judged(4 * 188).fidelity, Finding::kUndecided);
  EXPECT_EQ(judged(4 * 189).fidelity, Finding::kKept);
}

TEST(EvalCellsTest, HowManyMoreIsEnoughWherePrefixesFailAsOne) {
  // One prefix in 20 loses all of its 8 answers, and their first tokens.
  const auto judged = [&](int64_t n) {
    const auto rows = Rows(static_cast<int>(n), [](int i) {
      const bool bad = i / 8 % 20 == 0;
      ItemResult row = Row(i, true, !bad, bad);
      row.prefix_key = std::to_string(i / 8);
      return row;
    });
    return AllLengths(MakeCells(rows, Limits())).verdict;
  };
  const Verdict few = judged(640);
  EXPECT_EQ(few.utility, Finding::kUndecided);
  EXPECT_EQ(few.fidelity, Finding::kUndecided);
  ASSERT_GT(few.more_items, 0);
  const Verdict enough = judged((640 + few.more_items) * 11 / 10);
  EXPECT_EQ(enough.utility, Finding::kBroken);
  EXPECT_EQ(enough.fidelity, Finding::kBroken);
}

TEST(EvalCellsTest, TheTwoCriteriaAreApart) {
  // Another first token in a fifth of the answers, and all of them right.
  const auto cells =
      MakeCells(Rows(400, [](int i) { return Row(i, true, true, i % 5 == 0, 0.2); }), Limits());
  const Cell& cell = AllLengths(cells);
  EXPECT_EQ(cell.verdict.headline, "keeps the task, changes the behaviour");
  EXPECT_NEAR(cell.fidelity.flip.mean, 0.2, 1e-9);
  EXPECT_EQ(cell.same_first.n, 320);
  EXPECT_EQ(cell.same_first.same_answer, 320);
  EXPECT_EQ(cell.other_first.same_answer, 0);
  EXPECT_EQ(cell.other_first.same_outcome, 80);
  EXPECT_EQ(cell.fidelity.continuation.at("diverged"), 80);
}

TEST(EvalCellsTest, ALossIsFoundAndCountedBothWays) {
  const auto cells =
      MakeCells(Rows(300, [](int i) { return Row(i, i % 30 != 1, i % 10 != 0, i % 10 == 0, 0.3); }),
                Limits());
  const Cell& cell = AllLengths(cells);
  EXPECT_EQ(cell.paired.only_first, 30);
  EXPECT_EQ(cell.paired.only_second, 10);
  EXPECT_NEAR(cell.loss.mean, 20.0 / 300, 1e-9);
  EXPECT_EQ(cell.verdict.utility, Finding::kBroken) << cell.verdict.utility_text;
  int right = 0, survived = 0;
  for (const MarginBin& bin : cell.margins) {
    right += bin.right;
    survived += bin.survived;
  }
  EXPECT_EQ(right, 290);
  EXPECT_EQ(survived, 260);
}

TEST(EvalCellsTest, TheFloorIsTakenOff) {
  // As far from itself as carried is: nothing but noise.
  const auto cells =
      MakeCells(Rows(400, [](int i) { return Row(i, true, true, false, 0.2, 0.2); }), Limits());
  EXPECT_NEAR(AllLengths(cells).tv_excess.mean, 0, 1e-9);
  const auto over =
      MakeCells(Rows(400, [](int i) { return Row(i, true, true, false, 0.4, 0.2); }), Limits());
  EXPECT_NEAR(AllLengths(over).tv_excess.mean, 0.2, 1e-9);
  EXPECT_EQ(AllLengths(over).verdict.fidelity, Finding::kBroken);
}

TEST(EvalCellsTest, QuestionsOfOnePrefixAreOnePiece) {
  auto rows = Rows(400, [](int i) { return Row(i, true, true); });
  for (auto& [index, row] : rows) row.prefix_key = std::to_string(index / 100);
  const auto cells = MakeCells(rows, Limits());
  EXPECT_EQ(AllLengths(cells).prefixes, 4);
  EXPECT_EQ(AllLengths(cells).verdict.headline, "task undecided, behaviour undecided");
}

TEST(EvalCellsTest, ContinuationHasNoUtility) {
  auto rows = Rows(30, [](int i) { return Row(i, true, true); });
  for (auto& [index, row] : rows) {
    row.native.right = row.carried[0].right = row.source.right = std::nullopt;
    row.native.score = row.carried[0].score = row.source.score = std::nullopt;
  }
  const Cell cell = AllLengths(MakeCells(rows, Limits()));
  EXPECT_THAT(cell.verdict.headline, HasSubstr("no task to keep"));
  EXPECT_THAT(cell.verdict.utility_text, HasSubstr("n/a"));
}

TEST(EvalCellsTest, RowsSurviveTheirJson) {
  ItemResult row = Row(3, true, false, true, 0.25);
  row.hit = row.native;
  row.comparisons[0].positions[1].kl = std::numeric_limits<double>::infinity();
  row.comparisons[0].stop_disagreement = true;
  const auto json = ResultToJson(row);
  const auto again = ResultFromJson(nlohmann::json::parse(json.dump()));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(ResultToJson(*again), json);
  auto broken = nlohmann::json::parse(json.dump());
  broken["native"]["tokens"] = "x";
  EXPECT_THAT(std::string(ResultFromJson(broken).status().message()), HasSubstr("tokens"));
}

// Each plan is a cell of its own, and a point in the pictures of cost and worth.
TEST(EvalReportTest, PlansAreComparedWithOneAnother) {
  auto rows = Rows(40, [](int i) {
    ItemResult row = Row(i, true, i % 4 != 0, false, 0.2);
    Arm tail = row.native;
    tail.plan = "tail(32)";
    tail.ttft = row.native.ttft / 2;
    row.carried.push_back(tail);
    Comparison apart = row.comparisons[0];
    apart.plan = "tail(32)";
    for (Position& position : apart.positions) position.tv /= 10;
    row.comparisons.push_back(apart);
    return row;
  });
  const Report report = MakeReport({{"items", 40}}, rows);
  std::map<std::string, const Cell*> cells;
  for (const Cell& cell : report.cells) {
    if (cell.bucket == 0) cells[cell.plan] = &cell;
  }
  ASSERT_EQ(cells.size(), 2u);
  EXPECT_NEAR(cells["direct"]->carried.accuracy.mean, 0.75, 1e-9);
  EXPECT_NEAR(cells["tail(32)"]->carried.accuracy.mean, 1, 1e-9);
  EXPECT_NEAR(cells["tail(32)"]->fidelity.tv.mean, cells["direct"]->fidelity.tv.mean / 10, 1e-9);
  const std::string html = ReportToHtml(report);
  EXPECT_THAT(html, HasSubstr("Which way of carrying?"));
  for (const char* name : {">direct</text>", ">tail(32)</text>", ">natively</text>"}) {
    EXPECT_THAT(html, HasSubstr(name));
  }
}

TEST(EvalReportTest, JsonAndHtmlHoldWhatThereIs) {
  auto rows = Rows(40, [](int i) { return Row(i, true, i % 4 != 0, i % 4 == 0, 0.25); });
  rows[7].id = "<b>&";
  rows[40].index = 40;
  rows[40].id = "gone <script>";
  rows[40].task = "kv";
  rows[40].error_code = "INTERNAL";
  rows[40].error = "why <i>";
  nlohmann::ordered_json run = {{"items", 50}};
  run["identity"] = {
      {"model", "m"}, {"source", {{"version", "S"}}}, {"target", {{"version", "T"}}}};
  const Report report = MakeReport(run, rows);
  const auto json = ReportToJson(report);
  EXPECT_EQ(json["counts"]["done"], 40);
  EXPECT_EQ(json["counts"]["failed"], 1);
  EXPECT_EQ(json["items"].size(), 41u);
  EXPECT_EQ(json["cells"][0]["utility"]["correct_to_wrong"], 10);
  const std::string html = ReportToHtml(report);
  EXPECT_THAT(html, HasSubstr("T over the caches of S"));
  EXPECT_THAT(html, HasSubstr("(not finished)"));
  EXPECT_THAT(html, HasSubstr("right to wrong"));
  EXPECT_THAT(html, testing::Not(HasSubstr("Which way of carrying?")));  // there is one alone
  EXPECT_THAT(html, testing::Not(HasSubstr("<script")));
  EXPECT_THAT(html, testing::Not(HasSubstr("http://")));
  EXPECT_THAT(ReportToHtml(MakeReport(run, {})), HasSubstr("No item was answered"));
}

}  // namespace
}  // namespace carryover::eval
