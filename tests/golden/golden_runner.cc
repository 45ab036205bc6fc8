#include "tests/golden/golden_runner.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/status_macros.h"

namespace carryover {
namespace {

constexpr int kBlocks = 128;

int CeilDiv(int a, int b) { return (a + b - 1) / b; }

}  // namespace

absl::StatusOr<std::unique_ptr<GoldenRunner>> GoldenRunner::Load(const std::string& folder,
                                                                 const Ops& ops,
                                                                 const ModelOptions& options) {
  ASSIGN_OR_RETURN(Backend * backend, ops.create({}));
  std::unique_ptr<GoldenRunner> runner(new GoldenRunner(ops, backend));
  ASSIGN_OR_RETURN(runner->model_, Model::Load(folder, ops, backend, options));
  const KvGeometry& geometry = runner->model_->kv_layout().geometry;
  const size_t bytes = kBlocks * geometry.BlockBytes();
  ASSIGN_OR_RETURN(runner->kv_, ops.alloc(backend, bytes));
  // What nobody wrote must not matter: NaN in fp32 and in bf16.
  const std::vector<char> poison(bytes, '\xff');
  ops.upload(backend, runner->kv_, poison.data(), bytes);
  return runner;
}

GoldenRunner::~GoldenRunner() {
  model_.reset();
  if (kv_ != nullptr) ops_.release(backend_, kv_);
  ops_.destroy(backend_);
}

std::vector<int32_t> GoldenRunner::TakeBlocks(int tokens) {
  const int count = CeilDiv(tokens, model_->kv_layout().geometry.block_tokens);
  CHECK(count <= static_cast<int>(free_.size()));
  const std::vector<int32_t> taken(free_.end() - count, free_.end());
  free_.resize(free_.size() - count);
  return taken;
}

void GoldenRunner::Forward(const ForwardBatch& batch, std::vector<float>* logits) {
  const absl::Status status = model_->Forward(batch, kv_, logits);
  CHECK(status.ok());
}

std::vector<std::vector<float>> GoldenRunner::Run(const std::vector<std::vector<int32_t>>& prompts,
                                                  int chunk) {
  free_.clear();
  for (int i = 0; i < kBlocks; ++i) free_.push_back((i * 37 + 11) % kBlocks);
  std::vector<std::vector<int32_t>> blocks;
  size_t longest = 0;
  for (const auto& prompt : prompts) {
    blocks.push_back(TakeBlocks(prompt.size()));
    longest = std::max(longest, prompt.size());
  }
  const size_t step = chunk == 0 ? longest : chunk;
  std::vector<std::vector<float>> results(prompts.size());
  for (size_t begin = 0; begin < longest; begin += step) {
    ForwardBatch batch;
    std::vector<size_t> members;
    for (size_t p = 0; p < prompts.size(); ++p) {
      const size_t end = std::min(prompts[p].size(), begin + step);
      if (begin >= end) continue;
      members.push_back(p);
      batch.sequences.push_back({.row_begin = static_cast<int32_t>(batch.tokens.size()),
                                 .row_count = static_cast<int32_t>(end - begin),
                                 .kv_begin = static_cast<int32_t>(begin),
                                 .table_begin = static_cast<int32_t>(batch.block_table.size())});
      for (size_t i = begin; i < end; ++i) {
        batch.logit_rows.push_back(batch.tokens.size());
        batch.tokens.push_back(prompts[p][i]);
        batch.positions.push_back(i);
      }
      batch.block_table.insert(batch.block_table.end(), blocks[p].begin(), blocks[p].end());
    }
    std::vector<float> logits;
    Forward(batch, &logits);
    const size_t vocab = model_->config().vocab;
    for (size_t m = 0; m < members.size(); ++m) {
      const SequenceRows& rows = batch.sequences[m];
      const auto from = logits.begin() + rows.row_begin * vocab;
      results[members[m]].insert(results[members[m]].end(), from, from + rows.row_count * vocab);
    }
  }
  return results;
}

std::vector<int32_t> GoldenRunner::Greedy(const std::vector<int32_t>& prompt, int steps) {
  free_.clear();
  for (int i = 0; i < kBlocks; ++i) free_.push_back((i * 53 + 29) % kBlocks);
  const std::vector<int32_t> blocks = TakeBlocks(prompt.size() + steps);
  std::vector<int32_t> tokens = prompt;
  std::vector<int32_t> generated;
  std::vector<float> logits;
  int kv = 0;
  for (int i = 0; i < steps; ++i) {
    ForwardBatch batch;
    batch.tokens.assign(tokens.begin() + kv, tokens.end());
    for (size_t p = kv; p < tokens.size(); ++p) batch.positions.push_back(p);
    batch.sequences = {{.row_count = static_cast<int32_t>(batch.tokens.size()), .kv_begin = kv}};
    batch.block_table = blocks;
    batch.logit_rows = {static_cast<int32_t>(batch.tokens.size()) - 1};
    Forward(batch, &logits);
    kv = tokens.size();
    const int32_t best = std::max_element(logits.begin(), logits.end()) - logits.begin();
    generated.push_back(best);
    tokens.push_back(best);
  }
  return generated;
}

double MaxDistance(const GoldenPrompt& prompt, const std::vector<float>& logits, int vocab) {
  const size_t rows = prompt.tokens.size();
  const size_t columns = CeilDiv(vocab, prompt.stride);
  const size_t top = prompt.top.size() / rows;
  CHECK(logits.size() == rows * vocab);
  CHECK(prompt.logits.size() == rows * columns);
  double worst = 0;
  const auto compare = [&worst](double ours, double reference) {
    const double distance = std::abs(ours - reference);
    worst = distance <= worst ? worst : distance;  // so that a NaN stays
  };
  for (size_t row = 0; row < rows; ++row) {
    const float* ours = logits.data() + row * vocab;
    for (size_t i = 0; i < columns; ++i) {
      compare(ours[i * prompt.stride], prompt.logits[row * columns + i]);
    }
    for (size_t i = 0; i < top; ++i) {
      compare(ours[prompt.top_ids[row * top + i]], prompt.top[row * top + i]);
    }
    const double max = *std::max_element(ours, ours + vocab);
    double sum = 0;
    for (int i = 0; i < vocab; ++i) sum += std::exp(ours[i] - max);
    compare(max + std::log(sum), prompt.logsumexp[row]);
    if (std::isnan(worst)) return worst;
  }
  return worst;
}

}  // namespace carryover
