// What an operator meets: health, metrics that agree with usage, the status page, draining, ports.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <set>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "tests/integration/server_process.h"
#include "tests/skip.h"

namespace carryover {
namespace {

using grpc::health::v1::Health;
using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

class OperationsTest : public testing::Test {
 protected:
  void Start(const std::string& more = "") {
    server_ = ServerProcess::Start(LoadEntry("demo", "v1", DemoModel("2026-10")) + more);
    ASSERT_NE(server_, nullptr);
  }
  // SERVING, NOT_SERVING, or -1 with no answer.
  static int HealthOf(const std::shared_ptr<grpc::Channel>& channel, const std::string& service) {
    HealthCheckRequest request;
    request.set_service(service);
    HealthCheckResponse response;
    grpc::ClientContext context;
    return Health::NewStub(channel)->Check(&context, request, &response).ok() ? response.status()
                                                                              : -1;
  }

  std::unique_ptr<ServerProcess> server_;
};

TEST_F(OperationsTest, Health) {
  Start();
  for (const std::string service : {"", "carryover.v1.Completions"}) {
    EXPECT_EQ(HealthOf(server_->Connect(), service), HealthCheckResponse::SERVING);
  }
  EXPECT_EQ(HealthOf(server_->ConnectAdmin(), ""), HealthCheckResponse::SERVING);
  EXPECT_EQ(HealthOf(server_->Connect(), "no.such.Service"), -1);
  EXPECT_EQ(server_->Get("/healthz"), "ok\n");
  EXPECT_EQ(server_->Get("/nothing"), "");
  // Behaviour 19: the address of completions has no admin calls.
  grpc::ClientContext context;
  v1::ListVersionsResponse list;
  EXPECT_EQ(v1::Versions::NewStub(server_->Connect())->List(&context, {}, &list).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(OperationsTest, MetricsAgreeWithUsage) {
  Start();
  v1::Usage sum;
  int choices = 0;
  for (int i = 0; i < 8; ++i) {
    v1::CompleteRequest request = Tokens(SomeTokens(20 + 30 * (i % 3), i % 4), 6 + i);
    request.set_ignore_eos(true);
    request.set_n(1 + i % 2);
    const v1::Usage usage = i % 2 == 0 ? Complete(server_->completions(), request).usage()
                                       : Stream(server_->completions(), request).done.usage();
    ExpectConsistent(usage);
    sum.set_computed_tokens(sum.computed_tokens() + usage.computed_tokens());
    sum.set_cached_tokens(sum.cached_tokens() + usage.cached_tokens());
    sum.set_completion_tokens(sum.completion_tokens() + usage.completion_tokens());
    choices += request.n();
  }
  EXPECT_GT(sum.cached_tokens(), 0);
  EXPECT_EQ(server_->WaitIdle(), "");
  const auto metric = [&](const std::string& name) { return server_->Metric("carryover_" + name); };
  EXPECT_EQ(metric("prompt_tokens_total{source=\"computed\"}"), sum.computed_tokens());
  EXPECT_EQ(metric("prompt_tokens_total{source=\"cached\"}"), sum.cached_tokens());
  EXPECT_EQ(metric("prompt_tokens_total{source=\"carried\"}"), 0);
  EXPECT_EQ(metric("generation_tokens_total"), sum.completion_tokens());
  EXPECT_EQ(metric("finished_total{reason=\"length\"}"), choices);
  EXPECT_EQ(metric("time_to_first_token_seconds_count{plan=\"native\"}"), 8);
  double parts = 0;
  for (const std::string part : {"queue", "load", "compute"}) {
    const std::string labels = absl::StrCat("{part=\"", part, "\",plan=\"native\"}");
    EXPECT_EQ(metric("first_token_part_seconds_count" + labels), 8);
    parts += metric("first_token_part_seconds_sum" + labels);
  }
  EXPECT_NEAR(metric("time_to_first_token_seconds_sum{plan=\"native\"}"), parts, 1e-5);
  EXPECT_EQ(metric("request_duration_seconds_count"), 8);
  EXPECT_EQ(metric("queue_seconds_count"), 8);
  EXPECT_EQ(metric("inter_token_latency_seconds_count"), sum.completion_tokens() - choices);
  EXPECT_EQ(metric("requests_total{code=\"OK\",method=\"Complete\"}"), 4);
  EXPECT_EQ(metric("requests_total{code=\"OK\",method=\"CompleteStream\"}"), 4);
  EXPECT_EQ(metric("provenance_violations_total"), 0);
  EXPECT_EQ(metric("version_share{model=\"demo\",version=\"v1\"}"), 100);
  EXPECT_GT(metric("device_blocks_used"), 0);
  EXPECT_GT(server_->Metric("process_resident_memory_bytes"), 1e6);
  EXPECT_GT(server_->Metric("process_cpu_seconds_total"), 0);
  const std::time_t now = std::time(nullptr);
  EXPECT_NEAR(server_->Metric("process_start_time_seconds"), static_cast<double>(now), 600);
}

// What changes while the server runs is read anew for each scrape.
TEST_F(OperationsTest, GaugesFollow) {
  Start("engine { max_running: 1 } drain_timeout_seconds: 1");
  const auto metric = [&](const std::string& name) { return server_->Metric("carryover_" + name); };
  EXPECT_EQ(metric("waiting_tokens"), 0);
  EXPECT_EQ(metric("draining"), 0);
  EXPECT_EQ(metric("device_blocks_active"), 0);
  v1::LoadRequest update;
  update.set_model("demo");
  update.set_version("v2");
  update.set_path(DemoModel("2026-11"));
  update.set_promote(40);
  v1::Version loaded;
  ASSERT_TRUE(Load(*server_, update, &loaded).ok());
  EXPECT_EQ(metric("version_share{model=\"demo\",version=\"v1\"}"), 60);
  EXPECT_EQ(metric("version_share{model=\"demo\",version=\"v2\"}"), 40);

  const double steps = metric("steps_total");
  v1::CompleteRequest request = Tokens(SomeTokens(40, 1), 3500);
  request.set_ignore_eos(true);
  std::vector<std::future<grpc::Status>> calls;
  for (int i = 0; i < 2; ++i) {
    calls.push_back(std::async(std::launch::async,
                               [&] { return Stream(*server_->NewStub(), request).status; }));
  }
  EXPECT_TRUE(server_->WaitMetric("carryover_waiting_tokens", 40));
  EXPECT_TRUE(server_->WaitMetric("carryover_steps_total", steps + 1));
  EXPECT_TRUE(server_->WaitMetric("carryover_device_blocks_active", 1));
  server_->Signal(SIGTERM);
  EXPECT_TRUE(server_->WaitMetric("carryover_draining", 1, 5));
  for (auto& call : calls) call.get();
  EXPECT_EQ(server_->Wait(60), 0);
}

// One connection cannot have more calls under way than the configuration says; others can.
TEST_F(OperationsTest, CallsOfAConnectionAreBounded) {
  Start("limits { max_calls_per_connection: 2 }");
  const auto stub = server_->NewStub();
  std::vector<std::future<grpc::Status>> calls;
  grpc::ClientContext contexts[2];
  for (grpc::ClientContext& context : contexts) {
    calls.push_back(std::async(std::launch::async, [&] {
      v1::CompleteRequest request = Tokens(SomeTokens(40, 1), 3500);
      request.set_ignore_eos(true);
      request.set_n(16);
      return Stream(*stub, request, &context).status;
    }));
  }
  ASSERT_TRUE(server_->WaitMetric("carryover_requests_running{class=\"user\"}", 2));
  const auto complete = [](v1::Completions::Stub& at, int seconds) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(seconds));
    v1::CompleteResponse response;
    return at.Complete(&context, Tokens(SomeTokens(5, 2), 1), &response).error_code();
  };
  EXPECT_EQ(complete(*stub, 1), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(complete(*server_->NewStub(), 60), grpc::StatusCode::OK);
  for (grpc::ClientContext& context : contexts) context.TryCancel();
  for (auto& call : calls) EXPECT_EQ(call.get().error_code(), grpc::StatusCode::CANCELLED);
}

// A scrape with two samples of one name and labels is an error to Prometheus, which its checker
// does not see; nor is a label without a value of any use.
TEST_F(OperationsTest, EverySampleIsItsOwn) {
  Start();
  Complete(server_->completions(), Tokens(SomeTokens(40, 1), 4));
  std::set<std::string> samples;
  for (absl::string_view line : absl::StrSplit(server_->Get("/metrics"), '\n', absl::SkipEmpty())) {
    if (line[0] == '#') continue;
    const std::string sample(line.substr(0, line.rfind(' ')));
    EXPECT_TRUE(samples.insert(sample).second) << sample;
    EXPECT_EQ(sample.find("\"\""), std::string::npos) << sample;
  }
  EXPECT_GT(samples.size(), 50u);
}

// Prometheus' own checker finds nothing to say.
TEST_F(OperationsTest, PromtoolAcceptsTheMetrics) {
  if (std::system("command -v promtool > /dev/null") != 0) {
    SKIP_OR_FAIL_IN_CI("promtool is missing; run scripts/setup");
  }
  Start();
  Complete(server_->completions(), Tokens(SomeTokens(40, 1), 4));
  const std::string path = testing::TempDir() + absl::StrCat("/carryover-metrics-", getpid());
  std::ofstream(path) << server_->Get("/metrics");
  EXPECT_EQ(std::system(
                absl::StrCat("promtool check metrics < ", path, " > ", path, ".out 2>&1").c_str()),
            0);
  std::ifstream out(path + ".out");
  const std::string said((std::istreambuf_iterator<char>(out)), {});
  EXPECT_EQ(said, "");
  std::filesystem::remove(path);
  std::filesystem::remove(path + ".out");
}

// The page and the metrics show versions, never what was asked.
TEST_F(OperationsTest, NothingShowsPrompts) {
  Start();
  v1::CompleteRequest request =
      Prompt("my-secret-prompt and what follows it, long enough to be kept", 4);
  request.mutable_cache()->set_salt("my-secret-salt");
  request.mutable_cache()->set_task("my-secret-task");
  request.set_session("my-secret-session");
  Complete(server_->completions(), request);
  const std::string page = server_->Get("/");
  EXPECT_NE(page.find("v1"), std::string::npos);
  EXPECT_NE(page.find("100 %"), std::string::npos);
  for (const std::string& text : {page, server_->Get("/metrics"), server_->log()}) {
    EXPECT_EQ(text.find("my-secret"), std::string::npos) << text;
  }
}

// SIGTERM: what runs is finished, what comes is refused, and the process ends with 0.
TEST_F(OperationsTest, DrainFinishesWhatRuns) {
  Start();
  const auto channel = server_->Connect();
  auto running = std::async(std::launch::async, [&] {
    v1::CompleteRequest request = Tokens(SomeTokens(40, 1), 3500);
    request.set_ignore_eos(true);
    return Stream(server_->completions(), request);
  });
  ASSERT_TRUE(server_->WaitMetric("carryover_requests_running{class=\"user\"}", 1));
  server_->Signal(SIGTERM);
  int health = HealthCheckResponse::SERVING;
  for (int i = 0; i < 400 && health == HealthCheckResponse::SERVING; ++i) {
    health = HealthOf(channel, "");
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_EQ(health, HealthCheckResponse::NOT_SERVING);
  grpc::ClientContext context;
  v1::CompleteResponse response;
  EXPECT_EQ(v1::Completions::NewStub(channel)
                ->Complete(&context, Tokens(SomeTokens(5, 2), 1), &response)
                .error_code(),
            grpc::StatusCode::UNAVAILABLE);
  const Streamed all = running.get();
  EXPECT_TRUE(all.status.ok()) << all.status.error_message();
  EXPECT_EQ(all.done.usage().completion_tokens(), 3500);
  EXPECT_EQ(server_->Wait(30), 0);
}

TEST_F(OperationsTest, DrainEndsWhatTakesTooLong) {
  Start("drain_timeout_seconds: 0.05");
  auto running = std::async(std::launch::async, [&] {
    v1::CompleteRequest request = Tokens(SomeTokens(40, 1), 4000);
    request.set_ignore_eos(true);
    request.set_n(16);
    return Stream(server_->completions(), request).status;
  });
  ASSERT_TRUE(server_->WaitMetric("carryover_requests_running{class=\"user\"}", 1));
  server_->Signal(SIGINT);
  EXPECT_EQ(server_->Wait(30), 0);
  EXPECT_EQ(running.get().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(OperationsTest, SecondSignalExitsAtOnce) {
  Start("drain_timeout_seconds: 600");
  std::thread client([&] {
    v1::CompleteRequest request = Tokens(SomeTokens(40, 1), 4000);
    request.set_ignore_eos(true);
    request.set_n(16);
    EXPECT_FALSE(Stream(server_->completions(), request).status.ok());
  });
  EXPECT_TRUE(server_->WaitMetric("carryover_requests_running{class=\"user\"}", 1));
  server_->Signal(SIGTERM);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_TRUE(server_->running());
  server_->Signal(SIGTERM);
  EXPECT_EQ(server_->Wait(10), 128 + SIGTERM);
  client.join();
}

TEST_F(OperationsTest, StartFailsClearly) {
  const std::string path = testing::TempDir() + absl::StrCat("/carryover-start-", getpid());
  const auto run = [&](const std::string& config) {
    std::ofstream(path) << config;
    return RunServer({"--config", path});
  };
  const std::string any =
      "listen { completions: '127.0.0.1:0' admin: '127.0.0.1:0' http: '127.0.0.1:0' }";
  CommandResult result = run(any + LoadEntry("m", "v", "/no/such/folder"));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.output.find("/no/such/folder"), std::string::npos) << result.output;

  Start();
  result = run(absl::StrCat("listen { completions: '", server_->address(),
                            "' admin: '127.0.0.1:0' http: '127.0.0.1:0' }"));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.output.find(server_->address()), std::string::npos) << result.output;
  result = run(absl::StrCat("listen { http: '", server_->address(),
                            "' admin: '127.0.0.1:0' completions: '127.0.0.1:0' }"));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.output.find("listen.http"), std::string::npos) << result.output;
  std::filesystem::remove(path);
}

// A client in Python that knows nothing but the address.
TEST_F(OperationsTest, PythonThroughReflection) {
  const std::string python = std::getenv("CARRYOVER_PYTHON") != nullptr
                                 ? std::getenv("CARRYOVER_PYTHON")
                                 : CARRYOVER_PYTHON;
  if (!std::filesystem::exists(python)) {
    SKIP_OR_FAIL_IN_CI(python << " is missing; run scripts/setup");
  }
  Start();
  const std::string command =
      absl::StrCat(python, " ", CARRYOVER_SOURCE_DIR, "/tests/integration/reflection_client.py ",
                   server_->address());
  EXPECT_EQ(std::system(command.c_str()), 0);
}

}  // namespace
}  // namespace carryover
