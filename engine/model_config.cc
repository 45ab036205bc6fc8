#include "engine/model_config.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/mapped_file.h"
#include "base/status_macros.h"
#include "engine/bounded_json.h"

namespace carryover {
namespace {

using nlohmann::json;

constexpr char kConfigFile[] = "config.json";
constexpr char kGenerationFile[] = "generation_config.json";
constexpr size_t kMaxFileBytes = 1u << 20;
constexpr JsonLimits kJsonLimits = {.max_depth = 12, .max_values = 100000};

// Upper limits far above every public model, and low enough that no product of two overflows and
// no table sized by one is large.
constexpr int64_t kMaxVocab = 1 << 21;
constexpr int64_t kMaxHidden = 1 << 16;
constexpr int64_t kMaxIntermediate = 1 << 19;
constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxHeads = 1024;
constexpr int64_t kMaxHeadDim = 256;  // KvGeometry's
constexpr int64_t kMaxPositions = 1 << 24;
constexpr size_t kMaxEosIds = 64;

enum class Windows : uint8_t {
  kNone,     // every layer sees everything
  kAll,      // sliding_window holds for every layer
  kByLayer,  // use_sliding_window, then layer_types or else max_window_layers
};

enum class Bias : uint8_t { kNever, kAlways, kFromConfig };

// What an architecture fixes or defaults to, as in the reference implementation's configuration.
struct Architecture {
  const char* model_type;
  const char* class_name;  // in "architectures"
  Bias qkv_bias;
  Bias out_bias;
  Bias mlp_bias;
  bool qk_norm;
  Windows windows;
  int default_window;    // where sliding_window is absent
  int default_head_dim;  // 0: hidden / heads
  bool tied_by_default;
};

constexpr Architecture kArchitectures[] = {
    {"llama", "LlamaForCausalLM", Bias::kFromConfig, Bias::kFromConfig, Bias::kFromConfig, false,
     Windows::kNone, 0, 0, false},
    {"mistral", "MistralForCausalLM", Bias::kNever, Bias::kNever, Bias::kNever, false,
     Windows::kAll, 4096, 0, false},
    {"qwen2", "Qwen2ForCausalLM", Bias::kAlways, Bias::kNever, Bias::kNever, false,
     Windows::kByLayer, 4096, 0, false},
    {"qwen3", "Qwen3ForCausalLM", Bias::kFromConfig, Bias::kFromConfig, Bias::kNever, true,
     Windows::kByLayer, 4096, 128, false},
};

// Reads the fields of one JSON object and keeps the first error, so that callers read all fields
// first and look at `status` once. A null field counts as absent, as it does for the reference.
class Fields {
 public:
  Fields(const json& object, std::string where) : object_(object), where_(std::move(where)) {}

  const json* Find(const std::string& name) const {
    const auto found = object_.find(name);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  bool IsExplicitNull(const std::string& name) const {
    const auto found = object_.find(name);
    return found != object_.end() && found->is_null();
  }

  int Int(const std::string& name, int64_t low, int64_t high, std::optional<int> fallback = {}) {
    const json* value = Find(name);
    if (value == nullptr) {
      if (!fallback.has_value()) Fail(name, "is missing");
      return fallback.value_or(static_cast<int>(low));
    }
    const bool fits = value->is_number_unsigned()
                          ? value->get<uint64_t>() <= static_cast<uint64_t>(high)
                          : value->is_number_integer();
    if (!fits || value->get<int64_t>() < low || value->get<int64_t>() > high) {
      Fail(name, absl::StrCat("is not a whole number from ", low, " to ", high));
      return static_cast<int>(low);
    }
    return static_cast<int>(value->get<int64_t>());
  }

  double Number(const std::string& name, double low, double high,
                std::optional<double> fallback = {}) {
    const json* value = Find(name);
    if (value == nullptr) {
      if (!fallback.has_value()) Fail(name, "is missing");
      return fallback.value_or(low);
    }
    const double number = value->is_number() ? value->get<double>() : std::nan("");
    if (!(number >= low && number <= high)) {
      Fail(name, absl::StrCat("is not a number from ", low, " to ", high));
      return low;
    }
    return number;
  }

  bool Bool(const std::string& name, bool fallback) {
    const json* value = Find(name);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) {
      Fail(name, "is not true or false");
      return fallback;
    }
    return value->get<bool>();
  }

  std::string Text(const std::string& name, const std::string& fallback) {
    const json* value = Find(name);
    if (value == nullptr) return fallback;
    if (!value->is_string()) {
      Fail(name, "is not a string");
      return fallback;
    }
    return value->get<std::string>();
  }

  void Fail(const std::string& name, const std::string& what) {
    if (status.ok()) {
      status = absl::InvalidArgumentError(absl::StrCat(where_, name, " ", what));
    }
  }

  absl::Status status;

 private:
  const json& object_;
  const std::string where_;
};

absl::StatusOr<json> ParseObject(absl::string_view text, const std::string& file) {
  absl::StatusOr<json> parsed = ParseBoundedJson(text, kJsonLimits);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": ", parsed.status().message()));
  }
  if (!parsed->is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": is not a JSON object"));
  }
  return parsed;
}

absl::StatusOr<const Architecture*> FindArchitecture(Fields& fields) {
  const std::string type = fields.Text("model_type", "");
  RETURN_IF_ERROR(fields.status);
  for (const Architecture& row : kArchitectures) {
    if (type == row.model_type) return &row;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      kConfigFile, ": model_type '", type, "' is not supported; known are ",
      absl::StrJoin(kArchitectures, ", ", [](std::string* out, const Architecture& row) {
        absl::StrAppend(out, row.model_type);
      })));
}

// Fields that change the maths in ways that nothing here implements.
void RefuseUnsupported(const Architecture& row, Fields& fields) {
  if (fields.Text("hidden_act", "silu") != "silu") {
    fields.Fail("hidden_act", "is not 'silu', the only one supported");
  }
  if (fields.Find("quantization_config") != nullptr) {
    fields.Fail("quantization_config", "asks for quantised weights, which are not supported");
  }
  if (fields.Number("partial_rotary_factor", 0, 1, 1.0) != 1.0) {
    fields.Fail("partial_rotary_factor", "other than 1 is not supported");
  }
  for (const char* name : {"dtype", "torch_dtype"}) {
    const std::string dtype = fields.Text(name, "float32");
    if (dtype != "float32" && dtype != "bfloat16" && dtype != "float16") {
      fields.Fail(name, absl::StrCat("'", dtype, "' is not float32, bfloat16 or float16"));
    }
  }
  if (const json* classes = fields.Find("architectures"); classes != nullptr) {
    if (!classes->is_array() || classes->empty() || (*classes)[0] != row.class_name) {
      fields.Fail("architectures",
                  absl::StrCat("does not begin with '", row.class_name, "', which model_type '",
                               row.model_type, "' stands for"));
    }
  }
}

// The rope of rope_parameters (transformers 5), or of rope_scaling and rope_theta (before it). The
// type's key was "type" before it was "rope_type".
absl::StatusOr<RopeConfig> ParseRope(Fields& top, int max_positions) {
  constexpr double kMaxTheta = 1e12;
  constexpr double kMaxFactor = 1e4;
  RopeConfig rope;
  rope.theta = top.Number("rope_theta", 1, kMaxTheta, rope.theta);
  RETURN_IF_ERROR(top.status);

  const json* parameters = top.Find("rope_parameters");
  const json* scaling = top.Find("rope_scaling");
  if (parameters != nullptr && scaling != nullptr && *parameters != *scaling) {
    top.Fail("rope_scaling", "and rope_parameters are both there and differ");
    return top.status;
  }
  const std::string name = parameters != nullptr ? "rope_parameters" : "rope_scaling";
  const json* object = parameters != nullptr ? parameters : scaling;
  if (object == nullptr) return rope;
  if (!object->is_object()) {
    top.Fail(name, "is not an object");
    return top.status;
  }

  Fields fields(*object, absl::StrCat(kConfigFile, ": ", name, "."));
  for (const auto& [key, value] : object->items()) {
    if (value.is_object()) fields.Fail(key, "is an object: a rope by layer type is not supported");
  }
  rope.theta = fields.Number("rope_theta", 1, kMaxTheta, rope.theta);
  if (fields.Number("partial_rotary_factor", 0, 1, 1.0) != 1.0) {
    fields.Fail("partial_rotary_factor", "other than 1 is not supported");
  }
  const std::string old_type = fields.Text("type", "default");
  const std::string type = fields.Text("rope_type", old_type);
  if (type == "linear") {
    rope.scaling = RopeScaling::kLinear;
    rope.factor = fields.Number("factor", 1, kMaxFactor);
  } else if (type == "llama3") {
    rope.scaling = RopeScaling::kLlama3;
    rope.factor = fields.Number("factor", 1, kMaxFactor);
    rope.low_freq_factor = fields.Number("low_freq_factor", 1e-3, kMaxFactor);
    rope.high_freq_factor = fields.Number("high_freq_factor", 1e-3, kMaxFactor);
    if (rope.high_freq_factor <= rope.low_freq_factor) {
      fields.Fail("high_freq_factor", "is not above low_freq_factor");
    }
    const int original =
        fields.Int("original_max_position_embeddings", 1, kMaxPositions, max_positions);
    rope.original_max_positions =
        top.Int("original_max_position_embeddings", 1, kMaxPositions, original);
    RETURN_IF_ERROR(top.status);
  } else if (type != "default") {
    fields.Fail("rope_type",
                absl::StrCat("'", type, "' is not supported; known are default, linear, llama3"));
  }
  RETURN_IF_ERROR(fields.status);
  return rope;
}

// The window of each layer.
absl::StatusOr<std::vector<int>> ParseWindows(const Architecture& row, Fields& fields, int layers) {
  std::vector<int> windows(layers, 0);
  int window = 0;
  if (row.windows != Windows::kNone && !fields.IsExplicitNull("sliding_window")) {
    window = fields.Int("sliding_window", 1, kMaxPositions, row.default_window);
  }
  if (row.windows == Windows::kByLayer) {
    if (!fields.Bool("use_sliding_window", false)) window = 0;
    const int first = fields.Int("max_window_layers", 0, std::numeric_limits<int>::max(), 28);
    for (int i = first; i < layers; ++i) windows[i] = window;
  } else {
    std::fill(windows.begin(), windows.end(), window);
  }

  const json* types = fields.Find("layer_types");
  if (types != nullptr && (!types->is_array() || static_cast<int>(types->size()) != layers)) {
    fields.Fail("layer_types", absl::StrCat("is not a list of ", layers, " strings"));
  } else if (types != nullptr) {
    for (int i = 0; i < layers; ++i) {
      const bool full = (*types)[i] == "full_attention";
      if (!full && (*types)[i] != "sliding_attention") {
        fields.Fail("layer_types", "holds something else than full_attention, sliding_attention");
      } else if (!full && window == 0) {
        fields.Fail("layer_types", "asks for sliding_attention, but there is no window for it");
      } else if (full && window != 0 && row.windows == Windows::kAll) {
        fields.Fail("layer_types", "asks for full_attention, but sliding_window holds everywhere");
      }
      windows[i] = full ? 0 : window;
    }
  }
  RETURN_IF_ERROR(fields.status);
  return windows;
}

// eos_token_id, an id or a list of ids; nothing when it is absent.
std::optional<std::vector<int32_t>> ParseEos(Fields& fields, int vocab) {
  constexpr char kName[] = "eos_token_id";
  const json* value = fields.Find(kName);
  if (value == nullptr) return std::nullopt;
  std::vector<json> items = {*value};
  if (value->is_array()) items.assign(value->begin(), value->end());
  if (items.size() > kMaxEosIds) {
    fields.Fail(kName, absl::StrCat("holds more than ", kMaxEosIds, " ids"));
    return std::nullopt;
  }
  std::vector<int32_t> ids;
  for (const json& item : items) {
    if (!item.is_number_unsigned() || item.get<uint64_t>() >= static_cast<uint64_t>(vocab)) {
      fields.Fail(kName, absl::StrCat("is not a token id below ", vocab, " or a list of them"));
      return std::nullopt;
    }
    ids.push_back(item.get<int32_t>());
  }
  return ids;
}

bool Choose(Bias bias, const char* name, Fields& fields) {
  return bias == Bias::kFromConfig ? fields.Bool(name, false) : bias == Bias::kAlways;
}

absl::Status ParseHeads(const Architecture& row, Fields& fields, ModelConfig* config) {
  config->heads = fields.Int("num_attention_heads", 1, kMaxHeads);
  config->kv_heads = fields.Int("num_key_value_heads", 1, kMaxHeads, config->heads);
  RETURN_IF_ERROR(fields.status);
  if (config->heads % config->kv_heads != 0) {
    fields.Fail("num_key_value_heads", absl::StrCat("(", config->kv_heads, ") does not divide ",
                                                    "num_attention_heads (", config->heads, ")"));
  }
  std::optional<int> head_dim;
  if (row.default_head_dim != 0) {
    head_dim = row.default_head_dim;
  } else if (config->hidden % config->heads == 0 && config->hidden / config->heads <= kMaxHeadDim) {
    head_dim = config->hidden / config->heads;
  }
  if (fields.Find("head_dim") == nullptr && !head_dim.has_value()) {
    fields.Fail("hidden_size", absl::StrCat("(", config->hidden, ") over num_attention_heads (",
                                            config->heads, ") is not a head size up to ",
                                            kMaxHeadDim, ", and head_dim is missing"));
  }
  config->head_dim = fields.Int("head_dim", 2, kMaxHeadDim, head_dim.value_or(2));
  if (config->head_dim % 2 != 0) fields.Fail("head_dim", "is odd");
  return fields.status;
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view config_json,
                                             absl::string_view generation_json) {
  ASSIGN_OR_RETURN(const json object, ParseObject(config_json, kConfigFile));
  Fields fields(object, absl::StrCat(kConfigFile, ": "));
  ASSIGN_OR_RETURN(const Architecture* row, FindArchitecture(fields));
  RefuseUnsupported(*row, fields);

  ModelConfig config;
  config.model_type = row->model_type;
  config.vocab = fields.Int("vocab_size", 1, kMaxVocab);
  config.hidden = fields.Int("hidden_size", 1, kMaxHidden);
  config.layers = fields.Int("num_hidden_layers", 1, kMaxLayers);
  config.intermediate = fields.Int("intermediate_size", 1, kMaxIntermediate);
  config.max_positions = fields.Int("max_position_embeddings", 1, kMaxPositions);
  config.norm_eps = fields.Number("rms_norm_eps", 0, 1, config.norm_eps);
  config.qkv_bias = Choose(row->qkv_bias, "attention_bias", fields);
  config.out_bias = Choose(row->out_bias, "attention_bias", fields);
  config.mlp_bias = Choose(row->mlp_bias, "mlp_bias", fields);
  config.qk_norm = row->qk_norm;
  config.tied_embeddings = fields.Bool("tie_word_embeddings", row->tied_by_default);
  RETURN_IF_ERROR(fields.status);
  RETURN_IF_ERROR(ParseHeads(*row, fields, &config));
  ASSIGN_OR_RETURN(config.rope, ParseRope(fields, config.max_positions));
  ASSIGN_OR_RETURN(config.windows, ParseWindows(*row, fields, config.layers));

  std::optional<std::vector<int32_t>> eos = ParseEos(fields, config.vocab);
  RETURN_IF_ERROR(fields.status);
  if (!generation_json.empty()) {
    ASSIGN_OR_RETURN(const json generation, ParseObject(generation_json, kGenerationFile));
    Fields generation_fields(generation, absl::StrCat(kGenerationFile, ": "));
    std::optional<std::vector<int32_t>> override_eos = ParseEos(generation_fields, config.vocab);
    RETURN_IF_ERROR(generation_fields.status);
    if (override_eos.has_value()) eos = std::move(override_eos);
  }
  config.eos_ids = std::move(eos).value_or(std::vector<int32_t>{});
  return config;
}

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& folder) {
  ASSIGN_OR_RETURN(const std::string config,
                   ReadFile(absl::StrCat(folder, "/", kConfigFile), kMaxFileBytes));
  std::string generation;
  absl::StatusOr<std::string> file =
      ReadFile(absl::StrCat(folder, "/", kGenerationFile), kMaxFileBytes);
  if (file.ok()) {
    generation = *std::move(file);
  } else if (!absl::IsNotFound(file.status())) {
    return file.status();
  }
  absl::StatusOr<ModelConfig> parsed = ParseModelConfig(config, generation);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(folder, "/", parsed.status().message()));
  }
  return parsed;
}

}  // namespace carryover
