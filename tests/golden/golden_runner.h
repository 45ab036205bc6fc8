// Runs a model folder without the engine: prompts cut into chunks, alone or in one batch, with KV
// blocks of its own. Tests only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model.h"
#include "kernels/ops.h"
#include "tests/golden/golden_reference.h"

namespace carryover {

class GoldenRunner {
 public:
  static absl::StatusOr<std::unique_ptr<GoldenRunner>> Load(const std::string& folder,
                                                            const Ops& ops,
                                                            const ModelOptions& options);
  ~GoldenRunner();

  // Logits of every position, (tokens, vocab), of each prompt. All prompts go through one batch,
  // `chunk` tokens of each a pass (0: all at once).
  std::vector<std::vector<float>> Run(const std::vector<std::vector<int32_t>>& prompts, int chunk);
  std::vector<float> Run(const std::vector<int32_t>& prompt, int chunk) {
    return Run(std::vector<std::vector<int32_t>>{prompt}, chunk)[0];
  }

  // The most likely token, `steps` times.
  std::vector<int32_t> Greedy(const std::vector<int32_t>& prompt, int steps);

  const Model& model() const { return *model_; }

 private:
  GoldenRunner(const Ops& ops, Backend* backend) : ops_(ops), backend_(backend) {}

  // One sequence's blocks, in a scattered order so that no test relies on neighbours.
  std::vector<int32_t> TakeBlocks(int tokens);
  void Forward(const ForwardBatch& batch, std::vector<float>* logits);

  const Ops& ops_;
  Backend* backend_;
  std::unique_ptr<Model> model_;
  void* kv_ = nullptr;
  std::vector<int32_t> free_;
};

// The largest distance from the reference over every column that it kept, the log-sum-exp included.
double MaxDistance(const GoldenPrompt& prompt, const std::vector<float>& logits, int vocab);

}  // namespace carryover
