// eval as a command: resuming, refusing, Ctrl-C, failures, a server that goes away.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>

#include "client/commands.h"
#include "client/eval/result.h"
#include "tests/client/fake_server.h"

namespace carryover {
namespace {

using testing::HasSubstr;
using Json = nlohmann::ordered_json;

class EvalRunTest : public testing::Test {
 protected:
  EvalRunTest()
      : folder_(testing::TempDir() + "/eval_" +
                testing::UnitTest::GetInstance()->current_test_info()->name()) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    for (const char* name : {"S", "T"}) {
      v1::Version* version = server_.versions.list.add_versions();
      version->set_model("m");
      version->set_version(name);
      version->set_fingerprint(std::string("print of ") + name);
    }
    server_.fidelity.evaluate = [this](const v1::EvaluateRequest& request,
                                       v1::EvaluateResponse* response) {
      return Answer(request, response);
    };
    Tasks(4);
  }
  ~EvalRunTest() override { std::filesystem::remove_all(folder_); }

  std::string tasks() const { return folder_ + "/tasks.jsonl"; }
  std::string out() const { return folder_ + "/out"; }
  void Tasks(int count) {
    std::ofstream file(tasks());
    for (int i = 0; i < count; ++i) {
      file << Json({{"task", "kv"},
                    {"prefix", std::string(300, static_cast<char>('a' + i))},
                    {"suffix", "?x"},
                    {"answers", {"stone"}},
                    {"label", "!"}})
                  .dump()
           << "\n";
    }
  }
  grpc::Status Answer(const v1::EvaluateRequest& request, v1::EvaluateResponse* response) {
    const int n = asked_++;
    last_ = request;
    if (n == fail_at_) return {fail_with_, "no luck"};
    if (n == gone_at_) {
      server_.gone = true;
      return {grpc::StatusCode::UNAVAILABLE, "gone"};
    }
    if (n == interrupt_at_) {
      interrupt_->Trigger();
      return {grpc::StatusCode::CANCELLED, "gone"};
    }
    for (v1::EvaluatedAnswer* answer : {response->mutable_source(), response->mutable_native(),
                                        response->add_carried(), response->mutable_hit()}) {
      answer->set_plan("native");
      answer->mutable_choice()->set_text("stone");
      answer->mutable_choice()->add_token_ids(5);
      answer->mutable_timing()->set_first_token(0.25);
    }
    response->mutable_carried(0)->set_plan("direct");
    response->mutable_carried(0)->mutable_choice()->set_text(wrong_ ? "sand" : "stone");
    response->mutable_carried(0)->mutable_timing()->set_first_token(0.05);
    for (const char* name : {"carried", "control"}) {
      v1::FidelitySample* sample = response->add_samples();
      sample->set_comparison(name);
      sample->set_plan("direct");
      sample->set_valid(true);
      for (int i = 0; i < 3; ++i) sample->add_gate_values(0);
      sample->add_positions()->set_valid(true);
    }
    if (!request.sensitivity()) return grpc::Status::OK;
    v1::Sensitivity* sensitivity = response->mutable_sensitivity();
    sensitivity->set_layers(2);
    sensitivity->set_prefix_tokens(288);
    const auto part = [&](v1::CachePart::Kind kind, const char* name, int begin, int end,
                          double carried, double native) {
      v1::CachePart* out = sensitivity->add_parts();
      out->set_kind(kind);
      out->set_name(name);
      out->set_begin(begin);
      out->set_end(end);
      out->mutable_carried()->set_valid(n != invalid_at_ || kind == v1::CachePart::LAYERS);
      out->mutable_carried()->set_tv(carried);
      out->mutable_carried()->set_kl(n == 0 ? std::numeric_limits<double>::infinity() : carried);
      if (kind == v1::CachePart::ALL) return;
      out->mutable_native()->set_valid(n != invalid_at_);
      out->mutable_native()->set_tv(native);
    };
    // Prompts differ by a tenth.
    part(v1::CachePart::ALL, "all", 0, 2, 0.5 + 0.1 * n, 0);
    part(v1::CachePart::LAYERS, "layer 0", 0, 1, 0.125, 0.25 + 0.1 * n);
    part(v1::CachePart::LAYERS, "layer 1", 1, 2, 0.375, 0.5 + 0.1 * n);
    part(v1::CachePart::KEYS, "keys", 0, 2, 0.25, 0.25);
    part(v1::CachePart::POSITIONS, "first block", 0, 16, 0.0625, 0.75 + 0.1 * n);
    return grpc::Status::OK;
  }
  int Run(std::vector<std::string> more = {}) {
    std::vector<std::string> arguments = {"--source=S", "--target=T", "--tasks=" + tasks(),
                                          "--out=" + out()};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return RunArguments(std::move(arguments));
  }
  int RunArguments(std::vector<std::string> arguments) {
    std::ostringstream out_stream, err_stream;
    interrupt_ = std::make_unique<Interrupt>();
    arguments.push_back("--address=" + server_.address);
    arguments.push_back("--admin=" + server_.address);
    CommandContext context{.arguments = std::move(arguments),
                           .out = out_stream,
                           .err = err_stream,
                           .interrupt = *interrupt_};
    const int code = RunEval(context);
    out_ = out_stream.str();
    err_ = err_stream.str();
    return code;
  }
  Json Report() const {
    std::ifstream file(out() + "/eval.json");
    return Json::parse(file, nullptr, false);
  }

  const std::string folder_;
  FakeServer server_;
  std::unique_ptr<Interrupt> interrupt_;
  v1::EvaluateRequest last_;
  std::atomic<int> asked_{0};
  int fail_at_ = -1, interrupt_at_ = -1, gone_at_ = -1, invalid_at_ = -1;
  grpc::StatusCode fail_with_ = grpc::StatusCode::INTERNAL;
  bool wrong_ = false;
  std::string out_, err_;
};

TEST_F(EvalRunTest, AsksWhatTheItemSaysAndReports) {
  ASSERT_EQ(Run(), kExitOk) << err_;
  EXPECT_EQ(last_.prefix_tokens(), 300);
  EXPECT_EQ(last_.prompt().tokens().ids_size(), 302);
  EXPECT_EQ(last_.prompt().version(), "T");
  EXPECT_EQ(last_.source(), "S");
  ASSERT_EQ(last_.answer_ids_size(), 1);
  EXPECT_EQ(last_.answer_ids(0), '!');
  EXPECT_TRUE(last_.control());
  EXPECT_TRUE(last_.hit());
  const Json report = Report();
  EXPECT_EQ(report["schema_version"], 1);
  EXPECT_EQ(report["counts"]["done"], 4);
  EXPECT_EQ(report["run"]["identity"]["source"]["fingerprint"], "print of S");
  EXPECT_EQ(report["cells"][0]["utility"]["carried"]["accuracy"]["mean"], 1.0);
  EXPECT_TRUE(std::filesystem::exists(out() + "/eval.html"));
  EXPECT_THAT(out_, HasSubstr("task undecided"));
}

TEST_F(EvalRunTest, GoesOnWhereItWasInterrupted) {
  interrupt_at_ = 2;
  ASSERT_EQ(Run(), kExitInterrupted) << err_;
  EXPECT_EQ(Report()["counts"]["done"], 2) << "the report is there all the same";
  // A crash leaves half a row.
  std::ofstream(out() + "/items.jsonl", std::ios::app) << "{\"index\":2,\"id\"";
  ASSERT_EQ(Run(), kExitOk) << err_;
  EXPECT_EQ(asked_, 3 + 2);
  EXPECT_EQ(Report()["counts"]["done"], 4);
  EXPECT_EQ(Report()["items"].size(), 4u);
  ASSERT_EQ(Run(), kExitOk);
  EXPECT_EQ(asked_, 5) << "nothing is left to ask";
}

TEST_F(EvalRunTest, AnotherRunIsRefusedUnlessRestarted) {
  ASSERT_EQ(Run(), kExitOk) << err_;
  EXPECT_EQ(Run({"--max-tokens=3"}), kExitFailed);
  EXPECT_THAT(err_, HasSubstr("max_tokens was 16 and is 3"));
  Tasks(5);
  EXPECT_EQ(Run(), kExitFailed);
  EXPECT_THAT(err_, HasSubstr("tasks was"));
  EXPECT_EQ(asked_, 4);
  ASSERT_EQ(Run({"--restart"}), kExitOk) << err_;
  EXPECT_EQ(asked_, 9);
}

TEST_F(EvalRunTest, AFailedItemIsCountedAndTriedAgain) {
  fail_at_ = 1;
  ASSERT_EQ(Run(), kExitOk) << err_;
  EXPECT_EQ(Report()["counts"]["done"], 3);
  EXPECT_EQ(Report()["counts"]["failed"], 1);
  EXPECT_EQ(Report()["items"][1]["error"]["code"], "INTERNAL");
  EXPECT_THAT(err_, HasSubstr("no luck"));
  ASSERT_EQ(Run(), kExitOk) << err_;
  EXPECT_EQ(Report()["counts"]["done"], 4);
  EXPECT_EQ(Report()["counts"]["failed"], 0);
}

TEST_F(EvalRunTest, ARunWhoseItemsAllFailHasFailed) {
  Tasks(1);
  fail_at_ = 0;
  EXPECT_EQ(Run(), kExitFailed);
  EXPECT_THAT(err_, HasSubstr("0 of 1 items done, 1 failed"));
  EXPECT_EQ(Report()["counts"]["failed"], 1) << "the report is there all the same";
}

TEST_F(EvalRunTest, AServerThatIsGoneStopsTheRun) {
  gone_at_ = 1;
  EXPECT_EQ(Run(), kExitFailed);
  EXPECT_THAT(err_, HasSubstr("the server is gone"));
  EXPECT_EQ(asked_, 2);
  EXPECT_EQ(Report()["counts"]["done"], 1);
  EXPECT_EQ(Report()["counts"]["failed"], 0);
  server_.gone = false;
  ASSERT_EQ(Run(), kExitOk) << err_;
  EXPECT_EQ(Report()["counts"]["done"], 4);
}

TEST_F(EvalRunTest, AComparisonWithoutRoomIsAFailedItem) {
  fail_at_ = 1;
  fail_with_ = grpc::StatusCode::UNAVAILABLE;
  ASSERT_EQ(Run(), kExitOk) << err_;
  EXPECT_EQ(Report()["counts"]["done"], 3);
  EXPECT_EQ(Report()["counts"]["failed"], 1);
}

TEST_F(EvalRunTest, TheReportIsMadeAnewWithoutAServer) {
  wrong_ = true;
  ASSERT_EQ(Run(), kExitOk) << err_;
  std::filesystem::remove(out() + "/eval.json");
  server_.Stop();
  ASSERT_EQ(RunArguments({"report", out(), "--max-loss=0.1"}), kExitOk) << err_;
  EXPECT_EQ(Report()["cells"][0]["utility"]["correct_to_wrong"], 4);
  EXPECT_EQ(Report()["limits"]["max_loss"], 0.1);
  EXPECT_EQ(RunArguments({"report", folder_ + "/nothing"}), kExitUsage);
}

// Means over prompts; what a prompt could not compare is left out, and an infinite KL of the mean.
TEST_F(EvalRunTest, SensitivityIsAskedForAndReported) {
  interrupt_at_ = 3;
  invalid_at_ = 2;
  ASSERT_EQ(Run({"--sensitivity"}), kExitInterrupted) << err_;
  EXPECT_TRUE(last_.sensitivity());
  ASSERT_EQ(Run({"--sensitivity"}), kExitOk) << err_;  // its rows are read again
  const Json report = Report();
  ASSERT_EQ(report["sensitivity"].size(), 2u) << "over all lengths, and by bucket";
  const Json& all = report["sensitivity"][0];
  EXPECT_EQ(all["task"], "kv");
  EXPECT_EQ(all["prefix_bucket"], 0);
  EXPECT_EQ(report["sensitivity"][1]["prefix_bucket"], 256);
  EXPECT_EQ(all["prompts"], 4);
  EXPECT_EQ(all["layers"], 2);
  std::map<std::string, Json> parts;
  for (const Json& part : all["parts"]) parts[part["name"]] = part;
  ASSERT_EQ(parts.size(), 5u);
  EXPECT_EQ(parts["all"]["n"], 3);  // prompts 0, 1 and 4
  EXPECT_NEAR(parts["all"]["tv_carried"]["mean"], 0.5 + 0.5 / 3, 1e-9);
  EXPECT_NEAR(parts["all"]["kl_carried"], 0.5 + 0.5 / 2, 1e-9);
  EXPECT_TRUE(parts["all"]["tv_gain_native"].is_null());
  EXPECT_EQ(parts["layer 0"]["n"], 3);
  EXPECT_NEAR(parts["layer 0"]["tv_carried"]["mean"], 0.125, 1e-9);
  EXPECT_NEAR(parts["layer 0"]["tv_gain_native"]["mean"], 0.25, 1e-9);
  EXPECT_NEAR(parts["layer 1"]["tv_gain_native"]["mean"], 0, 1e-9);
  EXPECT_NEAR(parts["first block"]["tv_gain_native"]["mean"], -0.25, 1e-9);
  EXPECT_EQ(parts["first block"]["end"], 16);
  std::stringstream page;
  page << std::ifstream(out() + "/eval.html").rdbuf();
  for (const char* text :
       {"Where the divergence comes from", "by layer", "keys against values",
        "layer 0 native alone: TV falls by 0.2500", "first block carried alone: TV 0.0625"}) {
    EXPECT_THAT(page.str(), HasSubstr(text));
  }

  EXPECT_EQ(Run(), kExitFailed);
  EXPECT_THAT(err_, HasSubstr("sensitivity was true and is missing"));
  ASSERT_EQ(Run({"--restart"}), kExitOk) << err_;
  EXPECT_FALSE(last_.sensitivity());
  EXPECT_FALSE(Report().contains("sensitivity"));
  EXPECT_FALSE(Report()["run"]["identity"].contains("sensitivity")) << "older runs go on";
}

TEST_F(EvalRunTest, BrokenProfilesInARunSayWhichField) {
  ASSERT_EQ(Run({"--sensitivity"}), kExitOk) << err_;
  std::stringstream rows;
  rows << std::ifstream(out() + "/items.jsonl").rdbuf();
  const auto with = [&](const std::string& what, const std::string& instead) {
    std::string changed = rows.str();
    const size_t at = changed.find(what);
    ASSERT_NE(at, std::string::npos);
    std::ofstream(out() + "/items.jsonl", std::ios::trunc)
        << changed.replace(at, what.size(), instead);
    EXPECT_NE(RunArguments({"report", out()}), kExitOk);
  };
  with("\"prefix_tokens\":288", "\"prefix_tokens\":\"x\"");
  EXPECT_THAT(err_, HasSubstr("items.jsonl:1: sensitivity: prefix_tokens has another type"));
  with("\"parts\":[", "\"parts\":3,\"no\":[");
  EXPECT_THAT(err_, HasSubstr("sensitivity: parts is no list"));
  with("\"flips\":", "\"flops\":");
  EXPECT_THAT(err_, HasSubstr("sensitivity: flips is missing"));
}

TEST_F(EvalRunTest, WrongArgumentsSayWhich) {
  EXPECT_EQ(RunArguments({"--out=x"}), kExitUsage);
  EXPECT_THAT(err_, HasSubstr("--tasks is missing"));
  EXPECT_EQ(Run({"--control-rate=2"}), kExitUsage);
  EXPECT_EQ(Run({"--target=nobody"}), kExitFailed);
  EXPECT_THAT(err_, HasSubstr("--target: there is no version nobody"));
  std::ofstream(tasks(), std::ios::app) << "{\"task\":3}\n";
  EXPECT_EQ(Run(), kExitUsage);
  EXPECT_THAT(err_, HasSubstr("tasks.jsonl:5: task must be a string"));
  EXPECT_EQ(RunArguments({"tasks", "riddles", "--text=x", "--out=y"}), kExitUsage);
  EXPECT_THAT(err_, HasSubstr("KIND must be"));
}

}  // namespace
}  // namespace carryover
