// Storage types of kernels. Plain data, for host and device.
#pragma once

#include <cstdint>

namespace carryover {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

}  // namespace carryover
