// carryover-server; see server_main.h.
#include "server/server_main.h"

int main(int argc, char** argv) {
  carryover::ServerBackends backends;
#if defined(CARRYOVER_CUDA)
  backends.cuda = carryover::CudaOps;
#endif
  return carryover::ServerMain(argc, argv, backends);
}
