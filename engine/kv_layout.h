// What one KV block holds: enough to move it between tiers and to tell whether two versions' blocks
// are interchangeable.
#pragma once

#include <string>
#include <vector>

#include "base/hash.h"
#include "kernels/ops.h"

namespace carryover {

// One named plane of a block.
struct KvPlane {
  std::string name;        // "k", "v"
  int rows_per_token = 1;  // 1 for plain K and V; compressed caches have fewer rows than tokens
  size_t row_bytes = 0;    // over all layers
};

struct KvLayout {
  KvGeometry geometry;
  std::string format;  // Ops::kv_format
  std::vector<KvPlane> planes;
  // Of the geometry, the format, the architecture, the RoPE parameters and the sliding windows:
  // equal digests mean that one version may read the other's blocks.
  Digest sha256{};
};

}  // namespace carryover
