// Broken model folders: each gives one clear error that names the file, tensor or field, and never
// a crash, a hang or a large allocation.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/model.h"
#include "engine/model_config.h"
#include "engine/safetensors.h"
#include "engine/weights.h"
#include "kernels/ops.h"
#include "tests/unit/model_folder_writer.h"

namespace carryover {
namespace {

using nlohmann::json;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr char kShard[] = "model.safetensors";
constexpr char kIndex[] = "model.safetensors.index.json";

// One broken folder: its files (absent where empty), and what the error must say.
struct Broken {
  std::string what;
  std::string config;
  std::string safetensors;
  std::vector<std::string> named;  // all of these stand in the error
  std::string index;
  std::string generation;
};

class Mutations {
 public:
  std::vector<Broken> All() {
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
  std::vector<Broken> all_;

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
      Broken broken = {what, config_.dump(), "", std::move(named), index, ""};
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

// Limits the memory that this process may still map, so that a huge allocation fails at once, even
// one that nobody touches. AddressSanitizer maps terabytes by itself: there it does nothing.
class MemoryLimit {
 public:
  explicit MemoryLimit(size_t more_bytes) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    getrlimit(RLIMIT_AS, &before_);
    rlimit limit = before_;
    limit.rlim_cur = MappedBytes() + more_bytes;
    setrlimit(RLIMIT_AS, &limit);
    set_ = true;
#endif
  }
  ~MemoryLimit() {
    if (set_) setrlimit(RLIMIT_AS, &before_);
  }

 private:
  static size_t MappedBytes() {
    FILE* file = std::fopen("/proc/self/statm", "r");
    unsigned long pages = 0;
    if (file == nullptr || std::fscanf(file, "%lu", &pages) != 1) pages = 1 << 20;
    if (file != nullptr) std::fclose(file);
    return pages * 4096;
  }

  rlimit before_ = {};
  bool set_ = false;
};

class ModelFolder : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = NewTestFolder();
    auto backend = CpuOps().create({.threads = 1});
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *backend;
  }
  void TearDown() override {
    std::filesystem::remove_all(folder_);
    CpuOps().destroy(backend_);
  }

  void Write(const char* name, const std::string& bytes) {
    if (bytes.empty()) {
      std::filesystem::remove(folder_ + "/" + name);
    } else {
      WriteTestFile(folder_ + "/" + name, bytes);
    }
  }
  absl::StatusOr<std::unique_ptr<Model>> Load() {
    return Model::Load(folder_, CpuOps(), backend_,
                       {.weights = DType::kF32, .kv_dtype = DType::kF32});
  }

  std::string folder_;
  Backend* backend_ = nullptr;
};

TEST_F(ModelFolder, TheUnbrokenOneLoads) {
  Write("config.json", TestLlamaConfig().dump());
  Write(kShard, TestLlamaTensors().File());
  const auto model = Load();
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->config().vocab, 16);
  EXPECT_GT((*model)->weight_bytes(), 0u);
}

TEST_F(ModelFolder, EveryBrokenOneGivesAnErrorThatNamesThePlace) {
  const std::vector<Broken> all = Mutations().All();
  EXPECT_GE(all.size(), 200u);
  const MemoryLimit limit(256u << 20);
  const auto begin = std::chrono::steady_clock::now();
  for (const Broken& broken : all) {
    Write("config.json", broken.config);
    Write("generation_config.json", broken.generation);
    Write(kShard, broken.safetensors);
    Write(kIndex, broken.index);
    const absl::Status status = Load().status();
    EXPECT_THAT(status.code(),
                AnyOf(absl::StatusCode::kInvalidArgument, absl::StatusCode::kNotFound))
        << broken.what << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(folder_)) << broken.what;
    for (const std::string& named : broken.named) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(named)) << broken.what;
    }
    EXPECT_LT(status.message().size(), 1000u) << broken.what;
  }
  const auto time = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(std::chrono::duration<double>(time).count(), 0.2 * all.size());
  RecordProperty("broken_folders", static_cast<int>(all.size()));
}

TEST_F(ModelFolder, ToleratesBuffersAndACopyOfATiedHead) {
  TestSafetensors tensors = TestLlamaTensors();
  const size_t begin = tensors.data.size();
  tensors.data.append(8, '\0');
  tensors.tensors.push_back(
      {"model.layers.0.self_attn.rotary_emb.inv_freq", "F32", {2}, begin, begin + 8});
  json config = TestLlamaConfig();
  Write("config.json", config.dump());
  Write(kShard, tensors.File());
  EXPECT_TRUE(Load().ok()) << Load().status();

  config["tie_word_embeddings"] = true;
  Write("config.json", config.dump());
  EXPECT_THAT(std::string(Load().status().message()), HasSubstr("lm_head.weight"));
  // The head lies first in the file, the embedding behind it.
  const size_t bytes = tensors.tensors[0].end.get<size_t>();
  tensors.data.replace(0, bytes, tensors.data.substr(bytes, bytes));
  Write(kShard, tensors.File());
  EXPECT_TRUE(Load().ok()) << Load().status();
}

TEST_F(ModelFolder, TheFingerprintIsOfWhatComputes) {
  const auto load = [this](const json& config, const std::string& file, DType weights,
                           DType kv_dtype) {
    Write("config.json", config.dump());
    Write(kShard, file);
    auto model =
        Model::Load(folder_, CpuOps(), backend_, {.weights = weights, .kv_dtype = kv_dtype});
    EXPECT_TRUE(model.ok()) << model.status();
    return *std::move(model);
  };
  const json config = TestLlamaConfig();
  const TestSafetensors tensors = TestLlamaTensors();
  const auto base = load(config, tensors.File(), DType::kF32, DType::kF32);
  EXPECT_EQ(load(config, tensors.File(), DType::kF32, DType::kF32)->fingerprint(),
            base->fingerprint());

  // Other precision: another function, over the same bytes.
  for (const auto& other : {load(config, tensors.File(), DType::kBF16, DType::kF32),
                            load(config, tensors.File(), DType::kF32, DType::kBF16)}) {
    EXPECT_NE(other->fingerprint(), base->fingerprint());
    EXPECT_EQ(other->weights_sha256(), base->weights_sha256());
  }
  EXPECT_EQ(load(config, tensors.File(), DType::kBF16, DType::kF32)->kv_layout().sha256,
            base->kv_layout().sha256);
  EXPECT_NE(load(config, tensors.File(), DType::kF32, DType::kBF16)->kv_layout().sha256,
            base->kv_layout().sha256);

  // One bit of one weight.
  TestSafetensors flipped = tensors;
  flipped.data.back() = static_cast<char>(flipped.data.back() ^ 1);
  const auto other_bytes = load(config, flipped.File(), DType::kF32, DType::kF32);
  EXPECT_NE(other_bytes->fingerprint(), base->fingerprint());
  EXPECT_NE(other_bytes->weights_sha256(), base->weights_sha256());
  EXPECT_EQ(other_bytes->kv_layout().sha256, base->kv_layout().sha256);

  // Maths that the config decides. RoPE is also part of what a cached key means.
  json other_rope = config;
  other_rope["rope_theta"] = 20000.0;
  const auto rope = load(other_rope, tensors.File(), DType::kF32, DType::kF32);
  EXPECT_NE(rope->fingerprint(), base->fingerprint());
  EXPECT_NE(rope->kv_layout().sha256, base->kv_layout().sha256);
  json other_eps = config;
  other_eps["rms_norm_eps"] = 1e-6;
  const auto eps = load(other_eps, tensors.File(), DType::kF32, DType::kF32);
  EXPECT_NE(eps->fingerprint(), base->fingerprint());
  EXPECT_EQ(eps->kv_layout().sha256, base->kv_layout().sha256);
  // What ends a text, or bounds it, changes no function.
  json other_bounds = config;
  other_bounds["eos_token_id"] = 3;
  other_bounds["max_position_embeddings"] = 128;
  EXPECT_EQ(load(other_bounds, tensors.File(), DType::kF32, DType::kF32)->fingerprint(),
            base->fingerprint());

  // The order in the file and its metadata do not matter.
  TestSafetensors reordered = tensors;
  std::swap(reordered.tensors[0], reordered.tensors[3]);
  EXPECT_EQ(load(config, reordered.File(), DType::kF32, DType::kF32)->fingerprint(),
            base->fingerprint());
}

TEST(ModelFolderFuzz, RandomBytesNeverCrashTheChecks) {
  const std::string config_text = TestLlamaConfig().dump();
  const TestSafetensors tensors = TestLlamaTensors();
  const std::string file = tensors.File();
  const size_t header_bytes = file.size() - tensors.data.size();
  const auto good_config = ParseModelConfig(config_text, "");
  ASSERT_TRUE(good_config.ok());
  const MemoryLimit limit(256u << 20);
  std::mt19937 random(11);
  int refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string changed = file;
    for (int flips = 1 + random() % 3; flips > 0; --flips) {
      changed[random() % header_bytes] = static_cast<char>(random());
    }
    const auto parsed = ParseSafetensors(changed, kShard);
    if (parsed.ok()) {
      refused += !CheckTensors(*good_config, *parsed).ok();
    } else {
      EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_TRUE(absl::StartsWith(parsed.status().message(), "model.safetensors: "));
      ++refused;
    }
    std::string changed_config = config_text;
    for (int flips = 1 + random() % 3; flips > 0; --flips) {
      changed_config[random() % changed_config.size()] = static_cast<char>(random());
    }
    const auto config = ParseModelConfig(changed_config, "");
    if (!config.ok()) {
      EXPECT_TRUE(absl::StartsWith(config.status().message(), "config.json: "));
    }
  }
  EXPECT_GT(refused, 2500);
}

}  // namespace
}  // namespace carryover
