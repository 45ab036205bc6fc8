// The whole server where `backend: CUDA` is the emulated device. For tests: it is slow.
#include "server/server_main.h"

int main(int argc, char** argv) {
  return carryover::ServerMain(argc, argv, {.cuda = carryover::EmulatedCudaOps});
}
