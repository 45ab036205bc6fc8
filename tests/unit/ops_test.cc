// Every op but attention, against fp64, on every backend. attention_ops_test.cc has attention.
#include <atomic>
#include <thread>

#include "tests/unit/ops_testing.h"

namespace carryover {
namespace {

class OpsTest : public OpsTestBase {};

// A matrix of several parts in several types, packed from unaligned memory.
struct Weights {
  std::vector<float> values;  // (n, k) as the packed type holds them
  std::vector<float> bias;    // (n) or empty
  int n = 0;
  int k = 0;
  DType type;
  PackedMatrix* packed = nullptr;
};

class MatMulTest : public OpsTestBase {
 protected:
  void TearDown() override {
    for (PackedMatrix* m : packed_) ops().release_matrix(backend_, m);
    OpsTestBase::TearDown();
  }

  Weights MakeWeights(DType type, const std::vector<int>& part_rows, int k, bool bias) {
    Weights w;
    w.k = k;
    w.type = type;
    std::vector<std::vector<uint8_t>> storage;
    std::vector<HostMatrix> parts;
    for (int rows : part_rows) {
      const DType from = static_cast<DType>(Random(0, 2));
      const std::vector<float> values = Values(static_cast<size_t>(rows) * k, from, 0.5f);
      std::vector<uint8_t> bytes = Encode(from, values);
      bytes.insert(bytes.begin(), 0);  // an odd address
      storage.push_back(std::move(bytes));
      parts.push_back({storage.back().data() + 1, from, rows, k});
      for (float v : values) w.values.push_back(RoundTo(type, v));
      w.n += rows;
    }
    if (bias) w.bias = Values(w.n);
    auto packed = ops().pack(backend_, parts, w.bias, type, false);
    EXPECT_TRUE(packed.ok()) << packed.status();
    w.packed = *packed;
    packed_.push_back(w.packed);
    EXPECT_GE(ops().matrix_bytes(w.packed), w.values.size() * DTypeBytes(type));
    return w;
  }

  std::vector<PackedMatrix*> packed_;
};

TEST_P(MatMulTest, AgreesWithReference) {
  for (int round = 0; round < 12; ++round) {
    const DType type = AnyType();
    std::vector<int> parts;
    for (int i = Random(1, 3); i > 0; --i) parts.push_back(Random(1, 90));
    const int k = round == 0 ? Random(500, 900) : Random(1, 300);
    const Weights w = MakeWeights(type, parts, k, Coin());
    const int rows = Random(1, 70);
    const bool accumulate = Coin();
    SCOPED_TRACE(testing::Message() << DTypeName(type) << " rows " << rows << " k " << k << " n "
                                    << w.n << " accumulate " << accumulate);
    const std::vector<float> x = Values(static_cast<size_t>(rows) * k, type);
    const std::vector<float> before = Values(static_cast<size_t>(rows) * w.n);
    // One row more than asked for, which must stay untouched.
    float* const out = PoisonedFloats((rows + 1) * static_cast<size_t>(w.n));
    if (accumulate) ops().upload(backend_, out, before.data(), before.size() * sizeof(float));
    ops().matmul(backend_, UploadAs(type, x), w.packed, rows, out, accumulate);
    const std::vector<float> y = Download(out, (rows + 1) * static_cast<size_t>(w.n));

    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < w.n; ++c) {
        double sum = w.bias.empty() ? 0 : w.bias[c];
        double magnitude = std::fabs(sum);
        if (accumulate) {
          sum += before[r * w.n + c];
          magnitude += std::fabs(before[r * w.n + c]);
        }
        for (int i = 0; i < k; ++i) {
          const double product = double{x[r * k + i]} * w.values[c * k + i];
          sum += product;
          magnitude += std::fabs(product);
        }
        ASSERT_NEAR(y[r * w.n + c], sum, ToleranceOf(type).sum * magnitude)
            << "row " << r << " column " << c;
      }
    }
    for (int c = 0; c < w.n; ++c)
      ASSERT_TRUE(std::isnan(y[rows * w.n + c])) << "wrote past the end";
  }
}

TEST_P(MatMulTest, RowAloneEqualsRowInAnyBatch) {
  for (DType type : {DType::kF32, DType::kBF16}) {
    const Weights w = MakeWeights(type, {Random(1, 200)}, Random(1, 600), true);
    constexpr int kRows = 64;
    const std::vector<float> x = Values(static_cast<size_t>(kRows) * w.k, type);
    std::vector<float> alone;
    float* const one = PoisonedFloats(w.n);
    for (int r = 0; r < kRows; ++r) {
      const std::vector<float> row(x.begin() + r * w.k, x.begin() + (r + 1) * w.k);
      ops().matmul(backend_, UploadAs(type, row), w.packed, 1, one, false);
      const std::vector<float> y = Download(one, w.n);
      alone.insert(alone.end(), y.begin(), y.end());
    }
    void* const all = UploadAs(type, x);
    float* const out = PoisonedFloats(static_cast<size_t>(kRows) * w.n);
    const int same = type == DType::kF32 ? kRows : std::min(kRows, GetParam().same_bits_rows);
    for (int rows = 1; rows <= same; ++rows) {
      ops().matmul(backend_, all, w.packed, rows, out, false);
      const std::vector<float> y = Download(out, static_cast<size_t>(rows) * w.n);
      ASSERT_TRUE(SameBits(y.data(), alone.data(), y.size()))
          << DTypeName(type) << " in a batch of " << rows;
    }
  }
}

TEST_P(MatMulTest, ManyRowsEqualFewRows) {  // enough for more than one run of rows
  constexpr int kRows = 350;
  const DType type = GetParam().same_bits_rows < kRows ? DType::kF32 : DType::kBF16;
  const Weights w = MakeWeights(type, {33}, 1537, false);
  const std::vector<float> x = Values(static_cast<size_t>(kRows) * w.k, type);
  auto* const device = static_cast<char*>(UploadAs(type, x));
  float* const whole = PoisonedFloats(static_cast<size_t>(kRows) * w.n);
  float* const cut = PoisonedFloats(static_cast<size_t>(kRows) * w.n);
  ops().matmul(backend_, device, w.packed, kRows, whole, false);
  for (int begin = 0; begin < kRows;) {
    const int count = std::min(Random(1, 99), kRows - begin);
    ops().matmul(backend_, device + static_cast<size_t>(begin) * w.k * DTypeBytes(type), w.packed,
                 count, cut + static_cast<size_t>(begin) * w.n, false);
    begin += count;
  }
  const size_t size = static_cast<size_t>(kRows) * w.n;
  EXPECT_TRUE(SameBits(Download(whole, size).data(), Download(cut, size).data(), size));
}

TEST_P(MatMulTest, PacksWhileOpsRun) {
  const Weights w = MakeWeights(DType::kBF16, {64}, 128, false);
  const std::vector<float> values = Values(256 * 64);
  std::atomic<bool> failed{false};
  std::thread loader([&] {
    for (int i = 0; i < 20; ++i) {
      const HostMatrix part = {values.data(), DType::kF32, 256, 64};
      auto packed = ops().pack(backend_, {part}, {}, DType::kBF16, false);
      if (!packed.ok()) {
        failed = true;
      } else {
        ops().release_matrix(backend_, *packed);
      }
    }
  });
  void* const x = UploadAs(DType::kBF16, Values(20 * 128, DType::kBF16));
  float* const out = PoisonedFloats(20 * 64);
  for (int i = 0; i < 50; ++i) ops().matmul(backend_, x, w.packed, 20, out, false);
  loader.join();
  EXPECT_FALSE(failed);
}

TEST_P(MatMulTest, RefusesWhatDoesNotFit) {
  const std::vector<float> values(12);
  const HostMatrix a = {values.data(), DType::kF32, 3, 4};
  const HostMatrix b = {values.data(), DType::kF32, 4, 3};
  const HostMatrix none = {values.data(), DType::kF32, 0, 4};
  const std::vector<float> bias(4);
  const auto code = [&](std::vector<HostMatrix> parts, absl::Span<const float> bias, DType type) {
    return ops().pack(backend_, parts, bias, type, false).status().code();
  };
  EXPECT_EQ(code({a, b}, {}, DType::kF32), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({}, {}, DType::kF32), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({none}, {}, DType::kF32), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({a}, bias, DType::kF32), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({a}, {}, DType::kF16), absl::StatusCode::kInvalidArgument);
}

TEST_P(OpsTest, AllocReportsExhaustion) {
  EXPECT_EQ(ops().alloc(backend_, size_t{1} << 62).status().code(),
            absl::StatusCode::kResourceExhausted);
  void* const p = Allocate(1);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % 64, 0u);
}

TEST_P(OpsTest, EmbedCopiesRows) {
  for (DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    const int vocab = Random(1, 50);
    const int dim = Random(1, 700);
    const std::vector<float> table = Values(static_cast<size_t>(vocab) * dim, type);
    std::vector<int32_t> tokens(Random(1, 70));
    for (int32_t& t : tokens) t = Random(0, vocab - 1);
    float* const out = PoisonedFloats(tokens.size() * dim);
    ops().embed(backend_, UploadAs(type, table), type, tokens, dim, out);
    const std::vector<float> x = Download(out, tokens.size() * dim);
    for (size_t r = 0; r < tokens.size(); ++r) {
      ASSERT_TRUE(SameBits(&x[r * dim], &table[static_cast<size_t>(tokens[r]) * dim], dim))
          << DTypeName(type);
    }
  }
}

TEST_P(OpsTest, RmsNormAgreesWithReference) {
  for (int round = 0; round < 10; ++round) {
    const DType type = AnyType();
    const int rows = Random(1, 70);
    const int dim = Random(1, 700);
    const float eps = Coin() ? 1e-5f : 0.1f;
    const std::vector<float> x =
        Values(static_cast<size_t>(rows) * dim, DType::kF32, Coin() ? 3 : 0.01f);
    const std::vector<float> weight = Values(dim);
    void* const out = Poisoned(static_cast<size_t>(rows) * dim * DTypeBytes(type));
    ops().rms_norm(backend_, Upload(x), Upload(weight), rows, dim, eps, out, type);
    const std::vector<float> y = Download(out, static_cast<size_t>(rows) * dim, type);
    for (int r = 0; r < rows; ++r) {
      double squares = 0;
      for (int i = 0; i < dim; ++i) squares += double{x[r * dim + i]} * x[r * dim + i];
      const double scale = 1 / std::sqrt(squares / dim + double{eps});
      for (int i = 0; i < dim; ++i) {
        const double want = x[r * dim + i] * scale * weight[i];
        ASSERT_NEAR(y[r * dim + i], want, ToleranceOf(type).rounded * std::fabs(want) + 1e-9);
      }
    }
  }
}

TEST_P(OpsTest, Bf16RoundsToNearestEven) {
  // Of rows of 1 rms_norm makes its weight.
  std::vector<float> weight;
  const auto add = [&](uint32_t bits) {
    float v;
    std::memcpy(&v, &bits, sizeof(v));
    weight.push_back(v);
  };
  for (uint32_t high : {0x3f800000u, 0x3f810000u, 0xbf800000u, 0xbf810000u}) {
    for (uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) add(high | low);
  }
  for (int i = 0; i < 200; ++i) add((random_() & 0x807fffffu) | 0x3f800000u);
  add(0x7f800000u);
  add(0x7fc00001u);
  add(0x7f800001u);  // a signalling NaN whose upper half would read as infinity
  const int dim = static_cast<int>(weight.size());
  void* const out = Poisoned(weight.size() * 2);
  ops().rms_norm(backend_, Upload(std::vector<float>(weight.size(), 1.0f)), Upload(weight), 1, dim,
                 0, out, DType::kBF16);
  const std::vector<float> y = Download(out, weight.size(), DType::kBF16);
  for (size_t i = 0; i < weight.size(); ++i) {
    if (std::isnan(weight[i])) {
      EXPECT_TRUE(std::isnan(y[i]));
    } else if (std::isinf(weight[i])) {
      EXPECT_EQ(y[i], weight[i]);
    } else {
      EXPECT_EQ(y[i], RoundTo(DType::kBF16, weight[i])) << weight[i];
    }
  }
}

TEST_P(OpsTest, GatherRowsCopiesRows) {
  const int dim = Random(1, 300);
  const std::vector<float> x = Values(static_cast<size_t>(40) * dim);
  const std::vector<int32_t> rows = {39, 0, 7, 7};
  float* const out = PoisonedFloats(rows.size() * dim);
  ops().gather_rows(backend_, Upload(x), rows, dim, out);
  const std::vector<float> y = Download(out, rows.size() * dim);
  for (size_t r = 0; r < rows.size(); ++r) {
    EXPECT_TRUE(SameBits(&y[r * dim], &x[static_cast<size_t>(rows[r]) * dim], dim));
  }
}

TEST_P(MatMulTest, NoRowsIsNoWork) {
  const Weights w = MakeWeights(DType::kF32, {3}, 5, false);
  float* const out = PoisonedFloats(1);
  ops().begin_pass(backend_, {});
  ops().embed(backend_, out, DType::kF32, {}, 1, out);
  ops().rms_norm(backend_, out, out, 0, 1, 1e-5f, out, DType::kF32);
  ops().matmul(backend_, out, w.packed, 0, out, false);
  ops().gather_rows(backend_, out, {}, 1, out);
  RopeWriteArgs rope;
  rope.qkv = out;
  rope.heads = 2;
  rope.geometry = {.layers = 1, .kv_heads = 1, .head_dim = 8};
  ops().rope_write(backend_, rope);
  AttentionArgs attention;
  attention.qkv = out;
  attention.heads = 2;
  attention.geometry = rope.geometry;
  attention.out = out;
  ops().attention(backend_, attention);
  EXPECT_TRUE(std::isnan(Download(out, 1)[0]));
}

INSTANTIATE_TEST_SUITE_P(Backends, OpsTest, testing::ValuesIn(BackendCases()), CaseName);
INSTANTIATE_TEST_SUITE_P(Backends, MatMulTest, testing::ValuesIn(BackendCases()), CaseName);

}  // namespace
}  // namespace carryover
