// What the tests of kernels/ops.h share: the backends to test, memory of theirs, random data and
// tolerances. A new backend is a line in BackendCases().
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/bf16.h"
#include "kernels/cpu/targets.h"
#include "kernels/cuda/emulation/block.h"
#include "kernels/ops.h"
#include "tests/skip.h"
// After targets.h, which says what is compiled.
#include "hwy/targets.h"

namespace carryover {

// Errors allowed against fp64, by the type that values were stored as. `relative` is to the
// magnitude of what was added up, not of the result.
struct Tolerance {
  double sum;      // a sum of products in f32, inputs exact, by the sum of their magnitudes
  double rounded;  // an elementwise result stored as this type, by its magnitude
  double attend;   // attention over K and V of this type, values of about 1
};
inline Tolerance ToleranceOf(DType type) {
  if (type == DType::kF32) return {2e-6, 2e-6, 1e-5};
  return {2e-6, 4.5e-3, 1.5e-2};
}

struct BackendCase {
  std::string name;
  const Ops& (*ops)();
  int threads;
  int64_t highway_target;                               // 0: the best that this CPU has
  emulation::Order order = emulation::Order::kForward;  // of an emulated device's threads
  // Products with bf16 weights: a row's bits are the same in all batches up to this (docs/cuda.md).
  int same_bits_rows = 1 << 30;
};

inline void PrintTo(const BackendCase& backend, std::ostream* out) { *out << backend.name; }

inline std::vector<BackendCase> BackendCases() {
  std::vector<BackendCase> cases = {
      {"Cpu1", CpuOps, 1, 0},
      {"Cpu3", CpuOps, 3, 0},
      {"Emulated", EmulatedCudaOps, 1, 0},
      {"EmulatedReverse", EmulatedCudaOps, 1, 0, emulation::Order::kReverse}};
#if defined(CARRYOVER_CUDA)
  cases.push_back({"Cuda", CudaOps, 1, 0, emulation::Order::kForward, 16});
#endif
  // Every instruction set that this CPU has and the kernels were compiled for.
  for (int64_t target : {HWY_SCALAR, HWY_SSE4, HWY_AVX2, HWY_AVX3, HWY_NEON}) {
    if ((hwy::SupportedTargets() & HWY_TARGETS & target) != 0) {
      cases.push_back({std::string("Cpu") + hwy::TargetName(target), CpuOps, 2, target});
    }
  }
  return cases;
}

// A fresh seed for every run, or CARRYOVER_SEED.
inline uint32_t TestSeed() {
  static const uint32_t seed = [] {
    const char* const given = std::getenv("CARRYOVER_SEED");
    return given != nullptr ? static_cast<uint32_t>(std::strtoul(given, nullptr, 10))
                            : std::random_device()();
  }();
  return seed;
}

inline float Nan() { return std::numeric_limits<float>::quiet_NaN(); }

// The value that a type can hold nearest to x, as the tests' own rounding has it.
inline float RoundTo(DType type, float x) {
  if (type == DType::kF32 || x == 0 || !std::isfinite(x)) return x;
  int exponent;
  std::frexp(x, &exponent);
  const double unit = std::ldexp(1.0, exponent - (type == DType::kBF16 ? 8 : 11));
  return static_cast<float>(std::nearbyint(x / unit) * unit);  // ties to even
}

// Bytes of `values` stored as a type. The values must be ones that the type holds.
inline std::vector<uint8_t> Encode(DType type, const std::vector<float>& values) {
  std::vector<uint8_t> bytes(values.size() * DTypeBytes(type));
  for (size_t i = 0; i < values.size(); ++i) {
    if (type == DType::kF32) {
      std::memcpy(&bytes[4 * i], &values[i], 4);
      continue;
    }
    uint32_t bits;
    std::memcpy(&bits, &values[i], 4);
    uint16_t half = static_cast<uint16_t>(bits >> 16);
    if (type == DType::kF16) {
      const int exponent = static_cast<int>((bits >> 23) & 0xff) - 112;
      half = exponent <= 0
                 ? static_cast<uint16_t>((bits >> 16) & 0x8000)  // tests hold no subnormals
                 : static_cast<uint16_t>(((bits >> 16) & 0x8000) | exponent << 10 |
                                         ((bits >> 13) & 0x3ff));
    }
    std::memcpy(&bytes[2 * i], &half, 2);
  }
  return bytes;
}

class OpsTestBase : public testing::TestWithParam<BackendCase> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam().highway_target);
    hwy::GetChosenTarget().DeInit();
    emulation::SetOrder(GetParam().order);
    random_.seed(TestSeed());
    RecordProperty("seed", std::to_string(TestSeed()));
    auto backend = ops().create({.threads = GetParam().threads});
    SKIP_WITHOUT_GPU(backend.status());
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *backend;
  }
  void TearDown() override {
    if (backend_ == nullptr) return;
    EXPECT_TRUE(ops().sync(backend_).ok());
    for (void* p : buffers_) ops().release(backend_, p);
    ops().destroy(backend_);
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().DeInit();
    emulation::SetOrder(emulation::Order::kForward);
    if (HasFailure()) std::fprintf(stderr, "CARRYOVER_SEED=%u\n", TestSeed());
  }

  const Ops& ops() const { return GetParam().ops(); }

  int Random(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  bool Coin() { return Random(0, 1) == 1; }
  DType AnyType() { return Coin() ? DType::kF32 : DType::kBF16; }
  // Normal values that `type` can hold.
  std::vector<float> Values(size_t count, DType type = DType::kF32, float deviation = 1) {
    std::normal_distribution<float> normal(0, deviation);
    std::vector<float> values(count);
    for (float& v : values) {
      v = RoundTo(type, normal(random_));
      if (std::fabs(v) < 1e-4f) v = 0.25f;
    }
    return values;
  }

  // Device memory, freed at the end of the test.
  void* Allocate(size_t bytes) {
    auto p = ops().alloc(backend_, bytes);
    EXPECT_TRUE(p.ok()) << p.status();
    buffers_.push_back(*p);
    return *p;
  }
  void* Upload(const void* data, size_t bytes) {
    void* const p = Allocate(bytes);
    ops().upload(backend_, p, data, bytes);
    return p;
  }
  float* Upload(const std::vector<float>& values) {
    return static_cast<float*>(Upload(values.data(), values.size() * sizeof(float)));
  }
  void* UploadAs(DType type, const std::vector<float>& values) {
    const std::vector<uint8_t> bytes = Encode(type, values);
    return Upload(bytes.data(), bytes.size());
  }
  // Device memory full of NaN in every type.
  void* Poisoned(size_t bytes) {
    const std::vector<uint8_t> ones(bytes, 0xff);
    return Upload(ones.data(), bytes);
  }
  float* PoisonedFloats(size_t count) {
    return static_cast<float*>(Poisoned(count * sizeof(float)));
  }
  std::vector<float> Download(const void* device, size_t count, DType type = DType::kF32) {
    std::vector<uint8_t> bytes(count * DTypeBytes(type));
    ops().download(backend_, bytes.data(), device, bytes.size());
    EXPECT_TRUE(ops().sync(backend_).ok());
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i) {
      if (type == DType::kF32) {
        std::memcpy(&values[i], &bytes[4 * i], 4);
      } else {
        uint16_t half;
        std::memcpy(&half, &bytes[2 * i], 2);
        const uint32_t bits = uint32_t{half} << 16;
        std::memcpy(&values[i], &bits, 4);
      }
    }
    return values;
  }

  std::mt19937 random_;
  Backend* backend_ = nullptr;
  std::vector<void*> buffers_;
};

// Equal bits, NaN included.
inline bool SameBits(const float* a, const float* b, size_t count) {
  return std::memcmp(a, b, count * sizeof(float)) == 0;
}

inline std::string CaseName(const testing::TestParamInfo<BackendCase>& info) {
  return info.param.name;
}

}  // namespace carryover
