#include "tests/integration/server_process.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace carryover {
namespace {

using Clock = std::chrono::steady_clock;

Clock::time_point After(double seconds) {
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

void Pause() { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }

// The server of this build, or another one that is to be tested.
std::string ServerPath(const std::string& program) {
  if (!program.empty()) return program;
  const char* other = std::getenv("CARRYOVER_SERVER");
  return other != nullptr ? other : CARRYOVER_SERVER;
}

std::shared_ptr<grpc::Channel> ConnectTo(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  auto channel = grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  // gRPC 1.51's client, asked for many connections at once, fails now and then with ENOENT, and
  // the call with it. Waiting tries again.
  channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(5));
  return channel;
}

}  // namespace

std::string TinyModel(const std::string& name) {
  return absl::StrCat(CARRYOVER_SOURCE_DIR, "/tests/golden/tiny/", name);
}
std::string DemoModel(const std::string& version) {
  return absl::StrCat(CARRYOVER_SOURCE_DIR, "/models/demo/", version);
}

std::string LoadEntry(const std::string& model, const std::string& version, const std::string& path,
                      const std::string& more) {
  return absl::StrCat("load { model: \"", model, "\" version: \"", version, "\" path: \"", path,
                      "\" weights: DTYPE_FP32 kv_dtype: DTYPE_FP32 ", more, " }\n");
}

CommandResult RunServer(const std::vector<std::string>& args, const std::string& program) {
  ChildProcess server;
  CommandResult result;
  if (server.Start(ServerPath(program), args, "output", "output"))
    result.exit_code = server.Wait(60);
  result.output = server.Read("output");
  return result;
}

std::unique_ptr<ServerProcess> ServerProcess::Start(const std::string& config,
                                                    const std::string& program) {
  auto server = std::unique_ptr<ServerProcess>(new ServerProcess);
  const std::string config_path = server->child_.folder() + "/config.txtpb";
  std::ofstream(config_path) << config
                             << "\nlisten { completions: \"127.0.0.1:0\" admin: \"127.0.0.1:0\" "
                                "http: \"127.0.0.1:0\" }\n";
  const std::string addresses_path = server->child_.folder() + "/addresses";
  server->child_.Start(ServerPath(program),
                       {"--config", config_path, "--addresses-file", addresses_path}, "log", "log");
  const auto deadline = After(120);
  while (!std::filesystem::exists(addresses_path)) {
    if (!server->running() || Clock::now() > deadline) {
      ADD_FAILURE() << "the server did not get ready:\n" << server->log();
      return nullptr;
    }
    Pause();
  }
  for (absl::string_view line : absl::StrSplit(ReadAll(addresses_path), '\n', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(line, ' ');
    server->addresses_.insert(parts);
  }
  server->completions_ = v1::Completions::NewStub(server->Connect());
  const auto admin = server->ConnectAdmin();
  server->versions_ = v1::Versions::NewStub(admin);
  server->cache_ = v1::Cache::NewStub(admin);
  server->fidelity_ = v1::Fidelity::NewStub(admin);
  return server;
}

ServerProcess::~ServerProcess() {
  if (testing::Test::HasFailure()) fprintf(stderr, "server log:\n%s\n", log().c_str());
}

std::shared_ptr<grpc::Channel> ServerProcess::Connect() const { return ConnectTo(address()); }
std::shared_ptr<grpc::Channel> ServerProcess::ConnectAdmin() const {
  return ConnectTo(admin_address());
}
std::unique_ptr<v1::Completions::Stub> ServerProcess::NewStub() const {
  return v1::Completions::NewStub(Connect());
}

std::string ServerProcess::Get(const std::string& path) const {
  const std::string& address = addresses_.at("http");
  sockaddr_in peer{};
  peer.sin_family = AF_INET;
  peer.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int port = 0;
  if (!absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port)) return "";
  peer.sin_port = htons(static_cast<uint16_t>(port));
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  std::string answer;
  if (connect(fd, reinterpret_cast<sockaddr*>(&peer), sizeof(peer)) == 0) {
    const std::string request = absl::StrCat("GET ", path, " HTTP/1.0\r\nHost: test\r\n\r\n");
    if (write(fd, request.data(), request.size()) == static_cast<ssize_t>(request.size())) {
      char bytes[65536];
      ssize_t size;
      while ((size = read(fd, bytes, sizeof(bytes))) > 0) answer.append(bytes, size);
    }
  }
  close(fd);
  const size_t body = answer.find("\r\n\r\n");
  if (body == std::string::npos || answer.find(" 200 ") > 12) return "";
  return answer.substr(body + 4);
}

double ServerProcess::Metric(const std::string& sample) const {
  const std::string text = Get("/metrics");
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    const size_t space = line.rfind(' ');
    double value;
    if (space != absl::string_view::npos && line.substr(0, space) == sample &&
        absl::SimpleAtod(line.substr(space + 1), &value)) {
      return value;
    }
  }
  return -1;
}

std::string ServerProcess::WaitIdle(double seconds) const {
  const auto deadline = After(seconds);
  while (true) {
    const double running = Metric("carryover_requests_running{class=\"user\"}");
    const double waiting = Metric("carryover_requests_waiting{class=\"user\"}");
    const double blocks = Metric("carryover_device_blocks_active");
    if (running == 0 && waiting == 0 && blocks == 0) return "";
    if (Clock::now() > deadline) {
      return absl::StrCat(running, " running, ", waiting, " waiting, ", blocks, " active blocks");
    }
    Pause();
  }
}

bool ServerProcess::WaitMetric(const std::string& sample, double at_least, double seconds) const {
  const auto deadline = After(seconds);
  while (Metric(sample) < at_least) {
    if (Clock::now() > deadline) return false;
    Pause();
  }
  return true;
}

Streamed Stream(v1::Completions::Stub& stub, const v1::CompleteRequest& request,
                grpc::ClientContext* context) {
  grpc::ClientContext own;
  Streamed all;
  const auto reader = stub.CompleteStream(context != nullptr ? context : &own, request);
  v1::CompleteEvent event;
  while (reader->Read(&event)) {
    switch (event.event_case()) {
      case v1::CompleteEvent::kStarted:
        all.order += 's';
        all.started = event.started();
        break;
      case v1::CompleteEvent::kPromptLogprobs:
        all.order += 'p';
        break;
      case v1::CompleteEvent::kDelta:
        all.order += 'd';
        all.text[event.delta().index()] += event.delta().text();
        all.deltas[event.delta().index()].push_back(event.delta().text());
        break;
      case v1::CompleteEvent::kFinished:
        all.order += 'f';
        all.finish[event.finished().index()] = event.finished().finish();
        break;
      case v1::CompleteEvent::kDone:
        all.order += 'e';
        all.done = event.done();
        break;
      case v1::CompleteEvent::EVENT_NOT_SET:
        all.order += '?';
    }
  }
  all.status = reader->Finish();
  return all;
}

v1::CompleteResponse Complete(v1::Completions::Stub& stub, const v1::CompleteRequest& request) {
  grpc::ClientContext context;
  v1::CompleteResponse response;
  const grpc::Status status = stub.Complete(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_code() << " " << status.error_message();
  return response;
}

v1::CompleteRequest Prompt(const std::string& prompt, int max_tokens) {
  v1::CompleteRequest request;
  request.set_prompt(prompt);
  request.set_max_tokens(max_tokens);
  request.set_temperature(0);
  return request;
}

v1::CompleteRequest Tokens(const std::vector<int32_t>& tokens, int max_tokens) {
  v1::CompleteRequest request = Prompt("", max_tokens);
  request.mutable_tokens()->mutable_ids()->Add(tokens.begin(), tokens.end());
  return request;
}

std::vector<int32_t> SomeTokens(int count, int seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens) token = 3 + static_cast<int32_t>(random() % 297);
  return tokens;
}

void ExpectConsistent(const v1::Usage& usage) {
  EXPECT_EQ(usage.prompt_tokens(), usage.cached_tokens() + usage.carried_tokens() +
                                       usage.repaired_tokens() + usage.computed_tokens())
      << usage.ShortDebugString();
  EXPECT_EQ(usage.total_tokens(), usage.prompt_tokens() + usage.completion_tokens());
}

grpc::Status Load(ServerProcess& server, const v1::LoadRequest& request, v1::Version* loaded) {
  grpc::ClientContext context;
  const auto reader = server.versions().Load(&context, request);
  v1::LoadEvent event;
  bool progress = false;
  while (reader->Read(&event)) {
    if (event.has_version()) {
      *loaded = event.version();
    } else {
      progress = true;
      EXPECT_GE(event.progress(), 0);
      EXPECT_LE(event.progress(), 1);
    }
  }
  const grpc::Status status = reader->Finish();
  if (status.ok()) {
    EXPECT_TRUE(progress) << "a load shows progress";
  }
  return status;
}

}  // namespace carryover
