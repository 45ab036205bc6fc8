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

// How far a backend may be off. The CPU's terms are fp64, and those of small measures cancel; a
// device's are fp32 and do not. In TV a token whose |p - q| is below the rounding of the norms
// counts with that.
struct Tolerance {
  double relative;
  double kl;  // and js: absolute
  double tv;
  double other;  // absolute: of norms; relative: of what stop tokens weigh
};
constexpr Tolerance kF64 = {1e-12, 1e-13, 1e-13, 1e-11};
constexpr Tolerance kF32 = {2e-6, 0, 3e-10, 2e-7};

void ExpectNear(double is, double want, double relative, double absolute, const std::string& what) {
  if (std::isinf(want)) {
    EXPECT_EQ(is, want) << what;
  } else {
    EXPECT_NEAR(is, want, absolute + relative * std::fabs(want)) << what;
  }
}

struct Measures {
  long double kl = 0;
  long double js = 0;
  long double tv = 0;
};

// In long double, and in forms whose terms do not cancel: as they are written, even long double's
// rounding is a thousandth of the smallest measures here.
Measures PlainMeasures(const float* z, const float* w, int vocab) {
  long double z_sum = 0, w_sum = 0;
  for (int i = 0; i < vocab; ++i) z_sum += std::exp(static_cast<long double>(z[i]));
  for (int i = 0; i < vocab; ++i) w_sum += std::exp(static_cast<long double>(w[i]));
  Measures sums;
  for (int i = 0; i < vocab; ++i) {
    const long double log_p = z[i] - std::log(z_sum), log_q = w[i] - std::log(w_sum);
    const long double p = std::exp(log_p), q = std::exp(log_q), d = log_p - log_q;
    const long double t = std::tanh(d / 2);  // p = m (1 + t), q = m (1 - t)
    sums.kl += p * (std::expm1(-d) + d);     // the sum of q - p, which is 0, added
    sums.js += (p + q) / 4 * ((1 + t) * std::log1p(t) + (1 - t) * std::log1p(-t));
    sums.tv += std::fabs(p * std::expm1(-d)) / 2;
  }
  return sums;
}

class DivergenceTest : public OpsTestBase {
 protected:
  const Tolerance& tolerance() const { return std::string(ops().name) == "cpu" ? kF64 : kF32; }

  void ExpectMeasures(const DivergenceRow& row, const Measures& want) {
    const Tolerance& t = tolerance();
    ExpectNear(row.kl, static_cast<double>(want.kl), t.relative, t.kl, "kl");
    ExpectNear(row.js, static_cast<double>(want.js), t.relative, t.kl, "js");
    ExpectNear(row.tv, static_cast<double>(want.tv), t.relative, t.tv, "tv");
    EXPECT_GE(row.kl, 0);
    EXPECT_GE(row.js, 0);
  }

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
    for (const auto& [name, value] : {std::pair("kl", row.kl), {"js", row.js}, {"tv", row.tv}}) {
      // scipy's own rounding.
      ExpectNear(value, Number(want[name]), std::max(tolerance().relative, 1e-11), 1e-11, name);
    }
    for (const auto& [name, value] : {std::pair("native_log_sum_exp", row.native_log_sum_exp),
                                      {"carried_log_sum_exp", row.carried_log_sum_exp}}) {
      ExpectNear(value, Number(want[name]), 1e-11, tolerance().other, name);
    }
    EXPECT_EQ(row.native_margin, Number(want["native_margin"]));
    EXPECT_EQ(row.carried_margin, Number(want["carried_margin"]));
    EXPECT_EQ(row.native_gap, Number(want["native_gap"]));
    EXPECT_EQ(row.delta_range, Number(want["delta_range"]));
    for (const auto& [name, value] :
         {std::pair("native_stop", row.native_stop), {"carried_stop", row.carried_stop}}) {
      ExpectNear(value, Number(want[name]), tolerance().other, 1e-13, name);
    }
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

TEST_P(DivergenceTest, AgreesWithPlainSums) {
  for (int round = 0; round < 12; ++round) {
    const int rows = Random(1, 5), vocab = Random(1, 1400);
    const size_t size = static_cast<size_t>(rows) * vocab;
    std::vector<float> native = Values(size, DType::kF32, 4), carried = native;
    const float noise = std::ldexp(1.0f, Random(-16, 2));
    SCOPED_TRACE(testing::Message() << rows << " rows of " << vocab << ", noise " << noise);
    for (float& v : carried) v += noise * (static_cast<float>(Random(0, 1000)) / 500 - 1);
    const auto compared = Compare(native, carried, rows);
    for (int r = 0; r < rows; ++r) {
      const size_t at = static_cast<size_t>(r) * vocab;
      ExpectMeasures(compared[r], PlainMeasures(&native[at], &carried[at], vocab));
    }
  }
}

// What carrying between near versions leaves: measures many decades below their terms, in rows that
// are flat, sure of one token, or moved as a whole.
TEST_P(DivergenceTest, SmallDivergencesKeepTheirDigits) {
  constexpr int kVocab = 9001;  // three chunks
  for (const float noise : {1e-2f, 1e-4f, 1e-5f}) {
    for (const float peak : {0.0f, 12.0f}) {
      for (const float shift : {0.0f, 24.7f}) {
        SCOPED_TRACE(testing::Message()
                     << "noise " << noise << " peak " << peak << " shift " << shift);
        std::vector<float> native = Values(kVocab, DType::kF32, 3), carried = native;
        native[77] = carried[77] = peak;
        for (float& v : carried) {
          v += shift + noise * (static_cast<float>(Random(0, 1000)) / 500 - 1);
        }
        const Measures want = PlainMeasures(native.data(), carried.data(), kVocab);
        const DivergenceRow row = Compare(native, carried, 1)[0];
        ExpectMeasures(row, want);
        EXPECT_NEAR(row.carried_log_sum_exp - row.native_log_sum_exp - double{shift}, 0,
                    2 * double{noise} + 1e-5);
      }
    }
  }
}

TEST_P(DivergenceTest, EqualRowsAreNotApartAtAll) {
  std::vector<float> logits = Values(6000, DType::kF32, 8);
  for (size_t i = 0; i < logits.size(); i += 7) logits[i] = kMasked;
  const DivergenceRow row = Compare(logits, logits, 1)[0];
  EXPECT_EQ(row.valid, 1);
  EXPECT_EQ(row.kl, 0);
  EXPECT_EQ(row.js, 0);
  EXPECT_EQ(row.tv, 0);
  EXPECT_EQ(row.native_log_sum_exp, row.carried_log_sum_exp);
}

// Kernels look for them in parts of a row: all in one part, in one column, or one in each.
TEST_P(DivergenceTest, TopsAreFoundWhereverTheyLie) {
  constexpr int kVocab = 50000;
  const std::vector<float> logits = Values(kVocab, DType::kF32, 1);
  for (const int stride : {1, 3, 255, 256, 512, 4096, 4097}) {
    SCOPED_TRACE(stride);
    std::vector<float> native = logits, carried = logits;
    const int first = Random(0, 600);
    std::vector<int32_t> want;
    for (int k = 0; k < kDivergenceTop; ++k) {
      want.push_back(first + k * stride);
      native[want[k]] = 20 - static_cast<float>(k / 2);  // in pairs: the lower id first
      carried[want[k]] = 10 + static_cast<float>(k);
    }
    const DivergenceRow row = Compare(native, carried, 1)[0];
    EXPECT_EQ(std::vector<int32_t>(row.native_top, row.native_top + kDivergenceTop), want);
    std::reverse(want.begin(), want.end());
    EXPECT_EQ(std::vector<int32_t>(row.carried_top, row.carried_top + kDivergenceTop), want);
    EXPECT_EQ(row.overlap, kDivergenceTop);
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
