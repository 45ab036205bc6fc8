// The divergence op on every backend: against numpy and scipy (tests/golden/make_divergence.py),
// against plain sums in long double, and what it does with masks, ties and broken logits.
#include <algorithm>
#include <fstream>
#include <set>

#include "nlohmann/json.hpp"
#include "tests/source_dir.h"
#include "tests/unit/ops_testing.h"

namespace carryover {
namespace {

using nlohmann::json;

constexpr float kMasked = -std::numeric_limits<float>::infinity();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Arms {
  std::vector<float> native;
  std::vector<float> carried;
};

// As make_divergence.py says.
Arms MakeArms(const json& c) {
  const int vocab = c["vocab"];
  uint32_t state = c["seed"];
  const auto draw = [&] {
    state = 1664525u * state + 1013904223u;
    return static_cast<float>(state >> 8) / 16777216.0f - 0.5f;
  };
  const float scale = c["scale"], noise = c["noise"];
  const float quantum = c.value("quantum", 0.0f), shift = c.value("shift", 0.0f);
  const auto down = [&](float x) { return quantum == 0 ? x : std::floor(x / quantum) * quantum; };
  Arms arms;
  for (int i = 0; i < vocab; ++i) arms.native.push_back(down(draw() * scale));
  for (int i = 0; i < vocab; ++i) {
    const float moved = draw() * noise;
    const float near = arms.native[i] + moved;
    arms.carried.push_back(down(near) + shift);
  }
  std::vector<float>* const both[] = {&arms.native, &arms.carried};
  for (const json& raise : c.value("raise", json::array())) {
    (*both[raise[0].get<int>()])[raise[1].get<int>()] += raise[2].get<float>();
  }
  for (const json& mask : c.value("mask", json::array())) {
    for (int i = mask[2].get<int>(); i < vocab; i += mask[1].get<int>()) {
      (*both[mask[0].get<int>()])[i] = kMasked;
    }
  }
  return arms;
}

double Number(const json& value) {
  if (value.is_string()) return value == "-inf" ? -kInfinity : kInfinity;
  return value.get<double>();
}

// Within 1e-11 of the numbers' size, or equally infinite.
void ExpectNear(double is, double want, double size, const std::string& what) {
  if (std::isinf(want)) {
    EXPECT_EQ(is, want) << what;
  } else {
    EXPECT_NEAR(is, want, 1e-11 * (size + std::fabs(want))) << what;
  }
}

class DivergenceTest : public OpsTestBase {
 protected:
  std::vector<DivergenceRow> Compare(const std::vector<float>& native,
                                     const std::vector<float>& carried, int rows,
                                     const std::vector<int32_t>& stops = {},
                                     const std::vector<int32_t>& answers = {}) {
    DivergenceArgs args;
    args.native = Upload(native);
    args.carried = Upload(carried);
    args.rows = rows;
    args.vocab = static_cast<int>(native.size()) / rows;
    args.stop_tokens = stops;
    args.answers = answers;
    args.out = static_cast<DivergenceRow*>(Poisoned((rows + 1) * sizeof(DivergenceRow)));
    ops().divergence(backend_, args);
    std::vector<DivergenceRow> out(rows + 1);
    ops().download(backend_, out.data(), args.out, out.size() * sizeof(DivergenceRow));
    EXPECT_TRUE(ops().sync(backend_).ok());
    EXPECT_EQ(out.back().valid, -1) << "wrote past the end";
    out.pop_back();
    return out;
  }
};

TEST_P(DivergenceTest, AgreesWithScipy) {
  std::ifstream file(SourceDir() + "/tests/golden/reference/divergence.json");
  const json cases = json::parse(file);
  ASSERT_GE(cases.size(), 25u);
  for (const json& c : cases) {
    SCOPED_TRACE(c["name"].get<std::string>());
    const json& want = c["want"];
    const Arms arms = MakeArms(c);
    double sum = 0;
    for (const auto* row : {&arms.native, &arms.carried}) {
      for (float v : *row) sum += std::isfinite(v) ? double{v} : 0;
    }
    ASSERT_NEAR(sum, want["sum"].get<double>(), 1e-6) << "not the logits that were measured";
    const DivergenceRow row =
        Compare(arms.native, arms.carried, 1, c["stops"], {c.value("answer", -1)})[0];
    ASSERT_EQ(row.valid, 1);
    ExpectNear(row.kl, Number(want["kl"]), 1, "kl");
    ExpectNear(row.js, Number(want["js"]), 1, "js");
    ExpectNear(row.tv, Number(want["tv"]), 1, "tv");
    ExpectNear(row.native_log_sum_exp, Number(want["native_log_sum_exp"]), 1, "native_log_sum_exp");
    ExpectNear(row.carried_log_sum_exp, Number(want["carried_log_sum_exp"]), 1,
               "carried_log_sum_exp");
    EXPECT_EQ(row.native_margin, Number(want["native_margin"]));
    EXPECT_EQ(row.carried_margin, Number(want["carried_margin"]));
    EXPECT_EQ(row.native_gap, Number(want["native_gap"]));
    EXPECT_EQ(row.delta_range, Number(want["delta_range"]));
    ExpectNear(row.native_stop, Number(want["native_stop"]), 0.01, "native_stop");
    ExpectNear(row.carried_stop, Number(want["carried_stop"]), 0.01, "carried_stop");
    EXPECT_EQ(row.overlap, want["overlap"].get<int>());
    const auto tops = [](const int32_t* ids, int count) {
      for (int i = count; i < kDivergenceTop; ++i) EXPECT_EQ(ids[i], -1);
      return std::vector<int>(ids, ids + count);
    };
    EXPECT_EQ(tops(row.native_top, row.native_count), want["native_top"].get<std::vector<int>>());
    EXPECT_EQ(tops(row.carried_top, row.carried_count),
              want["carried_top"].get<std::vector<int>>());
  }
}

// The same sums, term by term, in long double.
TEST_P(DivergenceTest, AgreesWithPlainSums) {
  for (int round = 0; round < 12; ++round) {
    const int rows = Random(1, 5), vocab = Random(1, 1400);
    SCOPED_TRACE(testing::Message() << rows << " rows of " << vocab);
    const size_t size = static_cast<size_t>(rows) * vocab;
    std::vector<float> native = Values(size, DType::kF32, 4), carried = native;
    const float noise = std::ldexp(1.0f, Random(-16, 2));
    for (float& v : carried) v += noise * (static_cast<float>(Random(0, 1000)) / 500 - 1);
    const auto compared = Compare(native, carried, rows);
    for (int r = 0; r < rows; ++r) {
      const float* const z = &native[static_cast<size_t>(r) * vocab];
      const float* const w = &carried[static_cast<size_t>(r) * vocab];
      long double z_sum = 0, w_sum = 0, kl = 0, js = 0, tv = 0;
      for (int i = 0; i < vocab; ++i) z_sum += std::exp(static_cast<long double>(z[i]));
      for (int i = 0; i < vocab; ++i) w_sum += std::exp(static_cast<long double>(w[i]));
      for (int i = 0; i < vocab; ++i) {
        const long double p = std::exp(static_cast<long double>(z[i])) / z_sum;
        const long double q = std::exp(static_cast<long double>(w[i])) / w_sum;
        kl += p * std::log(p / q);
        js += (p * std::log(2 * p / (p + q)) + q * std::log(2 * q / (p + q))) / 2;
        tv += std::fabs(p - q) / 2;
      }
      EXPECT_NEAR(compared[r].kl, static_cast<double>(kl), 1e-13 + 1e-12 * static_cast<double>(kl));
      EXPECT_NEAR(compared[r].js, static_cast<double>(js), 1e-13);
      EXPECT_NEAR(compared[r].tv, static_cast<double>(tv), 1e-13);
      EXPECT_GE(compared[r].kl, 0);
      EXPECT_GE(compared[r].js, 0);
    }
  }
}

TEST_P(DivergenceTest, RowAloneEqualsRowInAnyBatch) {
  static_assert(sizeof(DivergenceRow) == 24 * 4 + 11 * 8);  // no padding: bytes can be compared
  constexpr int kRows = 16, kVocab = 1237;
  std::vector<float> native = Values(kRows * kVocab, DType::kF32, 4);
  std::vector<float> carried = Values(kRows * kVocab, DType::kF32, 4);
  native[3 * kVocab + 700] = Nan();  // and one bad row spoils no other
  const auto all = Compare(native, carried, kRows);
  for (int r = 0; r < kRows; ++r) {
    const auto row = [&](const std::vector<float>& v) {
      return std::vector<float>(v.begin() + r * kVocab, v.begin() + (r + 1) * kVocab);
    };
    const auto alone = Compare(row(native), row(carried), 1);
    EXPECT_EQ(all[r].valid, r == 3 ? 0 : 1);
    EXPECT_EQ(std::memcmp(&alone[0], &all[r], sizeof(DivergenceRow)), 0) << r;
  }
}

TEST_P(DivergenceTest, FlagsWhatIsNoDistribution) {
  constexpr int kVocab = 1100;  // two blocks and a rest
  const std::vector<float> good = Values(kVocab);
  const auto expect_invalid = [&](const std::vector<float>& native,
                                  const std::vector<float>& carried) {
    const DivergenceRow row = Compare(native, carried, 1, {1, 2})[0];
    EXPECT_EQ(row.valid, 0);
    EXPECT_EQ(row.overlap + row.native_count + row.carried_count, 0);
    EXPECT_EQ(row.native_top[0], -1);
    EXPECT_EQ(row.carried_top[9], -1);
    for (double value : {row.kl, row.js, row.tv, row.native_log_sum_exp, row.carried_log_sum_exp,
                         row.native_margin, row.carried_margin, row.native_gap, row.delta_range,
                         row.native_stop, row.carried_stop}) {
      EXPECT_TRUE(std::isnan(value));
    }
  };
  for (const float bad : {Nan(), -Nan(), std::numeric_limits<float>::infinity()}) {
    for (const int at : {0, 1, 511, 512, 1023, 1024, kVocab - 1}) {
      SCOPED_TRACE(at);
      std::vector<float> broken = good;
      broken[at] = bad;
      expect_invalid(broken, good);
      expect_invalid(good, broken);
    }
  }
  expect_invalid(std::vector<float>(kVocab, kMasked), good);
  expect_invalid(good, std::vector<float>(kVocab, kMasked));
}

TEST_P(DivergenceTest, RefusesWhatDoesNotFit) {
  DivergenceArgs args;
  args.rows = 0;
  ops().divergence(backend_, args);  // no work
  EXPECT_TRUE(ops().sync(backend_).ok());
  args.rows = 2;
  ops().divergence(backend_, args);
  EXPECT_EQ(ops().sync(backend_).code(), absl::StatusCode::kInvalidArgument);
  const int32_t answers[] = {1, 2, 3};
  args.vocab = 5;
  args.answers = answers;
  ops().divergence(backend_, args);
  EXPECT_EQ(ops().sync(backend_).code(), absl::StatusCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Backends, DivergenceTest, testing::ValuesIn(BackendCases()), CaseName);

}  // namespace
}  // namespace carryover
