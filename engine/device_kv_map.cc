#include "engine/device_kv_map.h"

#include <algorithm>

#include "base/status_macros.h"

namespace carryover {
namespace {

// At a time: few enough that they stay in a core's cache from one op to the next, many enough that
// a matrix is read seldom.
constexpr int kRows = 256;

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceKvMap>> DeviceKvMap::Create(const KvMap& map, DType type,
                                                                 const Ops& ops, Backend* backend) {
  std::unique_ptr<DeviceKvMap> device(new DeviceKvMap(&ops, backend));
  device->name_ = map.Name();
  // Maps are small, and rounding them to 8 bits would cost what they bring.
  type = ActivationDType(type);
  device->type_ = type;
  const int64_t dim = map.info.dim();
  for (size_t i = 0; i < map.layers.size(); ++i) {
    const std::vector<float> weight = map.Weight(static_cast<int>(i));
    const HostMatrix part = {weight.data(), DType::kF32, dim, dim};
    ASSIGN_OR_RETURN(PackedMatrix * packed,
                     ops.pack(backend, {part}, map.layers[i].bias, type, /*gated=*/false));
    device->layers_.push_back(packed);
  }
  return device;
}

DeviceKvMap::~DeviceKvMap() {
  for (PackedMatrix* layer : layers_) ops_->release_matrix(backend_, layer);
}

size_t DeviceKvMap::bytes() const {
  size_t bytes = 0;
  for (const PackedMatrix* layer : layers_) bytes += ops_->matrix_bytes(layer);
  return bytes;
}

absl::Status KvMapper::Map(const DeviceKvMap& map, const Blocks& blocks, Model* target,
                           void* kv_base) {
  const KvGeometry& geometry = target->kv_layout().geometry;
  const size_t dim = size_t{2} * geometry.kv_heads * geometry.head_dim;
  CHECK(static_cast<int>(map.layers_.size()) == geometry.layers);
  RETURN_IF_ERROR(rows_.Reserve(kRows * dim * sizeof(float)));
  RETURN_IF_ERROR(inputs_.Reserve(kRows * dim * DTypeBytes(map.type_)));
  const int tokens = static_cast<int>(blocks.from.size()) * geometry.block_tokens;
  ASSIGN_OR_RETURN(const float* cos_sin, target->CosSin(blocks.begin + tokens));

  // Read by the first half, written by the second.
  std::vector<int32_t> table(blocks.from.begin(), blocks.from.end());
  table.insert(table.end(), blocks.to.begin(), blocks.to.end());
  std::vector<int32_t> positions;
  for (int done = 0; done < tokens; done += kRows) {
    const int count = std::min(kRows, tokens - done);
    positions.resize(count);
    for (int i = 0; i < count; ++i) positions[i] = blocks.begin + done + i;
    const SequenceRows rows = {.row_begin = 0, .row_count = count, .kv_begin = done};
    ops_->begin_pass(backend_, {{&rows, 1}, positions, table});
    for (int layer = blocks.layer_begin; layer < blocks.layer_end; ++layer) {
      ops_->read_kv(backend_, {.cos_sin = cos_sin,
                               .layer = layer,
                               .kv_base = kv_base,
                               .geometry = geometry,
                               .out = rows_.floats(),
                               .copy = inputs_.data(),
                               .copy_type = map.type_});
      ops_->matmul(backend_, inputs_.data(), map.layers_[layer], count, rows_.floats(),
                   /*accumulate=*/true);
      ops_->rope_write(backend_, {.qkv = rows_.floats(),
                                  .cos_sin = cos_sin,
                                  .heads = 0,
                                  .layer = layer,
                                  .table_begin = static_cast<int>(blocks.from.size()),
                                  .kv_base = kv_base,
                                  .geometry = geometry});
    }
    RETURN_IF_ERROR(ops_->sync(backend_));
  }
  return absl::OkStatus();
}

}  // namespace carryover
