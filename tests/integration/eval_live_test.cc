// `carryover eval` as its users run it: the client program against a real server that has the
// demo's weights. Updates whose effect is known, interruptions, and what goes wrong.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"
#include "tests/integration/client_process.h"
#include "tests/integration/perturbed_model.h"
#include "tests/integration/server_process.h"

namespace carryover {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;
using Json = nlohmann::json;

constexpr int kPrefix = 64;  // tokens, all of them reusable
constexpr double kEqual = 1e-6;
const char* const kDecoded = "carryover_requests_total{code=\"OK\",method=\"Evaluate\"}";

std::vector<std::string> Lines(const std::string& text) {
  return absl::StrSplit(text, '\n', absl::SkipEmpty());
}

class EvalLiveTest : public testing::Test {
 protected:
  EvalLiveTest() {
    folder_ = (std::filesystem::temp_directory_path() / "carryover-eval-XXXXXX").string();
    CHECK(mkdtemp(folder_.data()) != nullptr);
    std::ifstream prompts(absl::StrCat(CARRYOVER_SOURCE_DIR, "/models/demo/prompts.jsonl"));
    std::ofstream book(At("book.txt"));
    for (std::string line; std::getline(prompts, line);) {
      const Json item = Json::parse(line, nullptr, false);
      if (item.value("kind", "") == "text") book << item["text"].get<std::string>() << "\n\n";
    }
  }
  ~EvalLiveTest() override {
    for (const std::string& folder : models_) std::filesystem::remove_all(folder);
    std::filesystem::remove_all(folder_);
  }

  std::string At(const std::string& name) const { return folder_ + "/" + name; }
  std::string Perturbed(const std::string& tensors, double step) {
    models_.push_back(PerturbedModel(DemoModel("2026-10"), tensors, step));
    return models_.back();
  }
  // more: entries beside S and T, which have the same weights under two fingerprints.
  void Start(const std::string& more = "") {
    server_ = ServerProcess::Start(
        absl::StrCat(LoadEntry("demo", "S", DemoModel("2026-10")),
                     LoadEntry("demo", "T", DemoModel("2026-10"), "carry_from: 'S' distinct: 'x'"),
                     more, "engine { kv_cache_bytes: 134217728 } log_level: 'warning'"));
    ASSERT_NE(server_, nullptr);
  }
  ClientResult Run(const std::vector<std::string>& args) { return RunClient(*server_, args); }

  // Items that the demo's 2026-10 was trained to answer, each about a prefix of its own.
  void MakeKv(int count) {
    const ClientResult made = Run({"eval", "tasks", "kv", "--text", At("book.txt"), "--out",
                                   At("kv.jsonl"), "--style", "demo-2026-10", "--words",
                                   absl::StrCat(CARRYOVER_SOURCE_DIR, "/models/demo/words.json"),
                                   "--lengths", absl::StrCat(kPrefix), "--per-length",
                                   absl::StrCat(count), "--per-prefix", "1", "--version", "S"});
    ASSERT_EQ(made.exit_code, 0) << made.err;
    ASSERT_EQ(Lines(ReadAll(At("kv.jsonl"))).size(), static_cast<size_t>(count));
  }
  void MakeText(int count) {
    const ClientResult made =
        Run({"eval", "tasks", "text", "--text", At("book.txt"), "--out", At("text.jsonl"),
             "--lengths", absl::StrCat(kPrefix), "--per-length", absl::StrCat(count),
             "--per-prefix", "2", "--max-tokens", "8", "--version", "S"});
    ASSERT_EQ(made.exit_code, 0) << made.err;
    ASSERT_EQ(Lines(ReadAll(At("text.jsonl"))).size(), static_cast<size_t>(count));
  }

  std::vector<std::string> Command(const std::string& source, const std::string& target,
                                   const std::vector<std::string>& tasks) const {
    std::vector<std::string> args = {"eval", "--source", source,   "--target",
                                     target, "--out",    At("out")};
    for (const std::string& file : tasks) {
      args.push_back("--tasks");
      args.push_back(At(file));
    }
    return args;
  }
  Json Report() const { return Json::parse(ReadAll(At("out/eval.json")), nullptr, false); }
  // The cell of all lengths.
  static Json Cell(const Json& report, const std::string& task) {
    for (const Json& cell : report["cells"]) {
      if (cell["task"] == task && cell["prefix_bucket"] == 0) return cell;
    }
    ADD_FAILURE() << "no cell " << task;
    return {};
  }
  std::vector<std::string> Rows() const { return Lines(ReadAll(At("out/items.jsonl"))); }
  // Waits until so many items are done while the client runs.
  void WaitForRows(ClientProcess& client, size_t count) {
    while (Rows().size() < count) {
      ASSERT_TRUE(client.running()) << client.err();
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  std::string folder_;
  std::vector<std::string> models_;
  std::unique_ptr<ServerProcess> server_;
};

// Every position of the comparison, over all rows.
void ForEachPosition(const Json& report, const std::string& comparison,
                     const std::function<void(const Json& positions, size_t i)>& see) {
  for (const Json& row : report["items"]) {
    for (const Json& one : row["comparisons"]) {
      if (one["comparison"] != comparison) continue;
      for (size_t i = 0; i < one["positions"]["kl"].size(); ++i) see(one["positions"], i);
    }
  }
}

TEST_F(EvalLiveTest, EqualWeightsKeepTheTaskAndTheBehaviour) {
  // 189 items without a flip prove under 2 % of them.
  constexpr int kKv = 192, kText = 24;
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_NO_FATAL_FAILURE(MakeKv(kKv));
  ASSERT_NO_FATAL_FAILURE(MakeText(kText));
  const ClientResult run = Run(Command("S", "T", {"kv.jsonl", "text.jsonl"}));
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(run.err, HasSubstr(absl::StrCat(kKv + kText, " of ", kKv + kText, " items done")));

  const Json report = Report();
  ASSERT_EQ(report["counts"]["done"], kKv + kText);
  EXPECT_EQ(report["counts"]["failed"], 0);
  const Json& versions = report["run"]["identity"];
  EXPECT_EQ(versions["source"]["weights_sha256"], versions["target"]["weights_sha256"]);
  EXPECT_NE(versions["source"]["fingerprint"], versions["target"]["fingerprint"]);

  for (const char* comparison : {"carried", "control", "old"}) {
    int positions = 0;
    ForEachPosition(report, comparison, [&](const Json& at, size_t i) {
      ++positions;
      ASSERT_EQ(at["valid"][i], 1);
      EXPECT_LE(at["kl"][i].get<double>(), kEqual);
      EXPECT_LE(at["tv"][i].get<double>(), kEqual);
      EXPECT_EQ(at["flip"][i], 0);
      EXPECT_EQ(at["fragile"][i], 0);
      EXPECT_EQ(at["overlap"][i], 1.0);
    });
    EXPECT_GE(positions, 4 * (kKv + kText)) << comparison;
  }
  for (const Json& row : report["items"]) {
    const Json& native = row["native"];
    const Json& carried = row["carried"][0];
    EXPECT_EQ(row["prefix_tokens"], kPrefix);
    EXPECT_EQ(native["prompt"]["computed"], row["prompt_tokens"]) << "from nothing";
    EXPECT_EQ(carried["prompt"]["carried"], kPrefix);
    EXPECT_EQ(row["hit"]["prompt"]["cached"], kPrefix);
    EXPECT_EQ(native["tokens"], carried["tokens"]);
    EXPECT_EQ(native["tokens"], row["hit"]["tokens"]);
    EXPECT_EQ(native["tokens"], row["source"]["tokens"]);
  }

  const Json kv = Cell(report, "kv-demo-2026-10");
  EXPECT_EQ(kv["n"], kKv);
  EXPECT_EQ(kv["prefixes"], kKv);
  EXPECT_EQ(kv["verdict"]["headline"], "keeps the task, keeps the behaviour");
  EXPECT_EQ(kv["verdict"]["utility"], "kept");
  EXPECT_EQ(kv["verdict"]["fidelity"], "kept");
  EXPECT_EQ(kv["utility"]["correct_to_wrong"], 0);
  EXPECT_EQ(kv["utility"]["wrong_to_correct"], 0);
  // It was trained for it, so that there is a task to be kept.
  EXPECT_GE(kv["utility"]["both_right"], kKv * 9 / 10);
  EXPECT_EQ(kv["utility"]["native"]["accuracy"], kv["utility"]["carried"]["accuracy"]);
  EXPECT_EQ(kv["fidelity"]["carried"]["first_token_flip"]["mean"], 0);
  const Json text = Cell(report, "text");
  EXPECT_EQ(text["n"], kText);
  EXPECT_EQ(text["prefixes"], kText / 2);
  EXPECT_EQ(text["verdict"]["headline"], "no task to keep, behaviour undecided");
  EXPECT_EQ(text["fidelity"]["carried"]["continuation"], Json({{"same", kText}}));
  EXPECT_GT(text["verdict"]["more_items"], 0);
  EXPECT_THAT(run.out, HasSubstr("keeps the task, keeps the behaviour"));

  // Nothing of it moves the gate or a fidelity metric.
  const Json status = Json::parse(server_->Get("/status.json"), nullptr, false);
  EXPECT_TRUE(status["fidelity"]["rows"].empty() && status["fidelity"].contains("rows"));
  EXPECT_EQ(status["gate"]["cells"], 0);
  EXPECT_EQ(server_->Metric("carryover_provenance_violations_total"), 0);

  // One file that loads nothing from elsewhere, with all of the verdicts.
  const std::string page = ReadAll(At("out/eval.html"));
  for (const char* loads : {"http:", "https:", "src=", "<link", "<script", "@import", "url(",
                            "<iframe", "<object", "<embed"}) {
    EXPECT_THAT(page, Not(HasSubstr(loads)));
  }
  for (size_t at = 0; (at = page.find("href=", at)) != page.npos; ++at) {
    EXPECT_EQ(page.substr(at, 7), "href=\"#");
  }
  for (const Json& cell : report["cells"]) {
    for (const char* field : {"headline", "utility_text", "fidelity_text"}) {
      EXPECT_THAT(page, HasSubstr(cell["verdict"][field].get<std::string>()));
    }
    if (cell["prefix_bucket"] != 0) continue;
    // Not only in the table by length.
    for (const auto& [name, field] :
         {std::pair("Utility: ", "utility_text"), std::pair("Fidelity: ", "fidelity_text")}) {
      EXPECT_THAT(page, HasSubstr(name + cell["verdict"][field].get<std::string>()));
    }
  }
  EXPECT_THAT(page, HasSubstr("<svg"));
}

// The profile of an update of one tensor is known beforehand: it shows where that tensor writes.
TEST_F(EvalLiveTest, ProfilesSayWhereTheDivergenceComesFrom) {
  ASSERT_NO_FATAL_FAILURE(Start(
      LoadEntry("demo", "V", Perturbed("model.layers.3.self_attn.v_proj", 1), "carry_from: 'S'")));
  constexpr int kKv = 4;
  ASSERT_NO_FATAL_FAILURE(MakeKv(kKv));
  std::vector<std::string> command = Command("S", "V", {"kv.jsonl"});
  command.push_back("--sensitivity");
  const ClientResult run = Run(command);
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const Json report = Report();
  ASSERT_EQ(report["counts"]["done"], kKv);
  ASSERT_EQ(report["sensitivity"].size(), 2u);
  const Json& profile = report["sensitivity"][0];
  EXPECT_EQ(profile["prompts"], kKv);
  EXPECT_EQ(profile["layers"], 4);
  std::map<std::string, double> carried, gain;
  for (const Json& part : profile["parts"]) {
    EXPECT_EQ(part["n"], kKv);
    carried[part["name"]] = part["tv_carried"]["mean"];
    if (!part["tv_gain_native"].is_null()) gain[part["name"]] = part["tv_gain_native"]["mean"];
  }
  const Json cell = Cell(report, "kv-demo-2026-10");
  EXPECT_GT(carried["all"], 0.01);
  EXPECT_NEAR(carried["all"], cell["fidelity"]["carried"]["tv"]["mean"], kEqual);
  for (const char* part : {"layer 0", "layer 1", "layer 2", "keys"}) {
    EXPECT_NEAR(carried[part], 0, kEqual) << part;
    EXPECT_NEAR(gain[part], 0, kEqual) << part;
  }
  for (const char* part : {"layer 3", "values"}) {
    EXPECT_NEAR(carried[part], carried["all"], kEqual) << part;
    EXPECT_NEAR(gain[part], carried["all"], kEqual) << part;
  }
  for (const char* part : {"first block", "last block"}) EXPECT_GT(carried[part], 0) << part;
  EXPECT_THAT(ReadAll(At("out/eval.html")), HasSubstr("Where the divergence comes from"));
  // Nothing of a mixture stays.
  EXPECT_EQ(server_->Metric("carryover_provenance_violations_total"), 0);
  for (int i = 0; i < 100 && server_->Metric("carryover_device_blocks_used") > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  EXPECT_EQ(server_->Metric("carryover_device_blocks_used"), 0);

  std::ofstream(At("prompt.txt")) << ReadAll(At("book.txt")).substr(0, 800);
  const ClientResult one =
      Run({"fidelity", "evaluate", "--source", "S", "--target", "V", "--prompt-file",
           At("prompt.txt"), "--max-tokens", "4", "--sensitivity"});
  ASSERT_EQ(one.exit_code, 0) << one.err;
  EXPECT_THAT(one.out, HasSubstr("last block (tokens "));
}

TEST_F(EvalLiveTest, UpdatesThatChangeMuchAreSeenAndSaid) {
  // P: a target that is far from its source. R: one whose source knows nothing that is of use.
  ASSERT_NO_FATAL_FAILURE(Start(
      absl::StrCat(LoadEntry("demo", "P", Perturbed("model.layers.1.", 0.5), "carry_from: 'S'"),
                   LoadEntry("demo", "N", Perturbed("", 3)),
                   LoadEntry("demo", "R", DemoModel("2026-10"), "carry_from: 'N' distinct: 'r'"))));
  constexpr int kKv = 40, kText = 24;
  ASSERT_NO_FATAL_FAILURE(MakeKv(kKv));
  ASSERT_NO_FATAL_FAILURE(MakeText(kText));
  const ClientResult run = Run(Command("S", "P", {"kv.jsonl", "text.jsonl"}));
  ASSERT_EQ(run.exit_code, 0) << run.err;
  Json report = Report();
  for (const char* task : {"kv-demo-2026-10", "text"}) {
    const Json cell = Cell(report, task);
    std::cout << task << ": " << cell["verdict"]["headline"] << ", KL "
              << cell["fidelity"]["carried"]["kl_nats"]["mean"] << ", utility " << cell["utility"]
              << "\n";
    EXPECT_EQ(cell["verdict"]["fidelity"], "broken") << task;
    EXPECT_THAT(cell["verdict"]["headline"].get<std::string>(), HasSubstr("changes the behaviour"));
    EXPECT_THAT(cell["verdict"]["fidelity_text"].get<std::string>(),
                HasSubstr("over the limit of"));
    EXPECT_GT(cell["fidelity"]["carried"]["kl_nats"]["mean"], 0.01) << task;
    EXPECT_GT(cell["fidelity"]["tv_excess"]["lower"], 0.05) << task;
    EXPECT_LE(cell["fidelity"]["control"]["kl_nats"]["mean"], kEqual) << "the floor stays";
  }

  std::filesystem::remove_all(At("out"));
  const ClientResult other = Run(Command("N", "R", {"kv.jsonl"}));
  ASSERT_EQ(other.exit_code, 0) << other.err;
  report = Report();
  const Json cell = Cell(report, "kv-demo-2026-10");
  EXPECT_EQ(cell["verdict"]["headline"], "loses the task, changes the behaviour");
  EXPECT_GE(cell["utility"]["native"]["accuracy"]["mean"], 0.9);
  EXPECT_LE(cell["utility"]["carried"]["accuracy"]["mean"], 0.2);
  EXPECT_GE(cell["utility"]["correct_to_wrong"], kKv / 2);
  EXPECT_LT(cell["utility"]["mcnemar_p"], 1e-4);
  EXPECT_GT(cell["fidelity"]["carried"]["first_token_flip"]["lower"], 0.5);
  EXPECT_LE(cell["fidelity"]["control"]["kl_nats"]["mean"], kEqual);
  EXPECT_THAT(ReadAll(At("out/eval.html")), HasSubstr("loses the task, changes the behaviour"));
}

TEST_F(EvalLiveTest, GoesOnAfterCtrlCAndAfterTheServersEnd) {
  constexpr int kItems = 48;
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_NO_FATAL_FAILURE(MakeKv(kItems));
  const std::vector<std::string> command = Command("S", "T", {"kv.jsonl"});
  // What the folder says now: whole rows, each item once, the first ones as they were before.
  std::vector<std::string> before;
  const auto expect_rows = [&](size_t least, size_t most) {
    const std::vector<std::string> rows = Rows();
    ASSERT_GE(rows.size(), least);
    ASSERT_LE(rows.size(), most);
    std::set<int> indexes;
    for (size_t i = 0; i < rows.size(); ++i) {
      const Json row = Json::parse(rows[i], nullptr, false);
      ASSERT_TRUE(row.is_object()) << rows[i];
      EXPECT_FALSE(row.contains("error"));
      EXPECT_TRUE(indexes.insert(row["index"].get<int>()).second) << "twice: " << row["index"];
      if (i < before.size()) EXPECT_EQ(rows[i], before[i]) << "an item that was done before";
    }
    const Json report = Report();
    EXPECT_EQ(report["counts"]["done"], rows.size());
    EXPECT_EQ(report["counts"]["items"], kItems);
    EXPECT_EQ(report["items"].size(), rows.size());
    EXPECT_EQ(Cell(report, "kv-demo-2026-10")["n"], rows.size());
    before = rows;
  };

  const auto first = ClientProcess::Start(*server_, command);
  ASSERT_NE(first, nullptr);
  ASSERT_NO_FATAL_FAILURE(WaitForRows(*first, 5));
  first->Signal(SIGINT);
  ASSERT_EQ(first->Wait(), 130) << first->err();
  EXPECT_THAT(first->err(), HasSubstr("interrupted; the same command goes on"));
  ASSERT_NO_FATAL_FAILURE(expect_rows(5, kItems - 10));
  ASSERT_EQ(server_->WaitIdle(), "") << "the server works on";

  const auto second = ClientProcess::Start(*server_, command);
  ASSERT_NE(second, nullptr);
  ASSERT_NO_FATAL_FAILURE(WaitForRows(*second, before.size() + 5));
  const double asked = server_->Metric(kDecoded);
  server_->Signal(SIGKILL);
  ASSERT_EQ(second->Wait(), 1) << second->err();
  EXPECT_THAT(second->err(), HasSubstr(absl::StrCat(before.size(), " items were done before")));
  EXPECT_THAT(second->err(), HasSubstr("the server is gone"));
  ASSERT_NO_FATAL_FAILURE(expect_rows(before.size() + 5, kItems - 2));
  // The answer to the one that was interrupted may have come too late for a row.
  EXPECT_LE(asked, before.size() + 1);

  // Another process at other addresses: it is the versions that make a run the same.
  ASSERT_NO_FATAL_FAILURE(Start());
  const size_t left = kItems - before.size();
  const ClientResult last = Run(command);
  ASSERT_EQ(last.exit_code, 0) << last.err;
  EXPECT_THAT(last.err, HasSubstr(absl::StrCat(before.size(), " items were done before")));
  ASSERT_NO_FATAL_FAILURE(expect_rows(kItems, kItems));
  EXPECT_EQ(server_->Metric(kDecoded), left) << "no item is asked twice";

  ASSERT_EQ(Run(command).exit_code, 0);
  EXPECT_EQ(server_->Metric(kDecoded), left) << "nothing was left to ask";
  ASSERT_NO_FATAL_FAILURE(expect_rows(kItems, kItems));

  // Other options are another run, and nothing is lost by trying.
  std::vector<std::string> other = command;
  other.push_back("--max-tokens=3");
  const ClientResult refused = Run(other);
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.err, HasSubstr("max_tokens was 16 and is 3"));
  ASSERT_NO_FATAL_FAILURE(expect_rows(kItems, kItems));
}

TEST_F(EvalLiveTest, SaysWhatIsWrong) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_NO_FATAL_FAILURE(MakeKv(2));
  std::ofstream(At("wrong.jsonl"))
      << ReadAll(At("kv.jsonl")) << "{\"task\": \"kv\", \"prefix\": 5, \"suffix\": \"?\"}\n";
  ClientResult run = Run(Command("S", "T", {"kv.jsonl", "wrong.jsonl"}));
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_THAT(run.err, HasSubstr(At("wrong.jsonl") + ":3: prefix must be a string"));
  std::ofstream(At("wrong.jsonl")) << "\n{\"task\": \"kv\", \"prefix\n";
  run = Run(Command("S", "T", {"wrong.jsonl"}));
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_THAT(run.err, HasSubstr(At("wrong.jsonl") + ":2: not a JSON object"));
  run = Run(Command("S", "T", {"absent.jsonl"}));
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_THAT(run.err, HasSubstr("absent.jsonl: cannot be opened"));

  run = Run(Command("S", "U", {"kv.jsonl"}));
  EXPECT_EQ(run.exit_code, 1);
  EXPECT_THAT(run.err, HasSubstr("NOT_FOUND: --target: there is no version U"));
  run = Run(Command("U", "T", {"kv.jsonl"}));
  EXPECT_EQ(run.exit_code, 1);
  EXPECT_THAT(run.err, HasSubstr("NOT_FOUND: --source: there is no version U"));
  run = Run({"eval", "tasks", "text", "--text", At("book.txt"), "--out", At("made.jsonl"),
             "--lengths", "64", "--version", "U"});
  EXPECT_EQ(run.exit_code, 1);
  EXPECT_THAT(run.err, HasSubstr("NOT_FOUND"));
  EXPECT_FALSE(std::filesystem::exists(At("made.jsonl")));

  // Nobody listens at port 1.
  std::vector<std::string> args = Command("S", "T", {"kv.jsonl"});
  args.push_back("--admin=127.0.0.1:1");
  run = Run(args);
  EXPECT_EQ(run.exit_code, 1);
  EXPECT_THAT(run.err, HasSubstr("UNAVAILABLE"));
  EXPECT_THAT(run.err, HasSubstr("server: 127.0.0.1:1"));
  EXPECT_FALSE(std::filesystem::exists(At("out"))) << "what never began leaves nothing behind";
  args.back() = "--address=127.0.0.1:1";
  run = Run(args);
  EXPECT_EQ(run.exit_code, 1);
  EXPECT_THAT(run.err, HasSubstr("the server is gone"));
  EXPECT_THAT(run.err, HasSubstr("server: 127.0.0.1:1, " + server_->admin_address()));
  EXPECT_TRUE(Rows().empty());

  // S declares no source: every item fails, and so does the run.
  std::filesystem::remove_all(At("out"));
  run = Run(Command("T", "S", {"kv.jsonl"}));
  EXPECT_EQ(run.exit_code, 1) << run.err;
  EXPECT_THAT(run.err, HasSubstr("S does not carry from T"));
  EXPECT_THAT(run.err, HasSubstr("0 of 2 items done, 2 failed"));
  EXPECT_EQ(Report()["counts"]["failed"], 2);
}

}  // namespace
}  // namespace carryover
