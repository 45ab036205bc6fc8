// KV maps (kv_map.h) on the device: their matrices, and applying them to blocks.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/kv_map.h"
#include "engine/model.h"
#include "kernels/ops.h"

namespace carryover {

// The matrices of one map. Immutable; may be made and dropped on any thread.
class DeviceKvMap {
 public:
  // type: kBF16 or kF32, as the target's weights. What a map adds to K and V is so precise; what it
  // adds it to stays f32. RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<DeviceKvMap>> Create(const KvMap& map, DType type,
                                                             const Ops& ops, Backend* backend);
  DeviceKvMap(const DeviceKvMap&) = delete;
  DeviceKvMap& operator=(const DeviceKvMap&) = delete;
  ~DeviceKvMap();

  const std::string& name() const { return name_; }  // KvMap::Name()
  size_t bytes() const;

 private:
  friend class KvMapper;
  DeviceKvMap(const Ops* ops, Backend* backend) : ops_(ops), backend_(backend) {}

  const Ops* ops_;
  Backend* backend_;
  std::string name_;
  DType type_ = DType::kF32;
  std::vector<PackedMatrix*> layers_;
};

// Applies maps, with scratch of its own. Engine thread only.
class KvMapper {
 public:
  KvMapper(const Ops* ops, Backend* backend)
      : ops_(ops), backend_(backend), rows_(ops, backend), inputs_(ops, backend) {}

  struct Blocks {
    absl::Span<const int32_t> from;  // ids of blocks that follow one another in a prefix
    absl::Span<const int32_t> to;    // as many others
    int begin = 0;                   // position of the first token
    int layer_begin = 0, layer_end = 0;
  };
  // `from` holds what the map's source computed, in `target`'s layout; afterwards `to` holds what
  // that is mapped to. Waits until that is done.
  absl::Status Map(const DeviceKvMap& map, const Blocks& blocks, Model* target, void* kv_base);

 private:
  const Ops* ops_;
  Backend* backend_;
  DeviceBuffer rows_;    // (kRows, dim) f32
  DeviceBuffer inputs_;  // (kRows, dim) of the map's type
};

}  // namespace carryover
