// What backends share when they pack weights: values as checkpoints hold them, and whether parts
// stack. Any thread may call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cpu/bf16.h"
#include "kernels/ops.h"

namespace carryover {

// Value i of memory at any address.
inline float HostValue(const void* data, DType type, size_t i) {
  const char* const at = static_cast<const char*>(data) + i * DTypeBytes(type);
  if (type == DType::kF32) {
    float value;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  uint16_t half;
  std::memcpy(&half, at, sizeof(half));
  return type == DType::kBF16 ? FloatFromBf16(half) : FloatFromF16(half);
}

struct MatrixSize {
  int64_t n = 0;
  int64_t k = 0;
};

// The size of `parts` one above the other, as pack() of kernels/ops.h takes them, or
// INVALID_ARGUMENT. Both sides are small enough that four times either is an int.
absl::StatusOr<MatrixSize> StackedSize(absl::Span<const HostMatrix> parts,
                                       absl::Span<const float> bias, DType type, bool gated);

// INVALID_ARGUMENT where a matrix packed as `gated` is multiplied by the op for the others, or the
// other way round.
absl::Status CheckGated(bool gated, bool wanted);

}  // namespace carryover
