// Products with weights of 8 bits. Both sides' rounding is done here once more: what is left are
// exact sums within groups and a few roundings of f32.
#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/unit/ops_testing.h"

namespace carryover {
namespace {

constexpr int kGroup = 64;

// Rounded as kernels/ops.h says, and back again. In f32, as the kernels do it: a value half-way
// between two integers must fall to the same side.
std::vector<double> Rounded(const float* row, int k) {
  std::vector<double> out;
  for (int begin = 0; begin < k; begin += kGroup) {
    const int end = std::min(k, begin + kGroup);
    float most = 0;
    for (int i = begin; i < end; ++i) most = std::max(most, std::fabs(row[i]));
    for (int i = begin; i < end; ++i) {
      out.push_back(most == 0 ? 0 : std::nearbyint(row[i] * (127 / most)) * (most / 127.0));
    }
  }
  return out;
}

class MatMulInt8Test : public OpsTestBase {
 protected:
  void SetUp() override {
    OpsTestBase::SetUp();
    if (!IsSkipped() && ops().name != std::string("cpu")) {
      GTEST_SKIP() << "INT8 weights are for the CPU alone";
    }
  }
  void TearDown() override {
    for (PackedMatrix* m : packed_) ops().release_matrix(backend_, m);
    OpsTestBase::TearDown();
  }

  PackedMatrix* Pack(const std::vector<float>& values, int n, int k,
                     const std::vector<float>& bias) {
    const HostMatrix part = {values.data(), DType::kF32, n, k};
    auto packed = ops().pack(backend_, {part}, bias, DType::kI8, false);
    EXPECT_TRUE(packed.ok()) << packed.status();
    packed_.push_back(*packed);
    return *packed;
  }

  std::vector<PackedMatrix*> packed_;
};

TEST_P(MatMulInt8Test, AgreesWithReference) {
  for (int round = 0; round < 12; ++round) {
    const int n = Random(1, 200), k = round == 0 ? Random(500, 900) : Random(1, 300);
    const int rows = Random(1, 70);
    const bool accumulate = Coin();
    SCOPED_TRACE(testing::Message() << "rows " << rows << " k " << k << " n " << n);
    std::vector<float> w = Values(static_cast<size_t>(n) * k, DType::kF32, 0.5f);
    if (n > 1) std::fill_n(w.begin(), k, 0.0f);
    const std::vector<float> bias = Coin() ? Values(n) : std::vector<float>();
    PackedMatrix* const packed = Pack(w, n, k, bias);
    EXPECT_GE(ops().matrix_bytes(packed), w.size());
    EXPECT_LE(ops().matrix_bytes(packed), (n + 32) * (k + 3 + 4 + 8 * (k / kGroup + 1)));

    std::vector<float> x = Values(static_cast<size_t>(rows) * k, DType::kBF16);
    if (rows > 1) std::fill_n(x.begin() + k, k, 0.0f);
    const std::vector<float> before = Values(static_cast<size_t>(rows) * n);
    float* const out = PoisonedFloats((rows + 1) * static_cast<size_t>(n));
    if (accumulate) ops().upload(backend_, out, before.data(), before.size() * sizeof(float));
    ops().matmul(backend_, UploadAs(DType::kBF16, x), packed, rows, out, accumulate);
    const std::vector<float> y = Download(out, (rows + 1) * static_cast<size_t>(n));

    for (int r = 0; r < rows; ++r) {
      const std::vector<double> left = Rounded(&x[static_cast<size_t>(r) * k], k);
      for (int c = 0; c < n; ++c) {
        const std::vector<double> right = Rounded(&w[static_cast<size_t>(c) * k], k);
        double sum = (bias.empty() ? 0 : bias[c]) + (accumulate ? before[r * n + c] : 0);
        double magnitude = std::fabs(sum);
        for (int i = 0; i < k; ++i) {
          sum += left[i] * right[i];
          magnitude += std::fabs(left[i] * right[i]);
        }
        ASSERT_NEAR(y[r * n + c], sum, 1e-6 * magnitude + 1e-7) << "row " << r << " column " << c;
      }
    }
    for (int c = 0; c < n; ++c) ASSERT_TRUE(std::isnan(y[rows * n + c])) << "wrote past the end";
  }
}

TEST_P(MatMulInt8Test, RowAloneEqualsRowInAnyBatch) {
  constexpr int kRows = 64;
  const int n = Random(1, 200), k = Random(1, 600);
  PackedMatrix* const packed = Pack(Values(static_cast<size_t>(n) * k), n, k, Values(n));
  const std::vector<float> x = Values(static_cast<size_t>(kRows) * k, DType::kBF16);
  std::vector<float> alone;
  float* const one = PoisonedFloats(n);
  for (int r = 0; r < kRows; ++r) {
    const std::vector<float> row(x.begin() + r * k, x.begin() + (r + 1) * k);
    ops().matmul(backend_, UploadAs(DType::kBF16, row), packed, 1, one, false);
    const std::vector<float> y = Download(one, n);
    alone.insert(alone.end(), y.begin(), y.end());
  }
  void* const all = UploadAs(DType::kBF16, x);
  float* const out = PoisonedFloats(static_cast<size_t>(kRows) * n);
  for (int rows = 1; rows <= kRows; ++rows) {
    ops().matmul(backend_, all, packed, rows, out, false);
    const std::vector<float> y = Download(out, static_cast<size_t>(rows) * n);
    ASSERT_TRUE(SameBits(y.data(), alone.data(), y.size())) << "in a batch of " << rows;
  }
}

// A broken activation must not come out as a number.
TEST_P(MatMulInt8Test, WhatIsNotFiniteStaysSo) {
  for (const float bad : {Nan(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> x = Values(2 * 40, DType::kBF16);
    x[Random(0, 39)] = bad;
    PackedMatrix* const packed = Pack(Values(5 * 40), 5, 40, {});
    float* const out = PoisonedFloats(10);
    ops().matmul(backend_, UploadAs(DType::kBF16, x), packed, 2, out, false);
    const std::vector<float> y = Download(out, 10);
    for (int c = 0; c < 5; ++c) {
      EXPECT_FALSE(std::isfinite(y[c])) << bad;
      EXPECT_TRUE(std::isfinite(y[5 + c])) << bad;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, MatMulInt8Test, testing::ValuesIn(BackendCases()), CaseName);

// Where there are no such products the pack says so, and the backend goes on.
using Int8RefusalTest = OpsTestBase;

TEST_P(Int8RefusalTest, IsClear) {
  const std::vector<float> values = Values(3 * 64);
  const HostMatrix part = {values.data(), DType::kF32, 3, 64};
  const auto packed = ops().pack(backend_, {part}, {}, DType::kI8, false);
  if (ops().name == std::string("cpu")) {
    ASSERT_TRUE(packed.ok()) << packed.status();
    ops().release_matrix(backend_, *packed);
    return;
  }
  EXPECT_EQ(packed.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(packed.status().message(), "INT8 weights are for the CPU alone");
  const auto good = ops().pack(backend_, {part}, {}, DType::kBF16, false);
  ASSERT_TRUE(good.ok()) << good.status();
  ops().release_matrix(backend_, *good);
}

INSTANTIATE_TEST_SUITE_P(Backends, Int8RefusalTest, testing::ValuesIn(BackendCases()), CaseName);

}  // namespace
}  // namespace carryover
