// A real carryover-server in a process of its own, on ports that the system picks, for one test.
#pragma once

#include <grpcpp/grpcpp.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "carryover/v1/cache.grpc.pb.h"
#include "carryover/v1/completions.grpc.pb.h"
#include "carryover/v1/fidelity.grpc.pb.h"
#include "carryover/v1/versions.grpc.pb.h"
#include "tests/integration/child_process.h"

namespace carryover {

// Folders of test models, under the source tree.
std::string TinyModel(const std::string& name);
std::string DemoModel(const std::string& version);

// A `load` entry of the configuration, in fp32 so that outputs are exact. more: further fields.
std::string LoadEntry(const std::string& model, const std::string& version, const std::string& path,
                      const std::string& more = "");

struct CommandResult {
  int exit_code = -1;
  std::string output;  // stdout and stderr
};
// Runs the server binary, or another program, to its end, or for a minute: then exit_code is -1.
CommandResult RunServer(const std::vector<std::string>& args, const std::string& program = "");

class ServerProcess {
 public:
  // config lacks the listen addresses. Fails the test, and gives null, when it does not get ready.
  static std::unique_ptr<ServerProcess> Start(const std::string& config,
                                              const std::string& program = "");
  ~ServerProcess();  // kills it, and shows its log where the test failed

  // Each call makes a connection of its own.
  std::shared_ptr<grpc::Channel> Connect() const;
  std::shared_ptr<grpc::Channel> ConnectAdmin() const;
  std::unique_ptr<v1::Completions::Stub> NewStub() const;

  v1::Completions::Stub& completions() { return *completions_; }
  v1::Versions::Stub& versions() { return *versions_; }
  v1::Cache::Stub& cache() { return *cache_; }
  v1::Fidelity::Stub& fidelity() { return *fidelity_; }
  const std::string& address() const { return addresses_.at("completions"); }
  const std::string& admin_address() const { return addresses_.at("admin"); }

  // Body of an HTTP GET; "" when there is no answer with 200.
  std::string Get(const std::string& path) const;
  // A sample of /metrics, its name with the labels as they stand there; -1 when there is none.
  double Metric(const std::string& sample) const;
  // Waits until nothing runs, waits or holds blocks; says what still does otherwise.
  std::string WaitIdle(double seconds = 30) const;
  // Waits until the gauge has at least this value.
  bool WaitMetric(const std::string& sample, double at_least, double seconds = 30) const;

  void Signal(int number) const { child_.Signal(number); }
  int Wait(double seconds) { return child_.Wait(seconds); }  // as ChildProcess
  bool running() { return child_.running(); }
  std::string log() const { return child_.Read("log"); }

 private:
  ServerProcess() = default;

  ChildProcess child_;
  std::map<std::string, std::string> addresses_;
  std::unique_ptr<v1::Completions::Stub> completions_;
  std::unique_ptr<v1::Versions::Stub> versions_;
  std::unique_ptr<v1::Cache::Stub> cache_;
  std::unique_ptr<v1::Fidelity::Stub> fidelity_;
};

// A streamed completion, read to its end.
struct Streamed {
  grpc::Status status;
  v1::CompleteEvent::Started started;
  v1::CompleteEvent::Done done;
  std::map<int, std::string> text;  // by choice
  std::map<int, std::vector<std::string>> deltas;
  std::map<int, v1::Finish> finish;
  std::string order;  // s, p, d, f, e: one letter an event
};
Streamed Stream(v1::Completions::Stub& stub, const v1::CompleteRequest& request,
                grpc::ClientContext* context = nullptr);

// A unary completion; the status is expected to be OK.
v1::CompleteResponse Complete(v1::Completions::Stub& stub, const v1::CompleteRequest& request);

v1::CompleteRequest Prompt(const std::string& prompt, int max_tokens);
v1::CompleteRequest Tokens(const std::vector<int32_t>& tokens, int max_tokens);
// So many tokens that differ by seed, each in [3, 300).
std::vector<int32_t> SomeTokens(int count, int seed);

// prompt = cached + carried + repaired + computed, and the total.
void ExpectConsistent(const v1::Usage& usage);

// Loads a version while the server runs; the status of the call.
grpc::Status Load(ServerProcess& server, const v1::LoadRequest& request, v1::Version* loaded);

}  // namespace carryover
