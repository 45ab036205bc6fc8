#include "tests/unit/broken_folders.h"

#include <functional>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/unit/model_folder_writer.h"

namespace carryover {
namespace {

using nlohmann::json;

constexpr char kShard[] = "model.safetensors";
constexpr char kIndex[] = "model.safetensors.index.json";

class Mutations {
 public:
  std::vector<BrokenFolder> All() {
    ConfigFields();
    ConfigText();
    ConfigAgainstTensors();
    HeaderLength();
    HeaderText();
    Tensors();
    Truncated();
    Index();
    Generation();
    return std::move(all_);
  }

 private:
  const json config_ = TestLlamaConfig();
  const TestSafetensors tensors_ = TestLlamaTensors();
  std::vector<BrokenFolder> all_;

  void Add(const std::string& what, const std::string& config, const std::string& safetensors,
           std::vector<std::string> named) {
    all_.push_back({what, config, safetensors, std::move(named), "", ""});
  }
  void AddConfig(const std::string& what, const json& config, std::vector<std::string> named) {
    Add(what, config.dump(), tensors_.File(), std::move(named));
  }
  void AddShard(const std::string& what, const std::string& file, std::vector<std::string> named) {
    Add(what, config_.dump(), file, std::move(named));
  }

  void ConfigFields() {
    const std::vector<json> wrong_number = {nullptr, "8",        1.5,           -1,
                                            0,       2147483648, INT64_MAX,     UINT64_MAX,
                                            1e300,   true,       json::array(), json::object()};
    for (const char* field : {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                              "num_attention_heads", "max_position_embeddings"}) {
      json missing = config_;
      missing.erase(field);
      AddConfig(absl::StrCat(field, " missing"), missing, {"config.json: ", field});
      for (const json& value : wrong_number) {
        json config = config_;
        config[field] = value;
        AddConfig(absl::StrCat(field, " = ", value.dump()), config, {"config.json: ", field});
      }
    }
    const std::vector<std::pair<const char*, json>> others = {
        {"num_key_value_heads", 0},
        {"num_key_value_heads", 3},
        {"num_key_value_heads", "1"},
        {"head_dim", 3},
        {"head_dim", 0},
        {"head_dim", -4},
        {"head_dim", 258},
        {"head_dim", "4"},
        {"rms_norm_eps", "small"},
        {"rms_norm_eps", -1},
        {"rms_norm_eps", 1e300},
        {"rope_theta", 0},
        {"rope_theta", -10000},
        {"rope_theta", "10000"},
        {"rope_theta", json::array()},
        {"hidden_act", "gelu"},
        {"hidden_act", 7},
        {"tie_word_embeddings", 0},
        {"attention_bias", "true"},
        {"mlp_bias", json::array()},
        {"torch_dtype", "int8"},
        {"torch_dtype", 32},
        {"architectures", json::array()},
        {"architectures", {"GPT2LMHeadModel"}},
        {"architectures", "LlamaForCausalLM"},
        {"model_type", "gpt2"},
        {"model_type", ""},
        {"model_type", 3},
        {"model_type", nullptr},
        {"quantization_config", {{"bits", 4}}},
        {"rope_scaling", 2.0},
        {"rope_scaling", {{"type", "dynamic"}, {"factor", 2.0}}},
        {"rope_scaling", {{"rope_type", "yarn"}, {"factor", 2.0}}},
        {"rope_scaling", {{"rope_type", "linear"}}},
        {"rope_scaling", {{"rope_type", "linear"}, {"factor", "2"}}},
        {"rope_scaling", {{"rope_type", "linear"}, {"factor", 0}}},
        {"rope_scaling", {{"rope_type", "linear"}, {"factor", -2}}},
        {"rope_scaling", {{"rope_type", "llama3"}, {"factor", 8}}},
        {"rope_scaling",
         {{"rope_type", "llama3"}, {"factor", 8}, {"low_freq_factor", 4}, {"high_freq_factor", 4}}},
        {"rope_parameters", {{"rope_type", 1}}},
        {"rope_parameters", json::array()},
        {"eos_token_id", 16},
        {"eos_token_id", -1},
        {"eos_token_id", "</s>"},
        {"eos_token_id", {1, 99}},
        {"eos_token_id", std::vector<int>(100, 1)},
        {"layer_types", {"sliding_attention"}},
        {"layer_types", {"full_attention", "full_attention"}},
        {"layer_types", 1},
    };
    for (const auto& [field, value] : others) {
      json config = config_;
      config[field] = value;
      AddConfig(absl::StrCat(field, " = ", value.dump()), config, {"config.json: ", field});
    }
  }

  void ConfigText() {
    const std::string text = config_.dump();
    for (size_t length = 1; length < text.size(); length += 23) {
      Add(absl::StrCat("config cut at ", length), text.substr(0, length), tensors_.File(),
          {"config.json: is not valid JSON"});
    }
    for (const std::string& bad :
         {std::string("[]"), std::string("null"), std::string("1"), text + "x", "\xff" + text,
          std::string(100000, '['), std::string(100000, '{'),
          "{\"a\":" + std::string(5000, '[') + std::string(5000, ']') + "}",
          std::string("{\"hidden_size\":8,\"hidden_size\":9}"), std::string("{\"a\":\"\xc0\x80\"}"),
          std::string("{\"a\":NaN}"), std::string("{\"a\":1e999}")}) {
      Add("config " + bad.substr(0, 40), bad, tensors_.File(), {"config.json: "});
    }
    Add("no config", "", tensors_.File(), {"config.json"});
  }

  void ConfigAgainstTensors() {
    const std::vector<std::tuple<const char*, json, const char*>> cases = {
        {"vocab_size", 17, "lm_head.weight"},
        {"vocab_size", 1 << 21, "lm_head.weight"},
        {"hidden_size", 12, "lm_head.weight"},
        {"intermediate_size", 13, "model.layers.0.mlp.down_proj.weight"},
        {"intermediate_size", 1 << 19, "model.layers.0.mlp.down_proj.weight"},
        {"num_hidden_layers", 2, "model.layers.1."},
        {"num_hidden_layers", 1024, "model.layers.1"},
        {"num_attention_heads", 4, "self_attn.o_proj.weight"},
        {"num_key_value_heads", 2, "self_attn.k_proj.weight"},
        {"head_dim", 8, "self_attn.k_proj.weight"},
        {"attention_bias", true, "self_attn.k_proj.bias"},
        {"mlp_bias", true, "mlp.down_proj.bias"},
        {"tie_word_embeddings", true, "lm_head.weight"},
    };
    for (const auto& [field, value, tensor] : cases) {
      json config = config_;
      config[field] = value;
      AddConfig(absl::StrCat(field, " = ", value.dump(), " against the tensors"), config,
                {"tensor '", tensor});
    }
    for (const char* type : {"qwen2", "qwen3"}) {
      json config = config_;
      config["model_type"] = type;
      config.erase("architectures");
      AddConfig(absl::StrCat("a Llama that says ", type), config, {"tensor '", "self_attn."});
    }
  }

  void HeaderLength() {
    const std::string header = tensors_.Header();
    const uint64_t size = header.size();
    for (uint64_t length :
         {uint64_t{0}, uint64_t{1}, size - 1, size + 1, size + tensors_.data.size(),
          size + tensors_.data.size() + 1, uint64_t{1} << 31, uint64_t{1} << 32, uint64_t{1} << 62,
          uint64_t{1} << 63, UINT64_MAX, UINT64_MAX - 7}) {
      AddShard(absl::StrCat("header length ", length),
               TestSafetensors::File(length, header, tensors_.data), {kShard, "header"});
    }
    for (size_t length = 1; length < 8; ++length) {
      AddShard(absl::StrCat("a file of ", length, " bytes"), tensors_.File().substr(0, length),
               {kShard});
    }
    // A header that is really long.
    AddShard("20 MB of header", TestSafetensors::File("{" + std::string(20 << 20, ' ') + "}", ""),
             {kShard, "limit"});
  }

  void HeaderText() {
    const std::string header = tensors_.Header();
    for (size_t length = 1; length < header.size(); length += 67) {
      AddShard(absl::StrCat("header cut at ", length),
               TestSafetensors::File(header.substr(0, length), tensors_.data), {kShard, "header"});
    }
    std::string many = "{\"a\":[0";
    for (int i = 0; i < 3000000; ++i) many += ",0";
    for (const std::string& bad :
         {std::string("{}"), std::string("{\"a\":1}"), std::string("{\"a\":{}}"),
          std::string("{\"__metadata__\":[]}"), std::string("{\"__metadata__\":{\"a\":1}}"),
          std::string("{\"a\":") + std::string(100000, '['), many + "]}", header + "{}",
          "[" + header + "]", std::string("{\"a\":null,\"a\":null}")}) {
      AddShard("header " + bad.substr(0, 40), TestSafetensors::File(bad, tensors_.data), {kShard});
    }
  }

  // Every tensor broken in every way.
  void Tensors() {
    using Change = std::function<void(TestTensor*)>;
    const std::vector<std::pair<const char*, Change>> changes = {
        {"dtype I8", [](TestTensor* t) { t->dtype = "I8"; }},
        {"dtype of half the width", [](TestTensor* t) { t->dtype = "BF16"; }},
        {"dtype empty", [](TestTensor* t) { t->dtype = ""; }},
        {"one row more", [](TestTensor* t) { t->shape[0] = t->shape[0].get<int>() + 1; }},
        {"one row less", [](TestTensor* t) { t->shape[0] = t->shape[0].get<int>() - 1; }},
        {"a zero extent", [](TestTensor* t) { t->shape[0] = 0; }},
        {"a negative extent", [](TestTensor* t) { t->shape[0] = -1; }},
        {"a fractional extent", [](TestTensor* t) { t->shape[0] = 8.5; }},
        {"a huge extent", [](TestTensor* t) { t->shape[0] = UINT64_MAX; }},
        {"extents whose product overflows",
         [](TestTensor* t) {
           t->shape = {uint64_t{1} << 32, uint64_t{1} << 32, 16};
         }},
        {"a text for a shape", [](TestTensor* t) { t->shape = "8"; }},
        {"an extent that is a text", [](TestTensor* t) { t->shape[0] = "8"; }},
        {"another rank", [](TestTensor* t) { t->shape.push_back(1); }},
        {"too high a rank", [](TestTensor* t) { t->shape = std::vector<int>(100, 1); }},
        {"a begin too late", [](TestTensor* t) { t->begin = t->begin.get<int>() + 4; }},
        {"an end too early", [](TestTensor* t) { t->end = t->end.get<int>() - 4; }},
        {"an end too late", [](TestTensor* t) { t->end = t->end.get<int>() + 4; }},
        {"an end beyond everything", [](TestTensor* t) { t->end = UINT64_MAX; }},
        {"a negative begin", [](TestTensor* t) { t->begin = -4; }},
        {"a fractional begin", [](TestTensor* t) { t->begin = 0.5; }},
        {"offsets swapped", [](TestTensor* t) { std::swap(t->begin, t->end); }},
        {"another name", [](TestTensor* t) { t->name += "x"; }},
    };
    for (size_t i = 0; i < tensors_.tensors.size(); ++i) {
      for (const auto& [what, change] : changes) {
        TestSafetensors changed = tensors_;
        change(&changed.tensors[i]);
        const std::string& name = tensors_.tensors[i].name;
        AddShard(absl::StrCat(name, ": ", what), changed.File(), {absl::StrCat("tensor '", name)});
      }
      // All offsets of it are moved onto its neighbour's.
      TestSafetensors overlapping = tensors_;
      const TestTensor& other = tensors_.tensors[i == 0 ? 1 : i - 1];
      overlapping.tensors[i].begin = other.begin;
      overlapping.tensors[i].end = other.end;
      overlapping.tensors[i].shape = other.shape;
      AddShard(tensors_.tensors[i].name + ": over its neighbour", overlapping.File(),
               {kShard, "tensor '"});
      TestSafetensors twice = tensors_;
      twice.tensors.push_back(tensors_.tensors[i]);
      AddShard(tensors_.tensors[i].name + ": twice", twice.File(), {kShard, twice.tensors[i].name});
    }
    for (const char* name :
         {"model.layers.1.mlp.up_proj.weight", "extra", "", "model.layers.0.self_attn.q_proj.bias",
          "model.layers.0.self_attn.q_norm.weight", "rotary_emb.inv_freq.x"}) {
      TestSafetensors extra = tensors_;
      const size_t begin = extra.data.size();
      extra.data.append(16, '\0');
      extra.tensors.push_back({name, "F32", {4}, begin, begin + 16});
      AddShard(absl::StrCat("an extra tensor ", name), extra.File(),
               {kShard, absl::StrCat("tensor '", name, "'")});
    }
  }

  void Truncated() {
    const std::string file = tensors_.File();
    const size_t data_begin = file.size() - tensors_.data.size();
    for (size_t length = data_begin; length < file.size(); length += 131) {
      AddShard(absl::StrCat("cut at ", length), file.substr(0, length),
               {kShard, "tensor '", "truncated"});
    }
    AddShard("a byte too many", file + "x", {kShard, "unused"});
    AddShard("no checkpoint", "", {"has neither", kShard});
  }

  void Index() {
    const auto add = [this](const std::string& what, const std::string& index,
                            std::vector<std::string> named) {
      BrokenFolder broken = {what, config_.dump(), "", std::move(named), index, ""};
      all_.push_back(std::move(broken));
    };
    for (const char* name : {"../x.safetensors", "/dev/zero", "/etc/passwd", "a/b.safetensors",
                             "..", ".", "", "..\\x.safetensors", "x.safetensors/", "config.json"}) {
      const json index = {{"weight_map", {{"model.norm.weight", name}}}};
      add(absl::StrCat("index to ", name), index.dump(), {kIndex, "model.norm.weight"});
    }
    add("index to a file that is not there",
        R"({"weight_map":{"model.norm.weight":"model-00001-of-00001.safetensors"}})",
        {kIndex, "model.norm.weight", "model-00001-of-00001.safetensors"});
    const std::string good = R"({"weight_map":{"model.norm.weight":"x.safetensors"}})";
    for (size_t length = 1; length < good.size(); length += 7) {
      add(absl::StrCat("index cut at ", length), good.substr(0, length), {kIndex});
    }
    for (const char* bad :
         {"[]", "{}", R"({"weight_map":[]})", R"({"weight_map":{}})", R"({"weight_map":{"a":1}})",
          R"({"weight_map":{"a":null}})", R"({"weight_map":"x.safetensors"})"}) {
      add(absl::StrCat("index ", bad), bad, {kIndex});
    }
  }

  void Generation() {
    for (const char* bad : {"", "[", "[]", R"({"eos_token_id":16})", R"({"eos_token_id":-1})",
                            R"({"eos_token_id":"x"})", R"({"eos_token_id":[1.5]})",
                            R"({"eos_token_id":{"a":1}})", R"({"eos_token_id":1e99})"}) {
      if (*bad == '\0') continue;
      all_.push_back({absl::StrCat("generation config ", bad),
                      config_.dump(),
                      tensors_.File(),
                      {"generation_config.json: "},
                      "",
                      bad});
    }
  }
};

}  // namespace

std::vector<BrokenFolder> BrokenFolders() { return Mutations().All(); }

}  // namespace carryover
