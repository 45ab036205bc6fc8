#include "engine/block_pool.h"

#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace carryover {

BlockRef::BlockRef(const BlockRef& other) : pool_(other.pool_), id_(other.id_) {
  if (pool_ != nullptr) pool_->Retain(id_);
}

void BlockRef::Reset() {
  if (pool_ == nullptr) return;
  BlockPool* pool = std::exchange(pool_, nullptr);
  pool->Release(std::exchange(id_, -1));
}

void* BlockRef::data() const { return pool_ == nullptr ? nullptr : pool_->BlockData(id_); }

int BlockRef::use_count() const { return pool_ == nullptr ? 0 : pool_->use_counts_[id_]; }

absl::StatusOr<std::unique_ptr<BlockPool>> BlockPool::Create(const Ops& ops, Backend* backend,
                                                             const BlockPoolOptions& options) {
  constexpr size_t kMaxBytes = size_t{1} << 47;
  if (options.block_bytes == 0 || options.blocks <= 0) {
    return absl::InvalidArgumentError(absl::StrCat("KV pool: ", options.blocks, " blocks of ",
                                                   options.block_bytes,
                                                   " bytes; both have to be positive"));
  }
  if (options.block_bytes > kMaxBytes / options.blocks) {
    return absl::InvalidArgumentError(absl::StrCat("KV pool: ", options.blocks, " blocks of ",
                                                   options.block_bytes,
                                                   " bytes are more than can be addressed"));
  }
  absl::StatusOr<void*> base = ops.alloc(backend, options.block_bytes * options.blocks);
  if (!base.ok()) {
    return absl::Status(base.status().code(),
                        absl::StrCat("kv_cache_bytes: ", base.status().message()));
  }
  return std::unique_ptr<BlockPool>(new BlockPool(ops, backend, options, *base));
}

BlockPool::BlockPool(const Ops& ops, Backend* backend, const BlockPoolOptions& options, void* base)
    : ops_(ops),
      backend_(backend),
      base_(base),
      block_bytes_(options.block_bytes),
      poison_(options.poison),
      use_counts_(options.blocks, 0) {
  free_.reserve(options.blocks);
  for (int32_t id = options.blocks - 1; id >= 0; --id) {
    free_.push_back(id);
    if (poison_) Poison(id);
  }
}

BlockPool::~BlockPool() {
  CHECK(used() == 0);
  if (poison_) ASAN_UNPOISON_MEMORY_REGION(base_, block_bytes_ * use_counts_.size());
  ops_.release(backend_, base_);
}

std::optional<BlockRef> BlockPool::Allocate() {
  if (free_.empty()) return std::nullopt;
  const int32_t id = free_.back();
  free_.pop_back();
  use_counts_[id] = 1;
  if (poison_) ASAN_UNPOISON_MEMORY_REGION(BlockData(id), block_bytes_);
  return BlockRef(this, id);
}

void BlockPool::Release(int32_t id) {
  CHECK(use_counts_[id] > 0);
  if (--use_counts_[id] > 0) return;
  free_.push_back(id);
  if (poison_) Poison(id);
}

void BlockPool::Poison(int32_t id) {
  // All ones is a NaN in F32, BF16 and F16 alike.
  std::memset(BlockData(id), 0xFF, block_bytes_);
  ASAN_POISON_MEMORY_REGION(BlockData(id), block_bytes_);
}

}  // namespace carryover
