#include "tests/gpu/random_model.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace carryover {
namespace {

using nlohmann::json;

// bf16 values of about +-0.02, as trained matrices have: zeros would let the device draw less power
// and clock higher.
std::vector<uint16_t> Noise(size_t count) {
  std::vector<uint16_t> values(count);
  std::minstd_rand random(7);
  for (uint16_t& v : values) {
    const auto bits = static_cast<uint32_t>(random());
    // Exponents of 2^-10 to 2^-6.
    v = static_cast<uint16_t>((bits & 0x8000u) | ((117 + (bits >> 16) % 5) << 7) | (bits & 0x7fu));
  }
  return values;
}

std::vector<std::pair<std::string, std::vector<int64_t>>> Tensors(const ModelShape& s) {
  std::vector<std::pair<std::string, std::vector<int64_t>>> all = {
      {"model.embed_tokens.weight", {s.vocab, s.hidden}}, {"model.norm.weight", {s.hidden}}};
  if (!s.tied) all.push_back({"lm_head.weight", {s.vocab, s.hidden}});
  for (int i = 0; i < s.layers; ++i) {
    const std::string layer = absl::StrCat("model.layers.", i, ".");
    const int64_t q = int64_t{s.heads} * s.head_dim, kv = int64_t{s.kv_heads} * s.head_dim;
    all.push_back({layer + "input_layernorm.weight", {s.hidden}});
    all.push_back({layer + "post_attention_layernorm.weight", {s.hidden}});
    all.push_back({layer + "self_attn.q_proj.weight", {q, s.hidden}});
    all.push_back({layer + "self_attn.k_proj.weight", {kv, s.hidden}});
    all.push_back({layer + "self_attn.v_proj.weight", {kv, s.hidden}});
    all.push_back({layer + "self_attn.o_proj.weight", {s.hidden, q}});
    all.push_back({layer + "mlp.gate_proj.weight", {s.intermediate, s.hidden}});
    all.push_back({layer + "mlp.up_proj.weight", {s.intermediate, s.hidden}});
    all.push_back({layer + "mlp.down_proj.weight", {s.hidden, s.intermediate}});
  }
  return all;
}

}  // namespace

absl::Status WriteRandomModel(const ModelShape& s, int max_positions, const std::string& source_dir,
                              const std::string& folder) {
  const json config = {{"architectures", {"LlamaForCausalLM"}},
                       {"model_type", "llama"},
                       {"vocab_size", s.vocab},
                       {"hidden_size", s.hidden},
                       {"intermediate_size", s.intermediate},
                       {"num_hidden_layers", s.layers},
                       {"num_attention_heads", s.heads},
                       {"num_key_value_heads", s.kv_heads},
                       {"head_dim", s.head_dim},
                       {"max_position_embeddings", max_positions},
                       {"rms_norm_eps", 1e-5},
                       {"rope_theta", 500000.0},
                       {"hidden_act", "silu"},
                       {"tie_word_embeddings", s.tied},
                       {"torch_dtype", "bfloat16"}};
  std::ofstream(folder + "/config.json") << config.dump();
  std::error_code error;
  std::filesystem::copy_file(source_dir + "/tests/golden/tiny/llama3/tokenizer.json",
                             folder + "/tokenizer.json",
                             std::filesystem::copy_options::overwrite_existing, error);
  if (error) {
    return absl::NotFoundError(
        absl::StrCat("no tokenizer below ", source_dir, ": ", error.message()));
  }
  json header = json::object();
  int64_t bytes = 0;
  for (const auto& [name, extents] : Tensors(s)) {
    int64_t size = 2;
    for (int64_t extent : extents) size *= extent;
    header[name] = {{"dtype", "BF16"}, {"shape", extents}, {"data_offsets", {bytes, bytes + size}}};
    bytes += size;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  std::ofstream file(folder + "/model.safetensors", std::ios::binary);
  for (int i = 0; i < 8; ++i) file.put(static_cast<char>(text.size() >> (8 * i)));
  file << text;
  // One stretch of noise over and over. Its odd length sees to it that no two rows are alike.
  const std::vector<uint16_t> noise = Noise(std::min<int64_t>(bytes / 2, (int64_t{8} << 20) + 7));
  const auto noise_bytes = static_cast<int64_t>(noise.size() * sizeof(noise[0]));
  for (int64_t at = 0; at < bytes; at += noise_bytes) {
    file.write(reinterpret_cast<const char*>(noise.data()), std::min(noise_bytes, bytes - at));
  }
  file.flush();
  if (!file) return absl::ResourceExhaustedError(absl::StrCat("cannot write to ", folder));
  return absl::OkStatus();
}

}  // namespace carryover
