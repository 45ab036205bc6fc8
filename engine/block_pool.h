// The KV blocks of one layout on the device: one allocation, cut into equal extents.
//
// A BlockRef shares a block and gives it back with the last copy. Counts are plain integers: pool
// and references belong to the engine thread. Memory of a block may be read or written elsewhere
// (a tier's worker, the device) only while the engine thread keeps a reference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/ops.h"

namespace carryover {

class BlockPool;

// Move it or copy it; an empty one refers to nothing. Must not outlive its pool.
class BlockRef {
 public:
  BlockRef() = default;
  BlockRef(const BlockRef& other);
  BlockRef(BlockRef&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)), id_(std::exchange(other.id_, -1)) {}
  BlockRef& operator=(BlockRef other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(id_, other.id_);
    return *this;
  }
  ~BlockRef() { Reset(); }

  explicit operator bool() const { return pool_ != nullptr; }
  int32_t id() const { return id_; }  // what a block table holds; -1 when empty
  void* data() const;                 // device memory of BlockPool::block_bytes()
  int use_count() const;              // 0 when empty
  void Reset();

 private:
  friend class BlockPool;
  BlockRef(BlockPool* pool, int32_t id) : pool_(pool), id_(id) {}

  BlockPool* pool_ = nullptr;
  int32_t id_ = -1;
};

struct BlockPoolOptions {
  size_t block_bytes = 0;  // KvGeometry::BlockBytes()
  int32_t blocks = 0;
  // Freed blocks are filled with NaNs and, under AddressSanitizer, made unreadable, so that a use
  // after free shows. Host memory only. Costs a pass over each freed block.
#if defined(__SANITIZE_ADDRESS__)
  bool poison = true;
#else
  bool poison = false;
#endif
};

class BlockPool {
 public:
  // INVALID_ARGUMENT when a size is not positive or the whole is over 2^47 bytes;
  // RESOURCE_EXHAUSTED when the device lacks the memory. `backend` outlives the pool.
  static absl::StatusOr<std::unique_ptr<BlockPool>> Create(const Ops& ops, Backend* backend,
                                                           const BlockPoolOptions& options);
  // REQUIRES: all references are gone.
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // Nothing when all blocks are used. Contents are undefined. The block that was freed last comes
  // first: it is likeliest to be in a cache.
  std::optional<BlockRef> Allocate();

  void* base() const { return base_; }  // block b lies at base() + b * block_bytes()
  size_t block_bytes() const { return block_bytes_; }
  int32_t capacity() const { return static_cast<int32_t>(use_counts_.size()); }
  int32_t free() const { return static_cast<int32_t>(free_.size()); }
  int32_t used() const { return capacity() - free(); }
  int32_t use_count(int32_t id) const { return use_counts_[id]; }

 private:
  friend class BlockRef;
  BlockPool(const Ops& ops, Backend* backend, const BlockPoolOptions& options, void* base);
  void Retain(int32_t id) { ++use_counts_[id]; }
  void Release(int32_t id);
  void Poison(int32_t id);
  char* BlockData(int32_t id) const { return static_cast<char*>(base_) + id * block_bytes_; }

  const Ops& ops_;
  Backend* backend_;
  void* base_;
  size_t block_bytes_;
  bool poison_;
  std::vector<int32_t> use_counts_;  // by block
  std::vector<int32_t> free_;        // a stack
};

}  // namespace carryover
