// The CUDA runtime for this folder: NVIDIA's, or the emulated device's under CARRYOVER_EMULATED.
// Everything here is compiled for both, in namespaces of their own, so that both can be linked into
// one program.
#pragma once

#if defined(CARRYOVER_EMULATED)
#define CARRYOVER_DEVICE emulated
#include "kernels/cuda/emulation/runtime.h"
#else
#define CARRYOVER_DEVICE cuda
#include <cuda_runtime_api.h>
#endif
