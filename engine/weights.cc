#include "engine/weights.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "engine/float_bits.h"

namespace carryover {
namespace {

constexpr char kEmbedding[] = "model.embed_tokens.weight";
constexpr char kFinalNorm[] = "model.norm.weight";
constexpr char kLmHead[] = "lm_head.weight";

std::string InLayer(int layer, const char* name) {
  return absl::StrCat("model.layers.", layer, ".", name);
}

using Shapes = std::map<std::string, std::vector<int64_t>>;

void AddLinear(const std::string& name, int64_t rows, int64_t cols, bool bias, Shapes* shapes) {
  shapes->emplace(name + ".weight", std::vector<int64_t>{rows, cols});
  if (bias) shapes->emplace(name + ".bias", std::vector<int64_t>{rows});
}

Shapes ExpectedShapes(const ModelConfig& config) {
  const int64_t hidden = config.hidden;
  const int64_t q_rows = int64_t{config.heads} * config.head_dim;
  const int64_t kv_rows = int64_t{config.kv_heads} * config.head_dim;
  Shapes shapes;
  shapes[kEmbedding] = {config.vocab, hidden};
  shapes[kFinalNorm] = {hidden};
  if (!config.tied_embeddings) shapes[kLmHead] = {config.vocab, hidden};
  for (int i = 0; i < config.layers; ++i) {
    shapes[InLayer(i, "input_layernorm.weight")] = {hidden};
    shapes[InLayer(i, "post_attention_layernorm.weight")] = {hidden};
    AddLinear(InLayer(i, "self_attn.q_proj"), q_rows, hidden, config.qkv_bias, &shapes);
    AddLinear(InLayer(i, "self_attn.k_proj"), kv_rows, hidden, config.qkv_bias, &shapes);
    AddLinear(InLayer(i, "self_attn.v_proj"), kv_rows, hidden, config.qkv_bias, &shapes);
    AddLinear(InLayer(i, "self_attn.o_proj"), hidden, q_rows, config.out_bias, &shapes);
    AddLinear(InLayer(i, "mlp.gate_proj"), config.intermediate, hidden, config.mlp_bias, &shapes);
    AddLinear(InLayer(i, "mlp.up_proj"), config.intermediate, hidden, config.mlp_bias, &shapes);
    AddLinear(InLayer(i, "mlp.down_proj"), hidden, config.intermediate, config.mlp_bias, &shapes);
    if (config.qk_norm) {
      shapes[InLayer(i, "self_attn.q_norm.weight")] = {config.head_dim};
      shapes[InLayer(i, "self_attn.k_norm.weight")] = {config.head_dim};
    }
  }
  return shapes;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("(", absl::StrJoin(shape, ", "), ")");
}

uint16_t Load16(const char* bytes) {
  uint16_t value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

float ElementAsFloat(const TensorView& tensor, size_t i) {
  if (tensor.dtype == DType::kBF16) return FloatFromBf16(Load16(tensor.bytes.data() + 2 * i));
  if (tensor.dtype == DType::kF16) return FloatFromF16(Load16(tensor.bytes.data() + 2 * i));
  float value;
  std::memcpy(&value, tensor.bytes.data() + 4 * i, sizeof(value));
  return value;
}

size_t Elements(const TensorView& tensor) { return tensor.bytes.size() / DTypeBytes(tensor.dtype); }

std::vector<float> AsFloats(const TensorView& tensor) {
  std::vector<float> values(Elements(tensor));
  for (size_t i = 0; i < values.size(); ++i) values[i] = ElementAsFloat(tensor, i);
  return values;
}

// Packs one model. Each step takes tensors by name and counts them for the progress.
class Packer {
 public:
  Packer(const ModelConfig& config, const TensorMap& tensors,
         const std::function<void(double)>& progress, ModelWeights* weights)
      : config_(config),
        tensors_(tensors),
        progress_(progress),
        // The tied head is a second pass over the embedding.
        total_(ExpectedShapes(config).size() + (config.tied_embeddings ? 1 : 0)),
        weights_(*weights) {}

  absl::Status Run() {
    RETURN_IF_ERROR(Embedding());
    RETURN_IF_ERROR(Norm(kFinalNorm, &weights_.final_norm));
    const char* head = config_.tied_embeddings ? kEmbedding : kLmHead;
    RETURN_IF_ERROR(Matrix({std::string(head)}, {}, /*gated=*/false, &weights_.lm_head));
    weights_.layers.resize(config_.layers);
    for (int i = 0; i < config_.layers; ++i) RETURN_IF_ERROR(Layer(i));
    return absl::OkStatus();
  }

 private:
  const TensorView& Take(const std::string& name) {
    const auto found = tensors_.find(name);
    CHECK(found != tensors_.end());
    ++taken_;
    if (progress_ != nullptr) progress_(std::min(1.0, static_cast<double>(taken_) / total_));
    return found->second;
  }

  absl::StatusOr<void*> Alloc(size_t bytes) {
    ASSIGN_OR_RETURN(void* device, weights_.ops->alloc(weights_.backend, bytes));
    weights_.bytes += bytes;
    return device;
  }

  absl::Status Norm(const std::string& name, float** device) {
    const std::vector<float> values = AsFloats(Take(name));
    ASSIGN_OR_RETURN(void* memory, Alloc(values.size() * sizeof(float)));
    *device = static_cast<float*>(memory);
    weights_.ops->upload(weights_.backend, memory, values.data(), values.size() * sizeof(float));
    return absl::OkStatus();
  }

  absl::Status Embedding() {
    const TensorView& tensor = Take(kEmbedding);
    const size_t elements = Elements(tensor);
    const DType type = ActivationDType(weights_.type);
    const size_t width = DTypeBytes(type);
    ASSIGN_OR_RETURN(weights_.embedding, Alloc(elements * width));
    if (tensor.dtype == type) {
      weights_.ops->upload(weights_.backend, weights_.embedding, tensor.bytes.data(),
                           tensor.bytes.size());
      return absl::OkStatus();
    }
    constexpr size_t kSlice = 1 << 18;  // elements converted at a time
    std::vector<char> slice(std::min(kSlice, elements) * width);
    for (size_t begin = 0; begin < elements; begin += kSlice) {
      const size_t count = std::min(kSlice, elements - begin);
      for (size_t i = 0; i < count; ++i) {
        const float value = ElementAsFloat(tensor, begin + i);
        if (type == DType::kF32) {
          std::memcpy(slice.data() + 4 * i, &value, 4);
        } else {
          const uint16_t bits = Bf16FromFloat(value);
          std::memcpy(slice.data() + 2 * i, &bits, 2);
        }
      }
      weights_.ops->upload(weights_.backend, static_cast<char*>(weights_.embedding) + begin * width,
                           slice.data(), count * width);
    }
    return absl::OkStatus();
  }

  // Stacks the named tensors into one matrix, and their biases likewise.
  absl::Status Matrix(const std::vector<std::string>& names,
                      const std::vector<std::string>& bias_names, bool gated,
                      PackedMatrix** matrix) {
    std::vector<HostMatrix> parts;
    for (const std::string& name : names) {
      const TensorView& tensor = Take(name);
      parts.push_back({tensor.bytes.data(), tensor.dtype, tensor.shape[0], tensor.shape[1]});
    }
    std::vector<float> bias;
    for (const std::string& name : bias_names) {
      const std::vector<float> part = AsFloats(Take(name));
      bias.insert(bias.end(), part.begin(), part.end());
    }
    ASSIGN_OR_RETURN(*matrix,
                     weights_.ops->pack(weights_.backend, parts, bias, weights_.type, gated));
    weights_.bytes += weights_.ops->matrix_bytes(*matrix);
    return absl::OkStatus();
  }

  absl::Status Linear(int layer, const std::vector<const char*>& names, bool bias, bool gated,
                      PackedMatrix** matrix) {
    std::vector<std::string> weight_names, bias_names;
    for (const char* name : names) {
      weight_names.push_back(absl::StrCat(InLayer(layer, name), ".weight"));
      if (bias) bias_names.push_back(absl::StrCat(InLayer(layer, name), ".bias"));
    }
    return Matrix(weight_names, bias_names, gated, matrix);
  }

  absl::Status Layer(int i) {
    LayerWeights& layer = weights_.layers[i];
    RETURN_IF_ERROR(Norm(InLayer(i, "input_layernorm.weight"), &layer.attention_norm));
    RETURN_IF_ERROR(Norm(InLayer(i, "post_attention_layernorm.weight"), &layer.mlp_norm));
    if (config_.qk_norm) {
      RETURN_IF_ERROR(Norm(InLayer(i, "self_attn.q_norm.weight"), &layer.q_norm));
      RETURN_IF_ERROR(Norm(InLayer(i, "self_attn.k_norm.weight"), &layer.k_norm));
    }
    RETURN_IF_ERROR(Linear(i, {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"},
                           config_.qkv_bias, /*gated=*/false, &layer.qkv));
    RETURN_IF_ERROR(Linear(i, {"self_attn.o_proj"}, config_.out_bias, /*gated=*/false, &layer.out));
    RETURN_IF_ERROR(Linear(i, {"mlp.gate_proj", "mlp.up_proj"}, config_.mlp_bias, /*gated=*/true,
                           &layer.gate_up));
    return Linear(i, {"mlp.down_proj"}, config_.mlp_bias, /*gated=*/false, &layer.down);
  }

  const ModelConfig& config_;
  const TensorMap& tensors_;
  const std::function<void(double)>& progress_;
  const size_t total_;
  size_t taken_ = 0;
  ModelWeights& weights_;
};

}  // namespace

bool IsUnusedTensor(const ModelConfig& config, const std::string& name) {
  return absl::EndsWith(name, ".rotary_emb.inv_freq") ||
         (config.tied_embeddings && name == kLmHead);
}

absl::Status CheckTensors(const ModelConfig& config, const TensorMap& tensors) {
  const Shapes expected = ExpectedShapes(config);
  for (const auto& [name, shape] : expected) {
    const auto found = tensors.find(name);
    if (found == tensors.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor '", name, "' is missing in the checkpoint"));
    }
    if (found->second.shape != shape) {
      return absl::InvalidArgumentError(absl::StrCat(
          found->second.file, ": tensor '", name, "' has the shape ",
          ShapeText(found->second.shape), ", config.json asks for ", ShapeText(shape)));
    }
  }
  for (const auto& [name, tensor] : tensors) {
    if (expected.find(name) == expected.end() && !IsUnusedTensor(config, name)) {
      return absl::InvalidArgumentError(absl::StrCat(
          tensor.file, ": tensor '", name, "' is not part of a ", config.model_type, " model of ",
          config.layers, " layers with the biases that config.json asks for"));
    }
  }
  const auto head = tensors.find(kLmHead);
  if (config.tied_embeddings && head != tensors.end()) {
    const TensorView& embedding = tensors.at(kEmbedding);
    if (head->second.shape != embedding.shape || head->second.dtype != embedding.dtype ||
        head->second.bytes != embedding.bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(head->second.file, ": tensor '", kLmHead, "' differs from '", kEmbedding,
                       "', but config.json says tie_word_embeddings"));
    }
  }
  return absl::OkStatus();
}

ModelWeights::ModelWeights(ModelWeights&& other) noexcept
    : ops(other.ops),
      backend(other.backend),
      type(other.type),
      embedding(std::exchange(other.embedding, nullptr)),
      final_norm(std::exchange(other.final_norm, nullptr)),
      lm_head(std::exchange(other.lm_head, nullptr)),
      layers(std::exchange(other.layers, {})),
      bytes(std::exchange(other.bytes, 0)) {}

ModelWeights::~ModelWeights() {
  const auto release = [this](void* device) {
    if (device != nullptr) ops->release(backend, device);
  };
  const auto release_matrix = [this](PackedMatrix* matrix) {
    if (matrix != nullptr) ops->release_matrix(backend, matrix);
  };
  release(embedding);
  release(final_norm);
  release_matrix(lm_head);
  for (const LayerWeights& layer : layers) {
    for (float* norm : {layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm}) {
      release(norm);
    }
    for (PackedMatrix* matrix : {layer.qkv, layer.out, layer.gate_up, layer.down}) {
      release_matrix(matrix);
    }
  }
}

absl::StatusOr<ModelWeights> PackWeights(const ModelConfig& config, const TensorMap& tensors,
                                         const Ops& ops, Backend* backend, DType type,
                                         const std::function<void(double)>& progress) {
  ModelWeights weights(&ops, backend);
  weights.type = type;
  RETURN_IF_ERROR(Packer(config, tensors, progress, &weights).Run());
  return weights;
}

}  // namespace carryover
