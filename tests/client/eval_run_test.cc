// eval as a command: resuming, refusing, Ctrl-C, failures, a server that goes away.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
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
  int fail_at_ = -1, interrupt_at_ = -1, gone_at_ = -1;
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
