// The real `carryover` client program in a process of its own, for one test.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/integration/server_process.h"

namespace carryover {

class ClientProcess {
 public:
  // With the server's addresses in the environment. Fails the test, and gives null, when there is
  // no such program.
  static std::unique_ptr<ClientProcess> Start(const ServerProcess& server,
                                              const std::vector<std::string>& args);
  ~ClientProcess();  // kills it

  void Signal(int number) const;
  bool running();
  // The exit status, 128 and the number where a signal ended it, or -1 when it still runs after so
  // long.
  int Wait(double seconds = 60);
  std::string out() const;
  std::string err() const;

 private:
  ClientProcess() = default;

  pid_t pid_ = -1;
  int status_ = -1;
  std::string folder_;
};

// To its end.
struct ClientResult {
  int exit_code = -1;
  std::string out, err;
};
ClientResult RunClient(const ServerProcess& server, const std::vector<std::string>& args);

}  // namespace carryover
