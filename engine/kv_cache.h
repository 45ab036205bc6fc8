// All KV of one layout: the device blocks, the prefix store over them, and its tiers. Versions with
// equal layouts share one. Engine thread only.
#pragma once

#include <memory>
#include <string>

#include "engine/block_pool.h"
#include "engine/kv_layout.h"
#include "engine/prefix_store.h"

namespace carryover {

struct KvCache {
  std::string model;  // first model that asked for this layout, for reports
  KvLayout layout;
  std::unique_ptr<BlockPool> pool;  // before the store: it outlives the store's references
  std::unique_ptr<PrefixStore> store;
};

}  // namespace carryover
