// What one pair of logits adds to the measures of divergence, in fp32, since fp64 is slow on most
// devices and never free. Both rows' norms are known: p = exp(z - ln sum exp z), q likewise.
//
// Nearly equal rows have small measures that are sums of large terms of both signs, so each term is
// taken in a form that is never negative and has the measure's own size. With d = ln p - ln q:
//
//   KL   p ln(p / q) + (q - p) = p (e^-d - 1 + d)        as q - p sums up to 0
//   JS   p ln(p / m) + q ln(q / m) = m h(t)              m = (p + q) / 2, t = tanh(|d| / 2),
//                                                        h(t) = t^2 + t^4 / 6 + t^6 / 15 + ...
//   TV   |p - q|
//
// A norm that is wrong by u moves d, and the first two by no more than u times themselves, but
// |p - q| by u q. The rows' own sums tell u: `excess` is what q has more than p, and with
// `signed_q` whoever adds up takes it back (Correct).
#pragma once

#include <math.h>

#include "kernels/cuda/device.h"

namespace carryover::CARRYOVER_DEVICE {

// The unevaluated sum of two floats.
struct Split {
  float high;
  float low;
};

__device__ inline Split SplitDouble(double x) {
  const float high = static_cast<float>(x);
  return {high, static_cast<float>(x - static_cast<double>(high))};
}

// a - b without rounding. Beyond what any likely logit is, only about.
__device__ inline Split Difference(float a, float b) {
  constexpr float kExact = 1e30f;
  const float high = a - b;
  const float b_part = a - high;
  const float a_part = high + b_part;
  return {high, fabsf(high) < kExact ? (a - a_part) + (b_part - b) : 0.0f};
}

// Norms of a pair of rows.
struct Norms {
  Split p;
  Split q;
  Split difference;  // p - q
};

struct Terms {
  float kl;
  float js;
  float tv;
  float excess;    // q - p
  float signed_q;  // q, negative where p is larger
};

// In units of the larger one of p and q, whose logarithms are `a` apart.
struct DistanceTerms {
  float one_less_ratio;  // 1 - e^-a: TV
  float up;              // e^-a - 1 + a: KL where p is the larger one
  float down;            // 1 - e^-a (1 + a): KL where q is
  float js;              // (1 + e^-a) / 2 h(tanh(a / 2))
};

// For a < 1, where differences of exponentials would cancel.
__device__ inline DistanceTerms Near(float a) {
  // (e^-a - 1 + a) / a^2, whose series has the reciprocals of factorials.
  float e = 1.0f / 39916800;
  e = 1.0f / 3628800 - a * e;
  e = 1.0f / 362880 - a * e;
  e = 1.0f / 40320 - a * e;
  e = 1.0f / 5040 - a * e;
  e = 1.0f / 720 - a * e;
  e = 1.0f / 120 - a * e;
  e = 1.0f / 24 - a * e;
  e = 1.0f / 6 - a * e;
  e = 1.0f / 2 - a * e;
  DistanceTerms near;
  near.up = a * a * e;
  near.one_less_ratio = a - near.up;
  near.down = a * a - near.up * (1 + a);
  const float sum = 2 - near.one_less_ratio;  // 1 + e^-a
  const float t = FastDivide(near.one_less_ratio, sum);
  const float t2 = t * t;
  // h(t) / t^2: 1 / (k (2 k - 1)).
  float h = 1.0f / 120;
  h = 1.0f / 91 + t2 * h;
  h = 1.0f / 66 + t2 * h;
  h = 1.0f / 45 + t2 * h;
  h = 1.0f / 28 + t2 * h;
  h = 1.0f / 15 + t2 * h;
  h = 1.0f / 6 + t2 * h;
  h = 1.0f + t2 * h;
  near.js = 0.5f * sum * t2 * h;
  return near;
}

__device__ inline DistanceTerms Far(float a) {
  constexpr float kLn2 = 0.693147181f;
  const float ratio = expf(-a);
  const float product = a * ratio;
  DistanceTerms far;
  far.one_less_ratio = 1 - ratio;
  far.up = a - far.one_less_ratio;
  far.down = far.one_less_ratio - product;
  far.js = (1 + ratio) * (kLn2 - log1pf(ratio)) - product;
  return far;
}

// z and w are no NaN and not +inf.
__device__ inline Terms PairTerms(float z, float w, const Norms& norms) {
  constexpr float kMost = 3.4028234664e38f;
  // In place of -inf, so that differences of two masked logits are no NaN. Its exponential is 0.
  z = Max(z, -kMost);
  w = Max(w, -kMost);
  const Split logits = Difference(z, w);
  const float d = (logits.high - norms.difference.high) + (logits.low - norms.difference.low);
  const float a = Min(fabsf(d), kMost);
  const bool p_larger = d >= 0;
  const DistanceTerms part = a < 1 ? Near(a) : Far(a);
  // The larger one of p and q.
  const Split norm = p_larger ? norms.p : norms.q;
  const Split log = Difference(p_larger ? z : w, norm.high);
  const float large = expf(log.high) * (1 + (log.low - norm.low));
  Terms terms;
  terms.tv = large * part.one_less_ratio;
  terms.js = large * part.js;
  terms.kl = large * (p_larger ? part.up : part.down);
  terms.excess = p_larger ? -terms.tv : terms.tv;
  terms.signed_q = p_larger ? terms.tv - large : large;
  return terms;
}

}  // namespace carryover::CARRYOVER_DEVICE
