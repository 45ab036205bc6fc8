// config.json and generation_config.json as numbers. Architectures are rows of data: a new one is
// a row in model_config.cc, and a new field here only where its maths differs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carryover {

enum class RopeScaling : uint8_t { kNone, kLinear, kLlama3 };

struct RopeConfig {
  double theta = 10000;
  RopeScaling scaling = RopeScaling::kNone;
  double factor = 1;
  double low_freq_factor = 1;      // llama3
  double high_freq_factor = 4;     // llama3
  int original_max_positions = 0;  // llama3
};

struct ModelConfig {
  std::string model_type;  // "llama", "mistral", "qwen2", "qwen3"
  int vocab = 0;
  int hidden = 0;
  int layers = 0;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int intermediate = 0;
  int max_positions = 0;
  double norm_eps = 1e-6;
  bool qkv_bias = false;
  bool out_bias = false;  // of the attention output (llama's attention_bias)
  bool mlp_bias = false;
  bool qk_norm = false;
  bool tied_embeddings = false;
  RopeConfig rope;
  std::vector<int> windows;  // (layers); 0 where a layer sees everything

  // From generation_config.json, or config.json where that says nothing. May be empty.
  std::vector<int32_t> eos_ids;
};

// Reads and checks folder/config.json and folder/generation_config.json. INVALID_ARGUMENT names the
// file and the field; an unknown model_type names those that are known.
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& folder);

// The same from text, for fuzzing: generation_json may be empty.
absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view config_json,
                                             absl::string_view generation_json);

}  // namespace carryover
