// The program carryover-server: reads its configuration, loads the versions, serves, and drains on
// SIGTERM. Apart from main, so that a test's program can bring another backend.
#pragma once

#include "kernels/ops.h"

namespace carryover {

struct ServerBackends {
  const Ops& (*cuda)() = nullptr;  // null: built without
};

// Called once, by main. The process's exit status: 1 when serving failed, 2 for wrong arguments or
// a wrong configuration.
int ServerMain(int argc, char** argv, const ServerBackends& backends);

}  // namespace carryover
