// Vector pieces shared by the Highway kernels, once per target: conversions, 2^x, and the
// register-blocked product that both matmul and attention are made of.

// The guard toggles, because foreach_target includes this once for every target.
#if defined(CARRYOVER_KERNELS_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CARRYOVER_KERNELS_CPU_SIMD_INL_H_
#undef CARRYOVER_KERNELS_CPU_SIMD_INL_H_
#else
#define CARRYOVER_KERNELS_CPU_SIMD_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "hwy/highway.h"
#include "kernels/cpu/bf16.h"

HWY_BEFORE_NAMESPACE();
namespace carryover::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// At most 16 lanes: KV tiles hold 16 tokens.
using DF = hn::CappedTag<float, 16>;
inline constexpr size_t kLanes = hn::MaxLanes(DF());
// Whether products of bf16 are taken by the CPU's own dot product of pairs.
inline constexpr bool kBf16Dot = HWY_TARGET == HWY_AVX3_DL;
// What stands on the left of a product with values of type T: f32, pairs of bf16,
// or of quads of 8 bits.
template <typename T>
using Left = std::conditional_t<(kBf16Dot && sizeof(T) == 2) || sizeof(T) == 1, uint32_t, float>;
// Values of k in one of them.
template <typename T>
inline constexpr size_t kPerLeft = std::is_same_v<Left<T>, uint32_t> ? 4 / sizeof(T) : 1;

#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL || HWY_ARCH_ARM_A64
inline constexpr bool kManyRegisters = true;  // 32 vector registers
#else
inline constexpr bool kManyRegisters = false;  // 16
#endif

// The rows that MultiplyTile takes at most, and how many vectors beside one another for a number of
// rows: as many as keep all sums in registers, and enough to hide the latency of multiply-add.
inline constexpr int kMaxTileRows = kManyRegisters ? 12 : kLanes > 1 ? 6 : 2;
constexpr int TileVectors(int rows) {
  if (kManyRegisters) return rows <= 3 ? 8 : rows <= 6 ? 4 : 2;
  return rows <= 1 ? 8 : rows <= 3 ? 4 : 2;
}

template <class D>
HWY_INLINE hn::Vec<D> LoadAs(D d, const float* p) {
  return hn::LoadU(d, p);
}

// n values of bf16 as f32.
template <class D>
HWY_INLINE hn::Vec<D> LoadAs(D d, const uint16_t* p) {
  const hn::Rebind<uint16_t, D> du16;
  const hn::Rebind<uint32_t, D> du32;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du32, hn::LoadU(du16, p))));
}

template <class D>
HWY_INLINE void StoreAs(D d, hn::Vec<D> v, float* p) {
  hn::StoreU(v, d, p);
}

// Rounds to nearest even; a NaN stays one.
template <class D>
HWY_INLINE void StoreAs(D d, hn::Vec<D> v, uint16_t* p) {
  const hn::Rebind<uint16_t, D> du16;
  const hn::Rebind<uint32_t, D> du32;
  const auto bits = hn::BitCast(du32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du32, 1));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du32, 0x7fff)));
  const auto quiet = hn::Or(bits, hn::Set(du32, 0x400000));
  const auto chosen = hn::IfThenElse(
      hn::MaskFromVec(hn::BitCast(du32, hn::VecFromMask(d, hn::IsNaN(v)))), quiet, rounded);
  // Arithmetic shift and signed narrowing keep all 16 bits.
  const hn::Rebind<int32_t, D> di32;
  const hn::Rebind<int16_t, D> di16;
  const auto high = hn::ShiftRight<16>(hn::BitCast(di32, chosen));
  hn::StoreU(hn::BitCast(du16, hn::DemoteTo(di16, high)), du16, p);
}

// The same, but subnormals may become 0.
template <class D>
HWY_INLINE void StoreRounded(D d, hn::Vec<D> v, uint16_t* p) {
#if HWY_TARGET == HWY_AVX3_DL  // and AVX512-BF16
  const hn::Rebind<uint16_t, D> du16;
  hn::Vec<decltype(du16)> rounded;
  asm("vcvtneps2bf16 %1, %0" : "=v"(rounded.raw) : "v"(v.raw));
  hn::StoreU(rounded, du16, p);
#else
  StoreAs(d, v, p);
#endif
}

HWY_INLINE void StoreScalar(float v, float* p) { *p = v; }
HWY_INLINE void StoreScalar(float v, uint16_t* p) { *p = Bf16FromFloat(v); }
HWY_INLINE float LoadScalar(const float* p) { return *p; }
HWY_INLINE float LoadScalar(const uint16_t* p) { return FloatFromBf16(*p); }

// 2^x for x < 127.5: exactly 1 at 0, and exactly 0 below -127 (also at -inf). Cody and Waite's
// split; `coefficients` of a polynomial for 2^r, |r| <= 1/2, without its 1, from the highest on.
template <class D, typename... Coefficient>
HWY_INLINE hn::Vec<D> Exp2Of(D d, hn::Vec<D> x, float first, Coefficient... coefficients) {
  const hn::RebindToSigned<D> di;
  x = hn::Max(x, hn::Set(d, -127.0f));  // of which the bits below make 0
  // Adding 1.5 * 2^23 rounds to an integer, left in the low bits.
  const auto magic = hn::Set(d, 12582912.0f);
  const auto shifted = hn::Add(x, magic);
  const auto r = hn::Sub(x, hn::Sub(shifted, magic));
  auto p = hn::Set(d, first);
  ((p = hn::MulAdd(p, r, hn::Set(d, coefficients))), ...);
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(di, shifted));
  return hn::BitCast(d, hn::Add(hn::BitCast(di, p), exponent));
}

// To about 1 unit in the last place down to -125. Interpolates at Chebyshev nodes.
template <class D>
HWY_INLINE hn::Vec<D> Exp2(D d, hn::Vec<D> x) {
  return Exp2Of(d, x, 0.00015453163359779865f, 0.0013390863314270973f, 0.009618083015084267f,
                0.055503569543361664f, 0.24022650718688965f, 0.6931471824645996f);
}

// silu(gate) * up.
template <class D>
HWY_INLINE hn::Vec<D> SiluMul(D d, hn::Vec<D> gate, hn::Vec<D> up) {
  const auto most = hn::Set(d, 127.0f);  // of the exponent: there gate / (1 + 2^x) is as good as 0
  const auto x = hn::Min(hn::Mul(gate, hn::Set(d, -1.44269504088896341f)), most);
  return hn::Mul(hn::Div(gate, hn::Add(hn::Set(d, 1.0f), Exp2(d, x))), up);
}

// 2^x where 4e-6 of it are nothing: for weights that are rounded to bf16. Exact where Exp2 is.
template <class D>
HWY_INLINE hn::Vec<D> Exp2Rough(D d, hn::Vec<D> x) {
  return Exp2Of(d, x, 0.009782912209630013f, 0.055976882576942444f, 0.24020710587501526f,
                0.6931136250495911f);
}

// silu(gate) * up where 1e-4 of it are nothing: for what is rounded to bf16. One step of Newton's
// method makes the CPU's approximation of a reciprocal good for 16 bits at least.
template <class D>
HWY_INLINE hn::Vec<D> SiluMulRough(D d, hn::Vec<D> gate, hn::Vec<D> up) {
  const auto most = hn::Set(d, 120.0f);  // the reciprocal is no subnormal
  const auto x = hn::Min(hn::Mul(gate, hn::Set(d, -1.44269504088896341f)), most);
  const auto below = hn::Add(hn::Set(d, 1.0f), Exp2Rough(d, x));
  const auto guess = hn::ApproximateReciprocal(below);
  const auto inverse = hn::Mul(guess, hn::NegMulAdd(below, guess, hn::Set(d, 2.0f)));
  return hn::Mul(hn::Mul(gate, inverse), up);
}

// Pairs of bf16, the first in the low half of each lane.
template <class D>
HWY_INLINE hn::Vec<D> LoadPairs(D du32, const uint16_t* p) {
  if constexpr (hn::MaxLanes(D()) == 1) {
    uint32_t pair;
    std::memcpy(&pair, p, sizeof(pair));
    return hn::Set(du32, pair);
  } else {
    const hn::Repartition<uint16_t, D> du16;
    return hn::BitCast(du32, hn::LoadU(du16, p));
  }
}

// Memory that MultiplyTile asks the second-level cache for while it multiplies: `step` bytes
// further at each of its rounds (a round is a value of k in f32, a pair in bf16).
struct Ahead {
  const char* at;
  size_t step;
  HWY_INLINE void operator()(size_t round) const { __builtin_prefetch(at + round * step, 0, 2); }
};
struct NothingAhead {
  HWY_INLINE void operator()(size_t) const {}
};

template <size_t kValue>
using Constant = std::integral_constant<size_t, kValue>;

// The column of the left side that is multiplied: Get(m) is of row m, Next() goes on to the next
// one. A distance between rows that the compiler does not know would have it keep, and spill, a
// pointer for each row: here every fourth row has one, from which addresses reach the next three.
template <int kRows, typename L, class Stride>
class LeftColumn {
 public:
  HWY_INLINE LeftColumn(const L* a, Stride stride)
      : bytes_(stride * sizeof(L)), three_(3 * bytes_) {
    for (int g = 0; g < kGroups; ++g) rows_[g] = reinterpret_cast<const char*>(a) + 4 * g * bytes_;
    asm("" : "+r"(three_));
  }
  HWY_INLINE L Get(int m) const {
    const size_t far = m % 4 == 3 ? three_ : m % 4 * bytes_;
    return *reinterpret_cast<const L*>(rows_[m / 4] + far);
  }
  HWY_INLINE void Next() {
#pragma GCC unroll 16
    for (int g = 0; g < kGroups; ++g) {
      rows_[g] += sizeof(L);
      asm("" : "+r"(rows_[g]));
    }
  }

 private:
  static constexpr int kGroups = (kRows + 3) / 4;
  const char* rows_[kGroups];
  size_t bytes_;
  size_t three_;
};

template <int kRows, typename L, size_t kStride>
class LeftColumn<kRows, L, Constant<kStride>> {
 public:
  HWY_INLINE LeftColumn(const L* a, Constant<kStride>) : at_(a) {}
  HWY_INLINE L Get(int m) const { return at_[m * kStride]; }
  HWY_INLINE void Next() { ++at_; }

 private:
  const L* at_;
};

// sums[m][v] += sum over i < depth of a[m * stride + i] * w(i, v), where w(i, v) are the lanes
// of vector v at depth i. f32: w[v][i * step + lane]; bf16: w[v][(i / 2) * step + 2 * lane + i %
// 2]. The order of additions is that of i, whatever kRows and kVectors are: this is what makes
// results independent of the batch. `stride` is a number or Constant.
template <int kRows, int kVectors, class Stride, class D, class A = NothingAhead>
HWY_INLINE void MultiplyTile(D d, const float* HWY_RESTRICT a, Stride stride,
                             const float* const (&w)[kVectors], size_t step, size_t depth,
                             hn::Vec<D> (&sums)[kRows][kVectors], A ahead = A()) {
  LeftColumn<kRows, float, Stride> left(a, stride);
  for (size_t i = 0; i < depth; ++i, left.Next()) {
    ahead(i);
    hn::Vec<D> b[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) b[v] = hn::LoadU(d, w[v] + i * step);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const auto x = hn::Set(d, left.Get(m));
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sums[m][v] = hn::MulAdd(x, b[v], sums[m][v]);
    }
  }
}

template <int kRows, int kVectors, class Stride, class D, class A = NothingAhead>
HWY_INLINE void MultiplyTile(D d, const float* HWY_RESTRICT a, Stride stride,
                             const uint16_t* const (&w)[kVectors], size_t step, size_t depth,
                             hn::Vec<D> (&sums)[kRows][kVectors], A ahead = A()) {
  const hn::Rebind<uint32_t, D> du32;
  const auto high_half = hn::Set(du32, 0xffff0000u);
  const size_t pairs = depth / 2;
  LeftColumn<kRows, float, Stride> left(a, stride);
  for (size_t i = 0; i < pairs; ++i, left.Next()) {
    ahead(i);
    hn::Vec<D> b[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      b[v] = hn::BitCast(d, hn::ShiftLeft<16>(LoadPairs(du32, w[v] + i * step)));
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const auto x = hn::Set(d, left.Get(m));
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sums[m][v] = hn::MulAdd(x, b[v], sums[m][v]);
    }
    left.Next();
    // The pairs are loaded again: holding both halves would leave too few registers for the sums.
    asm volatile("" ::: "memory");
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      b[v] = hn::BitCast(d, hn::And(LoadPairs(du32, w[v] + i * step), high_half));
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const auto x = hn::Set(d, left.Get(m));
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sums[m][v] = hn::MulAdd(x, b[v], sums[m][v]);
    }
  }
  if (depth % 2 != 0) {  // the other half of the pair may be anything and is not touched
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const auto both = LoadPairs(du32, w[v] + pairs * step);
      const auto even = hn::BitCast(d, hn::ShiftLeft<16>(both));
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        sums[m][v] = hn::MulAdd(hn::Set(d, left.Get(m)), even, sums[m][v]);
      }
    }
  }
}

#if HWY_TARGET == HWY_AVX3_DL
// Highway has no name for VDPBF16PS. It adds the product of the high halves first, rounds after
// each and flushes subnormals to 0.
template <class V, class U>
HWY_INLINE V AddDotOfPairs(V sum, U a, U b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
  return sum;
}

// Rounds two vectors to bf16, side by side; subnormals may become 0.
template <class V>
HWY_INLINE hn::VFromD<hn::Repartition<uint32_t, hn::DFromV<V>>> RoundToPairs(V low, V high) {
  hn::VFromD<hn::Repartition<uint32_t, hn::DFromV<V>>> pairs;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(pairs.raw) : "v"(high.raw), "v"(low.raw));
  return pairs;
}

// MultiplyTile with pairs of bf16 on both sides: a[m * stride + i / 2].
template <int kRows, int kVectors, class Stride, class D, class A = NothingAhead>
HWY_INLINE void MultiplyTile(D d, const uint32_t* HWY_RESTRICT a, Stride stride,
                             const uint16_t* const (&w)[kVectors], size_t step, size_t depth,
                             hn::Vec<D> (&sums)[kRows][kVectors], A ahead = A()) {
  const hn::Rebind<uint32_t, D> du32;
  const size_t pairs = depth / 2;
  hn::Vec<decltype(du32)> b[kVectors];
  LeftColumn<kRows, uint32_t, Stride> left(a, stride);
  for (size_t i = 0; i < pairs; ++i, left.Next()) {
    ahead(i);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) b[v] = LoadPairs(du32, w[v] + i * step);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const auto x = hn::Set(du32, left.Get(m));
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sums[m][v] = AddDotOfPairs(sums[m][v], x, b[v]);
    }
  }
  if (depth % 2 != 0) {  // the other half of the pair may be anything
    const auto low_half = hn::Set(du32, 0xffffu);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const auto even = hn::And(LoadPairs(du32, w[v] + pairs * step), low_half);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const auto x = hn::Set(du32, left.Get(m) & 0xffffu);
        sums[m][v] = AddDotOfPairs(sums[m][v], x, even);
      }
    }
  }
}
#endif  // HWY_AVX3_DL

// sum + the products of a's four bytes, from 0 to 255, and b's, from -128 to 127, lane by lane.
template <class V, class U>
HWY_INLINE V AddDotOfQuads(V sum, uint32_t a, U b) {
  const hn::DFromV<V> di32;
#if HWY_TARGET == HWY_AVX3_DL
  const auto x = hn::Set(di32, static_cast<int32_t>(a));
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.raw) : "v"(x.raw), "v"(b.raw));
  return sum;
#elif HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR
  // Products of neighbours in 16 bits are added in pairs, all in the first sum: PMADDWD.
  const hn::Repartition<int16_t, decltype(di32)> di16;
  const auto both = hn::BitCast(di16, b);
  auto none = hn::Zero(di32);
  const auto even = hn::BitCast(di16, hn::Set(di32, static_cast<int32_t>(a & 0x00ff00ffu)));
  const auto odd = hn::BitCast(di16, hn::Set(di32, static_cast<int32_t>((a >> 8) & 0x00ff00ffu)));
  sum = hn::ReorderWidenMulAccumulate(di32, even, hn::ShiftRight<8>(hn::ShiftLeft<8>(both)), sum,
                                      none);
  return hn::ReorderWidenMulAccumulate(di32, odd, hn::ShiftRight<8>(both), sum, none);
#else
  const auto part = [&](auto shifted, int i) HWY_ATTR {
    return hn::Mul(hn::Set(di32, static_cast<int32_t>((a >> (8 * i)) & 0xff)),
                   hn::ShiftRight<24>(shifted));
  };
  sum = hn::Add(sum, part(hn::ShiftLeft<24>(b), 0));
  sum = hn::Add(sum, part(hn::ShiftLeft<16>(b), 1));
  sum = hn::Add(sum, part(hn::ShiftLeft<8>(b), 2));
  return hn::Add(sum, part(b, 3));
#endif
}

// The same with quads of 8 bits: a[m * stride + i / 4], w[v][(i / 4) * step + 4 * lane + i %
// 4]. Both sides are padded with what adds nothing.
template <int kRows, int kVectors, class Stride, class D, class A = NothingAhead>
HWY_INLINE void MultiplyTile(D di32, const uint32_t* HWY_RESTRICT a, Stride stride,
                             const int8_t* const (&w)[kVectors], size_t step, size_t depth,
                             hn::Vec<D> (&sums)[kRows][kVectors], A ahead = A()) {
  const hn::Repartition<int8_t, D> di8;
  const size_t quads = (depth + 3) / 4;
  LeftColumn<kRows, uint32_t, Stride> left(a, stride);
  for (size_t i = 0; i < quads; ++i, left.Next()) {
    ahead(i);
    hn::Vec<D> b[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (hn::MaxLanes(D()) == 1) {
        std::memcpy(&b[v].raw, w[v] + i * step, sizeof(int32_t));
      } else {
        b[v] = hn::BitCast(di32, hn::LoadU(di8, w[v] + i * step));
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        sums[m][v] = AddDotOfQuads(sums[m][v], left.Get(m), b[v]);
      }
    }
  }
}

}  // namespace carryover::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // guard
