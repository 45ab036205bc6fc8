// Weights from a checkpoint into panels. Runs on the caller's thread alone, which may be any: it
// touches nothing of the backend.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/backend.h"
#include "kernels/host_matrix.h"

namespace carryover::cpu {
namespace {

// Writes one row of W as column `lane` of its panel.
void PackRow(const unsigned char* row, DType from, size_t k, DType to, size_t lane, void* panel) {
  constexpr size_t kPanel = PackedMatrix::kPanel;
  if (to == DType::kF32) {
    float* out = static_cast<float*>(panel) + lane;
    for (size_t i = 0; i < k; ++i) out[i * kPanel] = HostValue(row, from, i);
    return;
  }
  uint16_t* out = static_cast<uint16_t*>(panel) + 2 * lane;
  if (from == DType::kBF16) {
    for (size_t i = 0; i + 2 <= k; i += 2) std::memcpy(out + i * kPanel, row + 2 * i, 4);
    if (k % 2 != 0) std::memcpy(out + (k - 1) * kPanel, row + 2 * (k - 1), 2);
    return;
  }
  for (size_t i = 0; i < k; ++i) {
    out[(i / 2) * 2 * kPanel + i % 2] = Bf16FromFloat(HostValue(row, from, i));
  }
}

// The same in 8 bits; `scale` and `excess` are of the panel's first group. What is not finite makes
// its group's scale so, and all that comes of it.
void PackRowAsI8(const unsigned char* row, DType from, size_t k, size_t lane, void* panel,
                 float* scale, int32_t* excess) {
  constexpr size_t kPanel = PackedMatrix::kPanel, kGroup = PackedMatrix::kI8Group;
  constexpr float kMost = 127;
  int8_t* const out = static_cast<int8_t*>(panel) + 4 * lane;
  for (size_t begin = 0; begin < k; begin += kGroup, scale += kPanel, excess += kPanel) {
    const size_t end = std::min(k, begin + kGroup);
    float most = 0;
    for (size_t i = begin; i < end; ++i) {
      const float size = std::fabs(HostValue(row, from, i));
      most = size <= most ? most : size;  // and so a NaN stays
    }
    scale[lane] = most / kMost;
    if (most == 0 || !std::isfinite(most)) continue;  // all are 0
    int32_t sum = 0;
    for (size_t i = begin; i < end; ++i) {
      const float value = std::nearbyint(HostValue(row, from, i) * (kMost / most));
      const auto rounded = static_cast<int8_t>(std::clamp(value, -kMost, kMost));
      out[i / 4 * 4 * kPanel + i % 4] = rounded;
      sum += rounded;
    }
    excess[lane] = 128 * sum;
  }
}

}  // namespace

absl::StatusOr<PackedMatrix*> Pack(Backend* /*backend*/, absl::Span<const HostMatrix> parts,
                                   absl::Span<const float> bias, DType type, bool gated) {
  const absl::StatusOr<MatrixSize> size = StackedSize(parts, bias, type, gated);
  if (!size.ok()) return size.status();
  const auto [n, k] = *size;

  constexpr int kPanel = PackedMatrix::kPanel;
  auto matrix = std::make_unique<PackedMatrix>();
  matrix->type = type;
  matrix->gated = gated;
  matrix->n = static_cast<int>(n);
  matrix->k = static_cast<int>(k);
  // Panels are filled alike by all rows, or one half by those of gate, the other by those of up.
  const int64_t sides = gated ? 2 : 1;
  const int64_t side_rows = n / sides, side_lanes = kPanel / sides;
  matrix->panels = static_cast<int>((side_rows + side_lanes - 1) / side_lanes);
  const int64_t side_by_side = type == DType::kI8 ? 4 : type == DType::kBF16 ? 2 : 1;
  const auto padded_k = static_cast<size_t>((k + side_by_side - 1) / side_by_side * side_by_side);
  matrix->panel_bytes = padded_k * kPanel * DTypeBytes(type);
  const size_t bytes = matrix->panel_bytes * matrix->panels;
  matrix->data = AllocateAligned(bytes);
  matrix->bias.reset(new (std::nothrow) float[static_cast<size_t>(matrix->panels) * kPanel]());
  bool all = matrix->data != nullptr && matrix->bias != nullptr;
  const size_t panel_scales = static_cast<size_t>(kPanel) * matrix->I8Groups();
  if (type == DType::kI8) {
    matrix->scale.reset(new (std::nothrow) float[matrix->panels * panel_scales]());
    matrix->excess.reset(new (std::nothrow) int32_t[matrix->panels * panel_scales]());
    all = all && matrix->scale != nullptr && matrix->excess != nullptr;
  }
  if (!all) {
    return absl::ResourceExhaustedError(absl::StrCat("no ", bytes, " bytes for weights"));
  }
  char* const data = static_cast<char*>(matrix->data.get());
  if (side_rows % side_lanes != 0 || k % side_by_side != 0 || type == DType::kI8) {
    std::memset(data, 0, bytes);
  }
  int64_t w_row = 0;
  for (const HostMatrix& part : parts) {
    const auto* row = static_cast<const unsigned char*>(part.data);
    for (int64_t r = 0; r < part.rows; ++r, ++w_row, row += k * DTypeBytes(part.dtype)) {
      const int64_t side = w_row / side_rows, in_side = w_row % side_rows;
      const auto at = static_cast<size_t>(in_side / side_lanes * kPanel + side * side_lanes +
                                          in_side % side_lanes);
      if (!bias.empty()) matrix->bias[at] = bias[w_row];
      char* const panel = data + at / kPanel * matrix->panel_bytes;
      if (type == DType::kI8) {
        PackRowAsI8(row, part.dtype, static_cast<size_t>(k), at % kPanel, panel,
                    &matrix->scale[at / kPanel * panel_scales],
                    &matrix->excess[at / kPanel * panel_scales]);
      } else {
        PackRow(row, part.dtype, static_cast<size_t>(k), type, at % kPanel, panel);
      }
    }
  }
  return matrix.release();
}

void ReleaseMatrix(Backend* /*backend*/, PackedMatrix* matrix) { delete matrix; }

size_t MatrixBytes(const PackedMatrix* matrix) {
  // Of a row: bias, and the groups' scale and excess.
  const size_t words = matrix->type == DType::kI8 ? 1 + 2 * matrix->I8Groups() : 1;
  return (matrix->panel_bytes + PackedMatrix::kPanel * words * sizeof(float)) * matrix->panels;
}

}  // namespace carryover::cpu
