// silu(gate) * up straight from a product, against the same product as it is.
#include <cmath>
#include <string>
#include <vector>

#include "tests/unit/ops_testing.h"

namespace carryover {
namespace {

class MatMulGatedTest : public OpsTestBase {
 protected:
  void TearDown() override {
    for (PackedMatrix* m : packed_) ops().release_matrix(backend_, m);
    OpsTestBase::TearDown();
  }

  PackedMatrix* Pack(const std::vector<std::vector<float>>& parts, int k,
                     const std::vector<float>& bias, DType type, bool gated) {
    std::vector<HostMatrix> matrices;
    for (const std::vector<float>& part : parts) {
      const auto rows = static_cast<int64_t>(part.size()) / k;
      matrices.push_back({part.data(), DType::kF32, rows, k});
    }
    auto packed = ops().pack(backend_, matrices, bias, type, gated);
    EXPECT_TRUE(packed.ok()) << packed.status();
    packed_.push_back(*packed);
    return *packed;
  }

  DType AnyWeights() {
    if (ops().name == std::string("cpu") && Random(0, 2) == 0) return DType::kI8;
    return AnyType();
  }

  std::vector<PackedMatrix*> packed_;
};

TEST_P(MatMulGatedTest, AgreesWithTheProduct) {
  for (int round = 0; round < 16; ++round) {
    const DType type = AnyWeights();
    const DType act = ActivationDType(type);
    const int dim = Random(1, 150), k = Random(1, 300), rows = Random(1, 70);
    SCOPED_TRACE(testing::Message()
                 << DTypeName(type) << " rows " << rows << " k " << k << " dim " << dim);
    const std::vector<std::vector<float>> parts = {
        Values(static_cast<size_t>(dim) * k, DType::kF32, 0.5f),
        Values(static_cast<size_t>(dim) * k, DType::kF32, 0.5f)};
    std::vector<float> bias;
    if (Coin()) {
      bias = Values(2 * static_cast<size_t>(dim));
      bias[0] = Coin() ? 300.0f : -300.0f;  // far beyond what exp can hold
    }
    void* const x = UploadAs(act, Values(static_cast<size_t>(rows) * k, act));
    const size_t outputs = static_cast<size_t>(rows) * dim;
    float* const plain = PoisonedFloats(2 * outputs);
    ops().matmul(backend_, x, Pack(parts, k, bias, type, false), rows, plain, false);
    const std::vector<float> gate_up = Download(plain, 2 * outputs);

    // One row more than asked for, which must stay untouched.
    void* const out = Poisoned((outputs + dim) * DTypeBytes(act));
    ops().matmul_gated(backend_, x, Pack(parts, k, bias, type, true), rows, out);
    const std::vector<float> y = Download(out, outputs + dim, act);
    for (int r = 0; r < rows; ++r) {
      for (int i = 0; i < dim; ++i) {
        const double gate = gate_up[2 * r * dim + i];
        const double want = gate / (1 + std::exp(-gate)) * gate_up[2 * r * dim + dim + i];
        ASSERT_NEAR(y[r * dim + i], want, ToleranceOf(act).rounded * std::fabs(want) + 1e-9)
            << "row " << r << " column " << i;
      }
    }
    for (int i = 0; i < dim; ++i) ASSERT_TRUE(std::isnan(y[outputs + i])) << "wrote past the end";
  }
}

TEST_P(MatMulGatedTest, RowAloneEqualsRowInAnyBatch) {
  for (DType type : {DType::kF32, DType::kBF16}) {
    const DType act = ActivationDType(type);
    const int dim = Random(1, 150), k = Random(1, 300);
    constexpr int kRows = 40;
    const PackedMatrix* const w =
        Pack({Values(static_cast<size_t>(dim) * k), Values(static_cast<size_t>(dim) * k)}, k, {},
             type, true);
    auto* const x = static_cast<char*>(UploadAs(act, Values(static_cast<size_t>(kRows) * k, act)));
    std::vector<float> alone;
    void* const one = Poisoned(dim * DTypeBytes(act));
    for (int r = 0; r < kRows; ++r) {
      ops().matmul_gated(backend_, x + static_cast<size_t>(r) * k * DTypeBytes(act), w, 1, one);
      const std::vector<float> y = Download(one, dim, act);
      alone.insert(alone.end(), y.begin(), y.end());
    }
    void* const out = Poisoned(static_cast<size_t>(kRows) * dim * DTypeBytes(act));
    const int same = type == DType::kF32 ? kRows : std::min(kRows, GetParam().same_bits_rows);
    for (int rows = 1; rows <= same; ++rows) {
      ops().matmul_gated(backend_, x, w, rows, out);
      const std::vector<float> y = Download(out, static_cast<size_t>(rows) * dim, act);
      ASSERT_TRUE(SameBits(y.data(), alone.data(), y.size())) << "in a batch of " << rows;
    }
  }
}

TEST_P(MatMulGatedTest, RefusesWhatDoesNotFit) {
  const std::vector<float> values(12);
  const HostMatrix a = {values.data(), DType::kF32, 3, 4};
  const HostMatrix b = {values.data(), DType::kF32, 2, 4};
  const auto code = [&](std::vector<HostMatrix> parts) {
    return ops().pack(backend_, parts, {}, DType::kF32, true).status().code();
  };
  EXPECT_EQ(code({a}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({a, b}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({a, a, a}), absl::StatusCode::kInvalidArgument);

  const std::vector<std::vector<float>> parts = {values, values};
  float* const out = PoisonedFloats(6);
  void* const x = Upload(std::vector<float>(4));
  ops().matmul(backend_, x, Pack(parts, 4, {}, DType::kF32, true), 1, out, false);
  EXPECT_EQ(ops().sync(backend_).code(), absl::StatusCode::kInvalidArgument);
  ops().matmul_gated(backend_, x, Pack(parts, 4, {}, DType::kF32, false), 1, out);
  EXPECT_EQ(ops().sync(backend_).code(), absl::StatusCode::kInvalidArgument);
  ops().matmul_gated(backend_, x, Pack(parts, 4, {}, DType::kF32, true), 0, out);
  EXPECT_TRUE(ops().sync(backend_).ok());
  EXPECT_TRUE(std::isnan(Download(out, 1)[0]));
}

INSTANTIATE_TEST_SUITE_P(Backends, MatMulGatedTest, testing::ValuesIn(BackendCases()), CaseName);

}  // namespace
}  // namespace carryover
