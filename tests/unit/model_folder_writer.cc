#include "tests/unit/model_folder_writer.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>

#include "base/status_macros.h"

namespace carryover {

using nlohmann::json;

std::string TestSafetensors::Header() const {
  // Written by hand: a JSON object could not hold a name twice.
  std::string header = "{\"__metadata__\":{\"format\":\"pt\"}";
  for (const TestTensor& tensor : tensors) {
    const json entry = {{"dtype", tensor.dtype},
                        {"shape", tensor.shape},
                        {"data_offsets", json::array({tensor.begin, tensor.end})}};
    header += "," + json(tensor.name).dump() + ":" + entry.dump();
  }
  return header + "}";
}

std::string TestSafetensors::File() const { return File(Header(), data); }

std::string TestSafetensors::File(const std::string& header, const std::string& data) {
  return File(header.size(), header, data);
}

std::string TestSafetensors::File(uint64_t length, const std::string& header,
                                  const std::string& data) {
  std::string file(8, '\0');
  for (int i = 0; i < 8; ++i) file[i] = static_cast<char>(length >> (8 * i));
  return file + header + data;
}

json TestLlamaConfig() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"vocab_size", 16},
          {"hidden_size", 8},
          {"intermediate_size", 12},
          {"num_hidden_layers", 1},
          {"num_attention_heads", 2},
          {"num_key_value_heads", 1},
          {"head_dim", 4},
          {"max_position_embeddings", 64},
          {"rms_norm_eps", 1e-5},
          {"rope_theta", 10000.0},
          {"hidden_act", "silu"},
          {"tie_word_embeddings", false},
          {"torch_dtype", "float32"}};
}

TestSafetensors TestLlamaTensors() {
  const std::string layer = "model.layers.0.";
  const std::vector<std::pair<std::string, std::vector<int>>> shapes = {
      {"lm_head.weight", {16, 8}},
      {"model.embed_tokens.weight", {16, 8}},
      {layer + "input_layernorm.weight", {8}},
      {layer + "mlp.down_proj.weight", {8, 12}},
      {layer + "mlp.gate_proj.weight", {12, 8}},
      {layer + "mlp.up_proj.weight", {12, 8}},
      {layer + "post_attention_layernorm.weight", {8}},
      {layer + "self_attn.k_proj.weight", {4, 8}},
      {layer + "self_attn.o_proj.weight", {8, 8}},
      {layer + "self_attn.q_proj.weight", {8, 8}},
      {layer + "self_attn.v_proj.weight", {4, 8}},
      {"model.norm.weight", {8}},
  };
  TestSafetensors file;
  std::mt19937 random(7);
  for (const auto& [name, shape] : shapes) {
    size_t elements = 1;
    for (int extent : shape) elements *= extent;
    const size_t begin = file.data.size();
    for (size_t i = 0; i < elements; ++i) {
      const float value = static_cast<float>(random() % 2001) / 1000.0f - 1.0f;
      char bytes[sizeof(value)];
      std::memcpy(bytes, &value, sizeof(value));
      file.data.append(bytes, sizeof(bytes));
    }
    file.tensors.push_back({name, "F32", shape, begin, file.data.size()});
  }
  return file;
}

void WriteTestFile(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string NewTestFolder() {
  std::string folder = testing::TempDir() + "/model_folder.XXXXXX";
  CHECK(mkdtemp(folder.data()) != nullptr);
  return folder;
}

}  // namespace carryover
