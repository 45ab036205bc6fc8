// Behaviours 14 and 20, and overload: bad requests get an error that names the field, the server
// lives on and serves others.

#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "google/rpc/status_details.pb.h"
#include "tests/integration/server_process.h"

namespace carryover {
namespace {

class RequestsTest : public testing::Test {
 protected:
  void Start(const std::string& config) {
    server_ = ServerProcess::Start(LoadEntry("tiny", "v1", TinyModel("llama3")) + config);
    ASSERT_NE(server_, nullptr);
    stub_ = server_->NewStub();
  }
  grpc::Status Send(const v1::CompleteRequest& request) {
    grpc::ClientContext context;
    v1::CompleteResponse response;
    return stub_->Complete(&context, request, &response);
  }
  void ExpectAlive() {
    EXPECT_TRUE(server_->running());
    EXPECT_EQ(Complete(*stub_, Prompt("alive", 2)).usage().completion_tokens(), 2);
    EXPECT_EQ(server_->WaitIdle(), "");
  }

  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<v1::Completions::Stub> stub_;
};

template <class Detail>
bool FindDetail(const grpc::Status& status, Detail* detail) {
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return false;
  for (const auto& any : details.details()) {
    if (any.UnpackTo(detail)) return true;
  }
  return false;
}

TEST_F(RequestsTest, EveryBadFieldIsNamed) {
  Start("limits { max_prompt_tokens: 100 }");
  static constexpr int kMin = std::numeric_limits<int>::min(),
                       kMax = std::numeric_limits<int>::max();
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  static constexpr float kInf = std::numeric_limits<float>::infinity();
  using R = v1::CompleteRequest;
  struct Bad {
    const char* field;
    std::function<void(R*)> spoil;
  };
  std::vector<Bad> all = {
      {"max_tokens", [](R* r) { r->set_max_tokens(-1); }},
      {"max_tokens", [](R* r) { r->set_max_tokens(kMin); }},
      {"max_tokens", [](R* r) { r->set_max_tokens(kMax); }},
      {"max_tokens", [](R* r) { r->set_max_tokens(100'000); }},
      {"min_tokens", [](R* r) { r->set_min_tokens(-1); }},
      {"min_tokens", [](R* r) { r->set_min_tokens(kMax); }},
      {"top_k", [](R* r) { r->set_top_k(-1); }},
      {"top_k", [](R* r) { r->set_top_k(kMin); }},
      {"n", [](R* r) { r->set_n(0); }},
      {"n", [](R* r) { r->set_n(-3); }},
      {"n", [](R* r) { r->set_n(17); }},
      {"n", [](R* r) { r->set_n(kMax); }},
      {"logprobs", [](R* r) { r->set_logprobs(21); }},
      {"logprobs", [](R* r) { r->set_logprobs(kMin); }},
      {"prompt_logprobs", [](R* r) { r->set_prompt_logprobs(-1); }},
      {"prompt_logprobs", [](R* r) { r->set_prompt_logprobs(kMax); }},
      {"truncate_prompt_tokens", [](R* r) { r->set_truncate_prompt_tokens(0); }},
      {"truncate_prompt_tokens", [](R* r) { r->set_truncate_prompt_tokens(-5); }},
      {"priority", [](R* r) { r->set_priority(kMin); }},
      {"priority", [](R* r) { r->set_priority(1001); }},
      {"top_p", [](R* r) { r->set_top_p(0); }},
      {"repetition_penalty", [](R* r) { r->set_repetition_penalty(0); }},
      {"stop[0]", [](R* r) { r->add_stop(""); }},
      {"stop[0]", [](R* r) { r->add_stop(std::string(257, 'x')); }},
      {"stop",
       [](R* r) {
         for (int i = 0; i < 17; ++i) r->add_stop("x");
       }},
      {"stop_token_ids[0]", [](R* r) { r->add_stop_token_ids(-1); }},
      {"stop_token_ids", [](R* r) { r->add_stop_token_ids(kMax); }},
      {"stop_token_ids",
       [](R* r) {
         for (int i = 0; i < 65; ++i) r->add_stop_token_ids(1);
       }},
      {"logit_bias[-1]", [](R* r) { (*r->mutable_logit_bias())[-1] = 1; }},
      {"logit_bias", [](R* r) { (*r->mutable_logit_bias())[kMax] = 1; }},
      {"logit_bias",
       [](R* r) {
         for (int i = 0; i < 301; ++i) (*r->mutable_logit_bias())[i] = 1;
       }},
      {"tokens[1]",
       [](R* r) {
         r->mutable_tokens()->add_ids(5);
         r->mutable_tokens()->add_ids(-1);
       }},
      {"tokens", [](R* r) { r->mutable_tokens()->add_ids(kMax); }},
      {"tokens", [](R* r) { r->mutable_tokens(); }},
      {"tokens",
       [](R* r) {
         for (int i = 0; i < 101; ++i) r->mutable_tokens()->add_ids(5);
       }},
      {"prompt", [](R* r) { r->clear_input(); }},
      {"prompt", [](R* r) { r->set_prompt(std::string(5000, 'x')); }},
      {"model", [](R* r) { r->set_model(std::string(257, 'x')); }},
      {"request_id", [](R* r) { r->set_request_id(std::string(257, 'x')); }},
      {"session", [](R* r) { r->set_session(std::string(257, 'x')); }},
      {"cache.salt", [](R* r) { r->mutable_cache()->set_salt(std::string(257, 'x')); }},
      {"cache.task", [](R* r) { r->mutable_cache()->set_task(std::string(257, 'x')); }},
      {"cache.reuse",
       [](R* r) { r->mutable_cache()->set_reuse(static_cast<v1::CacheOptions::Reuse>(9)); }},
  };
  for (const float value : {-1.0f, 1e9f, kNan, kInf, -kInf}) {
    all.push_back({"temperature", [=](R* r) { r->set_temperature(value); }});
    all.push_back({"top_p", [=](R* r) { r->set_top_p(value); }});
    all.push_back({"min_p", [=](R* r) { r->set_min_p(value); }});
    all.push_back({"presence_penalty", [=](R* r) { r->set_presence_penalty(value * 3); }});
    all.push_back({"frequency_penalty", [=](R* r) { r->set_frequency_penalty(value * 3); }});
    all.push_back({"repetition_penalty", [=](R* r) { r->set_repetition_penalty(value); }});
    all.push_back({"logit_bias[7]", [=](R* r) { (*r->mutable_logit_bias())[7] = value * 1000; }});
  }
  for (const Bad& bad : all) {
    v1::CompleteRequest request = Prompt("hello", 4);
    bad.spoil(&request);
    SCOPED_TRACE(absl::StrCat(bad.field, ": ", request.ShortDebugString().substr(0, 200)));
    const grpc::Status status = Send(request);
    ASSERT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
    google::rpc::BadRequest detail;
    ASSERT_TRUE(FindDetail(status, &detail)) << status.error_message();
    EXPECT_EQ(detail.field_violations(0).field(), bad.field) << status.error_message();
    EXPECT_FALSE(detail.field_violations(0).description().empty());
  }
  // All that is wrong is told at once.
  v1::CompleteRequest worst = Prompt("x", -1);
  worst.set_n(0);
  worst.set_top_p(kNan);
  google::rpc::BadRequest detail;
  ASSERT_TRUE(FindDetail(Send(worst), &detail));
  EXPECT_EQ(detail.field_violations_size(), 3);

  v1::CompleteRequest unknown = Prompt("x", 1);
  unknown.set_model("nobody");
  EXPECT_EQ(Send(unknown).error_code(), grpc::StatusCode::NOT_FOUND);
  unknown.set_model("tiny");
  unknown.set_version("nothing");
  EXPECT_EQ(Send(unknown).error_code(), grpc::StatusCode::NOT_FOUND);
  ExpectAlive();
}

// What is in bounds, at its very edge, is served.
TEST_F(RequestsTest, EdgesAreServed) {
  Start("");
  v1::CompleteRequest request = Prompt("edge", 3);
  request.set_temperature(100);
  request.set_top_p(1);
  request.set_top_k(std::numeric_limits<int>::max());
  request.set_min_p(1);
  request.set_presence_penalty(-2);
  request.set_frequency_penalty(2);
  request.set_repetition_penalty(10);
  request.set_seed(std::numeric_limits<uint64_t>::max());
  request.set_n(16);
  request.set_logprobs(20);
  request.set_priority(-1000);
  for (int i = 0; i < 300; ++i) (*request.mutable_logit_bias())[i] = i % 2 == 0 ? 100 : -100;
  EXPECT_EQ(Complete(*stub_, request).choices_size(), 16);
  ExpectAlive();
}

// Behaviour 14.
TEST_F(RequestsTest, TooLargeMessageIsAClearError) {
  Start("limits { max_message_bytes: 1048576 }");
  const grpc::Status status = Send(Prompt(std::string(2 << 20, 'x'), 1));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_NE(status.error_message().find("1048576"), std::string::npos) << status.error_message();
  const Streamed stream = Stream(*stub_, Prompt(std::string(2 << 20, 'x'), 1));
  EXPECT_EQ(stream.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  // Below it the model's context decides, not gRPC's own 4 MiB.
  ExpectAlive();
  Start("");
  EXPECT_EQ(Send(Prompt(std::string(8 << 20, 'x'), 1)).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  ExpectAlive();
}

// Bytes that are no message at all, and text that is no UTF-8.
TEST_F(RequestsTest, GarbageIsRefused) {
  Start("");
  v1::CompleteRequest request = Prompt("abcdefgh", 1);
  std::string invalid = request.SerializeAsString();
  invalid[invalid.find("abcdefgh") + 3] = '\xff';
  for (const std::string& bytes :
       {std::string("\xff\xff\xff\xff"), std::string(100, '\x08'), invalid}) {
    for (const char* method :
         {"/carryover.v1.Completions/Complete", "/carryover.v1.Completions/CompleteStream"}) {
      grpc::GenericStub generic(server_->Connect());
      grpc::ClientContext context;
      grpc::CompletionQueue queue;
      const grpc::Slice slice(bytes);
      const auto call =
          generic.PrepareUnaryCall(&context, method, grpc::ByteBuffer(&slice, 1), &queue);
      call->StartCall();
      grpc::ByteBuffer answer;
      grpc::Status status;
      call->Finish(&answer, &status, nullptr);
      void* tag;
      bool ok;
      ASSERT_TRUE(queue.Next(&tag, &ok));
      EXPECT_FALSE(status.ok()) << method;
    }
  }
  ExpectAlive();
}

// Thousands of idle connections are turned away before files run out, after which gRPC would never
// accept another one.
TEST_F(RequestsTest, ConnectionsAreBoundedByTheirMemory) {
  constexpr int kConnections = 3000;
  rlimit files{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  if (files.rlim_max < 2 * kConnections) GTEST_SKIP() << "too few open files are allowed";
  files.rlim_cur = files.rlim_max;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
  Start("limits { connection_memory_bytes: 16777216 }");
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(std::stoi(server_->address().substr(server_->address().rfind(':') + 1)));
  std::vector<int> connections;
  for (int i = 0; i < kConnections; ++i) {
    connections.push_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    connect(connections.back(), reinterpret_cast<sockaddr*>(&address), sizeof(address));
    const std::string hello("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 33);
    send(connections.back(), hello.data(), hello.size(), MSG_NOSIGNAL);
  }
  // gRPC takes a burst in, and turns away what is over the limit once its buffers are counted.
  double open = 0;
  for (int i = 0; i < 60; ++i) {
    const double before = std::exchange(open, server_->Metric("process_open_fds"));
    if (open == before && open < kConnections - 300) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }
  EXPECT_LT(open, kConnections - 300);
  EXPECT_GT(open, 500);
  ExpectAlive();
  for (const int connection : connections) close(connection);
  stub_ = server_->NewStub();
  ExpectAlive();
}

TEST_F(RequestsTest, OverloadSaysWhenToRetry) {
  Start("engine { max_running: 1 max_waiting_requests: 3 kv_cache_bytes: 16777216 }");
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::thread> threads;
  std::atomic<int> refused{0}, served{0};
  for (int i = 0; i < 24; ++i) {
    threads.emplace_back([&, i] {
      v1::CompleteRequest request = Tokens(SomeTokens(20, i), 300);
      request.set_ignore_eos(true);
      const auto stub = server_->NewStub();
      grpc::ClientContext context;
      v1::CompleteResponse response;
      const grpc::Status status = stub->Complete(&context, request, &response);
      if (status.ok()) {
        ++served;
        return;
      }
      EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED)
          << status.error_message();
      google::rpc::RetryInfo retry;
      EXPECT_TRUE(FindDetail(status, &retry));
      EXPECT_GE(retry.retry_delay().seconds(), 1);
      ++refused;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GE(served, 3);  // that wait, if all come before one runs
  EXPECT_GE(refused, 1);
  EXPECT_EQ(served + refused, 24);
  EXPECT_EQ(server_->Metric("carryover_requests_rejected_total{reason=\"queue_requests\"}"),
            refused.load());
  ExpectAlive();
}

}  // namespace
}  // namespace carryover
