// The twins of kernels/cuda/tensor_core.h, against what the PTX ISA says of fragments.
#include "kernels/cuda/tensor_core.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "tests/emulation/device_memory.h"

namespace carryover::emulated {
namespace {

class TensorCoreTest : public DeviceMemoryTest {};

// a (16, 16), b (16, 8) and c (16, 8), all row-major, with the fragments filled by hand.
__global__ void Product(const Bf16* a, const Bf16* b, float* c) {
  const int g = LaneId() / 4, t = LaneId() % 4;
  const auto pair = [](Bf16 low, Bf16 high) {
    return low.bits | static_cast<uint32_t>(high.bits) << 16;
  };
  const auto a_pair = [&](int row, int column) {
    return pair(a[row * 16 + column], a[row * 16 + column + 1]);
  };
  const uint32_t fragment[4] = {a_pair(g, 2 * t), a_pair(g + 8, 2 * t), a_pair(g, 2 * t + 8),
                                a_pair(g + 8, 2 * t + 8)};
  const auto b_pair = [&](int row) { return pair(b[row * 8 + g], b[(row + 1) * 8 + g]); };
  float sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = c[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
  MultiplyAdd16x8x16(sums, fragment, b_pair(2 * t), b_pair(2 * t + 8));
  for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
}

// The same with fragments that LoadMatrices gives: a as it is, b transposed.
__global__ void ProductOfLoaded(const Bf16* a, const Bf16* b, float* c) {
  constexpr int kStride = 24;
  Bf16* const a_shared = DynamicShared<Bf16>();
  Bf16* const b_shared = a_shared + 16 * kStride;
  const int lane = LaneId();
  for (int i = lane; i < 16 * 16; i += 32) a_shared[i / 16 * kStride + i % 16] = a[i];
  for (int i = lane; i < 16 * 8; i += 32) b_shared[i / 8 * kStride + i % 8] = b[i];
  WarpSync();
  uint32_t fragment[4], columns[4];
  LoadMatrices(fragment, a_shared + lane % 16 * kStride + lane / 16 * 8);
  LoadMatricesTransposed(columns, b_shared + lane % 16 * kStride);
  float sums[4];
  const int g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) sums[i] = c[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
  MultiplyAdd16x8x16(sums, fragment, columns[0], columns[1]);
  for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
}

TEST_F(TensorCoreTest, ProductsAgreeWithReference) {
  std::mt19937 random(std::random_device{}());
  std::normal_distribution<float> normal;
  const auto values = [&](size_t count) {
    std::vector<Bf16> out(count);
    for (Bf16& v : out) v = ToBf16(normal(random));
    return out;
  };
  const std::vector<Bf16> a = values(16 * 16), b = values(16 * 8);
  std::vector<float> c(16 * 8);
  for (float& v : c) v = normal(random);
  for (const bool loaded : {false, true}) {
    float* const device_c = Upload(c);
    const Bf16* const device_a = Upload(a);
    const Bf16* const device_b = Upload(b);
    if (loaded) {
      Launch(ProductOfLoaded, {1}, 32, 2 * 16 * 24 * sizeof(Bf16), nullptr, device_a, device_b,
             device_c);
    } else {
      Launch(Product, {1}, 32, 0, nullptr, device_a, device_b, device_c);
    }
    const std::vector<float> got = Read(device_c, c.size());
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < 8; ++column) {
        double want = c[row * 8 + column], magnitude = std::fabs(want);
        for (int k = 0; k < 16; ++k) {
          const double product =
              static_cast<double>(ToFloat(a[row * 16 + k])) * ToFloat(b[k * 8 + column]);
          want += product;
          magnitude += std::fabs(product);
        }
        ASSERT_NEAR(got[row * 8 + column], want, 2e-6 * magnitude) << row << " " << column;
      }
    }
  }
}

// out (2, 4, 32): the registers of all lanes, as they are and transposed, of 32 rows of numbers.
__global__ void LoadRows(uint32_t* out) {
  uint16_t* const shared = DynamicShared<uint16_t>();
  for (int column = 0; column < 8; ++column) {
    shared[LaneId() * 8 + column] = static_cast<uint16_t>(LaneId() * 8 + column);
  }
  WarpSync();
  uint32_t r[4];
  LoadMatrices(r, shared + LaneId() * 8);
  for (int m = 0; m < 4; ++m) out[m * 32 + LaneId()] = r[m];
  LoadMatricesTransposed(r, shared + LaneId() * 8);
  for (int m = 0; m < 4; ++m) out[(4 + m) * 32 + LaneId()] = r[m];
}

TEST_F(TensorCoreTest, MatricesAreDealtToLanesAsDocumented) {
  uint32_t* const out = Allocate<uint32_t>(2 * 4 * 32);
  Launch(LoadRows, {1}, 32, 32 * 8 * sizeof(uint16_t), nullptr, out);
  const std::vector<uint32_t> got = Read(out, 2 * 4 * 32);
  for (uint32_t m = 0; m < 4; ++m) {
    for (uint32_t lane = 0; lane < 32; ++lane) {
      const uint32_t row = 8 * m + lane / 4, column = lane % 4 * 2;
      EXPECT_EQ(got[m * 32 + lane], (row * 8 + column) | (row * 8 + column + 1) << 16);
      const uint32_t first = (8 * m + lane % 4 * 2) * 8 + lane / 4;
      EXPECT_EQ(got[(4 + m) * 32 + lane], first | (first + 8) << 16);
    }
  }
}

// Each thread copies 16 bytes in each of two groups, and reads after waiting for `done` of them.
__global__ void CopyTwice(const float* from, float* out, int done) {
  float* const shared = DynamicShared<float>() + threadIdx.x * 8;
  CopyAsync16(shared, from + threadIdx.x * 8, true);
  CommitCopies();
  CopyAsync16(shared + 4, from + threadIdx.x * 8 + 4, threadIdx.x % 2 == 0);
  CommitCopies();
  if (done == 1) WaitForCopies<1>();
  if (done == 2) WaitForCopies<0>();
  for (int i = 0; i < 8; ++i) out[threadIdx.x * 8 + i] = shared[i];
}

TEST_F(TensorCoreTest, CopiesAreThereWhenWaitedForAndNoSooner) {
  std::vector<float> values(64 * 8);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i + 1);
  const float* const from = Upload(values);
  for (const int done : {0, 1, 2}) {
    float* const out = Allocate<float>(values.size());
    Launch(CopyTwice, {1}, 64, values.size() * sizeof(float), nullptr, from, out, done);
    const std::vector<float> got = Read(out, values.size());
    for (size_t i = 0; i < got.size(); ++i) {
      const bool second = i % 8 >= 4;
      if (done < (second ? 2 : 1)) {
        EXPECT_TRUE(std::isnan(got[i])) << done << " " << i;
      } else {
        EXPECT_EQ(got[i], second && i / 8 % 2 == 1 ? 0 : values[i]) << done << " " << i;
      }
    }
  }
}

__global__ void CopyAskew(const float* from) {
  CopyAsync16(DynamicShared<float>(), from + (threadIdx.x == 7 ? 1 : 0), true);
}

TEST_F(TensorCoreTest, ACopyFromAnOddAddressIsDiagnosed) {
  Launch(CopyAskew, {1}, 32, 16, nullptr, Allocate<float>(8));
  EXPECT_NE(Report().find("thread 7"), std::string::npos);
}

TEST_F(TensorCoreTest, PairsArePackedLowFirst) {
  EXPECT_EQ(PackBf16(1.0f, -2.0f), 0xc0003f80u);
  EXPECT_EQ(PackBf16(1.00390625f, 1.01171875f), 0x3f823f80u) << "ties go to even";
}

}  // namespace
}  // namespace carryover::emulated
