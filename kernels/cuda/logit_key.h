// A logit and its id in one number, for kernels that look for the largest logits of a row.
#pragma once

#include "kernels/cuda/device.h"

namespace carryover::CARRYOVER_DEVICE {

// The larger logit is the larger key, among equals the lower id. 0 is none.
using Key = unsigned long long;

__device__ inline unsigned FloatBits(float x) {
  union {
    float value;
    unsigned bits;
  } u;
  u.value = x;
  return u.bits;
}

__device__ inline Key MakeKey(float logit, int id) {
  const unsigned bits = FloatBits(logit + 0.0f);  // one zero
  const unsigned ordered = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<Key>(ordered) << 32 | (0xffffffffu - static_cast<unsigned>(id));
}
__device__ inline int IdOf(Key key) {
  return static_cast<int>(0xffffffffu - static_cast<unsigned>(key & 0xffffffffu));
}

}  // namespace carryover::CARRYOVER_DEVICE
