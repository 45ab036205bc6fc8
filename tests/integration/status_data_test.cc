// What /status.json says of given facts, and how often it is made.
#include "server/status_data.h"

#include <gtest/gtest.h>
#include <prometheus/registry.h>

#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "server/prometheus_observer.h"
#include "server/status_series.h"
#include "tests/integration/server_process.h"

namespace carryover {
namespace {

using Json = nlohmann::json;

Json Parse(const std::string& text) { return Json::parse(text, nullptr, false); }

GateRow MakeRow(const std::string& task, const std::string& state, double samples, double mean) {
  GateRow row;
  row.cell = {"m", "S", "T", "direct", task, 256, "long"};
  row.state = state;
  row.samples = samples;
  row.bounds = {{"flip", mean, 0, 1, 0.02, 0.005}};
  return row;
}

FidelitySample MakeSample(FidelityComparison comparison, double kl, bool flip) {
  FidelitySample sample;
  sample.labels = {"m", "S", "T", "direct", "qa", 256, comparison};
  sample.along = Along::kNative;
  sample.valid = true;
  sample.first_token_flip = flip;
  PositionFidelity position;
  position.valid = true;
  position.kl = kl;
  position.flip = flip;
  sample.positions = {position};
  return sample;
}

TEST(StatusDataTest, NothingKnownIsStillWhole) {
  const Json data = Parse(StatusJson({}));
  ASSERT_TRUE(data.is_object());
  for (const char* part : {"versions", "gate", "fidelity", "store"}) {
    EXPECT_EQ(data[part]["rows"], Json::array()) << part;
    EXPECT_EQ(data[part]["left_out"], 0) << part;
  }
  EXPECT_EQ(data["latency"]["inter_token"]["count"], 0);
}

TEST(StatusDataTest, TheWorstCellsComeFirstAndTheRestIsCounted) {
  auto rows = std::make_shared<std::vector<GateRow>>();
  for (int i = 0; i < 1021; ++i) rows->push_back(MakeRow(absl::StrCat("t", i), "open", 50, 0.005));
  rows->push_back(MakeRow("unproved", "learning", 0, 0));
  rows->push_back(MakeRow("drifts", "open", 50, 0.03));
  rows->push_back(MakeRow("shut", "closed", 9, 0.01));
  StatusFacts facts;
  facts.engine.gates = rows;
  facts.engine.gate_cells = 1024;
  const std::string text = StatusJson(facts);
  EXPECT_LT(text.size(), 100'000);
  const Json gate = Parse(text)["gate"];
  ASSERT_EQ(gate["rows"].size(), kStatusRows);
  EXPECT_EQ(gate["left_out"], 1024 - kStatusRows);
  EXPECT_EQ(gate["rows"][0]["task"], "shut");
  EXPECT_EQ(gate["rows"][1]["task"], "drifts");
  EXPECT_EQ(gate["states"], Json::parse(R"({"learning":1,"open":1022,"repaired":0,"closed":1})"));
}

TEST(StatusDataTest, ChangesUnderAnOperatorsStateAreToldApart) {
  GateChangeLog log;
  for (int i = 0; i < 25; ++i) {
    GateChange change;
    change.cell.task = absl::StrCat("t", i);
    change.hidden = i == 24;
    log.Add(change);
  }
  StatusFacts facts;
  facts.gate_changes = log.Latest();
  const Json recent = Parse(StatusJson(facts))["gate"]["recent"];
  ASSERT_EQ(recent.size(), GateChangeLog::kKept);
  EXPECT_EQ(recent[0]["task"], "t24");
  EXPECT_EQ(recent[0]["hidden"], true);
  EXPECT_EQ(recent[1]["hidden"], false);
  EXPECT_GT(recent[0]["time"], 1.7e9);
}

TEST(StatusDataTest, FidelityIsByCellWithItsFloor) {
  PrometheusObserver observer({.tasks = {"qa"}});
  observer.OnPairDeclared({"m", "S", "T", 1024});
  for (int i = 0; i < 9; ++i) {
    observer.OnFidelitySample(MakeSample(FidelityComparison::kCarried, 0.02, false));
  }
  observer.OnFidelitySample(MakeSample(FidelityComparison::kCarried, 5, true));
  observer.OnFidelitySample(MakeSample(FidelityComparison::kControl, 2e-6, false));
  StatusFacts facts;
  facts.families = observer.registry()->Collect();
  const Json fidelity = Parse(StatusJson(facts))["fidelity"];
  ASSERT_EQ(fidelity["rows"].size(), 1);
  const Json& row = fidelity["rows"][0];
  EXPECT_EQ(row["task"], "qa");
  EXPECT_EQ(row["carried"]["samples"], 10);
  EXPECT_EQ(row["carried"]["flips"], 1);
  EXPECT_EQ(row["control"]["samples"], 1);
  EXPECT_EQ(row["control"]["flips"], 0);
  // Nine of ten are in (0.01, 0.0316]: the median is 5/9 of the way through; 5 lies in (3.16, 10].
  EXPECT_NEAR(row["carried"]["kl"]["p50"].get<double>(), 0.01 + 0.0216 * 5 / 9, 1e-9);
  EXPECT_NEAR(row["carried"]["kl"]["p95"].get<double>(), 3.16 + 6.84 * 0.5, 1e-9);
  EXPECT_TRUE(row["old"]["kl"]["p50"].is_null());
  EXPECT_EQ(fidelity["without_samples"], 5);  // 2 tasks of 3 buckets are declared
}

TEST(StatusDataTest, QuantilesAreThoseOfPromQl) {
  HistogramSum histogram;
  EXPECT_FALSE(histogram.Quantile(0.5).has_value());
  histogram.bounds = {1, 2, 4};
  histogram.cumulative = {2, 2, 6};
  histogram.count = 8;
  EXPECT_DOUBLE_EQ(*histogram.Quantile(0.125), 0.5);
  EXPECT_DOUBLE_EQ(*histogram.Quantile(0.5), 3);
  EXPECT_DOUBLE_EQ(*histogram.Quantile(0.99), 4);  // beyond the last bound
}

// However many ask, what they get is made once, and again when it is old.
TEST(StatusDataTest, ManyPagesCostNoMoreThanOne) {
  int made = 0;
  StatusSource source([&made] {
    ++made;
    return StatusFacts();
  });
  const std::string first = source.Json();
  std::vector<std::thread> pages;
  for (int i = 0; i < 8; ++i) {
    pages.emplace_back([&] { EXPECT_EQ(source.Json(), first); });
  }
  for (std::thread& page : pages) page.join();
  EXPECT_EQ(made, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  source.Json();
  EXPECT_EQ(made, 2);
}

TEST(StatusDataTest, AServerGivesThePageItsFilesAndItsData) {
  const auto server = ServerProcess::Start(LoadEntry("demo", "v1", DemoModel("2026-10")));
  ASSERT_NE(server, nullptr);
  v1::CompleteRequest request = Tokens(SomeTokens(40, 1), 5);
  request.mutable_cache()->set_salt("my-secret-salt");
  request.set_request_id("my-secret-id");
  Complete(server->completions(), request);
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  const std::string text = server->Get("/status.json");
  EXPECT_EQ(text.find("my-secret"), std::string::npos);
  const Json data = Parse(text);
  ASSERT_TRUE(data.is_object()) << text;
  EXPECT_EQ(data["versions"]["rows"][0]["version"], "v1");
  EXPECT_EQ(data["versions"]["rows"][0]["share"], 100);
  EXPECT_EQ(data["tokens"]["prompt"]["computed"], 40);
  EXPECT_EQ(data["tokens"]["generated"], server->Metric("carryover_generation_tokens_total"));
  EXPECT_EQ(data["serving"], true);
  EXPECT_EQ(data["provenance_violations"], 0);
  EXPECT_NE(server->Get("/page.js").find("status.json"), std::string::npos);
  EXPECT_NE(server->Get("/page.css").find("prefers-color-scheme"), std::string::npos);
  EXPECT_NE(server->Get("/icon.svg").find("<svg"), std::string::npos);
  for (const char* path : {"/index.html", "/page.js/", "/server/page.js", "/nothing"}) {
    EXPECT_EQ(server->Get(path), "") << path;
  }
  EXPECT_EQ(server->Get("/").find("the server writes its tables here"), std::string::npos);
}

}  // namespace
}  // namespace carryover
