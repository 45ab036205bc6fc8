// A model folder of a given shape with random bf16 weights, for benchmarks: nothing is downloaded.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace carryover {

struct ModelShape {
  const char* name;
  int layers;
  int hidden;
  int heads;
  int kv_heads;
  int head_dim;
  int intermediate;
  int vocab;
  bool tied;  // the embedding is the LM head too

  int QkvRows() const { return (heads + 2 * kv_heads) * head_dim; }
  int64_t LayerValues() const {  // of its matrices
    return int64_t{hidden} * (QkvRows() + heads * head_dim + 3 * int64_t{intermediate});
  }
  int64_t HeadValues() const { return int64_t{vocab} * hidden; }
  int64_t KvBytesPerToken() const { return int64_t{2} * kv_heads * head_dim * 2 * layers; }
};

// The published shapes; `layers` may be cut to make a run shorter.
inline constexpr ModelShape kLlama8B = {"llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256, false};
inline constexpr ModelShape kSmolLm2 = {"smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, true};
// For the emulated device.
inline constexpr ModelShape kTiny = {"tiny", 1, 64, 4, 2, 16, 96, 320, true};

// Writes config.json and model.safetensors, and copies the tokenizer of tests/golden/tiny. The
// folder must exist. source_dir is the root of the source tree.
absl::Status WriteRandomModel(const ModelShape& shape, int max_positions,
                              const std::string& source_dir, const std::string& folder);

}  // namespace carryover
