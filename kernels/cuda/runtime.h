// The CUDA runtime for host code of this folder: NVIDIA's, or the emulated device's under
// CARRYOVER_EMULATED.
#pragma once

#if defined(CARRYOVER_EMULATED)
#include "kernels/cuda/emulation/runtime.h"
#else
#include <cuda_runtime_api.h>
#endif
