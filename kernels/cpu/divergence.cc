// How far two rows of logits are apart; kernels/ops.h has the formulas.
//
// Two sweeps. The first reads each row by itself, in blocks: the largest logit, the ten largest
// with their ids, and the sum of exponentials relative to the largest so far. The second reads both
// rows side by side, now that both are distributions. Exponentials are taken in f64: with f32 ones
// the measures of two nearly equal rows would be all rounding.
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/divergence.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "kernels/cpu/backend.h"
#include "kernels/cpu/for_rows.h"
#include "kernels/cpu/row_scan.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carryover::cpu::HWY_NAMESPACE {

constexpr size_t kN = kLanes;
constexpr size_t kBlock = 512;  // logits: a multiple of all vector sizes

using DD = hn::CappedTag<double, 8>;
using DH = hn::Rebind<float, DD>;  // as many floats as doubles
constexpr size_t kDoubles = hn::MaxLanes(DD());

// Calls body(block, first id) for blocks of kBlock logits, the last one filled up with masked ones.
template <typename Body>
HWY_INLINE void ForBlocks(const float* logits, size_t vocab, const Body& body) {
  size_t i = 0;
  for (; i + kBlock <= vocab; i += kBlock) body(logits + i, i);
  if (i == vocab) return;
  HWY_ALIGN float rest[kBlock];
  std::memcpy(rest, logits + i, (vocab - i) * sizeof(float));
  std::fill(rest + (vocab - i), rest + kBlock, kMaskedLogit);
  body(rest, i);
}

void ScanRow(const float* logits, size_t vocab, RowScan* scan) {
  const DF d;
  const DD dd;
  const DH dh;
  auto sums = hn::Zero(dd);
  ForBlocks(logits, vocab, [&](const float* block, size_t begin) HWY_ATTR {
    auto most = hn::Set(d, kMaskedLogit);
    const auto infinite = hn::Set(d, std::numeric_limits<float>::infinity());
    for (size_t i = 0; i < kBlock; i += kN) {
      const auto x = hn::LoadU(d, block + i);
      if (!hn::AllTrue(d, hn::Lt(x, infinite))) scan->finite = false;  // also for NaN
      most = hn::Max(most, x);
      if (hn::AllFalse(d, hn::Gt(x, hn::Set(d, scan->Least())))) continue;
      for (size_t j = i; j < i + kN; ++j) {
        if (block[j] > scan->Least()) scan->Insert(block[j], static_cast<int32_t>(begin + j));
      }
    }
    if (!scan->finite) return;
    const float block_max = hn::GetLane(hn::MaxOfLanes(d, most));
    if (block_max > scan->max) {
      sums = hn::Mul(sums, hn::Set(dd, std::exp(double{scan->max} - double{block_max})));
      scan->max = block_max;
    }
    if (scan->max == kMaskedLogit) return;  // nothing possible so far
    const auto max = hn::Set(dd, double{scan->max});
    for (size_t i = 0; i < kBlock; i += kDoubles) {
      const auto x = hn::PromoteTo(dd, hn::LoadU(dh, block + i));
      sums = hn::Add(sums, hn::Exp(dd, hn::Sub(x, max)));  // exactly 0 at -inf
    }
  });
  scan->sum = hn::GetLane(hn::SumOfLanes(dd, sums));
}

// Both rows side by side.
DivergenceSums CompareRow(const float* native, const float* carried, size_t vocab,
                          double native_log_sum, double carried_log_sum) {
  const DD dd;
  const DH dh;
  // In place of -inf, so that differences of two masked logits are no NaN. Its exponential is 0.
  const auto lowest = hn::Set(dd, double{std::numeric_limits<float>::lowest()});
  const auto masked = hn::Set(dd, double{kMaskedLogit});
  const auto half = hn::Set(dd, 0.5);
  const auto one = hn::Set(dd, 1.0);
  auto kl = hn::Zero(dd);
  auto js = hn::Zero(dd);
  auto tv = hn::Zero(dd);
  auto lost = hn::Zero(dd);  // above 0 in lanes that saw a token that q cannot give and p can
  const auto p_norm = hn::Set(dd, native_log_sum);
  const auto q_norm = hn::Set(dd, carried_log_sum);
  const auto block = [&](const float* p_block, const float* q_block) HWY_ATTR {
    for (size_t i = 0; i < kBlock; i += kDoubles) {
      const auto z = hn::PromoteTo(dd, hn::LoadU(dh, p_block + i));
      const auto w = hn::PromoteTo(dd, hn::LoadU(dh, q_block + i));
      lost = hn::IfThenElse(hn::And(hn::Gt(z, masked), hn::Eq(w, masked)), one, lost);
      const auto log_p = hn::Sub(hn::Max(z, lowest), p_norm);
      const auto log_q = hn::Sub(hn::Max(w, lowest), q_norm);
      const auto difference = hn::Sub(log_p, log_q);
      const auto distance = hn::Abs(difference);
      const auto ratio = hn::Exp(dd, hn::Neg(distance));  // of the smaller one to the larger one
      const auto larger = hn::Exp(dd, hn::Max(log_p, log_q));
      const auto smaller = hn::Mul(larger, ratio);
      const auto p = hn::IfThenElse(hn::Ge(log_p, log_q), larger, smaller);
      kl = hn::MulAdd(p, difference, kl);
      tv = hn::Add(tv, hn::Sub(larger, smaller));
      // p ln(p / m) + q ln(q / m), with ln m = ln larger + ln((1 + ratio) / 2).
      const auto log_mean = hn::Log1p(dd, hn::Mul(half, hn::Sub(ratio, one)));
      js = hn::NegMulAdd(smaller, distance, js);
      js = hn::NegMulAdd(hn::Add(larger, smaller), log_mean, js);
    }
  };
  size_t i = 0;
  for (; i + kBlock <= vocab; i += kBlock) block(native + i, carried + i);
  if (i < vocab) {
    HWY_ALIGN float rest[2][kBlock];
    std::fill(rest[0], rest[0] + 2 * kBlock, kMaskedLogit);
    std::memcpy(rest[0], native + i, (vocab - i) * sizeof(float));
    std::memcpy(rest[1], carried + i, (vocab - i) * sizeof(float));
    block(rest[0], rest[1]);
  }
  DivergenceSums sums;
  // What can only be rounding is cut off.
  sums.kl = hn::GetLane(hn::SumOfLanes(dd, lost)) > 0
                ? std::numeric_limits<double>::infinity()
                : std::max(0.0, hn::GetLane(hn::SumOfLanes(dd, kl)));
  sums.js = std::clamp(0.5 * hn::GetLane(hn::SumOfLanes(dd, js)), 0.0, 0.69314718055994531);
  sums.tv = std::clamp(0.5 * hn::GetLane(hn::SumOfLanes(dd, tv)), 0.0, 1.0);
  return sums;
}

}  // namespace carryover::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carryover::cpu {

HWY_EXPORT(ScanRow);
HWY_EXPORT(CompareRow);

namespace {

struct Comparison {
  const float* native;
  const float* carried;
  int vocab;
  absl::Span<const int32_t> stop_tokens;  // sorted, unique, within the vocabulary
  int32_t answer;                         // or -1
};

// logits[a] less the largest other one.
double Margin(const float* logits, const RowScan& scan, int32_t a) {
  const int other = scan.ids[0] == a ? 1 : 0;
  return double{logits[a]} - double{other < scan.count ? scan.top[other] : kMaskedLogit};
}

void TopIds(const RowScan& scan, int32_t* ids) {
  std::copy(scan.ids, scan.ids + scan.count, ids);
  std::fill(ids + scan.count, ids + kDivergenceTop, -1);
}

// largest - smallest of carried - native over both tops.
double DeltaRange(const Comparison& rows, const RowScan& native, const RowScan& carried) {
  double least = std::numeric_limits<double>::infinity();
  double most = -least;
  for (const RowScan* scan : {&native, &carried}) {
    for (int i = 0; i < scan->count; ++i) {
      const int32_t id = scan->ids[i];
      const double delta = double{rows.carried[id]} - double{rows.native[id]};
      least = std::min(least, delta);
      most = std::max(most, delta);
    }
  }
  return std::isinf(least) || std::isinf(most) ? std::numeric_limits<double>::infinity()
                                               : most - least;
}

double Mass(const float* logits, absl::Span<const int32_t> ids, double log_sum_exp) {
  double sum = 0;
  for (const int32_t id : ids) sum += std::exp(double{logits[id]} - log_sum_exp);
  return std::min(sum, 1.0);
}

DivergenceRow InvalidRow() {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  DivergenceRow out = {};
  TopIds(RowScan(), out.native_top);
  TopIds(RowScan(), out.carried_top);
  for (double* value : {&out.kl, &out.js, &out.tv, &out.native_log_sum_exp,
                        &out.carried_log_sum_exp, &out.native_margin, &out.carried_margin,
                        &out.native_gap, &out.delta_range, &out.native_stop, &out.carried_stop}) {
    *value = kNan;
  }
  return out;
}

DivergenceRow Compare(const Comparison& rows) {
  const size_t vocab = static_cast<size_t>(rows.vocab);
  RowScan native, carried;
  HWY_DYNAMIC_DISPATCH(ScanRow)(rows.native, vocab, &native);
  HWY_DYNAMIC_DISPATCH(ScanRow)(rows.carried, vocab, &carried);
  if (!native.finite || !carried.finite || native.count == 0 || carried.count == 0) {
    return InvalidRow();
  }
  DivergenceRow out = {};
  out.valid = 1;
  out.native_count = native.count;
  out.carried_count = carried.count;
  TopIds(native, out.native_top);
  TopIds(carried, out.carried_top);
  for (int i = 0; i < native.count; ++i) {
    const int32_t* const ids = carried.ids;
    out.overlap += static_cast<int32_t>(std::count(ids, ids + carried.count, native.ids[i]));
  }
  out.native_log_sum_exp = native.LogSumExp();
  out.carried_log_sum_exp = carried.LogSumExp();
  const DivergenceSums sums = HWY_DYNAMIC_DISPATCH(CompareRow)(
      rows.native, rows.carried, vocab, out.native_log_sum_exp, out.carried_log_sum_exp);
  out.kl = sums.kl;
  out.js = sums.js;
  out.tv = sums.tv;
  const int32_t answer = rows.answer >= 0 ? rows.answer : native.ids[0];
  out.native_margin = Margin(rows.native, native, answer);
  out.carried_margin = Margin(rows.carried, carried, answer);
  out.native_gap = Margin(rows.native, native, native.ids[0]);
  out.delta_range = DeltaRange(rows, native, carried);
  out.native_stop = Mass(rows.native, rows.stop_tokens, out.native_log_sum_exp);
  out.carried_stop = Mass(rows.carried, rows.stop_tokens, out.carried_log_sum_exp);
  return out;
}

}  // namespace

void Divergence(Backend* backend, const DivergenceArgs& args) {
  if (args.rows <= 0) return;
  if (args.vocab <= 0 ||
      (!args.answers.empty() && static_cast<int>(args.answers.size()) != args.rows)) {
    backend->status.Update(absl::InvalidArgumentError(
        absl::StrCat("divergence of ", args.rows, " rows of ", args.vocab, " logits with ",
                     args.answers.size(), " answers")));
    return;
  }
  std::vector<int32_t> stops;
  for (const int32_t id : args.stop_tokens) {
    if (id >= 0 && id < args.vocab) stops.push_back(id);
  }
  std::sort(stops.begin(), stops.end());
  stops.erase(std::unique(stops.begin(), stops.end()), stops.end());
  constexpr size_t kWork = 20;  // several exponentials a logit
  ForRows(backend->pool, args.rows, kWork * static_cast<size_t>(args.vocab), [&](int r) {
    const size_t at = static_cast<size_t>(r) * static_cast<size_t>(args.vocab);
    const int32_t given = args.answers.empty() ? -1 : args.answers[r];
    args.out[r] = Compare({.native = args.native + at,
                           .carried = args.carried + at,
                           .vocab = args.vocab,
                           .stop_tokens = stops,
                           .answer = given < args.vocab ? given : -1});
  });
}

}  // namespace carryover::cpu
#endif  // HWY_ONCE
