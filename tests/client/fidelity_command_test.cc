// carryover fidelity report and watch against a service that says what a test wants.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "carryover/v1/fidelity.grpc.pb.h"
#include "client/command.h"
#include "client/commands.h"

namespace carryover {
namespace {

using testing::HasSubstr;
using testing::Not;

class FakeFidelity final : public v1::Fidelity::Service {
 public:
  v1::FidelityReportResponse report;
  std::vector<v1::WatchedSample> samples;
  v1::WatchSamplesRequest watched;
  bool stays = false;  // the watch does not end by itself

  grpc::Status Report(grpc::ServerContext*, const v1::FidelityReportRequest*,
                      v1::FidelityReportResponse* response) override {
    *response = report;
    return grpc::Status::OK;
  }
  grpc::Status Evaluate(grpc::ServerContext*, const v1::EvaluateRequest* request,
                        v1::EvaluateResponse* response) override {
    if (!request->sensitivity()) return grpc::Status::OK;
    v1::Sensitivity* sensitivity = response->mutable_sensitivity();
    sensitivity->set_prefix_tokens(512);
    v1::CachePart* all = sensitivity->add_parts();
    all->set_name("all");
    all->mutable_carried()->set_valid(true);
    all->mutable_carried()->set_tv(0.25);
    v1::CachePart* first = sensitivity->add_parts();
    first->set_kind(v1::CachePart::POSITIONS);
    first->set_name("first block");
    first->set_end(16);
    first->mutable_carried();  // not valid
    first->mutable_native()->set_valid(true);
    first->mutable_native()->set_tv(0.125);
    first->mutable_native()->set_flips(0.5);
    return grpc::Status::OK;
  }
  grpc::Status WatchSamples(grpc::ServerContext* context, const v1::WatchSamplesRequest* request,
                            grpc::ServerWriter<v1::WatchedSample>* writer) override {
    watched = *request;
    for (const v1::WatchedSample& sample : samples) writer->Write(sample);
    while (stays && !context->IsCancelled()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is draining");
  }
};

class FidelityCommandTest : public testing::Test {
 protected:
  FidelityCommandTest() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&fidelity_);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
    v1::WatchedSample event;
    v1::FidelitySample* sample = event.mutable_sample();
    sample->set_source("2026-10");
    sample->set_target("2026-11");
    sample->set_comparison("carried");
    sample->set_task("qa");
    sample->set_prefix_bucket(512);
    sample->set_valid(true);
    sample->set_continuation("diverged");
    sample->set_first_token_flip(true);
    sample->add_positions()->set_kl(0.5);
    sample->add_positions()->set_flip(true);
    fidelity_.samples.push_back(event);
    event.Clear();
    event.set_dropped(7);
    fidelity_.samples.push_back(event);
    event.mutable_sample()->set_comparison("control");
    event.set_dropped(0);
    fidelity_.samples.push_back(event);
  }
  ~FidelityCommandTest() override { server_->Shutdown(std::chrono::system_clock::now()); }

  int Run(std::vector<std::string> arguments) {
    arguments.push_back("--admin=" + address_);
    CommandContext context{
        .arguments = std::move(arguments), .out = out_, .err = err_, .interrupt = interrupt_};
    return RunFidelity(context);
  }

  FakeFidelity fidelity_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
  Interrupt interrupt_;
  std::ostringstream out_, err_;
};

TEST_F(FidelityCommandTest, WatchPrintsALineASample) {
  EXPECT_EQ(Run({"watch", "--source=2026-10", "--task=qa"}), kExitFailed);  // the server drained
  EXPECT_EQ(fidelity_.watched.source(), "2026-10");
  EXPECT_EQ(fidelity_.watched.target(), "");
  EXPECT_EQ(fidelity_.watched.task(), "qa");
  const std::vector<std::string> lines = absl::StrSplit(out_.str(), '\n', absl::SkipEmpty());
  ASSERT_EQ(lines.size(), 2u) << out_.str();
  for (const char* part : {"carried", "2026-10 -> 2026-11", "qa 512", "KL 0.25",
                           "flips 1 of 2, the first", "diverged"}) {
    EXPECT_THAT(lines[0], HasSubstr(part));
  }
  EXPECT_THAT(lines[1], HasSubstr("control"));
  EXPECT_THAT(err_.str(), HasSubstr("7 samples lost"));
  EXPECT_THAT(err_.str(), HasSubstr("draining"));
}

TEST_F(FidelityCommandTest, WatchEndsAfterCount) {
  fidelity_.stays = true;
  EXPECT_EQ(Run({"watch", "--count=2", "--json"}), kExitOk);  // the loss is not one of them
  const std::vector<std::string> lines = absl::StrSplit(out_.str(), '\n', absl::SkipEmpty());
  ASSERT_EQ(lines.size(), 3u) << out_.str();
  for (const std::string& line : lines) {
    EXPECT_FALSE(nlohmann::json::parse(line, nullptr, false).is_discarded()) << line;
  }
  EXPECT_EQ(nlohmann::json::parse(lines[0])["sample"]["positions"][0]["kl"], 0.5);
  EXPECT_EQ(nlohmann::json::parse(lines[1])["dropped"], 7);
  EXPECT_EQ(Run({"watch", "--count=0"}), kExitUsage);
}

TEST_F(FidelityCommandTest, InterruptEndsAWatch) {
  fidelity_.stays = true;
  interrupt_.Trigger();
  EXPECT_EQ(Run({"watch"}), kExitInterrupted);
}

TEST_F(FidelityCommandTest, ReportShowsWhatOperatorsSaid) {
  EXPECT_EQ(Run({"report"}), kExitOk);
  EXPECT_THAT(out_.str(), Not(HasSubstr("operators")));
  v1::GateRule* rule = fidelity_.report.add_rules();
  rule->mutable_pattern()->set_source("2026-10");
  rule->mutable_pattern()->set_answer(v1::GateCell::SHORT);
  rule->set_state(v1::CLOSED);
  rule->set_who("anna");
  EXPECT_EQ(Run({"report"}), kExitOk);
  for (const char* part : {"Set by operators", "2026-10", "any", "short", "closed", "anna"}) {
    EXPECT_THAT(out_.str(), HasSubstr(part));
  }
}

TEST_F(FidelityCommandTest, EvaluatePrintsWhereTheDivergenceComesFrom) {
  EXPECT_EQ(Run({"evaluate", "--source=2026-10", "--prompt=x"}), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), Not(HasSubstr("comes from")));
  EXPECT_EQ(Run({"evaluate", "--source=2026-10", "--prompt=x", "--sensitivity"}), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr("divergence of 512 directly carried tokens comes from"));
  std::vector<std::string> rows;
  for (const absl::string_view line : absl::StrSplit(out_.str(), '\n')) {
    if (absl::StartsWith(line, "all ") || absl::StartsWith(line, "first block")) {
      rows.emplace_back(line);
    }
  }
  ASSERT_EQ(rows.size(), 2u) << out_.str();
  EXPECT_THAT(rows[0], HasSubstr("0.2500"));
  for (const char* part : {"tokens 0-15", "not comparable", "0.1250", "50 %"}) {
    EXPECT_THAT(rows[1], HasSubstr(part));
  }
}

}  // namespace
}  // namespace carryover
