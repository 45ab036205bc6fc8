// The prefix store over a tier whose transfers happen when the test says so.
#include <gtest/gtest.h>

#include "engine/prefix_store.h"
#include "tests/unit/store_fixture.h"

namespace carryover {
namespace {

constexpr int kBlock = StoreFixture::kBlock;

struct TieredFixture : StoreFixture {
  TieredFixture(int blocks, ManualTier* made) : StoreFixture(blocks, {}, One(made)), tier(made) {}
  explicit TieredFixture(int blocks, size_t budget = 1 << 20)
      : TieredFixture(blocks, new ManualTier(budget)) {}
  static std::vector<std::unique_ptr<KvTier>> One(ManualTier* tier) {
    std::vector<std::unique_ptr<KvTier>> tiers;
    tiers.emplace_back(tier);
    return tiers;
  }
  void Settle() {
    tier->Step();
    store->Poll();
  }
  std::vector<EntryRef> Entries(const Tokens& tokens, ProvenanceId provenance) {
    const ChainMatch match = store->Find(root, tokens);
    std::vector<EntryRef> entries;
    for (int i = 0; i < match.levels(); ++i) {
      if (const MatchEntry* entry = match.Find(i, provenance)) entries.push_back(entry->entry);
    }
    return entries;
  }
  size_t ImageBytes() {
    KvImageHeader header;
    header.tokens.resize(kBlock);
    header.payload_bytes = kBytes;
    return tier->ImageBytes(header);
  }

  ManualTier* tier;
};

TEST(Tiers, EvictedBlocksMoveAndComeBackTheSame) {
  TieredFixture fixture(4);
  const Tokens tokens = SomeTokens(4 * kBlock);
  const ProvenanceId t = fixture.Native("T");
  fixture.Serve("T", tokens);
  EvictOutcome outcome = fixture.store->EvictUntilFree(3);
  EXPECT_EQ(outcome.free, 0);
  EXPECT_EQ(outcome.pending, 3);
  EXPECT_INTACT(fixture);
  // Asking again starts nothing more.
  EXPECT_EQ(fixture.store->EvictUntilFree(3).pending, 3);
  fixture.Settle();
  EXPECT_EQ(fixture.pool->free(), 3);
  EXPECT_EQ(fixture.Row(Tier::kHost, t).blocks, 3);
  EXPECT_EQ(fixture.Row(Tier::kDevice, t).evictions[0], 3);
  EXPECT_INTACT(fixture);

  // Each image says all that it is. Tail first: depths 3, 2, 1.
  int depth = 3;
  Digest child_parent{};
  for (const auto& [id, image] : fixture.tier->images) {
    const absl::StatusOr<KvImageHeader> header = DecodeKvImageHeader(image.first);
    ASSERT_TRUE(header.ok());
    EXPECT_EQ(header->tokens,
              Tokens(tokens.begin() + depth * kBlock, tokens.begin() + (depth + 1) * kBlock));
    EXPECT_EQ(header->provenance, NativeOf(VersionNamed("T")));
    EXPECT_EQ(header->root, fixture.root.key);
    EXPECT_EQ(header->tokenizer_sha256, fixture.root.tokenizer_sha256);
    EXPECT_EQ(header->kv_layout_sha256, fixture.root.kv_layout_sha256);
    EXPECT_EQ(header->payload_bytes, StoreFixture::kBytes);
    if (depth < 3) {
      EXPECT_EQ(header->key, child_parent);
    }
    child_parent = header->parent;
    --depth;
  }

  const ChainMatch match = fixture.store->Find(fixture.root, tokens);
  ASSERT_EQ(match.levels(), 4);
  EXPECT_EQ(match.level(0)[0].tier, Tier::kDevice);
  EXPECT_EQ(match.level(1)[0].tier, Tier::kHost);
  EXPECT_FALSE(match.level(1)[0].ready);
  EXPECT_FALSE(fixture.store->Use(match.level(1)[0].entry).has_value());

  LoadResult result;
  bool done = false;
  const std::vector<EntryRef> entries = fixture.Entries(tokens, t);
  EXPECT_EQ(fixture.store->BlocksToLoad(entries), 3);
  ASSERT_TRUE(fixture.store
                  ->Load(entries,
                         [&](LoadResult loaded) {
                           result = std::move(loaded);
                           done = true;
                         })
                  .ok());
  EXPECT_FALSE(done);
  EXPECT_INTACT(fixture);
  EXPECT_EQ(fixture.store->EvictAll().in_use, 4);
  fixture.Settle();
  ASSERT_TRUE(done);
  EXPECT_EQ(result.failed, 0);
  for (int i = 0; i < 4; ++i) fixture.ExpectContent(result.blocks[i], tokens, i);
  EXPECT_EQ(fixture.Row(Tier::kHost, t).hit_blocks, 3);
  EXPECT_EQ(fixture.Row(Tier::kHost, t).blocks, 0);
  EXPECT_EQ(fixture.tier->used_bytes(), 0u);
  EXPECT_INTACT(fixture);
}

TEST(Tiers, DroppingIsImmediate) {
  TieredFixture fixture(4);
  fixture.Serve("T", SomeTokens(4 * kBlock));
  const EvictOutcome outcome = fixture.store->EvictUntilFree(2, {.drop = true});
  EXPECT_EQ(outcome.free, 2);
  EXPECT_EQ(outcome.pending, 0);
  EXPECT_EQ(fixture.FindLevels(SomeTokens(4 * kBlock)), 2);
}

TEST(Tiers, UseCallsAMoveOff) {
  TieredFixture fixture(4);
  const Tokens tokens = SomeTokens(2 * kBlock);
  fixture.Serve("T", tokens);
  fixture.store->EvictUntilFree(4);
  std::optional<TableBlock> used =
      fixture.store->Use(fixture.store->Find(fixture.root, tokens).level(1)[0].entry);
  ASSERT_TRUE(used.has_value());
  fixture.ExpectContent(*used, tokens, 1);
  EXPECT_INTACT(fixture);
  used.reset();
  // Out again before the first write has ended.
  EXPECT_EQ(fixture.store->EvictUntilFree(4).pending, 2);
  EXPECT_INTACT(fixture);
  fixture.tier->Step(1);
  fixture.store->Poll();
  EXPECT_INTACT(fixture);
  fixture.Settle();
  EXPECT_EQ(fixture.pool->free(), 4);
  EXPECT_EQ(fixture.Row(Tier::kHost, fixture.Native("T")).blocks, 2);
  EXPECT_EQ(fixture.tier->images.size(), 2u);
  EXPECT_INTACT(fixture);
}

TEST(Tiers, ASpoiledImageIsAMissAndCounted) {
  TieredFixture fixture(4);
  const Tokens tokens = SomeTokens(3 * kBlock);
  const ProvenanceId t = fixture.Native("T");
  fixture.Serve("T", tokens);
  fixture.store->EvictUntilFree(4);
  fixture.Settle();
  const std::vector<EntryRef> entries = fixture.Entries(tokens, t);
  ASSERT_EQ(entries.size(), 3u);
  // Images are in the order of their writes: tail first. Another header for depth 1, none for 2.
  auto image = fixture.tier->images.begin();
  image = fixture.tier->images.erase(image);
  image->second.first[40] ^= 1;
  LoadResult result;
  ASSERT_TRUE(
      fixture.store->Load(entries, [&](LoadResult loaded) { result = std::move(loaded); }).ok());
  fixture.Settle();
  ASSERT_EQ(result.blocks.size(), 3u);
  EXPECT_EQ(result.failed, 2);
  fixture.ExpectContent(result.blocks[0], tokens, 0);
  EXPECT_FALSE(result.blocks[1].block);
  EXPECT_FALSE(result.blocks[2].block);
  EXPECT_EQ(fixture.Rejects(RejectReason::kCorrupt), 1);
  EXPECT_EQ(fixture.Rejects(RejectReason::kLost), 1);
  EXPECT_EQ(fixture.FindLevels(tokens), 1);
  EXPECT_EQ(fixture.pool->used(), 1);
  EXPECT_INTACT(fixture);
  // And is computed anew.
  EXPECT_EQ(fixture.Serve("T", tokens).computed, 2);
  EXPECT_EQ(fixture.Serve("T", tokens).cached, 2);
}

TEST(Tiers, AFailedWriteLosesTheBlockAlone) {
  TieredFixture fixture(4);
  fixture.Serve("T", SomeTokens(2 * kBlock));
  fixture.tier->fail_next_write = true;
  fixture.store->EvictUntilFree(4);
  fixture.Settle();
  EXPECT_EQ(fixture.pool->free(), 4);
  EXPECT_EQ(fixture.FindLevels(SomeTokens(2 * kBlock)), 1);
  EXPECT_EQ(fixture.Rejects(RejectReason::kTransfer), 1);
  EXPECT_INTACT(fixture);
}

TEST(Tiers, FlushReachesAllOfThem) {
  TieredFixture fixture(4);
  const Tokens tokens = SomeTokens(4 * kBlock);
  fixture.Serve("T", tokens);
  fixture.store->EvictUntilFree(2);
  fixture.Settle();
  fixture.store->EvictUntilFree(3);  // one on its way
  const EvictReport report = fixture.store->EvictAll();
  EXPECT_EQ(report.evicted, 4);
  EXPECT_EQ(fixture.FindLevels(tokens), 0);
  EXPECT_EQ(fixture.tier->used_bytes(), 0u);
  EXPECT_INTACT(fixture);
  fixture.Settle();
  EXPECT_EQ(fixture.pool->free(), 4);
  fixture.Settle();
  EXPECT_TRUE(fixture.tier->images.empty());
  EXPECT_EQ(fixture.store->device_blocks(), 0);
  EXPECT_INTACT(fixture);
}

TEST(Tiers, TheHostForgetsItsOldestTail) {
  const size_t image = TieredFixture(1).ImageBytes();
  TieredFixture fixture(8, 3 * image);
  fixture.Serve("T", SomeTokens(2 * kBlock, 1));
  fixture.Serve("T", SomeTokens(2 * kBlock, 2));
  fixture.store->EvictUntilFree(8);
  fixture.Settle();
  EXPECT_EQ(fixture.pool->free(), 8);
  // While the first chain's images are still being written nothing can make room for the fourth.
  EXPECT_EQ(fixture.Row(Tier::kHost, fixture.Native("T")).blocks, 3);
  fixture.Serve("T", SomeTokens(2 * kBlock, 3));
  fixture.store->EvictUntilFree(8);
  fixture.Settle();
  EXPECT_EQ(fixture.Row(Tier::kHost, fixture.Native("T")).blocks, 3);
  EXPECT_EQ(fixture.FindLevels(SomeTokens(2 * kBlock, 3)), 2);
  EXPECT_EQ(fixture.Row(Tier::kHost, fixture.Native("T")).evictions[0], 2);
  EXPECT_INTACT(fixture);
}

TEST(Tiers, TooSmallATierIsPassedOver) {
  TieredFixture fixture(4, 10);
  fixture.Serve("T", SomeTokens(2 * kBlock));
  EXPECT_EQ(fixture.store->EvictUntilFree(4).free, 4);
  EXPECT_INTACT(fixture);
}

TEST(Tiers, TwoWhoWaitForOneBlock) {
  TieredFixture fixture(4);
  const Tokens tokens = SomeTokens(2 * kBlock);
  fixture.Serve("T", tokens);
  fixture.store->EvictUntilFree(4);
  fixture.Settle();
  const std::vector<EntryRef> entries = fixture.Entries(tokens, fixture.Native("T"));
  int finished = 0;
  std::vector<TableBlock> blocks;
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(fixture.store
                    ->Load(entries,
                           [&](LoadResult result) {
                             ++finished;
                             blocks.insert(blocks.end(), result.blocks.begin(),
                                           result.blocks.end());
                           })
                    .ok());
  }
  const absl::StatusOr<PrefixStore::LoadId> cancelled =
      fixture.store->Load(entries, [&](const LoadResult&) { finished += 100; });
  ASSERT_TRUE(cancelled.ok());
  fixture.store->CancelLoad(*cancelled);
  EXPECT_EQ(fixture.pool->used(), 2);
  fixture.Settle();
  EXPECT_EQ(finished, 2);
  ASSERT_EQ(blocks.size(), 4u);
  EXPECT_EQ(blocks[0].block.id(), blocks[2].block.id());
  blocks.clear();
  EXPECT_EQ(fixture.store->EvictAll().evicted, 2);
  EXPECT_INTACT(fixture);
}

TEST(Tiers, LoadingNeedsRoom) {
  TieredFixture fixture(2);
  const Tokens tokens = SomeTokens(2 * kBlock, 1);
  fixture.Serve("T", tokens);
  fixture.store->EvictUntilFree(2);
  fixture.Settle();
  const Served busy = fixture.Serve("T", SomeTokens(kBlock, 2));
  const std::vector<EntryRef> entries = fixture.Entries(tokens, fixture.Native("T"));
  EXPECT_TRUE(
      absl::IsResourceExhausted(fixture.store->Load(entries, [](const LoadResult&) {}).status()));
  EXPECT_EQ(fixture.pool->used(), 1);
  EXPECT_INTACT(fixture);
}

TEST(Tiers, WhatIsGoneFailsToLoad) {
  TieredFixture fixture(4);
  const Tokens tokens = SomeTokens(2 * kBlock);
  fixture.Serve("T", tokens);
  const std::vector<EntryRef> stale = fixture.Entries(tokens, fixture.Native("T"));
  fixture.store->EvictAll();
  fixture.Serve("T", tokens);  // new entries in the same slots
  EXPECT_FALSE(fixture.store->Use(stale[0]).has_value());
  EXPECT_FALSE(fixture.store->Use(EntryRef{}).has_value());
  EXPECT_FALSE(fixture.store->Use(EntryRef{12345, 1}).has_value());
  int failed = -1;
  ASSERT_TRUE(
      fixture.store->Load(stale, [&](const LoadResult& result) { failed = result.failed; }).ok());
  EXPECT_EQ(failed, -1);
  fixture.store->Poll();
  EXPECT_EQ(failed, 2);
}

TEST(Tiers, AVersionRemovedWhileItsBlocksLoad) {
  TieredFixture fixture(4);
  const Tokens tokens = SomeTokens(2 * kBlock);
  fixture.Serve("T", tokens);
  fixture.store->EvictUntilFree(4);
  fixture.Settle();
  int failed = -1;
  ASSERT_TRUE(fixture.store
                  ->Load(fixture.Entries(tokens, fixture.Native("T")),
                         [&](const LoadResult& result) { failed = result.failed; })
                  .ok());
  EXPECT_EQ(fixture.store->RemoveVersion(VersionNamed("T")).in_use, 2);
  EXPECT_INTACT(fixture);
  fixture.Settle();
  EXPECT_EQ(failed, 2);
  EXPECT_EQ(fixture.pool->used(), 0);
  EXPECT_INTACT(fixture);
}

TEST(Tiers, AFreshBlockTakesThePlaceOfAnImage) {
  TieredFixture fixture(4);
  const Tokens tokens = SomeTokens(2 * kBlock);
  fixture.Serve("T", tokens);
  fixture.store->EvictUntilFree(4);
  fixture.Settle();
  const Served again = fixture.Serve("T", tokens);  // takes only what is on the device
  EXPECT_EQ(again.computed, 2);
  EXPECT_EQ(again.insert.existing, 2);
  EXPECT_EQ(fixture.Row(Tier::kHost, fixture.Native("T")).blocks, 0);
  EXPECT_EQ(fixture.tier->used_bytes(), 0u);
  EXPECT_EQ(fixture.Serve("T", SomeTokens(2 * kBlock + 1)).cached, 2);
  EXPECT_INTACT(fixture);
}

TEST(Tiers, IntegrityCheckSeesWrongAccounting) {
  TieredFixture fixture(4);
  fixture.Serve("T", SomeTokens(2 * kBlock));
  EXPECT_INTACT(fixture);
  fixture.tier->lie = 1;
  EXPECT_EQ(fixture.store->CheckIntegrity().code(), absl::StatusCode::kInternal);
}

TEST(Tiers, AStoreMayEndWithTransfersUnderWay) {
  {
    TieredFixture fixture(4);
    const Tokens tokens = SomeTokens(2 * kBlock);
    fixture.Serve("T", tokens);
    fixture.store->EvictUntilFree(4);
    fixture.Settle();
    ASSERT_TRUE(fixture.store
                    ->Load(fixture.Entries(tokens, fixture.Native("T")),
                           [](const LoadResult&) { FAIL() << "after the end"; })
                    .ok());
  }
}

}  // namespace
}  // namespace carryover
