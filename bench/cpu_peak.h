// What this CPU's cores can do at most, measured: what the kernels are compared with.
#pragma once

#include <cstddef>

namespace carryover {

// One core, in GFLOP/s; 0 where the CPU lacks the instruction. Each call runs for about a
// millisecond; take the best of several.
double PeakFmaGflops();   // 512-bit f32 multiply-add (256-bit where there is no AVX-512)
double PeakBf16Gflops();  // AVX512-BF16 dot product

// One core reading `bytes` of memory, in GB/s.
double ReadGbytes(const void* data, size_t bytes);

}  // namespace carryover
