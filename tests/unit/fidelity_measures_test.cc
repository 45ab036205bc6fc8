// The measures of a request: hand-made rows whose answers can be counted on fingers.
#include "engine/fidelity_measures.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace carryover {
namespace {

constexpr int kVocab = 6;
constexpr int32_t kStop = 5;

// Logits whose argmax is `first`.
std::vector<float> Row(int32_t first, float lead = 4) {
  std::vector<float> row(kVocab, 0.0f);
  for (int i = 0; i < kVocab; ++i) row[i] = -0.1f * static_cast<float>(i);
  row[first] = lead;
  return row;
}

class FidelityMeasuresTest : public testing::Test {
 protected:
  void SetUp() override { backend_ = *CpuOps().create({.threads = 1}); }
  void TearDown() override { CpuOps().destroy(backend_); }

  // Greedy over rows with these argmaxes, the native arm serving.
  FidelitySample Measure(const std::vector<int32_t>& native, const std::vector<int32_t>& carried,
                         bool complete = true, bool greedy = true, Along along = Along::kNative) {
    std::vector<float> p, q;
    for (int32_t id : native) {
      for (float v : Row(id)) p.push_back(v);
    }
    for (int32_t id : carried) {
      for (float v : Row(id)) q.push_back(v);
    }
    const int32_t stops[] = {kStop, 4};
    ArmsToCompare arms;
    arms.native = p;
    arms.carried = q;
    arms.vocab = kVocab;
    arms.served = along == Along::kNative ? native : carried;
    arms.stop_tokens = stops;
    arms.complete = complete;
    arms.greedy = greedy;
    arms.along = along;
    arms.labels.task = "qa";
    absl::StatusOr<FidelitySample> sample = MeasureArms(CpuOps(), backend_, arms);
    EXPECT_TRUE(sample.ok()) << sample.status();
    return *sample;
  }

  Backend* backend_ = nullptr;
};

// In steps, with what belongs to each position, the same as all rows at once.
TEST_F(FidelityMeasuresTest, StepsAreTheSameAsAllAtOnce) {
  constexpr int kRows = 16, kWide = 3000;
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> p(kRows * kWide), q;
  for (float& value : p) value = normal(random);
  for (float value : p) q.push_back(value + 0.3f * normal(random));
  std::vector<int32_t> served, answers;
  for (int i = 0; i < kRows; ++i) {
    served.push_back(100 + i);
    answers.push_back(i % 3 == 0 ? 500 + i : -1);
  }
  const int32_t stops[] = {7, 8};
  ArmsToCompare arms;
  arms.native = p;
  arms.carried = q;
  arms.vocab = kWide;
  arms.served = served;
  arms.stop_tokens = stops;
  arms.answers = answers;
  DivergenceRow rows[kRows];
  CpuOps().divergence(backend_, {.native = p.data(),
                                 .carried = q.data(),
                                 .rows = kRows,
                                 .vocab = kWide,
                                 .stop_tokens = stops,
                                 .answers = answers,
                                 .out = rows});
  const FidelitySample expected = MeasureRows(rows, arms);

  auto comparison = ArmsComparison::Start(CpuOps(), backend_, arms);
  ASSERT_TRUE(comparison.ok()) << comparison.status();
  absl::StatusOr<bool> done = false;
  int steps = 0;
  while (done.ok() && !*done) {
    done = (*comparison)->Step();
    ++steps;
  }
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_GE(steps, 5);  // 1, 2, 4, 8 and the last, or less at a time
  const FidelitySample sample = (*comparison)->Finish();
  ASSERT_EQ(sample.positions.size(), expected.positions.size());
  for (int i = 0; i < kRows; ++i) {
    EXPECT_EQ(sample.positions[i].kl, expected.positions[i].kl) << i;
    EXPECT_EQ(sample.positions[i].native_margin, expected.positions[i].native_margin) << i;
    EXPECT_EQ(sample.positions[i].carried_stop, expected.positions[i].carried_stop) << i;
  }
  EXPECT_EQ(sample.gate_values, expected.gate_values);
  EXPECT_NE(sample.positions[0].native_margin, sample.positions[1].native_margin);
}

TEST_F(FidelityMeasuresTest, EqualArms) {
  const FidelitySample sample = Measure({1, 2, 3, kStop}, {1, 2, 3, kStop});
  ASSERT_EQ(sample.positions.size(), 4u);
  EXPECT_TRUE(sample.valid);
  EXPECT_EQ(sample.labels.task, "qa");
  for (const PositionFidelity& position : sample.positions) {
    EXPECT_EQ(position.kl, 0);
    EXPECT_EQ(position.tv, 0);
    EXPECT_EQ(position.overlap, 1);
    EXPECT_EQ(position.margin_shift, 0);
    EXPECT_EQ(position.stop_shift, 0);
    EXPECT_FALSE(position.flip);
    EXPECT_FALSE(position.fragile);
  }
  EXPECT_EQ(sample.continuation, Continuation::kSame);
  EXPECT_EQ(sample.divergence, -1);
  EXPECT_EQ(sample.stop_disagreement, false);
  EXPECT_THAT(sample.gate_values, testing::ElementsAre(0, 0, 0));
  EXPECT_EQ(Measure({1, 2}, {1, 2}, /*complete=*/false).continuation, Continuation::kSameSoFar);
}

TEST_F(FidelityMeasuresTest, FlipsAndMargins) {
  const FidelitySample sample = Measure({1, 2}, {3, 2});
  const PositionFidelity& first = sample.positions[0];
  EXPECT_TRUE(sample.first_token_flip);
  EXPECT_TRUE(first.flip);
  EXPECT_FALSE(sample.positions[1].flip);
  EXPECT_NEAR(first.native_margin, 4, 1e-6);          // over token 0
  EXPECT_NEAR(first.carried_margin, -0.1 - 4, 1e-6);  // token 1 against token 3
  EXPECT_NEAR(first.margin_shift, -8.1, 1e-6);
  EXPECT_NEAR(first.delta_range, 4.3 + 4.1, 1e-6);  // token 3 up, token 1 down
  EXPECT_TRUE(first.fragile);
  EXPECT_EQ(sample.gate_values[kFidelityFlip], 1);
  EXPECT_NEAR(sample.gate_values[kFidelityTv], first.tv / 2, 1e-12);  // mean over two positions
  EXPECT_GT(first.tv, 0.5);
}

TEST_F(FidelityMeasuresTest, Continuation) {
  struct Case {
    std::vector<int32_t> native, carried;
    int divergence;
    std::optional<bool> stops;
  };
  const Case cases[] = {
      {{1, 2, kStop}, {1, 2, kStop}, -1, false},
      {{1, 2, kStop}, {1, 3, kStop}, 1, std::nullopt},  // nobody knows what comes after the 3
      {{1, 2, kStop}, {1, 2, 3}, 2, true},              // the other one goes on
      {{1, 2, 3}, {1, kStop, 3}, 1, true},              // the other one stops earlier
      {{1, 2, kStop}, {1, 2, 4}, 2, false},             // by another stop token, but here too
      {{2, 2, kStop}, {1, 2, kStop}, 0, std::nullopt},
  };
  for (const Along along : {Along::kNative, Along::kServed}) {
    for (const Case& c : cases) {
      const FidelitySample sample = along == Along::kNative
                                        ? Measure(c.native, c.carried)
                                        : Measure(c.carried, c.native, true, true, along);
      EXPECT_EQ(sample.along, along);
      EXPECT_EQ(sample.divergence, c.divergence);
      EXPECT_EQ(sample.continuation,
                c.divergence < 0 ? Continuation::kSame : Continuation::kDiverged);
      EXPECT_EQ(sample.stop_disagreement, c.stops);
      EXPECT_EQ(sample.gate_values[kFidelityStop],
                c.stops.has_value() ? (*c.stops ? 1 : 0) : StopTotalVariation(sample.positions));
    }
  }
}

TEST_F(FidelityMeasuresTest, NotGreedyHasNoContinuation) {
  const FidelitySample sample = Measure({1, 2}, {1, 3}, true, /*greedy=*/false);
  EXPECT_EQ(sample.continuation, Continuation::kUnknown);
  EXPECT_EQ(sample.stop_disagreement, std::nullopt);
  // Said to be greedy, but the served token is not the argmax: a bias chose it.
  std::vector<float> row = Row(1);
  const int32_t served[] = {2};
  ArmsToCompare arms{.native = row, .carried = row, .vocab = kVocab, .served = served};
  arms.greedy = true;
  EXPECT_EQ(MeasureArms(CpuOps(), backend_, arms)->continuation, Continuation::kUnknown);
}

TEST_F(FidelityMeasuresTest, StopTotalVariation) {
  std::vector<PositionFidelity> positions(2);
  positions[0].native_stop = 0.5, positions[0].carried_stop = 0.25;
  positions[1].native_stop = 0.5, positions[1].carried_stop = 1;
  // Stops at 0, 1, later: native 1/2, 1/4, 1/4; carried 1/4, 3/4, 0.
  EXPECT_DOUBLE_EQ(StopTotalVariation(positions), (0.25 + 0.5 + 0.25) / 2);
  EXPECT_EQ(StopTotalVariation({}), 0);
}

TEST_F(FidelityMeasuresTest, BrokenLogitsCountAsTheWorst) {
  std::vector<float> p = Row(1), q = Row(1);
  for (float v : Row(2)) p.push_back(v), q.push_back(v);
  q[3] = std::numeric_limits<float>::quiet_NaN();
  const int32_t served[] = {1, 2};
  const int32_t stops[] = {kStop};
  ArmsToCompare arms{.native = p, .carried = q, .vocab = kVocab, .served = served};
  arms.stop_tokens = stops;
  arms.greedy = arms.complete = true;
  const FidelitySample sample = *MeasureArms(CpuOps(), backend_, arms);
  EXPECT_FALSE(sample.valid);
  EXPECT_FALSE(sample.positions[0].valid);
  EXPECT_TRUE(sample.positions[1].valid);
  EXPECT_EQ(sample.continuation, Continuation::kUnknown);
  EXPECT_THAT(sample.gate_values, testing::ElementsAre(1, 0.5, 1));
}

TEST_F(FidelityMeasuresTest, RefusesWhatDoesNotFit) {
  const std::vector<float> row = Row(1);
  const std::vector<int32_t> served(17, 1);
  const std::vector<float> many(17 * kVocab);
  const auto code = [&](const ArmsToCompare& arms) {
    return MeasureArms(CpuOps(), backend_, arms).status().code();
  };
  const absl::Span<const int32_t> one(served.data(), 1);
  EXPECT_EQ(code({.native = row, .carried = row, .vocab = kVocab, .served = one}),
            absl::StatusCode::kOk);
  EXPECT_EQ(code({.native = row, .carried = row, .vocab = kVocab}),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.native = row, .vocab = kVocab, .served = one}),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.native = row, .carried = row, .vocab = 0, .served = one}),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.native = many, .carried = many, .vocab = kVocab, .served = served}),
            absl::StatusCode::kInvalidArgument);
}

TEST(FidelityTest, LabelsAndGroups) {
  const std::vector<std::string> tasks = {"qa", "chat"};
  EXPECT_EQ(TaskLabel(tasks, "chat"), "chat");
  EXPECT_EQ(TaskLabel(tasks, "my secret"), "other");
  EXPECT_EQ(TaskLabel(tasks, ""), "other");
  EXPECT_STREQ(PositionGroupName(PositionGroup(0)), "1");
  EXPECT_STREQ(PositionGroupName(PositionGroup(1)), "2-4");
  EXPECT_STREQ(PositionGroupName(PositionGroup(3)), "2-4");
  EXPECT_STREQ(PositionGroupName(PositionGroup(4)), "5-16");
}

TEST(FidelityTest, RecoveredFidelity) {
  EXPECT_DOUBLE_EQ(*RecoveredFidelity(0.1, 0.4), 0.75);
  EXPECT_DOUBLE_EQ(*RecoveredFidelity(0.8, 0.4), -1);  // worse than not updating
  EXPECT_EQ(RecoveredFidelity(0.1, 0), std::nullopt);
  EXPECT_EQ(RecoveredFidelity(std::numeric_limits<double>::infinity(), 1), std::nullopt);
}

}  // namespace
}  // namespace carryover
