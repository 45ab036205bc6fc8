#include "engine/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace carryover {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

json Llama() {
  return {{"model_type", "llama"},    {"vocab_size", 320},
          {"hidden_size", 64},        {"intermediate_size", 128},
          {"num_hidden_layers", 4},   {"num_attention_heads", 4},
          {"num_key_value_heads", 2}, {"max_position_embeddings", 256}};
}

json Typed(const char* type) {
  json config = Llama();
  config["model_type"] = type;
  return config;
}

ModelConfig Parse(const json& config, const std::string& generation = "") {
  absl::StatusOr<ModelConfig> parsed = ParseModelConfig(config.dump(), generation);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return parsed.ok() ? *parsed : ModelConfig{};
}

std::string ErrorOf(const json& config, const std::string& generation = "") {
  absl::StatusOr<ModelConfig> parsed = ParseModelConfig(config.dump(), generation);
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << config;
  return std::string(parsed.status().message());
}

TEST(ModelConfig, FillsInTheDefaultsOfAnArchitecture) {
  const ModelConfig llama = Parse(Llama());
  EXPECT_EQ(llama.head_dim, 16);
  EXPECT_EQ(llama.rope.theta, 10000);
  EXPECT_FALSE(llama.qkv_bias || llama.out_bias || llama.mlp_bias || llama.qk_norm);
  EXPECT_FALSE(llama.tied_embeddings);
  EXPECT_THAT(llama.windows, ElementsAre(0, 0, 0, 0));
  EXPECT_THAT(llama.eos_ids, IsEmpty());

  EXPECT_TRUE(Parse(Typed("qwen2")).qkv_bias);
  EXPECT_FALSE(Parse(Typed("qwen2")).out_bias);
  EXPECT_TRUE(Parse(Typed("qwen3")).qk_norm);
  EXPECT_EQ(Parse(Typed("qwen3")).head_dim, 128);
}

TEST(ModelConfig, WithoutKvHeadsEveryHeadHasItsOwn) {
  json config = Llama();
  config["num_key_value_heads"] = nullptr;
  EXPECT_EQ(Parse(config).kv_heads, 4);
}

TEST(ModelConfig, BiasesAreLlamasChoice) {
  json config = Llama();
  config["attention_bias"] = true;
  config["mlp_bias"] = true;
  const ModelConfig parsed = Parse(config);
  EXPECT_TRUE(parsed.qkv_bias && parsed.out_bias && parsed.mlp_bias);
}

TEST(ModelConfig, ReadsEverySpellingOfRope) {
  const json llama3 = {{"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 64}};
  for (const char* key : {"type", "rope_type"}) {
    for (const char* object : {"rope_scaling", "rope_parameters"}) {
      json config = Llama();
      config["rope_theta"] = 500000.0;
      config[object] = llama3;
      config[object][key] = "llama3";
      const RopeConfig rope = Parse(config).rope;
      EXPECT_EQ(rope.scaling, RopeScaling::kLlama3);
      EXPECT_EQ(rope.theta, 500000);
      EXPECT_EQ(rope.factor, 8);
      EXPECT_EQ(rope.low_freq_factor, 1);
      EXPECT_EQ(rope.high_freq_factor, 4);
      EXPECT_EQ(rope.original_max_positions, 64);
    }
  }
  json config = Llama();
  config["rope_parameters"] = {{"rope_type", "linear"}, {"factor", 2}, {"rope_theta", 1000}};
  EXPECT_EQ(Parse(config).rope.scaling, RopeScaling::kLinear);
  EXPECT_EQ(Parse(config).rope.factor, 2);
  EXPECT_EQ(Parse(config).rope.theta, 1000);
  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1000}};
  EXPECT_EQ(Parse(config).rope.scaling, RopeScaling::kNone);
}

TEST(ModelConfig, RefusesRopeItDoesNotKnow) {
  for (const char* type : {"dynamic", "yarn", "longrope", "su", "Linear"}) {
    json config = Llama();
    config["rope_scaling"] = {{"rope_type", type}, {"factor", 2.0}};
    EXPECT_THAT(ErrorOf(config), HasSubstr("config.json: rope_scaling.rope_type")) << type;
  }
  json config = Llama();
  config["rope_scaling"] = {{"type", "linear"}};
  EXPECT_THAT(ErrorOf(config), HasSubstr("rope_scaling.factor is missing"));
  config["rope_scaling"] = {{"full_attention", {{"rope_type", "default"}}}};
  EXPECT_THAT(ErrorOf(config), HasSubstr("rope_scaling.full_attention"));
}

TEST(ModelConfig, MistralsWindowHoldsForEveryLayer) {
  json config = Typed("mistral");
  EXPECT_THAT(Parse(config).windows, ElementsAre(4096, 4096, 4096, 4096));
  config["sliding_window"] = 24;
  EXPECT_THAT(Parse(config).windows, ElementsAre(24, 24, 24, 24));
  config["sliding_window"] = nullptr;
  EXPECT_THAT(Parse(config).windows, ElementsAre(0, 0, 0, 0));
  config["sliding_window"] = 0;
  EXPECT_THAT(ErrorOf(config), HasSubstr("sliding_window"));
}

TEST(ModelConfig, QwensWindowHoldsForSomeLayers) {
  json config = Typed("qwen2");
  config["sliding_window"] = 24;
  config["max_window_layers"] = 1;
  config["use_sliding_window"] = false;
  EXPECT_THAT(Parse(config).windows, ElementsAre(0, 0, 0, 0));
  config["use_sliding_window"] = true;
  EXPECT_THAT(Parse(config).windows, ElementsAre(0, 24, 24, 24));
  config["layer_types"] = {"full_attention", "sliding_attention", "full_attention",
                           "sliding_attention"};
  EXPECT_THAT(Parse(config).windows, ElementsAre(0, 24, 0, 24));
  config["use_sliding_window"] = false;
  EXPECT_THAT(ErrorOf(config), HasSubstr("layer_types"));
  config["layer_types"] = {"full_attention"};
  EXPECT_THAT(ErrorOf(config), HasSubstr("layer_types"));
}

TEST(ModelConfig, TheGenerationConfigDecidesWhatEndsAText) {
  json config = Llama();
  config["eos_token_id"] = 2;
  EXPECT_THAT(Parse(config).eos_ids, ElementsAre(2));
  EXPECT_THAT(Parse(config, R"({"eos_token_id": [3, 4]})").eos_ids, ElementsAre(3, 4));
  EXPECT_THAT(Parse(config, R"({"eos_token_id": 5})").eos_ids, ElementsAre(5));
  EXPECT_THAT(Parse(config, "{}").eos_ids, ElementsAre(2));
  EXPECT_THAT(ErrorOf(config, R"({"eos_token_id": 320})"),
              HasSubstr("generation_config.json: eos_token_id"));
  EXPECT_THAT(ErrorOf(config, R"({"eos_token_id": [true]})"),
              HasSubstr("generation_config.json: eos_token_id"));
  EXPECT_THAT(ErrorOf(config, "{"), HasSubstr("generation_config.json: is not valid JSON"));
}

TEST(ModelConfig, NamesTheFieldThatIsWrong) {
  const struct {
    const char* field;
    json value;
  } cases[] = {
      {"model_type", "gpt2"},
      {"model_type", 1},
      {"model_type", nullptr},
      {"hidden_act", "gelu"},
      {"torch_dtype", "float8_e4m3fn"},
      {"dtype", 16},
      {"quantization_config", json::object()},
      {"partial_rotary_factor", 0.5},
      {"architectures", {"LlamaForSequenceClassification"}},
      {"vocab_size", 0},
      {"vocab_size", -1},
      {"vocab_size", 320.5},
      {"vocab_size", "320"},
      {"vocab_size", 1e30},
      {"vocab_size", 9223372036854775807},
      {"vocab_size", 18446744073709551615u},
      {"vocab_size", nullptr},
      {"hidden_size", 66000},
      {"hidden_size", 66},
      {"num_hidden_layers", 1000000},
      {"num_attention_heads", 0},
      {"num_key_value_heads", 3},
      {"head_dim", 15},
      {"head_dim", 512},
      {"intermediate_size", true},
      {"max_position_embeddings", 1e9},
      {"rms_norm_eps", "1e-5"},
      {"rms_norm_eps", -1},
      {"attention_bias", "yes"},
      {"mlp_bias", 1},
      {"tie_word_embeddings", "true"},
      {"rope_theta", 0},
      {"rope_theta", "10000"},
      {"rope_scaling", {1, 2}},
      {"eos_token_id", -1},
  };
  for (const auto& test : cases) {
    json config = Llama();
    config[test.field] = test.value;
    const std::string error = ErrorOf(config);
    EXPECT_THAT(error, HasSubstr("config.json: ")) << test.field << test.value;
    EXPECT_THAT(error, HasSubstr(test.field)) << test.field << test.value;
  }
}

TEST(ModelConfig, AKeyMayStandOnlyOnce) {
  EXPECT_THAT(std::string(ParseModelConfig(R"({"a": 1, "a": 2})", "").status().message()),
              HasSubstr("config.json: has the key 'a' twice"));
}

TEST(ModelConfig, DeepOrLongJsonIsRefused) {
  const auto error = [](const std::string& text) {
    return std::string(ParseModelConfig(text, "").status().message());
  };
  EXPECT_THAT(error(std::string(100000, '[')), HasSubstr("nested deeper"));
  std::string numbers = "[0";
  for (int i = 0; i < 200000; ++i) numbers += ",0";
  EXPECT_THAT(error(numbers + "]"), HasSubstr("more than"));
  EXPECT_THAT(error("[]"), HasSubstr("is not a JSON object"));
  EXPECT_THAT(error(""), HasSubstr("is not valid JSON"));
}

}  // namespace
}  // namespace carryover
