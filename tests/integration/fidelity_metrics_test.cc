// The series of compared requests: there from a pair's declaration, filled by samples, gone with
// the pair, capped, and never named after anything that a request says.
#include "server/fidelity_metrics.h"

#include <gtest/gtest.h>
#include <prometheus/text_serializer.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/prometheus_observer.h"

namespace carryover {
namespace {

const VersionPair kPair = {"demo", "v1", "v2", 1000};

class FidelityMetricsTest : public testing::Test {
 protected:
  std::string Text() const {
    return prometheus::TextSerializer().Serialize(observer_.registry()->Collect());
  }
  // The sum of all samples of a metric whose labels contain `having`; -1 when there are none.
  double Sum(const std::string& name, const std::string& having = "") const {
    double sum = 0;
    int count = 0;
    for (absl::string_view line : absl::StrSplit(Text(), '\n')) {
      const size_t end = line.find_first_of("{ ");
      if (line.substr(0, end) != "carryover_" + name || line.find(having) == line.npos) continue;
      double value = 0;
      EXPECT_TRUE(absl::SimpleAtod(line.substr(line.rfind(' ') + 1), &value)) << line;
      sum += value;
      ++count;
    }
    return count == 0 ? -1 : sum;
  }
  static FidelitySample Sample(const std::string& task = "qa") {
    FidelitySample sample;
    sample.labels = {"demo", "v1", "v2", "direct", task, 512, FidelityComparison::kCarried};
    sample.valid = true;
    sample.first_token_flip = true;
    sample.positions.resize(6);
    for (PositionFidelity& position : sample.positions) {
      position = {.valid = true, .kl = 0.02, .native_margin = 0.2, .carried_margin = -0.5};
      position.margin_shift = -0.7;
    }
    sample.positions[0].flip = sample.positions[5].flip = true;
    sample.positions[5].kl = std::numeric_limits<double>::infinity();
    sample.positions[2].fragile = true;
    sample.continuation = Continuation::kDiverged;
    sample.stop_disagreement = true;
    return sample;
  }

  PrometheusObserver observer_{{.tasks = {"qa"}, .max_cells = 10}};
};

TEST_F(FidelityMetricsTest, SeriesOfAPairComeAndGo) {
  EXPECT_EQ(Sum("fidelity_samples_total"), -1);
  observer_.OnPairDeclared(kPair);
  EXPECT_EQ(Sum("fidelity_cells"), 4);  // 256 and 512, "qa" and "other"
  EXPECT_EQ(Sum("fidelity_samples_total"), 0);
  EXPECT_EQ(Sum("fidelity_kl_nats_count"), 0);
  EXPECT_EQ(Sum("position_flips_total", "positions=\"5-16\""), 0);
  observer_.OnPairRemoved({"demo", "v1", "v3", 1000});
  EXPECT_EQ(Sum("fidelity_cells"), 4);
  observer_.OnPairRemoved(kPair);
  EXPECT_EQ(Sum("fidelity_cells"), 0);
  EXPECT_EQ(Text().find("target=\"v2\""), std::string::npos);
  // A shadow that ends afterwards does not bring them back.
  observer_.OnFidelitySample(Sample());
  EXPECT_EQ(Text().find("target=\"v2\""), std::string::npos);
  EXPECT_EQ(Sum("fidelity_samples_without_cell_total"), 1);
}

TEST_F(FidelityMetricsTest, SamplesAreCounted) {
  observer_.OnPairDeclared(kPair);
  observer_.OnFidelitySample(Sample());
  EXPECT_EQ(Sum("fidelity_cells"), 4);
  EXPECT_EQ(Sum("fidelity_samples_total", "prefix_bucket=\"512\""), 1);
  EXPECT_EQ(Sum("fidelity_samples_total", "prefix_bucket=\"256\""), 0);
  EXPECT_EQ(Sum("first_token_flips_total"), 1);
  EXPECT_EQ(Sum("position_flips_total", "positions=\"1\""), 1);
  EXPECT_EQ(Sum("position_flips_total", "positions=\"2-4\""), 0);
  EXPECT_EQ(Sum("position_flips_total", "positions=\"5-16\""), 1);
  EXPECT_EQ(Sum("fidelity_positions_total", "positions=\"2-4\""), 3);
  EXPECT_EQ(Sum("fidelity_kl_nats_count"), 6);
  EXPECT_EQ(Sum("fidelity_kl_nats_sum", "positions=\"5-16\""), 1000.02);  // no infinity in a sum
  EXPECT_EQ(Sum("answer_margin_nats_count", "path=\"native\""), 6);
  EXPECT_NEAR(Sum("answer_margin_nats_sum", "path=\"carried\""), -3, 1e-9);
  EXPECT_NEAR(Sum("answer_margin_shift_nats_sum"), -4.2, 1e-9);
  EXPECT_EQ(Sum("fragile_total"), 1);
  EXPECT_EQ(Sum("continuation_match_total", "match=\"diverged\""), 1);
  EXPECT_EQ(Sum("continuation_match_total", "match=\"same\""), 0);
  EXPECT_EQ(Sum("stops_compared_total"), 1);
  EXPECT_EQ(Sum("stop_disagreements_total"), 1);
  EXPECT_EQ(Sum("fidelity_invalid_samples_total"), 0);

  FidelitySample broken = Sample();
  broken.valid = broken.positions[1].valid = false;
  observer_.OnFidelitySample(broken);
  EXPECT_EQ(Sum("fidelity_invalid_samples_total"), 1);
  EXPECT_EQ(Sum("fidelity_kl_nats_count"), 11);
}

TEST_F(FidelityMetricsTest, CellsAreCapped) {
  observer_.OnPairDeclared(kPair);
  for (int bucket = 256; bucket <= 1 << 20; bucket *= 2) {
    FidelitySample sample = Sample();
    sample.labels.prefix_bucket = bucket;
    observer_.OnFidelitySample(sample);
  }
  EXPECT_EQ(Sum("fidelity_cells"), 10);
  EXPECT_EQ(Sum("fidelity_cells_limit"), 10);
  EXPECT_EQ(Sum("fidelity_samples_total"), 8);  // two cells of "other" have none
  EXPECT_EQ(Sum("fidelity_samples_without_cell_total"), 13 - 8);
}

TEST_F(FidelityMetricsTest, NoTextOfARequestInALabel) {
  observer_.OnPairDeclared(kPair);
  observer_.OnFidelitySample(Sample("my-secret-task"));
  EXPECT_EQ(Text().find("my-secret"), std::string::npos);
  EXPECT_EQ(Sum("fidelity_samples_total", "task=\"other\""), 1);
}

TrialRecord Trial(bool held_out, const std::string& task = "qa", int bucket = 512) {
  TrialRecord record;
  record.pair = {"demo", "v1", "v2"};
  record.plan = "direct";
  record.task = task;
  record.prefix_bucket = bucket;
  record.held_out = held_out;
  record.reasons = {FinishReason::kStopToken, FinishReason::kLength};
  record.answer_tokens = {3, 40};
  record.first_token = 0.25;
  return record;
}

TEST_F(FidelityMetricsTest, TheTrialHasBothArmsFromItsFirstRequest) {
  observer_.OnPairDeclared(kPair);
  EXPECT_EQ(Sum("trial_finished_total"), -1);
  observer_.OnTrialDone(Trial(false));
  EXPECT_EQ(Sum("trial_finished_total", "arm=\"held_out\""), 0);
  EXPECT_EQ(Sum("trial_answer_tokens_count", "arm=\"held_out\""), 0);
  observer_.OnTrialDone(Trial(true));
  observer_.OnTrialDone(Trial(true));
  const std::string labels =
      "{arm=\"held_out\",model=\"demo\",plan=\"direct\",prefix_bucket=\"512\",";
  const std::string rest = "source=\"v1\",target=\"v2\",task=\"qa\"}";
  EXPECT_EQ(Sum("trial_finished_total", labels + "reason=\"stop_token\"," + rest), 2);
  EXPECT_EQ(Sum("trial_finished_total", labels + "reason=\"length\"," + rest), 2);
  EXPECT_EQ(Sum("trial_finished_total", labels + "reason=\"cancelled\"," + rest), 0);
  EXPECT_EQ(Sum("trial_answer_tokens_count", labels + rest), 4);
  EXPECT_EQ(Sum("trial_answer_tokens_sum", labels + rest), 86);
  EXPECT_EQ(Sum("trial_time_to_first_token_seconds_sum", labels + rest), 0.5);
  EXPECT_EQ(Sum("trial_answer_tokens_count", "arm=\"carried\""), 2);
  // One that got no first token has none to show.
  TrialRecord none = Trial(true);
  none.first_token.reset();
  observer_.OnTrialDone(none);
  EXPECT_EQ(Sum("trial_time_to_first_token_seconds_count", "arm=\"held_out\""), 2);
  EXPECT_EQ(Sum("trial_answer_tokens_count", "arm=\"held_out\""), 6);

  observer_.OnPairRemoved(kPair);
  EXPECT_EQ(Sum("trial_finished_total"), -1);
  observer_.OnTrialDone(Trial(true));
  EXPECT_EQ(Sum("trial_finished_total"), -1);
  EXPECT_EQ(Sum("trial_requests_without_cell_total"), 1);
}

TEST_F(FidelityMetricsTest, TheTrialIsCappedAndShowsNoText) {
  observer_.OnPairDeclared(kPair);
  observer_.OnTrialDone(Trial(true, "my-secret-task"));
  EXPECT_EQ(Text().find("my-secret"), std::string::npos);
  EXPECT_EQ(Sum("trial_answer_tokens_count", "task=\"other\""), 2);
  for (int i = 0; i < 12; ++i) observer_.OnTrialDone(Trial(false, "qa", 256 << i));
  EXPECT_EQ(Sum("trial_requests_without_cell_total"), 3);
  EXPECT_EQ(Sum("trial_answer_tokens_count"), 2 * 10);
}

TEST_F(FidelityMetricsTest, ShadowsAndGate) {
  EXPECT_EQ(Sum("shadow_total", "outcome=\"completed\""), 0);  // from the start
  observer_.OnShadowEnded("native", "completed");
  observer_.OnShadowLag(0.5);
  observer_.OnShadowTokens(300);
  observer_.OnRefreshedBlocks(7);
  observer_.OnMappedAhead(5);
  observer_.OnShadowDelay(0.25);
  observer_.OnRefreshEnded("completed");
  observer_.OnGateChange({{}, "learning", "open", "evidence"});
  EXPECT_EQ(Sum("shadow_total", "arm=\"native\",outcome=\"completed\""), 1);
  EXPECT_EQ(Sum("shadow_lag_seconds_sum"), 0.5);
  EXPECT_EQ(Sum("shadow_tokens_total"), 300);
  EXPECT_EQ(Sum("refresh_blocks_total"), 7);
  EXPECT_EQ(Sum("mapped_ahead_blocks_total"), 5);
  EXPECT_EQ(Sum("shadow_delay_seconds_sum"), 0.25);
  EXPECT_EQ(Sum("refresh_total", "outcome=\"completed\""), 1);
  EXPECT_EQ(Sum("gate_transitions_total", "to=\"open\""), 1);
}

TEST_F(FidelityMetricsTest, PromtoolAcceptsThem) {
  if (std::system("command -v promtool > /dev/null") != 0) GTEST_SKIP() << "promtool is missing";
  observer_.OnPairDeclared(kPair);
  observer_.OnFidelitySample(Sample());
  observer_.OnTrialDone(Trial(true));
  observer_.OnGateChange({{}, "learning", "open", "evidence"});
  const std::string path = testing::TempDir() + absl::StrCat("/carryover-fidelity-", getpid());
  std::ofstream(path) << Text();
  EXPECT_EQ(std::system(
                absl::StrCat("promtool check metrics < ", path, " > ", path, ".out 2>&1").c_str()),
            0);
  std::ifstream out(path + ".out");
  EXPECT_EQ(std::string((std::istreambuf_iterator<char>(out)), {}), "");
  std::filesystem::remove(path);
  std::filesystem::remove(path + ".out");
}

}  // namespace
}  // namespace carryover
