// The services over a fake engine: order of events, slow and lost clients, statuses, details.

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <string>
#include <thread>

#include "base/log.h"
#include "google/rpc/status_details.pb.h"
#include "server/config.h"
#include "server/server.h"
#include "tests/integration/fake_engine.h"
#include "tests/integration/server_process.h"

namespace carryover {
namespace {

using std::chrono::milliseconds;

class ServicesTest : public testing::Test {
 protected:
  void SetUp() override {
    SetLogLevel("off");
    Start("");
  }
  void Start(const std::string& more, bool open = true) {
    server_.reset();
    auto config = ParseConfig(
        "listen { completions: '127.0.0.1:0' admin: '127.0.0.1:0' http: '127.0.0.1:0' }" + more,
        "test", "");
    ASSERT_TRUE(config.ok()) << config.status();
    auto engine = std::make_unique<FakeEngine>();
    engine_ = engine.get();
    auto server = Server::Start(*config, std::make_unique<PrometheusObserver>(), std::move(engine));
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    if (open) server_->Open();
    channel_ =
        grpc::CreateChannel(server_->addresses().completions, grpc::InsecureChannelCredentials());
    stub_ = v1::Completions::NewStub(channel_);
    const auto admin =
        grpc::CreateChannel(server_->addresses().admin, grpc::InsecureChannelCredentials());
    versions_ = v1::Versions::NewStub(admin);
    cache_ = v1::Cache::NewStub(admin);
    fidelity_ = v1::Fidelity::NewStub(admin);
  }

  void WaitForNone() {
    for (int i = 0; i < 5000 && engine_->pending() > 0; ++i) {
      std::this_thread::sleep_for(milliseconds(2));
    }
    EXPECT_EQ(engine_->pending(), 0u);
  }

  std::unique_ptr<Server> server_;
  FakeEngine* engine_ = nullptr;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Completions::Stub> stub_;
  std::unique_ptr<v1::Versions::Stub> versions_;
  std::unique_ptr<v1::Fidelity::Stub> fidelity_;
  std::unique_ptr<v1::Cache::Stub> cache_;
};

google::rpc::Status Details(const grpc::Status& status) {
  google::rpc::Status details;
  EXPECT_TRUE(details.ParseFromString(status.error_details()));
  EXPECT_EQ(details.code(), status.error_code());
  EXPECT_EQ(details.message(), status.error_message());
  return details;
}

// Far more events than a write takes, pushed as fast as possible: all arrive, in order.
TEST_F(ServicesTest, StreamKeepsOrder) {
  constexpr int kEvents = 900;  // fits the queue of 1024
  std::thread engine([&] {
    auto [ticket, pending] = engine_->WaitForRequest();
    EXPECT_EQ(*pending.request.prompt, "hello");
    EXPECT_EQ(pending.request.sampling.max_tokens, 7);
    pending.sink->OnStart("m", {.prompt_tokens = 5, .computed_tokens = 5}, {.target = "v"});
    for (int i = 0; i < kEvents; ++i) {
      pending.sink->OnDelta({.index = i % 3, .text = std::to_string(i) + " ", .token_ids = {i}});
    }
    for (int i = 0; i < 3; ++i) {
      pending.sink->OnFinish({.index = i, .reason = FinishReason::kLength});
    }
    engine_->Done(ticket, {.usage = {.prompt_tokens = 5,
                                     .completion_tokens = kEvents,
                                     .cached_tokens = 2,
                                     .computed_tokens = 3}});
  });
  const Streamed all = Stream(*stub_, Prompt("hello", 7));
  engine.join();
  EXPECT_TRUE(all.status.ok()) << all.status.error_message();
  EXPECT_EQ(all.order, "s" + std::string(kEvents, 'd') + "fffe");
  for (int choice = 0; choice < 3; ++choice) {
    std::string expected;
    for (int i = choice; i < kEvents; i += 3) expected += std::to_string(i) + " ";
    EXPECT_EQ(all.text.at(choice), expected);
  }
  EXPECT_EQ(all.started.version(), "v");
  EXPECT_EQ(all.started.id().substr(0, 5), "cmpl-");
  EXPECT_EQ(all.done.usage().cached_tokens(), 2);
  EXPECT_EQ(all.done.usage().total_tokens(), 5 + kEvents);
}

// A client that does not read at all: its queue fills, the request is cancelled, others go on.
TEST_F(ServicesTest, SlowClientIsCancelled) {
  grpc::ClientContext context;
  auto reader = stub_->CompleteStream(&context, Prompt("slow", 1));
  auto [ticket, pending] = engine_->WaitForRequest();
  const std::string large(4000, 'x');
  int pushed = 0;
  while (engine_->cancels == 0 && pushed < 100'000) {
    pending.sink->OnDelta({.index = 0, .text = large});
    ++pushed;
  }
  EXPECT_EQ(engine_->cancels, 1) << "after " << pushed;
  EXPECT_GE(pushed, 1024) << "the queue's bound";
  EXPECT_LT(pushed, 20'000) << "more than the queue and the windows of HTTP/2 can hold";
  WaitForNone();
  v1::CompleteEvent event;
  while (reader->Read(&event)) {
  }
  EXPECT_FALSE(reader->Finish().ok());

  std::thread engine([&] {
    auto [next, other] = engine_->WaitForRequest();
    other.sink->OnDelta({.index = 0, .text = "fine"});
    engine_->Done(next, {});
  });
  EXPECT_EQ(Complete(*stub_, Prompt("quick", 1)).choices(0).text(), "fine");
  engine.join();
}

// What hangs up, hangs up: unary and stream, before anything came and in the middle.
TEST_F(ServicesTest, ClientThatLeavesCancelsTheRequest) {
  int expected = 0;
  for (const bool middle : {false, true}) {
    {
      grpc::ClientContext context;
      v1::CompleteResponse response;
      auto call = std::async(std::launch::async, [&] {
        return stub_->Complete(&context, Prompt("unary", 1), &response);
      });
      auto [ticket, pending] = engine_->WaitForRequest();
      if (middle) pending.sink->OnDelta({.index = 0, .text = "a"});
      context.TryCancel();
      EXPECT_EQ(call.get().error_code(), grpc::StatusCode::CANCELLED);
    }
    WaitForNone();
    EXPECT_EQ(engine_->cancels, ++expected);
    {
      grpc::ClientContext context;
      auto reader = stub_->CompleteStream(&context, Prompt("stream", 1));
      auto [ticket, pending] = engine_->WaitForRequest();
      v1::CompleteEvent event;
      if (middle) {
        pending.sink->OnDelta({.index = 0, .text = "a"});
        EXPECT_TRUE(reader->Read(&event));
      }
      context.TryCancel();
      while (reader->Read(&event)) {
      }
      EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
    }
    WaitForNone();
    EXPECT_EQ(engine_->cancels, ++expected);
  }
}

TEST_F(ServicesTest, DeadlineReachesTheEngine) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(100));
  auto reader = stub_->CompleteStream(&context, Prompt("x", 1));
  auto [ticket, pending] = engine_->WaitForRequest();
  ASSERT_TRUE(pending.request.deadline.has_value());
  const std::chrono::duration<double> left =
      *pending.request.deadline - std::chrono::steady_clock::now();
  EXPECT_GT(left.count(), 80);
  EXPECT_LT(left.count(), 101);
  engine_->Done(ticket, {.status = absl::DeadlineExceededError("too late")});
  v1::CompleteEvent event;
  EXPECT_FALSE(reader->Read(&event));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
}

TEST_F(ServicesTest, NoDeadlineStaysNone) {
  std::thread engine([&] {
    auto [ticket, pending] = engine_->WaitForRequest();
    EXPECT_FALSE(pending.request.deadline.has_value());
    engine_->Done(ticket, {});
  });
  Complete(*stub_, Prompt("x", 1));
  engine.join();
}

TEST_F(ServicesTest, StatusesCarryDetails) {
  const auto unary = [&] {
    grpc::ClientContext context;
    v1::CompleteResponse response;
    return stub_->Complete(&context, Prompt("x", 1), &response);
  };
  engine_->set_submit_error(absl::ResourceExhaustedError("the queue is full"));
  grpc::Status status = unary();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  google::rpc::RetryInfo retry;
  ASSERT_EQ(Details(status).details_size(), 1);
  ASSERT_TRUE(Details(status).details(0).UnpackTo(&retry));
  EXPECT_GT(retry.retry_delay().seconds() * 1e9 + retry.retry_delay().nanos(), 0);

  engine_->set_submit_error(absl::InvalidArgumentError("max_tokens: is over the context"));
  status = unary();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  google::rpc::BadRequest bad;
  ASSERT_EQ(Details(status).details_size(), 1);
  ASSERT_TRUE(Details(status).details(0).UnpackTo(&bad));
  ASSERT_EQ(bad.field_violations_size(), 1);
  EXPECT_EQ(bad.field_violations(0).field(), "max_tokens");
  EXPECT_EQ(bad.field_violations(0).description(), "is over the context");

  // The same for a stream.
  EXPECT_EQ(Stream(*stub_, Prompt("x", 1)).status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);

  // Every field that differs between two versions, apart from the message.
  v1::LoadRequest load;
  load.set_model("m");
  load.set_version("T");
  load.set_path("/incompatible");
  grpc::ClientContext context;
  auto reader = versions_->Load(&context, load);
  v1::LoadEvent event;
  while (reader->Read(&event)) {
  }
  status = reader->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  google::rpc::PreconditionFailure failure;
  ASSERT_TRUE(Details(status).details(0).UnpackTo(&failure));
  ASSERT_EQ(failure.violations_size(), 2);
  EXPECT_EQ(failure.violations(0).subject(), "layers");
  EXPECT_EQ(failure.violations(0).description(), "2 and 4");
  EXPECT_EQ(failure.violations(1).subject(), "sliding_windows");
  EXPECT_EQ(failure.violations(1).description(), "0,0 and 8,8");
}

// A request that ends while another thread cancels it, many times: Finish comes once each time, or
// gRPC aborts.
TEST_F(ServicesTest, CancelAndEndAtOnce) {
  for (int round = 0; round < 300; ++round) {
    grpc::ClientContext context;
    auto reader = stub_->CompleteStream(&context, Prompt("race", 1));
    auto [ticket, pending] = engine_->WaitForRequest();
    std::thread engine([&, ticket = ticket, sink = pending.sink] {
      for (int i = 0; i < round % 5; ++i) sink->OnDelta({.index = 0, .text = "x"});
      engine_->Done(ticket, {});
    });
    if (round % 2 == 0) context.TryCancel();
    v1::CompleteEvent event;
    while (reader->Read(&event)) {
      if (round % 3 == 0) context.TryCancel();
    }
    (void)reader->Finish();
    engine.join();
  }
  WaitForNone();
}

// The server goes away while requests run: it waits for none forever, and nothing leaks.
TEST_F(ServicesTest, ShutdownEndsWhatRuns) {
  grpc::ClientContext context;
  auto reader = stub_->CompleteStream(&context, Prompt("x", 1));
  engine_->WaitForRequest();
  server_.reset();
  v1::CompleteEvent event;
  EXPECT_FALSE(reader->Read(&event));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(ServicesTest, WarmStopsWhenItsCallerLeaves) {
  grpc::ClientContext context;
  v1::WarmRequest request;
  request.mutable_prefix()->set_prompt("x");
  auto reader = cache_->Warm(&context, request);
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(engine_->warms_cancelled, 0);
  context.TryCancel();
  v1::WarmEvent event;
  while (reader->Read(&event)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  for (int i = 0; i < 2000 && engine_->warms_cancelled == 0; ++i) {
    std::this_thread::sleep_for(milliseconds(2));
  }
  EXPECT_EQ(engine_->warms_cancelled, 1);
}

// However many evaluations and warmings there are.
TEST_F(ServicesTest, AnOperatorsWordWaitsForNobody) {
  constexpr int kCalls = 40;
  std::vector<grpc::ClientContext> contexts(kCalls);
  std::vector<std::unique_ptr<grpc::ClientReader<v1::WarmEvent>>> calls;
  v1::WarmRequest request;
  request.mutable_prefix()->set_prompt("x");
  for (grpc::ClientContext& context : contexts) calls.push_back(cache_->Warm(&context, request));
  while (engine_->warms_begun < 8) std::this_thread::sleep_for(milliseconds(1));

  const auto in_time = [](grpc::ClientContext* context) {
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    return context;
  };
  grpc::ClientContext set, report, promote;
  v1::SetGateResponse was_set;
  EXPECT_EQ(fidelity_->SetGate(in_time(&set), {}, &was_set).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
  v1::FidelityReportResponse reported;
  EXPECT_TRUE(fidelity_->Report(in_time(&report), {}, &reported).ok());
  v1::PromoteRequest back;
  back.set_model("m");
  back.set_version("v");
  v1::PromoteResponse promoted;
  EXPECT_TRUE(versions_->Promote(in_time(&promote), back, &promoted).ok());

  for (grpc::ClientContext& context : contexts) context.TryCancel();
  for (const auto& call : calls) call->Finish();
}

TEST_F(ServicesTest, AdminErrorsReachTheCaller) {
  grpc::ClientContext check_context;
  v1::CheckResponse checked;
  const grpc::Status check = cache_->Check(&check_context, {}, &checked);
  EXPECT_EQ(check.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(check.error_message(), "block 7 is lost");

  grpc::ClientContext unload_context;
  v1::UnloadRequest unload;
  unload.set_model("m");
  unload.set_version("v");
  v1::UnloadResponse unloaded;
  const grpc::Status status = versions_->Unload(&unload_context, unload, &unloaded);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  google::rpc::PreconditionFailure failure;
  ASSERT_TRUE(Details(status).details(0).UnpackTo(&failure));
  EXPECT_EQ(failure.violations(0).subject(), "version");
}

// While versions load there is an answer already: later.
TEST_F(ServicesTest, NothingIsServedBeforeItIsOpen) {
  Start("", /*open=*/false);
  const Streamed early = Stream(*stub_, Prompt("x", 1));
  EXPECT_EQ(early.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  google::rpc::RetryInfo retry;
  ASSERT_EQ(Details(early.status).details_size(), 1);
  EXPECT_TRUE(Details(early.status).details(0).UnpackTo(&retry));
  EXPECT_EQ(engine_->pending(), 0u);
}

// A token's spelling may be bytes that are no text; the response must be readable all the same.
TEST_F(ServicesTest, SpellingsAreText) {
  std::thread engine([&] {
    auto [ticket, pending] = engine_->WaitForRequest();
    PositionLogprobs position;
    position.chosen = {.token = 1, .text = "\xe2\x82", .logprob = -1, .rank = 1};
    pending.sink->OnDelta({.index = 0, .text = "", .token_ids = {1}, .logprobs = {position}});
    engine_->Done(ticket, {});
  });
  EXPECT_EQ(Complete(*stub_, Prompt("x", 1)).choices(0).logprobs(0).chosen().text(),
            "\xef\xbf\xbd");
  engine.join();
}

}  // namespace
}  // namespace carryover
