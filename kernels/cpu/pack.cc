// Weights from a checkpoint into panels. Runs on the caller's thread alone, which may be any: it
// touches nothing of the backend.
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

}  // namespace

absl::StatusOr<PackedMatrix*> Pack(Backend* /*backend*/, absl::Span<const HostMatrix> parts,
                                   absl::Span<const float> bias, DType type) {
  const absl::StatusOr<MatrixSize> size = StackedSize(parts, bias, type);
  if (!size.ok()) return size.status();
  const auto [n, k] = *size;

  constexpr int kPanel = PackedMatrix::kPanel;
  auto matrix = std::make_unique<PackedMatrix>();
  matrix->type = type;
  matrix->n = static_cast<int>(n);
  matrix->k = static_cast<int>(k);
  matrix->panels = static_cast<int>((n + kPanel - 1) / kPanel);
  const size_t padded_k = static_cast<size_t>(type == DType::kBF16 ? k + k % 2 : k);
  matrix->panel_bytes = padded_k * kPanel * DTypeBytes(type);
  const size_t bytes = matrix->panel_bytes * matrix->panels;
  matrix->data = AllocateAligned(bytes);
  matrix->bias.reset(new (std::nothrow) float[static_cast<size_t>(matrix->panels) * kPanel]());
  if (matrix->data == nullptr || matrix->bias == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("no ", bytes, " bytes for weights"));
  }
  if (!bias.empty()) std::memcpy(matrix->bias.get(), bias.data(), bias.size() * sizeof(float));

  char* const data = static_cast<char*>(matrix->data.get());
  if (n % kPanel != 0 || k % 2 != 0) {
    std::memset(data, 0, bytes);
  }
  size_t at = 0;  // row of W
  for (const HostMatrix& part : parts) {
    const auto* row = static_cast<const unsigned char*>(part.data);
    for (int64_t r = 0; r < part.rows; ++r, ++at, row += k * DTypeBytes(part.dtype)) {
      PackRow(row, part.dtype, static_cast<size_t>(k), type, at % kPanel,
              data + at / kPanel * matrix->panel_bytes);
    }
  }
  return matrix.release();
}

void ReleaseMatrix(Backend* /*backend*/, PackedMatrix* matrix) { delete matrix; }

size_t MatrixBytes(const PackedMatrix* matrix) {
  return (matrix->panel_bytes + PackedMatrix::kPanel * sizeof(float)) * matrix->panels;
}

}  // namespace carryover::cpu
