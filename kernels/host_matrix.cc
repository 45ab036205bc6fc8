#include "kernels/host_matrix.h"

#include <limits>

#include "absl/strings/str_cat.h"

namespace carryover {

absl::StatusOr<MatrixSize> StackedSize(absl::Span<const HostMatrix> parts,
                                       absl::Span<const float> bias, DType type, bool gated) {
  constexpr int64_t kMaxSide = std::numeric_limits<int>::max() / 4;
  if (type == DType::kF16) {
    return absl::InvalidArgumentError(
        absl::StrCat("weights cannot be packed as ", DTypeName(type)));
  }
  if (parts.empty()) return absl::InvalidArgumentError("nothing to pack");
  MatrixSize size = {0, parts[0].cols};
  for (const HostMatrix& part : parts) {
    if (part.data == nullptr || part.rows <= 0 || part.cols != size.k || size.k <= 0 ||
        size.k > kMaxSide || part.rows > kMaxSide - size.n) {
      return absl::InvalidArgumentError(absl::StrCat("cannot stack a (", part.rows, ", ", part.cols,
                                                     ") matrix on (", size.n, ", ", size.k, ")"));
    }
    size.n += part.rows;
  }
  if (!bias.empty() && static_cast<int64_t>(bias.size()) != size.n) {
    return absl::InvalidArgumentError(
        absl::StrCat("bias has ", bias.size(), " values for ", size.n, " rows"));
  }
  if (gated && (parts.size() != 2 || parts[0].rows != parts[1].rows)) {
    return absl::InvalidArgumentError("a gated matrix has two parts with as many rows");
  }
  return size;
}

absl::Status CheckGated(bool gated, bool wanted) {
  if (gated == wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(gated ? "matmul of a matrix that was packed as gated"
                                          : "matmul_gated of a matrix that was not packed so");
}

}  // namespace carryover
