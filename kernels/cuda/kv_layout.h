// Where keys and values lie inside a block on a device, for host and device code. Inside a layer:
// K, then V, each (kv_heads, block_tokens, head_dim) of the KV's type.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/shapes.h"

namespace carryover {

inline constexpr char kDeviceKvFormat[] = "kv-htd-v1";

// What KvGeometry says, as a kernel's argument: counts of values, not of bytes.
struct DeviceKv {
  int kv_heads;
  int head_dim;
  int block_tokens;
  int64_t block_stride;  // from block to block
  int64_t v_offset;      // from K to V of a layer
  int64_t layer_offset;  // of the layer in question, in its block

  // Where K of a token begins; V lies v_offset behind. `slot` is its place in the block.
#if defined(__CUDACC__)
  __host__ __device__
#endif
      int64_t
      At(int32_t block, int kv_head, int slot) const {
    return block * block_stride + layer_offset +
           (static_cast<int64_t>(kv_head) * block_tokens + slot) * head_dim;
  }
  bool operator==(const DeviceKv&) const = default;
};

inline DeviceKv MakeDeviceKv(const KvGeometry& g, int layer) {
  const int64_t plane = static_cast<int64_t>(g.kv_heads) * g.block_tokens * g.head_dim;
  return {g.kv_heads, g.head_dim, g.block_tokens, 2 * plane * g.layers, plane, 2 * plane * layer};
}

}  // namespace carryover
