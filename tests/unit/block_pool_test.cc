#include "engine/block_pool.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/unit/store_fixture.h"

namespace carryover {
namespace {

std::unique_ptr<BlockPool> MakePool(int32_t blocks, bool poison = false) {
  return BlockPool::Create(PlainMemoryOps(), nullptr,
                           {.block_bytes = 64, .blocks = blocks, .poison = poison})
      .value();
}

TEST(BlockPool, SharesAndGivesBackAtOnce) {
  auto pool = MakePool(2);
  std::optional<BlockRef> a = pool->Allocate();
  BlockRef b = *a;
  EXPECT_EQ(b.use_count(), 2);
  EXPECT_EQ(pool->used(), 1);
  BlockRef c = std::move(b);
  EXPECT_FALSE(b);
  EXPECT_EQ(c.use_count(), 2);
  a.reset();
  EXPECT_EQ(c.use_count(), 1);
  EXPECT_EQ(pool->used(), 1);
  c = c;
  EXPECT_EQ(c.use_count(), 1);
  c = BlockRef();
  EXPECT_EQ(pool->used(), 0);
}

TEST(BlockPool, RunsOutWithoutHarm) {
  auto pool = MakePool(2);
  const std::optional<BlockRef> a = pool->Allocate();
  std::optional<BlockRef> b = pool->Allocate();
  EXPECT_NE(a->id(), b->id());
  EXPECT_EQ(static_cast<char*>(b->data()) - static_cast<char*>(pool->base()), 64 * b->id());
  EXPECT_FALSE(pool->Allocate().has_value());
  b->Reset();
  EXPECT_TRUE(pool->Allocate().has_value());
}

TEST(BlockPool, RefusesSizesThatCannotBe) {
  for (const BlockPoolOptions& options :
       {BlockPoolOptions{.block_bytes = 0, .blocks = 1},
        BlockPoolOptions{.block_bytes = 1, .blocks = 0},
        BlockPoolOptions{.block_bytes = 1, .blocks = -1},
        BlockPoolOptions{.block_bytes = SIZE_MAX / 2, .blocks = 1 << 30}}) {
    EXPECT_EQ(BlockPool::Create(PlainMemoryOps(), nullptr, options).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST(BlockPool, FreedBlocksReadAsNaN) {
  auto pool = MakePool(1, /*poison=*/true);
  std::optional<BlockRef> block = pool->Allocate();
  float* data = static_cast<float*>(block->data());
  data[0] = 1;
  block.reset();
#if !defined(__SANITIZE_ADDRESS__)
  EXPECT_TRUE(std::isnan(data[0]));
#endif
  block = pool->Allocate();
  EXPECT_TRUE(std::isnan(static_cast<float*>(block->data())[15]));
}

#if defined(__SANITIZE_ADDRESS__)
TEST(BlockPoolDeathTest, UseAfterFreeIsFound) {
  auto pool = MakePool(1, /*poison=*/true);
  std::optional<BlockRef> block = pool->Allocate();
  volatile float* data = static_cast<float*>(block->data());
  block.reset();
  EXPECT_DEATH(data[0] = 1, "use-after-poison");
}
#endif

}  // namespace
}  // namespace carryover
