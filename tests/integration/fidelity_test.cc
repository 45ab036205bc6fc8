// Fidelity live: what is compared beside served requests, what the gate makes of it, and what an
// operator sees and says.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "google/rpc/status_details.pb.h"
#include "tests/integration/server_process.h"

namespace carryover {
namespace {

class FidelityTest : public testing::Test {
 protected:
  // S, and T that carries from it: an update, or the same weights under another fingerprint.
  void Start(const std::string& rates, bool same_weights) {
    server_ = ServerProcess::Start(
        absl::StrCat(LoadEntry("demo", "S", DemoModel("2026-10")),
                     "engine { kv_cache_bytes: 134217728 } fidelity { tasks: 'qa' ", rates, "}"));
    ASSERT_NE(server_, nullptr);
    stub_ = server_->NewStub();
    v1::LoadRequest request;
    request.set_model("demo");
    request.set_version("T");
    request.set_path(DemoModel(same_weights ? "2026-10" : "2026-11"));
    if (same_weights) request.set_distinct("control");
    request.set_weights(v1::DTYPE_FP32);
    request.set_kv_dtype(v1::DTYPE_FP32);
    request.add_carry_from("S");
    v1::Version loaded;
    const grpc::Status status = Load(*server_, request, &loaded);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  v1::CompleteResponse Ask(const std::string& version, int prefix, int seed) {
    v1::CompleteRequest request = Tokens(SomeTokens(prefix, seed), 6);
    request.set_version(version);
    request.mutable_cache()->set_task("qa");
    return Complete(*stub_, request);
  }
  grpc::Status SetGate(const v1::SetGateRequest& request) {
    grpc::ClientContext context;
    v1::SetGateResponse response;
    return server_->fidelity().SetGate(&context, request, &response);
  }
  v1::FidelityReportResponse Report() {
    grpc::ClientContext context;
    v1::FidelityReportResponse response;
    EXPECT_TRUE(server_->fidelity().Report(&context, {}, &response).ok());
    return response;
  }
  static std::string Series(const std::string& name, const std::string& comparison,
                            const std::string& more = "") {
    return absl::StrCat("carryover_", name, "{along=\"native\",comparison=\"", comparison,
                        "\",model=\"demo\",plan=\"direct\",", more,
                        "prefix_bucket=\"512\",source=\"S\",target=\"T\",task=\"qa\"}");
  }

  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<v1::Completions::Stub> stub_;
};

TEST_F(FidelityTest, SampledRequestsShowInMetricsAndReport) {
  Start("sample_rate: 1 learning_sample_rate: 1 hold_out_rate: 0 control_rate: 1 old_rate: 0",
        /*same_weights=*/true);
  EXPECT_EQ(server_->Metric(Series("fidelity_samples_total", "carried")), 0)
      << "series of a pair exist from its declaration on";
  for (int i = 0; i < 3; ++i) {
    Ask("S", 600, i);
    const v1::CompleteResponse answer = Ask("T", 600, i);
    EXPECT_EQ(answer.usage().carried_tokens(), 0);
    EXPECT_EQ(answer.cache().gate(), "learning");
    EXPECT_TRUE(answer.cache().shadowed());
  }
  EXPECT_TRUE(server_->WaitMetric(Series("fidelity_samples_total", "carried"), 3));
  EXPECT_TRUE(server_->WaitMetric(Series("fidelity_samples_total", "control"), 3));
  // A carried arm costs the suffix after 37 blocks, the control all; the last token needs no row.
  EXPECT_EQ(server_->Metric("carryover_shadow_tokens_total"), 3 * (600 - 592 + 5 + 600 + 5));
  EXPECT_EQ(server_->Metric(Series("first_token_flips_total", "carried")), 0);
  EXPECT_LE(server_->Metric(Series("fidelity_kl_nats_sum", "carried", "positions=\"1\",")), 1e-6);
  const v1::FidelityReportResponse report = Report();
  ASSERT_EQ(report.cells_size(), 1);
  EXPECT_EQ(report.cells(0).cell().source(), "S");
  EXPECT_EQ(report.cells(0).cell().target(), "T");
  EXPECT_EQ(report.cells(0).cell().task(), "qa");
  EXPECT_EQ(report.cells(0).cell().prefix_bucket(), 512);
  EXPECT_EQ(report.cells(0).state(), v1::LEARNING);
  EXPECT_EQ(report.cells(0).samples(), 3);
  EXPECT_EQ(report.cells(0).controls(), 3);
  EXPECT_EQ(report.cells(0).measures_size(), 3);
  EXPECT_NE(report.cells(0).explanation(), "");
  EXPECT_EQ(server_->Metric("carryover_provenance_violations_total"), 0);
}

TEST_F(FidelityTest, AnOperatorOpensAndCloses) {
  Start("sample_rate: 0 learning_sample_rate: 0 hold_out_rate: 0", /*same_weights=*/false);
  v1::SetGateRequest request;
  request.mutable_pattern()->set_source("S");
  request.set_state(v1::OPEN);
  request.set_who("test");
  ASSERT_TRUE(SetGate(request).ok());
  Ask("S", 600, 1);
  v1::CompleteResponse answer = Ask("T", 600, 1);
  EXPECT_EQ(answer.usage().carried_tokens(), 592);
  EXPECT_EQ(answer.cache().gate(), "open");
  request.set_state(v1::CLOSED);
  ASSERT_TRUE(SetGate(request).ok());
  Ask("S", 600, 2);
  answer = Ask("T", 600, 2);  // the very next request
  EXPECT_EQ(answer.usage().carried_tokens(), 0);
  EXPECT_EQ(answer.cache().gate(), "closed");
  ASSERT_EQ(Report().cells_size(), 1);
  EXPECT_TRUE(Report().cells(0).forced());
  EXPECT_EQ(Report().cells(0).evidence_state(), v1::LEARNING);
  request.set_state(v1::GATE_STATE_UNSPECIFIED);
  ASSERT_TRUE(SetGate(request).ok());
  EXPECT_FALSE(Report().cells(0).forced());
}

// Everything that a request may say of itself, in every place that shows something of requests.
TEST_F(FidelityTest, NothingOfARequestIsShown) {
  Start("sample_rate: 1 learning_sample_rate: 1 hold_out_rate: 0.5 control_rate: 1 old_rate: 1",
        /*same_weights=*/false);
  v1::SetGateRequest open;
  open.set_state(v1::OPEN);
  ASSERT_TRUE(SetGate(open).ok());
  grpc::ClientContext watching;
  const auto watch = server_->fidelity().WatchSamples(&watching, {});
  watch->WaitForInitialMetadata();
  std::string text = "my-secret-prompt";
  for (int i = 0; i < 40; ++i) absl::StrAppend(&text, " and what follows it ", i);
  for (const char* version : {"S", "T", "T"}) {
    v1::CompleteRequest request = Prompt(text, 4);
    request.set_version(version);
    request.set_request_id("my-secret-id");
    request.set_session("my-secret-session");
    request.mutable_cache()->set_salt("my-secret-salt");
    request.mutable_cache()->set_task("my-secret-task");
    request.add_stop("my-secret-stop");
    grpc::ClientContext context;
    context.AddMetadata("x-tenant", "my-secret-tenant");
    v1::CompleteResponse response;
    ASSERT_TRUE(stub_->Complete(&context, request, &response).ok());
    EXPECT_EQ(response.request_id(), "my-secret-id");
  }
  v1::WatchedSample sample;
  ASSERT_TRUE(watch->Read(&sample));
  EXPECT_EQ(sample.sample().task(), "other");
  watching.TryCancel();
  v1::WatchedSample rest;
  while (watch->Read(&rest)) {
  }
  watch->Finish();
  EXPECT_GT(server_->Metric("carryover_fidelity_cells"), 0);
  v1::ListCacheResponse prefixes;
  {
    grpc::ClientContext context;
    ASSERT_TRUE(server_->cache().List(&context, {}, &prefixes).ok());
  }
  EXPECT_GT(prefixes.prefixes_size(), 0);
  for (const std::string& shown :
       {server_->Get("/"), server_->Get("/metrics"), server_->log(), sample.ShortDebugString(),
        Report().ShortDebugString(), prefixes.ShortDebugString()}) {
    EXPECT_GT(shown.size(), 20u);
    EXPECT_EQ(shown.find("my-secret"), std::string::npos) << shown;
  }
}

// Of requests that the gate would carry, chance serves some natively; every one is in the trial.
// (With equal weights: nothing is drawn any more where the evidence speaks against what an operator
// set.)
TEST_F(FidelityTest, TheTrialCountsBothArms) {
  Start("sample_rate: 0 hold_out_rate: 0.5 control_rate: 0 old_rate: 0 refresh: NEVER",
        /*same_weights=*/true);
  v1::SetGateRequest open;
  open.set_state(v1::OPEN);
  ASSERT_TRUE(SetGate(open).ok());
  int carried = 0, tokens[2] = {0, 0};
  constexpr int kRequests = 30;
  for (int i = 0; i < kRequests; ++i) {
    Ask("S", 600, i);
    const v1::CompleteResponse answer = Ask("T", 600, i);
    const bool arm = answer.usage().carried_tokens() > 0;
    carried += arm;
    tokens[arm] += answer.usage().completion_tokens();
  }
  EXPECT_GT(carried, 1);  // 5 standard deviations
  EXPECT_LT(carried, kRequests - 1);
  const auto metric = [&](const std::string& name, const std::string& arm,
                          const std::string& reason = "") {
    return server_->Metric(absl::StrCat("carryover_trial_", name, "{arm=\"", arm,
                                        "\",model=\"demo\",plan=\"direct\",prefix_bucket=\"512\",",
                                        reason, "source=\"S\",target=\"T\",task=\"qa\"}"));
  };
  EXPECT_EQ(metric("answer_tokens_count", "carried"), carried);
  EXPECT_EQ(metric("answer_tokens_count", "held_out"), kRequests - carried);
  EXPECT_EQ(metric("answer_tokens_sum", "carried"), tokens[1]);
  EXPECT_EQ(metric("answer_tokens_sum", "held_out"), tokens[0]);
  EXPECT_EQ(metric("time_to_first_token_seconds_count", "carried"), carried);
  double ended = 0;
  for (const char* arm : {"carried", "held_out"}) {
    for (const char* reason : {"stop_token", "stop_string", "length", "cancelled"}) {
      ended += metric("finished_total", arm, absl::StrCat("reason=\"", reason, "\","));
    }
  }
  EXPECT_EQ(ended, kRequests);
  // What carrying is for, without bias: 592 of 600 tokens need not be computed.
  EXPECT_LT(metric("time_to_first_token_seconds_sum", "carried") / carried,
            metric("time_to_first_token_seconds_sum", "held_out") / (kRequests - carried));
}

TEST_F(FidelityTest, WrongPatternsAreRefusedByField) {
  Start("", /*same_weights=*/false);
  v1::SetGateRequest request;
  request.mutable_pattern()->set_source("nobody");
  EXPECT_EQ(SetGate(request).error_code(), grpc::StatusCode::NOT_FOUND);
  request.mutable_pattern()->set_source("S");
  request.mutable_pattern()->set_prefix_bucket(300);
  const grpc::Status status = SetGate(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(status.error_message().find("pattern.prefix_bucket"), std::string::npos)
      << status.error_message();
  request.mutable_pattern()->set_prefix_bucket(0);
  request.set_who(std::string(65, 'a'));
  EXPECT_EQ(SetGate(request).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(FidelityTest, EvaluateAnswersInEveryWay) {
  Start("", /*same_weights=*/false);
  v1::EvaluateRequest request;
  for (int32_t token : SomeTokens(600, 4)) {
    request.mutable_prompt()->mutable_tokens()->add_ids(token);
  }
  request.mutable_prompt()->set_version("T");
  request.set_source("S");
  request.set_max_tokens(8);
  request.set_ignore_eos(true);
  request.set_control(true);
  v1::EvaluateResponse response;
  {
    grpc::ClientContext context;
    const grpc::Status status = server_->fidelity().Evaluate(&context, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  EXPECT_EQ(response.source().version(), "S");
  EXPECT_EQ(response.native().version(), "T");
  EXPECT_EQ(response.native().usage().computed_tokens(), 600);
  ASSERT_EQ(response.carried_size(), 1);
  EXPECT_EQ(response.carried(0).usage().carried_tokens(), 592);
  EXPECT_EQ(response.carried(0).choice().token_ids_size(), 8);
  ASSERT_EQ(response.samples_size(), 3);
  EXPECT_EQ(response.samples(0).comparison(), "carried");
  ASSERT_EQ(response.samples(0).positions_size(), 8);
  EXPECT_GT(response.samples(0).positions(0).kl(), 0);
  EXPECT_EQ(response.samples(1).comparison(), "control");
  for (const auto& position : response.samples(1).positions()) EXPECT_LE(position.kl(), 1e-6);
  EXPECT_EQ(response.samples(2).comparison(), "old");
  EXPECT_EQ(Report().cells_size(), 0);  // it moves nothing

  request.set_max_tokens(0);
  grpc::ClientContext context;
  EXPECT_EQ(server_->fidelity().Evaluate(&context, request, &response).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

}  // namespace
}  // namespace carryover
