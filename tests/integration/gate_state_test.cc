// What the gate learned and was told, over a restart of a real server.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/integration/server_process.h"

namespace carryover {
namespace {

namespace fs = std::filesystem;

std::string Read(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

class GateStateFileTest : public testing::Test {
 protected:
  GateStateFileTest()
      : folder_(fs::path(testing::TempDir()) / absl::StrCat("gate-state-", getpid())),
        file_(folder_ / "gate.state") {
    fs::create_directory(folder_);
  }
  ~GateStateFileTest() override { fs::remove_all(folder_); }

  // Limits so loose that a dozen samples open a cell.
  void Start(const std::string& gate = "alpha: 0.5") {
    server_ = ServerProcess::Start(absl::StrCat(
        LoadEntry("m", "s", TinyModel("llama3")),
        LoadEntry("m", "t", TinyModel("llama3"), "distinct: 'control' carry_from: 's'"),
        "engine { kv_cache_bytes: 33554432 } fidelity { tasks: 'qa' sample_rate: 1 "
        "learning_sample_rate: 1 hold_out_rate: 0 old_rate: 0 control_rate: 0 gate { "
        "flip_limit: 0.5 tv_limit: 0.5 stop_limit: 0.5 min_prefixes: 2 ",
        gate, " state_file: '", file_.string(), "' } }"));
    ASSERT_NE(server_, nullptr);
  }
  v1::CompleteResponse Ask(int seed, const std::string& task = "") {
    v1::CompleteRequest request = Tokens(SomeTokens(40, seed), 2);
    for (int32_t& id : *request.mutable_tokens()->mutable_ids()) id %= 256;
    request.set_version("s");
    Complete(server_->completions(), request);
    request.set_version("t");
    request.mutable_cache()->set_task(task);
    return Complete(server_->completions(), request);
  }
  v1::FidelityReportResponse Report() {
    grpc::ClientContext context;
    v1::FidelityReportResponse response;
    EXPECT_TRUE(server_->fidelity().Report(&context, {}, &response).ok());
    return response;
  }
  void Close(const std::string& task, const std::string& who) {
    v1::SetGateRequest request;
    request.mutable_pattern()->set_source("s");
    request.mutable_pattern()->set_task(task);
    request.set_state(v1::CLOSED);
    request.set_who(who);
    grpc::ClientContext context;
    v1::SetGateResponse response;
    EXPECT_TRUE(server_->fidelity().SetGate(&context, request, &response).ok());
  }
  void Stop() {
    server_->Signal(SIGTERM);
    EXPECT_EQ(server_->Wait(30), 0) << server_->log();
  }
  bool WaitForFile(double seconds) {
    for (int i = 0; i < 200 * seconds && !fs::exists(file_); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return fs::exists(file_);
  }

  const fs::path folder_, file_;
  std::unique_ptr<ServerProcess> server_;
};

TEST_F(GateStateFileTest, WhatWasLearnedAndSaidOutlivesARestart) {
  Start();
  int asked = 0;
  while (asked < 200 && Ask(asked).cache().gate() != "open") ++asked;
  ASSERT_LT(asked, 200);
  EXPECT_GT(asked, 1);
  Close("qa", "anna");
  const v1::FidelityReportResponse before = Report();
  Stop();
  struct stat info;
  ASSERT_EQ(stat(file_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);

  Start();
  v1::FidelityReportResponse after = Report();
  ASSERT_EQ(before.cells_size(), 1);
  ASSERT_EQ(after.cells_size(), 1);
  EXPECT_EQ(after.cells(0).cell().source(), "s");
  EXPECT_EQ(after.cells(0).state(), v1::OPEN);
  // What waited when the server ended counts as dropped, and no sample is lost.
  EXPECT_GE(after.cells(0).samples(), before.cells(0).samples());
  EXPECT_GT(after.cells(0).samples(), 0);
  ASSERT_EQ(after.rules_size(), 1);
  EXPECT_EQ(after.rules(0).pattern().source(), "s");
  EXPECT_EQ(after.rules(0).pattern().task(), "qa");
  EXPECT_EQ(after.rules(0).state(), v1::CLOSED);
  EXPECT_EQ(after.rules(0).who(), "anna");
  const std::string cell =
      "{model=\"m\",source=\"s\",target=\"t\",plan=\"direct\",task=\"other\",prefix_bucket=\"256\","
      "answer=\"short\"";
  EXPECT_EQ(server_->Metric(absl::StrCat("carryover_gate_state", cell, ",state=\"open\"}")), 1);
  EXPECT_EQ(server_->Metric(absl::StrCat("carryover_gate_samples", cell, "}")),
            after.cells(0).samples());

  // The first requests get what was decided before.
  EXPECT_EQ(Ask(5000).usage().carried_tokens(), 32);
  const v1::CompleteResponse closed = Ask(5001, "qa");
  EXPECT_EQ(closed.cache().gate(), "closed");
  EXPECT_EQ(closed.usage().carried_tokens(), 0);
  EXPECT_EQ(server_->log().find("gate_state_refused"), std::string::npos);
}

TEST_F(GateStateFileTest, ABrokenFileIsKeptAsideAndTheServerLearns) {
  Start();
  Close("qa", "anna");
  Ask(1);
  Stop();
  std::string broken = Read(file_);
  ASSERT_GT(broken.size(), 1000u);
  broken[broken.size() / 2] ^= 1;
  std::ofstream(file_) << broken;

  Start();
  EXPECT_NE(server_->log().find("gate_state_refused"), std::string::npos) << server_->log();
  EXPECT_EQ(Read(file_.string() + ".refused"), broken);
  EXPECT_FALSE(fs::exists(file_));
  EXPECT_EQ(Report().cells_size(), 0);
  EXPECT_EQ(Report().rules_size(), 0);
  EXPECT_EQ(Ask(2).cache().gate(), "learning");
  Close("qa", "bert");
  EXPECT_TRUE(WaitForFile(10));
  Stop();

  Start();
  ASSERT_EQ(Report().rules_size(), 1);
  EXPECT_EQ(Report().rules(0).who(), "bert");
}

TEST_F(GateStateFileTest, EvidenceUnderOtherLimitsIsKeptAside) {
  Start();
  Ask(1);
  Stop();
  const std::string saved = Read(file_);
  Start("alpha: 0.4");
  EXPECT_NE(server_->log().find("alpha"), std::string::npos) << server_->log();
  EXPECT_EQ(Read(file_.string() + ".refused"), saved);
  EXPECT_EQ(Report().cells_size(), 0);
}

TEST_F(GateStateFileTest, AKilledServerLosesLittle) {
  Start("alpha: 0.5 state_interval_seconds: 1");
  // An operator's word is on the disk soon, samples within the interval.
  Close("qa", "anna");
  ASSERT_TRUE(WaitForFile(10));
  for (int i = 0; i < 3; ++i) Ask(i);
  const fs::file_time_type first = fs::last_write_time(file_);
  for (int i = 0; i < 4000 && fs::last_write_time(file_) == first; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_NE(fs::last_write_time(file_), first);
  server_->Signal(SIGKILL);
  EXPECT_EQ(server_->Wait(10), 128 + SIGKILL);

  Start();
  const v1::FidelityReportResponse report = Report();
  ASSERT_EQ(report.cells_size(), 1);
  EXPECT_GT(report.cells(0).samples(), 0);
  ASSERT_EQ(report.rules_size(), 1);
  EXPECT_EQ(report.rules(0).who(), "anna");
}

// Learning goes on and requests are answered, whatever the disk does.
TEST_F(GateStateFileTest, AFolderThatGoesAwayIsOnlyAWarning) {
  Start();
  fs::remove_all(folder_);
  Close("qa", "anna");
  for (int i = 0; i < 2000 && server_->log().find("gate_state_not_saved") == std::string::npos;
       ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_NE(server_->log().find("gate_state_not_saved"), std::string::npos);
  EXPECT_EQ(Ask(1).cache().gate(), "learning");
  Stop();
}

}  // namespace
}  // namespace carryover
