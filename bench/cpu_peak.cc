#include "bench/cpu_peak.h"

#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace carryover {
namespace {

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

#if defined(__x86_64__)
constexpr int kSums = 12;
constexpr int kRounds = 100000;

// Twelve independent sums hide the latency; the empty asm keeps a step from being folded away.
// Macros, since a function of the baseline's instruction set cannot be inlined into another's.
#define ON_TWELVE(DO) DO(a) DO(b) DO(c) DO(d) DO(e) DO(f) DO(g) DO(h) DO(i) DO(j) DO(k) DO(l)
#define DECLARE(v) auto v = x;
#define KEEP(v) asm volatile("" : "+v"(v));

__attribute__((target("avx512f"))) double Fma512() {
  const __m512 x = _mm512_set1_ps(0.5f);
  ON_TWELVE(DECLARE)
  const double start = Seconds();
  for (int r = 0; r < kRounds; ++r) {
#define STEP(v) v = _mm512_fmadd_ps(x, v, x);
    ON_TWELVE(STEP)
#undef STEP
    ON_TWELVE(KEEP)
  }
  return 32e-9 * kSums * kRounds / (Seconds() - start);
}

__attribute__((target("avx2,fma"))) double Fma256() {
  const __m256 x = _mm256_set1_ps(0.5f);
  ON_TWELVE(DECLARE)
  const double start = Seconds();
  for (int r = 0; r < kRounds; ++r) {
#define STEP(v) v = _mm256_fmadd_ps(x, v, x);
    ON_TWELVE(STEP)
#undef STEP
    ON_TWELVE(KEEP)
  }
  return 16e-9 * kSums * kRounds / (Seconds() - start);
}

__attribute__((target("avx512f,avx512bf16"))) double Dot512() {
  const __m512 x = _mm512_set1_ps(1.0f);
  const auto pairs = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f803f80));
  ON_TWELVE(DECLARE)
  const double start = Seconds();
  for (int r = 0; r < kRounds; ++r) {
#define STEP(v) v = _mm512_dpbf16_ps(v, pairs, pairs);
    ON_TWELVE(STEP)
#undef STEP
    ON_TWELVE(KEEP)
  }
  return 64e-9 * kSums * kRounds / (Seconds() - start);
}
#endif

}  // namespace

double PeakFmaGflops() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return Fma512();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Fma256();
#endif
  return 0;
}

double PeakBf16Gflops() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bf16")) return Dot512();
#endif
  return 0;
}

double ReadGbytes(const void* data, size_t bytes) {
  const auto* const p = static_cast<const uint64_t*>(data);
  const size_t words = bytes / 8;
  uint64_t sums[8] = {};
  const double start = Seconds();
  for (size_t i = 0; i + 64 <= words; i += 64) {
    for (int j = 0; j < 8; ++j) sums[j] += p[i + 8 * j];  // a load of every cache line
  }
  const double s = Seconds() - start;
  for (uint64_t sum : sums) asm volatile("" : : "r"(sum));
  return static_cast<double>(bytes) / s * 1e-9;
}

}  // namespace carryover
