// Watching samples as they are made: all of them, by filter, too slowly, until the caller leaves,
// and until the server drains.

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <future>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "server/config.h"
#include "server/server.h"
#include "tests/integration/fake_engine.h"
#include "tests/integration/server_process.h"

namespace carryover {
namespace {

using Reader = std::unique_ptr<grpc::ClientReader<v1::WatchedSample>>;

// A watch that has begun.
Reader Begin(v1::Fidelity::Stub& stub, grpc::ClientContext* context,
             const v1::WatchSamplesRequest& request = {}) {
  Reader reader = stub.WatchSamples(context, request);
  reader->WaitForInitialMetadata();
  return reader;
}

class WatchTest : public testing::Test {
 protected:
  void Start() {
    server_ = ServerProcess::Start(absl::StrCat(
        LoadEntry("m", "s", TinyModel("llama3")),
        LoadEntry("m", "t", TinyModel("llama3"), "distinct: 'control' carry_from: 's'"),
        "engine { kv_cache_bytes: 33554432 } drain_timeout_seconds: 1 fidelity { tasks: 'qa' "
        "learning_sample_rate: 1 control_rate: 1 old_rate: 1 }"));
    ASSERT_NE(server_, nullptr);
  }
  void Ask(int seed, const std::string& task) {
    v1::CompleteRequest request = Tokens(SomeTokens(60, seed), 3);
    for (int32_t& id : *request.mutable_tokens()->mutable_ids()) id %= 256;
    request.set_version("s");
    Complete(server_->completions(), request);
    request.set_version("t");
    request.mutable_cache()->set_task(task);
    Complete(server_->completions(), request);
  }

  std::unique_ptr<ServerProcess> server_;
};

TEST_F(WatchTest, EverySampleComesAsItIsMade) {
  Start();
  grpc::ClientContext all, one, evaluated;
  const Reader watch = Begin(server_->fidelity(), &all);
  v1::WatchSamplesRequest filter;
  filter.set_model("m");
  filter.set_source("s");
  filter.set_target("t");
  filter.set_task("qa");
  const Reader filtered = Begin(server_->fidelity(), &one, filter);

  v1::EvaluateRequest evaluate;  // not by chance: nobody's sample
  for (int id : SomeTokens(60, 9)) evaluate.mutable_prompt()->mutable_tokens()->add_ids(id % 256);
  evaluate.mutable_prompt()->set_version("t");
  evaluate.set_source("s");
  v1::EvaluateResponse response;
  ASSERT_TRUE(server_->fidelity().Evaluate(&evaluated, evaluate, &response).ok());
  EXPECT_GT(response.samples_size(), 0);
  Ask(1, "other");
  Ask(2, "qa");
  std::multiset<std::string> seen, seen_filtered;
  v1::WatchedSample event;
  for (int i = 0; i < 6; ++i) {
    ASSERT_TRUE(watch->Read(&event));
    EXPECT_EQ(event.dropped(), 0);
    EXPECT_EQ(event.sample().model(), "m");
    EXPECT_EQ(event.sample().source(), "s");
    EXPECT_EQ(event.sample().target(), "t");
    EXPECT_EQ(event.sample().along(), "native");
    EXPECT_EQ(event.sample().positions_size(), 3);
    EXPECT_EQ(event.sample().gate_values_size(), 3);
    EXPECT_TRUE(event.sample().valid());
    seen.insert(event.sample().task() + " " + event.sample().comparison());
  }
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(filtered->Read(&event));
    seen_filtered.insert(event.sample().task() + " " + event.sample().comparison());
  }
  EXPECT_EQ(seen, (std::multiset<std::string>{"other carried", "other control", "other old",
                                              "qa carried", "qa control", "qa old"}));
  EXPECT_EQ(seen_filtered, (std::multiset<std::string>{"qa carried", "qa control", "qa old"}));

  // It ends when its caller leaves, and others go on.
  one.TryCancel();
  EXPECT_FALSE(filtered->Read(&event));
  EXPECT_EQ(filtered->Finish().error_code(), grpc::StatusCode::CANCELLED);
  Ask(3, "qa");
  EXPECT_TRUE(watch->Read(&event));
  all.TryCancel();
}

TEST_F(WatchTest, DrainEndsIt) {
  Start();
  grpc::ClientContext read, unread;
  const Reader watch = Begin(server_->fidelity(), &read);
  const Reader other = Begin(server_->fidelity(), &unread);  // nobody reads
  Ask(1, "qa");
  server_->Signal(SIGTERM);
  v1::WatchedSample event;
  int samples = 0;
  while (watch->Read(&event)) samples += event.has_sample();
  EXPECT_LE(samples, 3);
  EXPECT_EQ(watch->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(server_->Wait(5), 0);
}

TEST_F(WatchTest, AFilterThatIsNoNameIsRefused) {
  Start();
  v1::WatchSamplesRequest filter;
  filter.set_task("a b");
  grpc::ClientContext context;
  const grpc::Status status = Begin(server_->fidelity(), &context, filter)->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(status.error_message().find("task"), std::string::npos);
}

// The server's parts in this process, so that a test makes the samples.
class FeedTest : public testing::Test {
 protected:
  void SetUp() override {
    SetLogLevel("off");
    auto config = ParseConfig(
        "listen { completions: '127.0.0.1:0' admin: '127.0.0.1:0' http: '127.0.0.1:0' }", "test",
        "");
    ASSERT_TRUE(config.ok()) << config.status();
    auto observer = std::make_unique<PrometheusObserver>();
    observer_ = observer.get();
    auto server = Server::Start(*config, std::move(observer), std::make_unique<FakeEngine>());
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    server_->Open();
    stub_ = v1::Fidelity::NewStub(
        grpc::CreateChannel(server_->addresses().admin, grpc::InsecureChannelCredentials()));
  }
  void Tell(int number) {
    FidelitySample sample;
    sample.labels.model = "m";
    sample.labels.prefix_bucket = number;
    sample.positions.resize(16);
    observer_->OnFidelitySample(sample);
  }

  PrometheusObserver* observer_ = nullptr;
  std::unique_ptr<Server> server_;
  std::unique_ptr<v1::Fidelity::Stub> stub_;
};

// The engine goes on at once, the reader gets what there was room for, in order, and every sample
// is either read or told as lost.
TEST_F(FeedTest, ASlowReaderLosesSamplesAndIsTold) {
  grpc::ClientContext context;
  const Reader watch = Begin(*stub_, &context);
  constexpr int kSamples = 20000;
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 1; i <= kSamples; ++i) Tell(i);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(took.count(), 5);
  int64_t read = 0, lost = 0, last = 0;
  v1::WatchedSample event;
  while (read + lost < kSamples && watch->Read(&event)) {
    lost += event.dropped();
    if (!event.has_sample()) continue;
    ++read;
    EXPECT_GT(event.sample().prefix_bucket(), last);
    last = event.sample().prefix_bucket();
    EXPECT_EQ(last, read + lost) << "losses are told in their place";
  }
  EXPECT_EQ(read + lost, kSamples);
  EXPECT_GT(lost, 0);
  EXPECT_GT(read, 200);
  // And it goes on as if nothing had been.
  Tell(1);
  ASSERT_TRUE(watch->Read(&event));
  EXPECT_EQ(event.dropped(), 0);
  EXPECT_EQ(event.sample().prefix_bucket(), 1);
  context.TryCancel();
}

TEST_F(FeedTest, SixteenMayWatch) {
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<Reader> watches;
  for (int i = 0; i < 16; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    watches.push_back(Begin(*stub_, contexts.back().get()));
  }
  const auto one_more = [&] {
    grpc::ClientContext context;
    const Reader watch = Begin(*stub_, &context);
    Tell(1);
    v1::WatchedSample event;
    if (watch->Read(&event)) {
      context.TryCancel();
      return grpc::Status::OK;
    }
    return watch->Finish();
  };
  EXPECT_EQ(one_more().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  contexts[3]->TryCancel();
  // The server hears of it soon.
  grpc::Status status;
  for (int i = 0; i < 2000 && !(status = one_more()).ok(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_TRUE(status.ok()) << status.error_message();
  for (const auto& context : contexts) context->TryCancel();
}

// A reader that reads nothing does not hold up the end.
TEST_F(FeedTest, DrainDoesNotWaitForASlowReader) {
  grpc::ClientContext context;
  const Reader watch = Begin(*stub_, &context);
  for (int i = 1; i <= 2000; ++i) Tell(i);
  const auto begin = std::chrono::steady_clock::now();
  server_->Drain();
  server_.reset();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(took.count(), 5);
  context.TryCancel();
}

}  // namespace
}  // namespace carryover
