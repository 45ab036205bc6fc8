// Behaviour 11: whoever leaves, whenever and however, nothing keeps running and no block stays
// held.

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tests/integration/server_process.h"

namespace carryover {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr char kRunning[] = "carryover_requests_running{class=\"user\"}";
constexpr char kWaiting[] = "carryover_requests_waiting{class=\"user\"}";

// Passes bytes between one client and the server, and can cut the connection without a word.
class Proxy {
 public:
  explicit Proxy(const std::string& server) {
    EXPECT_TRUE(absl::SimpleAtoi(server.substr(server.rfind(':') + 1), &server_port_));
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in self{};
    self.sin_family = AF_INET;
    self.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&self), sizeof(self)), 0);
    EXPECT_EQ(listen(listener_, 1), 0);
    socklen_t size = sizeof(self);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&self), &size);
    port_ = ntohs(self.sin_port);
    thread_ = std::thread([this] { Run(); });
  }
  ~Proxy() {
    Cut();
    thread_.join();
    close(listener_);
  }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }
  void Cut() { cut_ = true; }

 private:
  void Run() {
    pollfd wait{listener_, POLLIN, 0};
    while (!cut_ && poll(&wait, 1, 5) == 0) {
    }
    if (cut_) return;
    const int client = accept(listener_, nullptr, nullptr);
    const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in peer{};
    peer.sin_family = AF_INET;
    peer.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    peer.sin_port = htons(static_cast<uint16_t>(server_port_));
    EXPECT_EQ(connect(server, reinterpret_cast<sockaddr*>(&peer), sizeof(peer)), 0);
    pollfd both[2] = {{client, POLLIN, 0}, {server, POLLIN, 0}};
    char bytes[65536];
    while (!cut_) {
      if (poll(both, 2, 5) <= 0) continue;
      for (int i = 0; i < 2; ++i) {
        if (both[i].revents == 0) continue;
        const ssize_t size = read(both[i].fd, bytes, sizeof(bytes));
        if (size <= 0 || write(both[1 - i].fd, bytes, size) != size) cut_ = true;
      }
    }
    // A reset instead of an orderly end, as when a machine dies.
    const linger now{1, 0};
    setsockopt(server, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
    close(server);
    close(client);
  }

  int listener_ = -1;
  int server_port_ = 0;
  int port_ = 0;
  std::atomic<bool> cut_{false};
  std::thread thread_;
};

enum class Where { kQueue, kPrefill, kDecode };
enum class How { kCancel, kDeadline, kDrop };

// The demo model: slow enough to be met in each phase.
class CancelTest : public testing::Test {
 protected:
  void Start(const std::string& engine) {
    server_ = ServerProcess::Start(LoadEntry("demo", "v1", DemoModel("2026-10")) + engine);
    ASSERT_NE(server_, nullptr);
  }

  // A request that stays in the phase until it is cancelled.
  static v1::CompleteRequest RequestFor(Where where, int n, int seed) {
    v1::CompleteRequest request = where == Where::kPrefill ? Tokens(SomeTokens(3000, seed), 1000)
                                                           : Tokens(SomeTokens(40, seed), 4000);
    request.set_ignore_eos(true);
    request.set_n(n);
    return request;
  }

  std::unique_ptr<ServerProcess> server_;
};

TEST_F(CancelTest, EveryPhaseEveryWay) {
  // One row of sequences at a time and few tokens a step, so that the phases last.
  Start("engine { kv_cache_bytes: 268435456 max_running: 4 step_tokens: 32 }");
  int seed = 0;
  for (const Where where : {Where::kQueue, Where::kPrefill, Where::kDecode}) {
    // Who fills the server, so that others queue.
    std::vector<std::unique_ptr<grpc::ClientContext>> busy;
    std::vector<std::thread> holders;
    if (where == Where::kQueue) {
      for (int i = 0; i < 4; ++i) {
        busy.push_back(std::make_unique<grpc::ClientContext>());
        holders.emplace_back([this, context = busy.back().get(), i] {
          Stream(*server_->NewStub(), RequestFor(Where::kPrefill, 1, 9000 + i), context);
        });
      }
      ASSERT_TRUE(server_->WaitMetric(kRunning, 4));
    }
    for (const How how : {How::kCancel, How::kDeadline, How::kDrop}) {
      for (const bool stream : {true, false}) {
        for (const int n : {1, 3}) {
          SCOPED_TRACE(absl::StrCat("where ", static_cast<int>(where), " how ",
                                    static_cast<int>(how), stream ? " stream" : " unary", " n ",
                                    n));
          Proxy proxy(server_->address());
          const auto stub = v1::Completions::NewStub(
              how == How::kDrop
                  ? grpc::CreateChannel(proxy.address(), grpc::InsecureChannelCredentials())
                  : server_->Connect());
          grpc::ClientContext context;
          if (how == How::kDeadline) {
            context.set_deadline(std::chrono::system_clock::now() +
                                 milliseconds(where == Where::kDecode ? 80 : 30));
          }
          const v1::CompleteRequest request = RequestFor(where, n, ++seed);
          std::atomic<bool> over{false};
          std::thread client([&] {
            grpc::Status status;
            if (stream) {
              status = Stream(*stub, request, &context).status;
            } else {
              v1::CompleteResponse response;
              status = stub->Complete(&context, request, &response);
            }
            over = true;
            EXPECT_FALSE(status.ok());
          });
          if (how != How::kDeadline) {
            if (where == Where::kQueue) {
              EXPECT_TRUE(server_->WaitMetric(kWaiting, 1));
            } else {
              EXPECT_TRUE(server_->WaitMetric(kRunning, 1));
              std::this_thread::sleep_for(milliseconds(where == Where::kDecode ? 50 : 5));
            }
            EXPECT_FALSE(over) << "it ended by itself";
            if (how == How::kCancel) context.TryCancel();
            if (how == How::kDrop) proxy.Cut();
          }
          client.join();
          if (where != Where::kQueue) {
            EXPECT_EQ(server_->WaitIdle(), "");
          } else {
            for (int i = 0; i < 2000 && server_->Metric(kWaiting) > 0; ++i) {
              std::this_thread::sleep_for(milliseconds(5));
            }
            EXPECT_EQ(server_->Metric(kWaiting), 0);
          }
        }
      }
    }
    for (const auto& context : busy) context->TryCancel();
    for (std::thread& thread : holders) thread.join();
    EXPECT_EQ(server_->WaitIdle(), "");
  }
}

// A thousand requests of all kinds, cancelled at random moments by random means.
TEST_F(CancelTest, ThousandRandomCancels) {
  server_ = ServerProcess::Start(
      LoadEntry("tiny", "v1", TinyModel("llama3")) +
      "engine { kv_cache_bytes: 8388608 max_running: 8 step_tokens: 16 max_waiting_requests: 12 }");
  ASSERT_NE(server_, nullptr);
  constexpr int kRequests = 1000, kThreads = 16;
  std::atomic<int> next{0}, ok{0}, cancelled{0}, late{0}, full{0}, dropped{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937 random(static_cast<unsigned>(thread));
      auto stub = server_->NewStub();
      for (int i; (i = next++) < kRequests;) {
        v1::CompleteRequest request =
            Tokens(SomeTokens(1 + static_cast<int>(random() % 300), i % 40), 100);
        request.set_ignore_eos(true);
        request.set_n(random() % 4 == 0 ? 3 : 1);
        request.set_priority(static_cast<int>(random() % 3));
        grpc::ClientContext context;
        // On a busy machine a connection may fail once, which is not what this is about.
        context.set_wait_for_ready(true);
        const int how = static_cast<int>(random() % 4);  // 3: by dropping the connection
        const microseconds after(random() % 60'000);
        if (how == 1) context.set_deadline(std::chrono::system_clock::now() + after);
        grpc::Status status;
        if (random() % 2 == 0) {
          auto reader = stub->CompleteStream(&context, request);
          std::thread killer([&] {
            std::this_thread::sleep_for(after);
            if (how != 1) context.TryCancel();
          });
          v1::CompleteEvent event;
          while (reader->Read(&event)) {
          }
          killer.join();
          status = reader->Finish();
        } else {
          std::thread killer([&] {
            std::this_thread::sleep_for(after);
            if (how != 1) context.TryCancel();
          });
          v1::CompleteResponse response;
          status = stub->Complete(&context, request, &response);
          killer.join();
        }
        if (how == 3) {
          stub = server_->NewStub();
          ++dropped;
        }
        switch (status.error_code()) {
          case grpc::StatusCode::OK:
            ++ok;
            break;
          case grpc::StatusCode::CANCELLED:
            ++cancelled;
            break;
          case grpc::StatusCode::DEADLINE_EXCEEDED:
            ++late;
            break;
          case grpc::StatusCode::RESOURCE_EXHAUSTED:
            ++full;
            break;
          default:
            ADD_FAILURE() << status.error_code() << " " << status.error_message();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(server_->running());
  EXPECT_EQ(server_->WaitIdle(60), "");
  EXPECT_GT(cancelled, 200);
  EXPECT_GT(late, 50);
  RecordProperty("outcome", absl::StrCat(ok.load(), " ok, ", cancelled.load(), " cancelled, ",
                                         late.load(), " late, ", full.load(), " refused"));
  grpc::ClientContext context;
  v1::CheckResponse checked;
  const grpc::Status check = server_->cache().Check(&context, {}, &checked);
  EXPECT_TRUE(check.ok()) << check.error_message();
  EXPECT_EQ(server_->Metric("carryover_provenance_violations_total"), 0);

  // It still answers, and right: the same as a server that saw none of this.
  const v1::CompleteRequest request = Tokens(SomeTokens(100, 12345), 20);
  const std::string text = Complete(server_->completions(), request).choices(0).text();
  server_->Signal(SIGTERM);
  EXPECT_EQ(server_->Wait(60), 0) << "a clean exit, under sanitizers too";
  const auto fresh = ServerProcess::Start(LoadEntry("tiny", "v1", TinyModel("llama3")));
  ASSERT_NE(fresh, nullptr);
  EXPECT_EQ(Complete(fresh->completions(), request).choices(0).text(), text);
}

}  // namespace
}  // namespace carryover
