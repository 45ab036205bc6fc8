// The real `carryover` client program in a process of its own, for one test.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/integration/child_process.h"
#include "tests/integration/server_process.h"

namespace carryover {

class ClientProcess {
 public:
  // With the server's addresses in the environment. Fails the test, and gives null, when there is
  // no such program.
  static std::unique_ptr<ClientProcess> Start(const ServerProcess& server,
                                              const std::vector<std::string>& args);

  void Signal(int number) const { child_.Signal(number); }
  bool running() { return child_.running(); }
  int Wait(double seconds = 60) { return child_.Wait(seconds); }  // as ChildProcess
  std::string out() const { return child_.Read("out"); }
  std::string err() const { return child_.Read("err"); }

 private:
  ClientProcess() = default;

  ChildProcess child_;
};

// To its end.
struct ClientResult {
  int exit_code = -1;
  std::string out, err;
};
ClientResult RunClient(const ServerProcess& server, const std::vector<std::string>& args);

}  // namespace carryover
