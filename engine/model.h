// A loaded model: packed weights and the forward pass. Immutable after Load; Forward is called from
// the engine thread only, Load from any thread but not while another thread runs ops of the same
// backend (see Load).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/hash.h"
#include "engine/kv_layout.h"
#include "engine/model_config.h"
#include "kernels/ops.h"

namespace carryover {

struct ModelOptions {
  DType weights = DType::kBF16;   // compute precision of weights and activations: kBF16 or kF32
  DType kv_dtype = DType::kBF16;  // kBF16 or kF32
  int block_tokens = 16;          // a multiple of 16
  // Told the share of tensors packed so far, 0 to 1. May be null.
  std::function<void(double)> progress;
};

// The new tokens of several sequences, run in one pass.
struct ForwardBatch {
  std::vector<int32_t> tokens;          // (rows)
  std::vector<int32_t> positions;       // (rows)
  std::vector<SequenceRows> sequences;  // in row order, covering all rows
  std::vector<int32_t> block_table;     // block ids; a sequence's entries start at table_begin and
                                        // reach over kv_begin + row_count tokens
  std::vector<int32_t> logit_rows;      // rows whose logits are wanted, ascending
};

class Model {
 public:
  // Maps, checks, hashes and packs a Hugging Face folder. INVALID_ARGUMENT or NOT_FOUND with the
  // file, tensor or field that is wrong. pack() is thread-safe against a running Forward.
  static absl::StatusOr<std::unique_ptr<Model>> Load(const std::string& folder, const Ops& ops,
                                                     Backend* backend, const ModelOptions& options);
  ~Model();

  // Runs the batch; its K and V go into the blocks at kv_base. logits gets (logit_rows.size(),
  // vocab) f32 in host memory. REQUIRES: every position < config().max_positions; every token in
  // [0, vocab).
  absl::Status Forward(const ForwardBatch& batch, void* kv_base, std::vector<float>* logits);

  const ModelConfig& config() const;
  const KvLayout& kv_layout() const;
  // SHA-256 over the tensors (names, shapes, dtypes, bytes), the config that affects the maths and
  // the compute precision: equal fingerprints mean equal functions.
  const Digest& fingerprint() const;
  // Of the tensors' bytes alone, for people.
  const Digest& weights_sha256() const;
  size_t weight_bytes() const;

 private:
  struct Impl;
  explicit Model(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace carryover
