#include "engine/calibration_device.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace carryover {
namespace {

std::vector<int32_t> Range(int begin, int count) {
  std::vector<int32_t> range(count);
  for (int i = 0; i < count; ++i) range[i] = begin + i;
  return range;
}

}  // namespace

KvMapQuality QualitySums::Mean() const {
  const double n = std::max<int64_t>(positions, 1);
  return {tv / n, kl / n, flips / n};
}

struct CalibrationDevice::Impl {
  Impl(const Ops& ops, Backend* backend, Model* source, Model* target, const Options& options)
      : ops(ops),
        backend(backend),
        source(source),
        target(target),
        options(options),
        geometry(target->kv_layout().geometry),
        dim(2 * geometry.kv_heads * geometry.head_dim) {
    const int block = geometry.block_tokens;
    prefix_blocks = options.prefix_tokens / block;
    suffix_blocks = (options.positions + block - 1) / block;
  }

  // Where number `kept` lies; behind them there is room for one text of either version.
  std::vector<int32_t> KeptTable(int kept) const {
    return Range(kept * prefix_blocks, prefix_blocks);
  }
  std::vector<int32_t> SourceTable() const { return ScratchTable(0); }
  std::vector<int32_t> TargetTable() const { return ScratchTable(1); }
  std::vector<int32_t> ScratchTable(int which) const {
    const int text = prefix_blocks + suffix_blocks;
    return Range(options.kept * prefix_blocks + which * text, text);
  }
  int Blocks() const { return options.kept * prefix_blocks + 2 * (prefix_blocks + suffix_blocks); }

  absl::Status ReadRows(absl::Span<const int32_t> table, int begin, int count, int layer,
                        float* out);
  absl::Status MapLayer(const DeviceKvMap& map, absl::Span<const int32_t> from,
                        absl::Span<const int32_t> to, int rows, int layer);
  absl::Status Diverge(absl::Span<const float> native, absl::Span<const float> carried,
                       QualitySums* sums);
  void BeginRows(absl::Span<const int32_t> table, int begin, int count) {
    rows = {{.row_begin = 0, .row_count = count, .kv_begin = begin, .table_begin = 0}};
    positions = Range(begin, count);
    block_table.assign(table.begin(), table.end());
    ops.begin_pass(backend, {rows, positions, block_table});
  }

  const Ops& ops;
  Backend* const backend;
  Model* const source;
  Model* const target;
  const Options options;
  const KvGeometry geometry;
  const int dim;
  int prefix_blocks = 0, suffix_blocks = 0;

  DeviceBuffer kv{&ops, backend};
  DeviceBuffer x{&ops, backend};
  DeviceBuffer native{&ops, backend}, carried{&ops, backend}, divergence{&ops, backend};
  std::vector<SequenceRows> rows;  // of a pass; read until sync
  std::vector<int32_t> positions, block_table;
  KvMapper mapper{&ops, backend};
};

namespace {

// A model's pass over tokens from `at` to `end`, in chunks.
struct Prefill {
  Prefill(const Ops& ops, Backend* backend, Model* model, absl::Span<const int32_t> tokens, int at,
          int end, int chunk, std::vector<int32_t> table)
      : model(model),
        tokens(tokens),
        at(at),
        end(end),
        chunk(chunk),
        table(std::move(table)),
        pass(&ops, backend) {}

  absl::StatusOr<bool> Advance(void* kv_base, const std::function<bool()>& yield) {
    while (at < end) {
      if (!in_pass) {
        const int count = std::min(chunk, end - at);
        ForwardBatch& batch = pass.batch;
        batch = ForwardBatch();
        batch.sequences.push_back({.row_begin = 0, .row_count = count, .kv_begin = at});
        batch.tokens.assign(tokens.begin() + at, tokens.begin() + at + count);
        batch.positions = Range(at, count);
        batch.block_table = table;
        for (int i = std::max(0, logits_from - at); i < count; ++i) batch.logit_rows.push_back(i);
        RETURN_IF_ERROR(model->Begin(&pass));
        in_pass = true;
      }
      ASSIGN_OR_RETURN(const bool done, model->Advance(&pass, kv_base, yield, &chunk_logits));
      if (!done) return false;
      in_pass = false;
      at += static_cast<int>(pass.batch.tokens.size());
      logits.insert(logits.end(), chunk_logits.begin(), chunk_logits.end());
      if (at < end && yield()) return false;
    }
    return true;
  }

  Model* model;
  absl::Span<const int32_t> tokens;
  int at, end, chunk;
  std::vector<int32_t> table;
  int logits_from = std::numeric_limits<int>::max();  // position
  ResumablePass pass;
  bool in_pass = false;
  std::vector<float> chunk_logits, logits;
};

}  // namespace

CalibrationDevice::CalibrationDevice(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CalibrationDevice::~CalibrationDevice() = default;

absl::StatusOr<std::unique_ptr<CalibrationDevice>> CalibrationDevice::Create(
    const Ops& ops, Backend* backend, Model* source, Model* target, const Options& options) {
  auto impl = std::make_unique<Impl>(ops, backend, source, target, options);
  RETURN_IF_ERROR(impl->kv.Reserve(impl->Blocks() * impl->geometry.BlockBytes()));
  const ModelConfig& config = target->config();
  const size_t row_bytes = impl->dim * sizeof(float);
  const size_t most = std::max(options.prefix_tokens, options.chunk_tokens);
  RETURN_IF_ERROR(impl->x.Reserve(most * row_bytes));
  const size_t logit_bytes = size_t{1} * options.positions * config.vocab * sizeof(float);
  RETURN_IF_ERROR(impl->native.Reserve(logit_bytes));
  RETURN_IF_ERROR(impl->carried.Reserve(logit_bytes));
  RETURN_IF_ERROR(impl->divergence.Reserve(options.positions * sizeof(DivergenceRow)));
  return std::unique_ptr<CalibrationDevice>(new CalibrationDevice(std::move(impl)));
}

absl::Status CalibrationDevice::Impl::ReadRows(absl::Span<const int32_t> table, int begin,
                                               int count, int layer, float* out) {
  BeginRows(table, begin, count);
  ASSIGN_OR_RETURN(const float* cos_sin, target->CosSin(begin + count));
  ops.read_kv(backend, {.cos_sin = cos_sin,
                        .layer = layer,
                        .kv_base = kv.data(),
                        .geometry = geometry,
                        .out = x.floats()});
  ops.download(backend, out, x.data(), size_t{1} * count * dim * sizeof(float));
  return ops.sync(backend);
}

absl::Status CalibrationDevice::Impl::MapLayer(const DeviceKvMap& map,
                                               absl::Span<const int32_t> from,
                                               absl::Span<const int32_t> to, int count, int layer) {
  const int blocks = count / geometry.block_tokens;
  return mapper.Map(map, {from.first(blocks), to.first(blocks), 0, layer, layer + 1}, target,
                    kv.data());
}

absl::Status CalibrationDevice::Impl::Diverge(absl::Span<const float> native_logits,
                                              absl::Span<const float> carried_logits,
                                              QualitySums* sums) {
  const int vocab = target->config().vocab;
  const int count = static_cast<int>(native_logits.size() / vocab);
  CHECK(native_logits.size() == carried_logits.size() && count == options.positions);
  ops.upload(backend, native.data(), native_logits.data(), native_logits.size() * sizeof(float));
  ops.upload(backend, carried.data(), carried_logits.data(), carried_logits.size() * sizeof(float));
  ops.divergence(backend, {.native = native.floats(),
                           .carried = carried.floats(),
                           .rows = count,
                           .vocab = vocab,
                           .out = static_cast<DivergenceRow*>(divergence.data())});
  std::vector<DivergenceRow> out(count);
  ops.download(backend, out.data(), divergence.data(), out.size() * sizeof(DivergenceRow));
  RETURN_IF_ERROR(ops.sync(backend));
  for (const DivergenceRow& row : out) {
    if (row.valid == 0 || !std::isfinite(row.kl)) {
      return absl::InternalError("calibration: a model's logits are not finite");
    }
    ++sums->positions;
    sums->tv += row.tv;
    sums->kl += row.kl;
    sums->flips += row.native_top[0] != row.carried_top[0] ? 1 : 0;
  }
  return absl::OkStatus();
}

Slice CalibrationDevice::ComputePair(absl::Span<const int32_t> tokens, int begin, int count,
                                     PairedRows* out) {
  Impl& impl = *impl_;
  struct State {
    State(Impl& impl, absl::Span<const int32_t> tokens, int begin, int end)
        : source(impl.ops, impl.backend, impl.source, tokens, begin, end, end - begin,
                 impl.SourceTable()),
          target(impl.ops, impl.backend, impl.target, tokens, begin, end, end - begin,
                 impl.TargetTable()) {}
    Prefill source, target;
    int layer = 0;
  };
  CHECK(count <= impl.options.chunk_tokens);
  auto state = std::make_shared<State>(impl, tokens, begin, begin + count);
  out->rows = count;
  const size_t values = size_t{1} * count * impl.dim;
  out->source.resize(values * impl.geometry.layers);
  out->target.resize(values * impl.geometry.layers);
  return [&impl, state, begin, count, values,
          out](const std::function<bool()>& yield) -> absl::StatusOr<bool> {
    for (Prefill* prefill : {&state->source, &state->target}) {
      ASSIGN_OR_RETURN(const bool done, prefill->Advance(impl.kv.data(), yield));
      if (!done) return false;
    }
    for (; state->layer < impl.geometry.layers; ++state->layer) {
      if (yield()) return false;
      RETURN_IF_ERROR(impl.ReadRows(state->source.table, begin, count, state->layer,
                                    out->source.data() + values * state->layer));
      RETURN_IF_ERROR(impl.ReadRows(state->target.table, begin, count, state->layer,
                                    out->target.data() + values * state->layer));
    }
    return true;
  };
}

Slice CalibrationDevice::KeepPrefix(absl::Span<const int32_t> tokens, int kept) {
  Impl& impl = *impl_;
  auto prefill = std::make_shared<Prefill>(impl.ops, impl.backend, impl.source, tokens, 0,
                                           static_cast<int>(tokens.size()),
                                           impl.options.chunk_tokens, impl.KeptTable(kept));
  return [&impl, prefill](const std::function<bool()>& yield) {
    return prefill->Advance(impl.kv.data(), yield);
  };
}

Slice CalibrationDevice::ComputeNative(absl::Span<const int32_t> tokens,
                                       std::vector<float>* logits) {
  Impl& impl = *impl_;
  const int end = static_cast<int>(tokens.size());
  auto prefill = std::make_shared<Prefill>(impl.ops, impl.backend, impl.target, tokens, 0, end,
                                           impl.options.chunk_tokens, impl.TargetTable());
  prefill->logits_from = end - impl.options.positions;
  return [&impl, prefill, logits](const std::function<bool()>& yield) -> absl::StatusOr<bool> {
    ASSIGN_OR_RETURN(const bool done, prefill->Advance(impl.kv.data(), yield));
    if (done) *logits = std::move(prefill->logits);
    return done;
  };
}

Slice CalibrationDevice::Compare(absl::Span<const int32_t> tokens, int kept, const DeviceKvMap* map,
                                 absl::Span<const float> native, QualitySums* sums) {
  Impl& impl = *impl_;
  const int end = static_cast<int>(tokens.size()), prefix = end - impl.options.positions;
  CHECK(prefix % impl.geometry.block_tokens == 0);
  struct State {
    State(Impl& impl, absl::Span<const int32_t> tokens, int prefix, std::vector<int32_t> table)
        : suffix(impl.ops, impl.backend, impl.target, tokens, prefix,
                 static_cast<int>(tokens.size()), impl.options.chunk_tokens, std::move(table)) {}
    std::vector<int32_t> from, to;
    Prefill suffix;
    int layer = 0;
  };
  const std::vector<int32_t> from = impl.KeptTable(kept), scratch = impl.TargetTable();
  // As they are, the blocks serve in place, with the suffix in blocks of its own.
  std::vector<int32_t> table = scratch;
  if (map == nullptr) {
    std::copy_n(from.begin(), prefix / impl.geometry.block_tokens, table.begin());
  }
  auto state = std::make_shared<State>(impl, tokens, prefix, std::move(table));
  state->from = from;
  state->to = scratch;
  state->layer = map == nullptr ? impl.geometry.layers : 0;
  state->suffix.logits_from = prefix;
  return [&impl, state, map, prefix, native,
          sums](const std::function<bool()>& yield) -> absl::StatusOr<bool> {
    for (; state->layer < impl.geometry.layers; ++state->layer) {
      if (yield()) return false;
      RETURN_IF_ERROR(impl.MapLayer(*map, state->from, state->to, prefix, state->layer));
    }
    ASSIGN_OR_RETURN(const bool done, state->suffix.Advance(impl.kv.data(), yield));
    if (!done) return false;
    RETURN_IF_ERROR(impl.Diverge(native, state->suffix.logits, sums));
    return true;
  };
}

absl::StatusOr<std::unique_ptr<DeviceKvMap>> CalibrationDevice::Pack(const KvMap& map) {
  return DeviceKvMap::Create(map, impl_->target->weights_dtype(), impl_->ops, impl_->backend);
}

}  // namespace carryover
