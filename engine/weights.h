// The tensors of a checkpoint, checked against the config and packed for a backend. The checks and
// the packing may run on any thread; what they make is immutable.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model_config.h"
#include "engine/safetensors.h"
#include "kernels/ops.h"

namespace carryover {

// INVALID_ARGUMENT names the first tensor that is missing, of another shape than the config asks
// for, or not part of the model. Tolerated, because files in the wild have them: buffers named
// *.rotary_emb.inv_freq, and in a tied model an lm_head.weight with the embedding's own values.
absl::Status CheckTensors(const ModelConfig& config, const TensorMap& tensors);

// Whether CheckTensors merely tolerates the tensor: it takes no part in the maths.
bool IsUnusedTensor(const ModelConfig& config, const std::string& name);

struct LayerWeights {
  float* attention_norm = nullptr;  // device (hidden)
  float* mlp_norm = nullptr;        // device (hidden)
  float* q_norm = nullptr;          // device (head_dim), null without QK norm
  float* k_norm = nullptr;          // device (head_dim), null without QK norm
  PackedMatrix* qkv = nullptr;      // ((heads + 2 kv_heads) * head_dim, hidden)
  PackedMatrix* out = nullptr;      // (hidden, heads * head_dim)
  PackedMatrix* gate_up = nullptr;  // (2 intermediate, hidden), gate first
  PackedMatrix* down = nullptr;     // (hidden, intermediate)
};

// Owns device memory; move-only.
struct ModelWeights {
  ModelWeights(const Ops* ops, Backend* backend) : ops(ops), backend(backend) {}
  ModelWeights(ModelWeights&& other) noexcept;
  ModelWeights& operator=(ModelWeights&&) = delete;
  ~ModelWeights();

  const Ops* ops;
  Backend* backend;
  DType type = DType::kF32;         // of the matrices
  void* embedding = nullptr;        // device (vocab, hidden) of ActivationDType(type)
  float* final_norm = nullptr;      // device (hidden)
  PackedMatrix* lm_head = nullptr;  // (vocab, hidden)
  std::vector<LayerWeights> layers;
  size_t bytes = 0;  // of everything above
};

// REQUIRES: CheckTensors passed. `progress` may be null; it is told shares from 0 to 1.
absl::StatusOr<ModelWeights> PackWeights(const ModelConfig& config, const TensorMap& tensors,
                                         const Ops& ops, Backend* backend, DType type,
                                         const std::function<void(double)>& progress);

}  // namespace carryover
