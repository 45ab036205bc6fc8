#include "engine/model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "engine/model_identity.h"
#include "engine/rope_table.h"
#include "engine/safetensors.h"
#include "engine/weights.h"

namespace carryover {
namespace {

constexpr int kFirstPositions = 4096;  // rows of the first rotary table
constexpr int kLogitSlice = 64;        // rows of the LM head at a time: bounds its scratch memory

absl::Status CheckOptions(const ModelOptions& options) {
  if (options.weights == DType::kF16 || options.kv_dtype == DType::kF16) {
    return absl::InvalidArgumentError("weights and kv_dtype are not F16");
  }
  if (options.kv_dtype == DType::kI8) {
    return absl::InvalidArgumentError("kv_dtype is BF16 or F32, not INT8");
  }
  if (options.block_tokens <= 0 || options.block_tokens % 16 != 0) {
    return absl::InvalidArgumentError("block_tokens is not a positive multiple of 16");
  }
  return absl::OkStatus();
}

absl::Status InFolder(const std::string& folder, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(folder, ": ", status.message()));
}

}  // namespace

DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) ops_->release(backend_, data_);
}

absl::Status DeviceBuffer::Reserve(size_t bytes) {
  if (bytes <= bytes_) return absl::OkStatus();
  if (data_ != nullptr) ops_->release(backend_, data_);
  data_ = nullptr;
  bytes_ = 0;
  ASSIGN_OR_RETURN(data_, ops_->alloc(backend_, bytes));
  bytes_ = bytes;
  return absl::OkStatus();
}

struct Model::Impl {
  Impl(const Ops& ops, Backend* backend, ModelConfig config, ModelWeights weights)
      : ops(ops),
        backend(backend),
        config(std::move(config)),
        weights(std::move(weights)),
        frequencies(RopeFrequencies(this->config.rope, this->config.head_dim)) {}

  absl::Status CheckBatch(const ForwardBatch& batch) const;
  absl::Status CheckSamples(const ForwardBatch& batch) const;
  absl::Status ReserveRows(int rows, int logit_rows, int samples);
  absl::Status ReservePositions(int count);
  absl::Status Begin(const ForwardBatch& batch, DeviceBuffer* residual);
  // Layers from *layer on, then the head, which counts as one more. Sets *layer to the next.
  absl::Status Run(const ForwardBatch& batch, float* x, void* kv_base,
                   const std::function<bool()>& yield, int* layer, std::vector<float>* logits,
                   std::vector<SampledToken>* sampled);
  // x is the residual stream; kv_only leaves it as it is.
  void RunLayer(int layer, int rows, float* x, void* kv_base, bool kv_only);
  void RunHead(const ForwardBatch& batch, const float* x, float* logits, SampledToken* sampled);

  const Ops& ops;
  Backend* const backend;
  const ModelConfig config;
  KvLayout kv_layout;
  ModelDigests digests;
  const ModelWeights weights;

  const std::vector<double> frequencies;  // (head_dim / 2)
  int table_positions = 0;
  DeviceBuffer cos_sin{&ops, backend};  // (table_positions, 2, head_dim / 2)

  // Scratch of a pass; act is of the weights' type.
  DeviceBuffer residual{&ops, backend};      // (rows, hidden) f32, of Forward
  DeviceBuffer normed{&ops, backend};        // (rows, hidden) act
  DeviceBuffer qkv{&ops, backend};           // (rows, (heads + 2 kv_heads) * head_dim) f32
  DeviceBuffer attended{&ops, backend};      // (rows, heads * head_dim) act
  DeviceBuffer activated{&ops, backend};     // (rows, intermediate) act
  DeviceBuffer head_rows{&ops, backend};     // (logit slice, hidden) f32
  DeviceBuffer head_normed{&ops, backend};   // (logit slice, hidden) act
  DeviceBuffer head_logits{&ops, backend};   // (logit slice, vocab) f32
  DeviceBuffer head_sampled{&ops, backend};  // (samples) SampledToken
  std::vector<SampleSpec> specs;             // the samples of a pass, by row of a slice
};

absl::Status Model::Impl::CheckBatch(const ForwardBatch& batch) const {
  const auto broken = [](const char* what) {
    return absl::InvalidArgumentError(absl::StrCat("forward batch: ", what));
  };
  const int64_t rows = batch.tokens.size();
  if (rows > std::numeric_limits<int>::max() ||
      batch.positions.size() != static_cast<size_t>(rows)) {
    return broken("tokens and positions differ in number");
  }
  for (int32_t token : batch.tokens) {
    if (token < 0 || token >= config.vocab) return broken("a token is outside the vocabulary");
  }
  int64_t next_row = 0;
  for (const SequenceRows& sequence : batch.sequences) {
    if (sequence.row_begin != next_row || sequence.row_count <= 0 || sequence.kv_begin < 0 ||
        sequence.row_count > rows - next_row) {
      return broken("its sequences do not cover its rows in order");
    }
    const int64_t end = int64_t{sequence.kv_begin} + sequence.row_count;
    if (end > config.max_positions) return broken("a position is beyond max_position_embeddings");
    const int64_t tokens_in_table =
        (static_cast<int64_t>(batch.block_table.size()) - sequence.table_begin) *
        kv_layout.geometry.block_tokens;
    if (sequence.table_begin < 0 || end > tokens_in_table) {
      return broken("its block table is too short");
    }
    for (int i = 0; i < sequence.row_count; ++i) {
      if (batch.positions[next_row + i] != sequence.kv_begin + i) {
        return broken("a position is not the token's place in its sequence");
      }
    }
    next_row += sequence.row_count;
  }
  if (next_row != rows) return broken("its sequences do not cover its rows in order");
  for (int32_t block : batch.block_table) {
    if (block < 0) return broken("a block id is negative");
  }
  if (batch.kv_layers < 0 || batch.kv_layers > config.layers) return broken("no such layers");
  if (batch.kv_layers > 0 && !batch.logit_rows.empty()) return broken("logits without all layers");
  int32_t last = -1;
  for (int32_t row : batch.logit_rows) {
    if (row <= last || row >= rows) return broken("its logit rows are not ascending rows of it");
    last = row;
  }
  return CheckSamples(batch);
}

absl::Status Model::Impl::CheckSamples(const ForwardBatch& batch) const {
  const auto broken = [](const char* what) {
    return absl::InvalidArgumentError(absl::StrCat("forward batch: ", what));
  };
  int32_t last = -1;
  for (const SampleSpec& spec : batch.samples) {
    if (spec.row <= last || spec.row >= static_cast<int64_t>(batch.logit_rows.size())) {
      return broken("its samples are not of ascending logit rows");
    }
    last = spec.row;
    if (spec.logprobs > kSampleTop) return broken("a sample wants too many alternatives");
    if (spec.edit_begin < 0 || spec.edit_count < 0 ||
        int64_t{spec.edit_begin} + spec.edit_count > static_cast<int64_t>(batch.edits.size())) {
      return broken("a sample has edits that are not there");
    }
  }
  for (const LogitEdit& edit : batch.edits) {
    if (edit.token < 0 || edit.token >= config.vocab) {
      return broken("an edited token is outside the vocabulary");
    }
  }
  return absl::OkStatus();
}

absl::Status Model::Impl::ReserveRows(int rows, int logit_rows, int samples) {
  const size_t n = rows;
  const size_t act = DTypeBytes(ActivationDType(weights.type));
  const size_t q_dim = size_t{1} * config.heads * config.head_dim;
  const size_t kv_dim = size_t{1} * config.kv_heads * config.head_dim;
  RETURN_IF_ERROR(normed.Reserve(n * config.hidden * act));
  RETURN_IF_ERROR(qkv.Reserve(n * (q_dim + 2 * kv_dim) * sizeof(float)));
  RETURN_IF_ERROR(attended.Reserve(n * q_dim * act));
  RETURN_IF_ERROR(activated.Reserve(n * config.intermediate * act));
  const size_t slice = std::min(logit_rows, kLogitSlice);
  RETURN_IF_ERROR(head_rows.Reserve(slice * config.hidden * sizeof(float)));
  RETURN_IF_ERROR(head_normed.Reserve(slice * config.hidden * act));
  RETURN_IF_ERROR(head_sampled.Reserve(samples * sizeof(SampledToken)));
  return head_logits.Reserve(slice * config.vocab * sizeof(float));
}

// The table grows with the longest sequence seen: a config that claims millions of positions costs
// nothing until they are used.
absl::Status Model::Impl::ReservePositions(int count) {
  if (count <= table_positions) return absl::OkStatus();
  const int64_t wanted = std::max<int64_t>({count, kFirstPositions, int64_t{2} * table_positions});
  const int rows = static_cast<int>(std::min<int64_t>(wanted, config.max_positions));
  const std::vector<float> table = RopeTable(frequencies, 0, rows);
  table_positions = 0;
  RETURN_IF_ERROR(cos_sin.Reserve(table.size() * sizeof(float)));
  ops.upload(backend, cos_sin.data(), table.data(), table.size() * sizeof(float));
  RETURN_IF_ERROR(ops.sync(backend));
  table_positions = rows;
  return absl::OkStatus();
}

void Model::Impl::RunLayer(int index, int rows, float* x, void* kv_base, bool kv_only) {
  const LayerWeights& layer = weights.layers[index];
  const DType act = ActivationDType(weights.type);
  const float eps = static_cast<float>(config.norm_eps);

  ops.rms_norm(backend, x, layer.attention_norm, rows, config.hidden, eps, normed.data(), act);
  ops.matmul(backend, normed.data(), layer.qkv, rows, qkv.floats(), /*accumulate=*/false);
  ops.rope_write(backend, {.qkv = qkv.floats(),
                           .q_norm = layer.q_norm,
                           .k_norm = layer.k_norm,
                           .norm_eps = eps,
                           .cos_sin = cos_sin.floats(),
                           .heads = config.heads,
                           .layer = index,
                           .kv_base = kv_base,
                           .geometry = kv_layout.geometry});
  if (kv_only) return;
  ops.attention(backend, {.qkv = qkv.floats(),
                          .heads = config.heads,
                          .layer = index,
                          .scale = static_cast<float>(1.0 / std::sqrt(config.head_dim)),
                          .window = config.windows[index],
                          .kv_base = kv_base,
                          .geometry = kv_layout.geometry,
                          .out = attended.data(),
                          .out_type = act});
  ops.matmul(backend, attended.data(), layer.out, rows, x, /*accumulate=*/true);

  ops.rms_norm(backend, x, layer.mlp_norm, rows, config.hidden, eps, normed.data(), act);
  ops.matmul_gated(backend, normed.data(), layer.gate_up, rows, activated.data());
  ops.matmul(backend, activated.data(), layer.down, rows, x, /*accumulate=*/true);
}

void Model::Impl::RunHead(const ForwardBatch& batch, const float* x, float* logits,
                          SampledToken* sampled) {
  const absl::Span<const int32_t> rows = batch.logit_rows;
  const int vocab = config.vocab;
  specs.assign(batch.samples.begin(), batch.samples.end());
  for (SampleSpec& spec : specs) spec.row %= kLogitSlice;
  auto* const chosen = static_cast<SampledToken*>(head_sampled.data());
  size_t next = 0;  // of the samples
  for (size_t begin = 0; begin < rows.size(); begin += kLogitSlice) {
    const absl::Span<const int32_t> slice = rows.subspan(begin, kLogitSlice);
    const int count = static_cast<int>(slice.size());
    ops.gather_rows(backend, x, slice, config.hidden, head_rows.floats());
    ops.rms_norm(backend, head_rows.floats(), weights.final_norm, count, config.hidden,
                 static_cast<float>(config.norm_eps), head_normed.data(),
                 ActivationDType(weights.type));
    ops.matmul(backend, head_normed.data(), weights.lm_head, count, head_logits.floats(),
               /*accumulate=*/false);
    int row = 0;
    const auto download = [&](int end) {  // the rows up to there
      const size_t values = static_cast<size_t>(end - row) * vocab;
      ops.download(backend, logits, head_logits.floats() + int64_t{row} * vocab,
                   values * sizeof(float));
      logits += values;
      row = end + 1;
    };
    const size_t first = next;
    while (next < specs.size() && batch.samples[next].row < static_cast<int>(begin) + count) {
      download(specs[next++].row);
    }
    download(count);
    if (next == first) continue;
    ops.sample(backend, {.logits = head_logits.floats(),
                         .vocab = vocab,
                         .rows = absl::MakeConstSpan(specs).subspan(first, next - first),
                         .edits = batch.edits,
                         .out = chosen + first});
  }
  if (next > 0) ops.download(backend, sampled, chosen, next * sizeof(SampledToken));
}

Model::Model(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Model::~Model() = default;

absl::StatusOr<std::unique_ptr<Model>> Model::Load(const std::string& folder, const Ops& ops,
                                                   Backend* backend, const ModelOptions& options) {
  RETURN_IF_ERROR(CheckOptions(options));
  ASSIGN_OR_RETURN(ModelConfig config, LoadModelConfig(folder));
  absl::StatusOr<Checkpoint> checkpoint = OpenCheckpoint(folder);
  if (!checkpoint.ok()) return InFolder(folder, checkpoint.status());
  if (const absl::Status checked = CheckTensors(config, checkpoint->tensors); !checked.ok()) {
    return InFolder(folder, checked);
  }
  const ModelDigests digests =
      HashModel(config, checkpoint->tensors, options.weights, options.kv_dtype);
  ASSIGN_OR_RETURN(ModelWeights weights, PackWeights(config, checkpoint->tensors, ops, backend,
                                                     options.weights, options.progress));
  // What was hashed is what was packed.
  for (const MappedFile& file : checkpoint->files) RETURN_IF_ERROR(file.CheckUnchanged());
  auto impl = std::make_unique<Impl>(ops, backend, std::move(config), std::move(weights));
  impl->digests = digests;
  impl->kv_layout =
      MakeKvLayout(impl->config, options.kv_dtype, options.block_tokens, ops.kv_format);
  return std::unique_ptr<Model>(new Model(std::move(impl)));
}

absl::Status Model::Impl::Begin(const ForwardBatch& batch, DeviceBuffer* x) {
  RETURN_IF_ERROR(CheckBatch(batch));
  RETURN_IF_ERROR(x->Reserve(batch.tokens.size() * config.hidden * sizeof(float)));
  if (batch.tokens.empty()) return absl::OkStatus();
  ops.embed(backend, weights.embedding, ActivationDType(weights.type), batch.tokens, config.hidden,
            x->floats());
  return absl::OkStatus();
}

absl::Status Model::Impl::Run(const ForwardBatch& batch, float* x, void* kv_base,
                              const std::function<bool()>& yield, int* layer,
                              std::vector<float>* logits, std::vector<SampledToken>* sampled) {
  const int rows = static_cast<int>(batch.tokens.size());
  const int logit_rows = static_cast<int>(batch.logit_rows.size());
  const int samples = static_cast<int>(batch.samples.size());
  logits->resize(static_cast<size_t>(logit_rows - samples) * config.vocab);
  if (samples > 0) sampled->resize(samples);
  if (rows > 0) {
    // Here, not in Begin: a pass that went on in between used the same scratch.
    RETURN_IF_ERROR(ReserveRows(rows, logit_rows, samples));
    RETURN_IF_ERROR(
        ReservePositions(*std::max_element(batch.positions.begin(), batch.positions.end()) + 1));
    ops.begin_pass(backend, {batch.sequences, batch.positions, batch.block_table});
  }
  const int layers = batch.kv_layers > 0 ? batch.kv_layers : config.layers;
  for (; *layer < layers; ++*layer) {
    if (rows > 0) RunLayer(*layer, rows, x, kv_base, *layer + 1 == batch.kv_layers);
    if (yield != nullptr && yield()) {
      ++*layer;
      return ops.sync(backend);
    }
  }
  if (rows > 0 && batch.kv_layers == 0) {
    RunHead(batch, x, logits->data(), samples > 0 ? sampled->data() : nullptr);
  }
  ++*layer;
  return ops.sync(backend);
}

absl::Status Model::Forward(const ForwardBatch& batch, void* kv_base, std::vector<float>* logits,
                            std::vector<SampledToken>* sampled) {
  Impl& model = *impl_;
  RETURN_IF_ERROR(model.Begin(batch, &model.residual));
  int layer = 0;
  return model.Run(batch, model.residual.floats(), kv_base, nullptr, &layer, logits, sampled);
}

absl::Status Model::Begin(ResumablePass* pass) {
  pass->next_layer = 0;
  RETURN_IF_ERROR(impl_->Begin(pass->batch, &pass->residual));
  return impl_->ops.sync(impl_->backend);
}

absl::StatusOr<bool> Model::Advance(ResumablePass* pass, void* kv_base,
                                    const std::function<bool()>& yield,
                                    std::vector<float>* logits) {
  RETURN_IF_ERROR(impl_->Run(pass->batch, pass->residual.floats(), kv_base, yield,
                             &pass->next_layer, logits, nullptr));
  const int kv_layers = pass->batch.kv_layers;
  return pass->next_layer > (kv_layers > 0 ? kv_layers : impl_->config.layers);
}

absl::StatusOr<const float*> Model::CosSin(int count) {
  RETURN_IF_ERROR(impl_->ReservePositions(count));
  return impl_->cos_sin.floats();
}

const ModelConfig& Model::config() const { return impl_->config; }
const KvLayout& Model::kv_layout() const { return impl_->kv_layout; }
const Digest& Model::fingerprint() const { return impl_->digests.fingerprint; }
const Digest& Model::weights_sha256() const { return impl_->digests.weights; }
DType Model::weights_dtype() const { return impl_->weights.type; }
size_t Model::weight_bytes() const { return impl_->weights.bytes; }

}  // namespace carryover
