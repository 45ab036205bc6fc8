#include "server/trial_metrics.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace carryover {
namespace {

using prometheus::BuildCounter;
using prometheus::BuildHistogram;
using Buckets = prometheus::Histogram::BucketBoundaries;

constexpr FinishReason kReasonOrder[] = {FinishReason::kStopToken, FinishReason::kStopString,
                                         FinishReason::kLength, FinishReason::kCancelled};
constexpr const char* kArms[] = {"carried", "held_out"};

const Buckets& AnswerBuckets() {
  static const auto* buckets = new Buckets{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};
  return *buckets;
}

}  // namespace

const Buckets& FirstTokenBuckets() {
  static const auto* buckets =
      new Buckets{0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
                  1,     2.5,   5,    7.5,  10,   20,   40,   80,  160,  640, 2560};
  return *buckets;
}

const char* FinishReasonName(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone:
      break;
    case FinishReason::kStopToken:
      return "stop_token";
    case FinishReason::kStopString:
      return "stop_string";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "cancelled";
  }
  return "none";
}

TrialMetrics::TrialMetrics(const FidelityMetricsOptions& options, prometheus::Registry* registry)
    : options_(options),
      tokens_(BuildHistogram()
                  .Name("carryover_trial_answer_tokens")
                  .Help("Tokens of answers in the trial, by arm.")
                  .Register(*registry)),
      first_token_(BuildHistogram()
                       .Name("carryover_trial_time_to_first_token_seconds")
                       .Help("From accepting a request of the trial to its first token, by arm.")
                       .Register(*registry)),
      finished_(BuildCounter()
                    .Name("carryover_trial_finished_total")
                    .Help("Answers of the trial that ended, by arm and reason.")
                    .Register(*registry)),
      homeless_(
          BuildCounter()
              .Name("carryover_trial_requests_without_cell_total")
              .Help("Requests of the trial over the limit of cells, or of a pair that is gone.")
              .Register(*registry)
              .Add({})) {}

TrialMetrics::Cell* TrialMetrics::FindOrMake(const CellKey& key) {
  if (const auto found = cells_.find(key); found != cells_.end()) return &found->second;
  if (cells_.size() >= static_cast<size_t>(std::max(options_.max_cells, 0))) return nullptr;
  const auto& [pair, plan, task, bucket] = key;
  Cell cell;
  for (size_t arm = 0; arm < cell.size(); ++arm) {
    prometheus::Labels labels = {{"model", std::get<0>(pair)},
                                 {"source", std::get<1>(pair)},
                                 {"target", std::get<2>(pair)},
                                 {"plan", plan},
                                 {"task", task},
                                 {"prefix_bucket", absl::StrCat(bucket)},
                                 {"arm", kArms[arm]}};
    cell[arm].tokens = &tokens_.Add(labels, AnswerBuckets());
    cell[arm].first_token = &first_token_.Add(labels, FirstTokenBuckets());
    for (int i = 0; i < kReasons; ++i) {
      labels["reason"] = FinishReasonName(kReasonOrder[i]);
      cell[arm].finished[i] = &finished_.Add(labels);
    }
  }
  return &cells_.emplace(key, cell).first->second;
}

void TrialMetrics::Declare(const VersionPair& pair) {
  MutexLock lock(&mutex_);
  pairs_.insert({pair.model, pair.source, pair.target});
}

void TrialMetrics::Remove(const VersionPair& pair) {
  MutexLock lock(&mutex_);
  const PairKey key = {pair.model, pair.source, pair.target};
  pairs_.erase(key);
  for (auto it = cells_.begin(); it != cells_.end();) {
    if (std::get<0>(it->first) != key) {
      ++it;
      continue;
    }
    for (const Arm& arm : it->second) {
      tokens_.Remove(arm.tokens);
      first_token_.Remove(arm.first_token);
      for (prometheus::Counter* counter : arm.finished) finished_.Remove(counter);
    }
    it = cells_.erase(it);
  }
}

void TrialMetrics::Observe(const TrialRecord& record) {
  const PairKey pair = {record.pair.model, record.pair.source, record.pair.target};
  MutexLock lock(&mutex_);
  Cell* cell = nullptr;
  if (pairs_.count(pair) != 0) {
    cell = FindOrMake(
        {pair, record.plan, TaskLabel(options_.tasks, record.task), record.prefix_bucket});
  }
  if (cell == nullptr) {
    homeless_.Increment();
    return;
  }
  const Arm& arm = (*cell)[record.held_out ? 1 : 0];
  for (int tokens : record.answer_tokens) arm.tokens->Observe(tokens);
  for (FinishReason reason : record.reasons) {
    for (int i = 0; i < kReasons; ++i) {
      if (kReasonOrder[i] == reason) arm.finished[i]->Increment();
    }
  }
  if (record.first_token.has_value()) arm.first_token->Observe(*record.first_token);
}

}  // namespace carryover
