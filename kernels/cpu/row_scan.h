// What the divergence kernel knows of one row of logits by itself.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/ops.h"

namespace carryover::cpu {

inline constexpr float kMaskedLogit = -std::numeric_limits<float>::infinity();

struct RowScan {
  bool finite = true;  // no NaN and no +inf
  int count = 0;       // in top
  float max = kMaskedLogit;
  double sum = 0;                  // of exp(logit - max)
  float top[kDivergenceTop] = {};  // largest first, the lower id first among equals
  int32_t ids[kDivergenceTop] = {};

  // A logit has to be larger than this to get into top.
  float Least() const { return count < kDivergenceTop ? kMaskedLogit : top[kDivergenceTop - 1]; }
  // REQUIRES: logit > Least(), and a larger id than all before.
  void Insert(float logit, int32_t id) {
    int at = count < kDivergenceTop ? count++ : kDivergenceTop - 1;
    for (; at > 0 && logit > top[at - 1]; --at) {
      top[at] = top[at - 1];
      ids[at] = ids[at - 1];
    }
    top[at] = logit;
    ids[at] = id;
  }
  double LogSumExp() const { return double{max} + std::log(sum); }
};

struct DivergenceSums {
  double kl = 0;
  double js = 0;
  double tv = 0;
};

}  // namespace carryover::cpu
