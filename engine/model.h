// A loaded model: packed weights and the forward pass. Immutable after Load; Forward is called from
// the engine thread only, Load from any thread but not while another thread runs ops of the same
// backend (see Load).
#pragma once

#include <cstddef>
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
  // Precision of matrices; activations have ActivationDType() of it. Not kF16.
  DType weights = DType::kBF16;
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
  // Of these, those of which only the choice of a token is wanted: each one's row is an index into
  // logit_rows, ascending. Their logits never leave the device.
  std::vector<SampleSpec> samples;
  std::vector<LogitEdit> edits;  // of the samples
  // If not 0, nothing but K and V of so many of the lowest layers is computed, and no logits.
  int kv_layers = 0;
};

// Device memory that only grows, so that a step like an earlier one allocates nothing.
class DeviceBuffer {
 public:
  // Both outlive the buffer.
  DeviceBuffer(const Ops* ops, Backend* backend) : ops_(ops), backend_(backend) {}
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer();

  // The contents are lost when it grows.
  absl::Status Reserve(size_t bytes);
  void* data() const { return data_; }
  float* floats() const { return static_cast<float*>(data_); }

 private:
  const Ops* ops_;
  Backend* backend_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// A pass that gives way to others between two layers: Model::Begin, then Advance until it says that
// all is done. Other passes, of any model, may run in between. Dropping it half-way is fine.
struct ResumablePass {
  ResumablePass(const Ops* ops, Backend* backend) : residual(ops, backend) {}

  ForwardBatch batch;
  int next_layer = 0;
  DeviceBuffer residual;  // (rows, hidden) f32
};

class Model {
 public:
  // Maps, checks, hashes and packs a Hugging Face folder. INVALID_ARGUMENT or NOT_FOUND with the
  // file, tensor or field that is wrong. pack() is thread-safe against a running Forward.
  static absl::StatusOr<std::unique_ptr<Model>> Load(const std::string& folder, const Ops& ops,
                                                     Backend* backend, const ModelOptions& options);
  ~Model();

  // Runs the batch; its K and V go into the blocks at kv_base. logits gets (logit rows that are not
  // sampled, vocab) f32 in host memory, sampled gets (samples) and may be null without any.
  // REQUIRES: every position < config().max_positions; every token in [0, vocab).
  absl::Status Forward(const ForwardBatch& batch, void* kv_base, std::vector<float>* logits,
                       std::vector<SampledToken>* sampled = nullptr);

  // The same in parts and without samples, for background work. Begin checks pass->batch. Advance
  // runs layers until all are done, fills logits and returns true; or until yield, asked after each
  // layer, returns true, and returns false. What lies in the blocks of batch must not change in
  // between.
  absl::Status Begin(ResumablePass* pass);
  absl::StatusOr<bool> Advance(ResumablePass* pass, void* kv_base,
                               const std::function<bool()>& yield, std::vector<float>* logits);

  // cos and sin of positions [0, count), as ops take it: device (count, 2, head_dim / 2). Valid
  // until the next call of a method with more positions than ever before. RESOURCE_EXHAUSTED.
  absl::StatusOr<const float*> CosSin(int count);

  const ModelConfig& config() const;
  const KvLayout& kv_layout() const;
  // SHA-256 over the tensors (names, shapes, dtypes, bytes), the config that affects the maths and
  // the compute precision: equal fingerprints mean equal functions.
  const Digest& fingerprint() const;
  // Of the tensors' bytes alone, for people.
  const Digest& weights_sha256() const;
  DType weights_dtype() const;  // of the matrices
  size_t weight_bytes() const;

 private:
  struct Impl;
  explicit Model(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace carryover
