// Which instruction sets the Highway kernels are compiled for. Included before
// hwy/foreach_target.h. Targets left out are covered by a neighbour; vectors of unknown length
// (SVE, RVV) cannot be held in the arrays that the register-blocked kernels need, so those CPUs run
// NEON or the baseline.
//
// Kernels with products of bf16 define HWY_WANT_AVX3_DL before this. That target stands for the
// CPUs of PreferBf16Dot() (kernels/cpu/bf16_dot.h) and is taken on no others.
#pragma once

#ifndef HWY_DISABLED_TARGETS
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
// Each target takes a sanitizer long to compile, and SSE4 differs from AVX2 in the width alone.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#else
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif
#endif
