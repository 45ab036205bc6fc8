#include "engine/kv_fit.h"

#include <Eigen/Cholesky>
#include <Eigen/Dense>
#include <Eigen/Eigenvalues>
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace carryover {
namespace {

using Matrix = Eigen::MatrixXd;
using Vector = Eigen::VectorXd;
using FloatRows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr int kRowsAtOnce = 256;  // of doubles: stays in a cache of the second level
// Of a value's mean square: a spread below it is rounding, as of a constant.
constexpr double kConstant = 1e-12;

std::vector<float> ToFloats(const Matrix& matrix) {
  std::vector<float> values(matrix.size());
  Eigen::Map<FloatRows>(values.data(), matrix.rows(), matrix.cols()) = matrix.cast<float>();
  return values;
}

// The centred sums of some values.
struct Centred {
  Matrix xx;      // (dim, dim)
  Matrix yx;      // (dim, dim): y - x by x
  Vector mean_x;  // (dim)
  Vector mean_y;  // (dim), of y - x
  Vector spread;  // (dim): diagonal of xx; 0 where x is constant
};

// W for some of the values: rows and columns `places` of the sums.
absl::StatusOr<Matrix> Ridge(const Centred& sums, const std::vector<int>& places, double lambda) {
  const int dim = static_cast<int>(places.size());
  // In units of each input's spread the penalty is the same for all, and the numbers are near 1.
  Vector scale(dim);
  for (int i = 0; i < dim; ++i) {
    const double spread = sums.spread[places[i]];
    scale[i] = spread > 0 ? 1 / std::sqrt(spread) : 0;
  }
  Matrix xx = scale.asDiagonal() * sums.xx(places, places) * scale.asDiagonal();
  // A constant's row is nought but for this, and its weight then, too.
  for (int i = 0; i < dim; ++i) xx(i, i) = scale[i] > 0 ? 1 + lambda : 1;
  const Eigen::LLT<Matrix> cholesky(xx);
  if (cholesky.info() != Eigen::Success) {
    return absl::InvalidArgumentError(
        absl::StrCat("the sums have no Cholesky factor at lambda ", lambda));
  }
  const Matrix xy = scale.asDiagonal() * sums.yx(places, places).transpose();
  return Matrix((scale.asDiagonal() * cholesky.solve(xy)).transpose());
}

}  // namespace

struct KvFitSums::Impl {
  Impl(int kv_heads, int head_dim)
      : kv_heads(kv_heads),
        head_dim(head_dim),
        dim(2 * kv_heads * head_dim),
        xx(Matrix::Zero(dim, dim)),
        yx(Matrix::Zero(dim, dim)),
        x(Vector::Zero(dim)),
        y(Vector::Zero(dim)),
        yy(Vector::Zero(dim)) {}

  absl::StatusOr<Centred> Centre() const;

  int kv_heads, head_dim, dim;
  int64_t rows = 0;
  Matrix xx;    // sum of x x^T, lower half
  Matrix yx;    // sum of (y - x) x^T
  Vector x, y;  // sums of x, of y - x
  Vector yy;    // sums of squares of y - x
};

absl::StatusOr<Centred> KvFitSums::Impl::Centre() const {
  if (rows == 0) return absl::InvalidArgumentError("there are no rows to fit");
  if (!x.allFinite() || !y.allFinite() || !xx.diagonal().allFinite() || !yy.allFinite()) {
    return absl::InvalidArgumentError("some rows hold values that are not finite");
  }
  const double n = static_cast<double>(rows);
  Centred out;
  out.mean_x = x / n;
  out.mean_y = y / n;
  out.xx = xx.selfadjointView<Eigen::Lower>();
  const Vector squares = out.xx.diagonal();
  out.xx -= x * out.mean_x.transpose();
  out.yx = yx - y * out.mean_x.transpose();
  out.spread = out.xx.diagonal();
  for (int i = 0; i < dim; ++i) {
    if (out.spread[i] <= kConstant * squares[i]) out.spread[i] = 0;
  }
  return out;
}

KvFitSums::KvFitSums(int kv_heads, int head_dim)
    : impl_(std::make_unique<Impl>(kv_heads, head_dim)) {}
KvFitSums::KvFitSums(KvFitSums&&) noexcept = default;
KvFitSums& KvFitSums::operator=(KvFitSums&&) noexcept = default;
KvFitSums::~KvFitSums() = default;

int64_t KvFitSums::rows() const { return impl_->rows; }

void KvFitSums::Add(absl::Span<const float> source, absl::Span<const float> target) {
  Impl& sums = *impl_;
  CHECK(source.size() == target.size() && source.size() % sums.dim == 0);
  const int64_t rows = source.size() / sums.dim;
  for (int64_t begin = 0; begin < rows; begin += kRowsAtOnce) {
    const int64_t count = std::min<int64_t>(kRowsAtOnce, rows - begin);
    const Eigen::Map<const FloatRows> from(source.data() + begin * sums.dim, count, sums.dim);
    const Eigen::Map<const FloatRows> to(target.data() + begin * sums.dim, count, sums.dim);
    const Matrix x = from.cast<double>().transpose();
    const Matrix y = to.cast<double>().transpose() - x;
    sums.xx.selfadjointView<Eigen::Lower>().rankUpdate(x);
    sums.yx.noalias() += y * x.transpose();
    sums.x += x.rowwise().sum();
    sums.y += y.rowwise().sum();
    sums.yy += y.rowwise().squaredNorm();
  }
  sums.rows += rows;
}

void KvFitSums::Merge(const KvFitSums& other) {
  Impl& sums = *impl_;
  CHECK(sums.kv_heads == other.impl_->kv_heads && sums.head_dim == other.impl_->head_dim);
  sums.rows += other.impl_->rows;
  sums.xx += other.impl_->xx;
  sums.yx += other.impl_->yx;
  sums.x += other.impl_->x;
  sums.y += other.impl_->y;
  sums.yy += other.impl_->yy;
}

absl::StatusOr<KvMapLayer> KvFitSums::Solve(KvMapVariant variant, double lambda, int rank) const {
  const Impl& impl = *impl_;
  if (!(lambda > 0) || !std::isfinite(lambda)) {
    return absl::InvalidArgumentError("lambda is not a positive number");
  }
  if (variant == KvMapVariant::kLowRank && (rank < 1 || rank > impl.dim)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the rank ", rank, " is not from 1 to ", impl.dim));
  }
  ASSIGN_OR_RETURN(const Centred sums, impl.Centre());
  KvMapLayer layer;
  Vector through_mean;  // W mean_x

  if (variant == KvMapVariant::kPerHead) {
    through_mean.resize(impl.dim);
    for (int head = 0; head < impl.kv_heads; ++head) {
      std::vector<int> places;
      for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < impl.head_dim; ++i) {
          places.push_back(half * impl.dim / 2 + head * impl.head_dim + i);
        }
      }
      ASSIGN_OR_RETURN(const Matrix w, Ridge(sums, places, lambda));
      through_mean(places) = w * sums.mean_x(places);
      const std::vector<float> values = ToFloats(w);
      layer.weight.insert(layer.weight.end(), values.begin(), values.end());
    }
  } else {
    std::vector<int> all(impl.dim);
    for (int i = 0; i < impl.dim; ++i) all[i] = i;
    ASSIGN_OR_RETURN(Matrix w, Ridge(sums, all, lambda));
    if (variant == KvMapVariant::kLowRank) {
      Vector spread = (impl.yy - impl.y.cwiseProduct(sums.mean_y)).cwiseMax(0);
      const double least = 1e-12 * spread.maxCoeff();
      for (double& value : spread) value = value > least ? std::sqrt(value) : 0;
      const Vector inverse = spread.unaryExpr([](double s) { return s > 0 ? 1 / s : 0; });
      const Matrix scaled = inverse.asDiagonal() * w;
      // The spread of what W predicts from shrunken inputs, as the ridge saw them.
      Matrix inner = sums.xx;
      inner.diagonal() += lambda * sums.spread;
      const Eigen::SelfAdjointEigenSolver<Matrix> eigen(scaled * inner * scaled.transpose());
      const Matrix leading = eigen.eigenvectors().rightCols(rank);
      const Matrix up = spread.asDiagonal() * leading, down = leading.transpose() * scaled;
      layer.up = ToFloats(up);
      layer.down = ToFloats(down);
      through_mean = up * (down * sums.mean_x);
    } else {
      layer.weight = ToFloats(w);
      through_mean = w * sums.mean_x;
    }
  }
  layer.bias = ToFloats(sums.mean_y - through_mean);
  return layer;
}

}  // namespace carryover
