// What makes two versions the same, and two versions' KV blocks interchangeable. Pure functions.
#pragma once

#include "base/hash.h"
#include "engine/kv_layout.h"
#include "engine/model_config.h"
#include "engine/safetensors.h"
#include "kernels/ops.h"

namespace carryover {

struct ModelDigests {
  Digest weights{};      // of the tensors' names and bytes
  Digest fingerprint{};  // of names, shapes, dtypes, bytes, the config's maths and the precision
};

// Hashes the tensors that take part in the maths, on as many threads as there are cores.
ModelDigests HashModel(const ModelConfig& config, const TensorMap& tensors, DType weights,
                       DType kv_dtype);

// REQUIRES: kv_dtype is kBF16 or kF32, block_tokens a positive multiple of 16.
KvLayout MakeKvLayout(const ModelConfig& config, DType kv_dtype, int block_tokens,
                      const char* kv_format);

}  // namespace carryover
