// What leaves the prefix store: when room is needed, and when it is asked for.
#include <gtest/gtest.h>

#include "engine/prefix_store.h"
#include "tests/unit/store_fixture.h"

namespace carryover {
namespace {

constexpr int kBlock = StoreFixture::kBlock;

// --- Eviction ---

TEST(Eviction, LeastRecentlyUsedTailFirst) {
  StoreFixture fixture(7);
  const Tokens old = SomeTokens(3 * kBlock, 1);
  const Tokens recent = SomeTokens(3 * kBlock, 2);
  fixture.Serve("T", recent);
  fixture.Serve("T", old);
  fixture.Serve("T", recent);  // reuses two blocks and touches the third by its insert
  EXPECT_EQ(fixture.store->EvictUntilFree(2).free, 2);
  EXPECT_EQ(fixture.FindLevels(old), 2);
  EXPECT_EQ(fixture.FindLevels(recent), 3);
  EXPECT_EQ(fixture.store->EvictUntilFree(5).free, 5);
  EXPECT_EQ(fixture.FindLevels(old), 0);
  EXPECT_EQ(fixture.FindLevels(recent), 2);
  EXPECT_EQ(fixture.Row(Tier::kDevice, fixture.Native("T")).evictions[0], 4);
  EXPECT_INTACT(fixture);
}

TEST(Eviction, UseKeepsABlockEvenWithoutAnInsert) {
  StoreFixture fixture(2);
  const Tokens first = SomeTokens(kBlock, 1);
  fixture.Serve("T", first);
  fixture.Serve("T", SomeTokens(kBlock, 2));
  fixture.store->Use(fixture.store->Find(fixture.root, first).level(0)[0].entry);
  fixture.store->EvictUntilFree(1);
  EXPECT_EQ(fixture.FindLevels(first), 1);
  EXPECT_EQ(fixture.FindLevels(SomeTokens(kBlock, 2)), 0);
  // A look alone keeps nothing.
  fixture.Serve("T", SomeTokens(kBlock, 3));
  fixture.store->Find(fixture.root, first);
  fixture.store->EvictUntilFree(1);
  EXPECT_EQ(fixture.FindLevels(first), 0);
}

TEST(Eviction, LeavesWhatSequencesHold) {
  StoreFixture fixture(4);
  Served running = fixture.Serve("T", SomeTokens(2 * kBlock, 1));
  fixture.Serve("T", SomeTokens(2 * kBlock, 2));
  EXPECT_EQ(fixture.store->EvictUntilFree(4).free, 2);
  EXPECT_EQ(fixture.FindLevels(SomeTokens(2 * kBlock, 1)), 2);
  EXPECT_INTACT(fixture);
  running.table.clear();
  EXPECT_EQ(fixture.store->EvictUntilFree(4).free, 4);
  EXPECT_EQ(fixture.store->stats().nodes, 0);
  EXPECT_INTACT(fixture);
}

TEST(Eviction, PinsHoldTheirChain) {
  StoreFixture fixture(8);
  const Tokens pinned = SomeTokens(3 * kBlock, 1);
  fixture.Serve("T", pinned);
  fixture.Serve("T", SomeTokens(3 * kBlock, 2));
  EXPECT_EQ(fixture.store->Pin(fixture.root, pinned, fixture.Native("S")), 0);
  // Two blocks of three, twice, which is once.
  const auto head = absl::MakeConstSpan(pinned).first(2 * kBlock + 1);
  EXPECT_EQ(fixture.store->Pin(fixture.root, head, fixture.Native("T")), 2 * kBlock);
  EXPECT_EQ(fixture.store->Pin(fixture.root, head, fixture.Native("T")), 2 * kBlock);
  fixture.store->EvictUntilFree(8);
  EXPECT_EQ(fixture.FindLevels(pinned), 2);
  EXPECT_EQ(fixture.pool->used(), 2);
  const EvictReport flush = fixture.store->EvictAll();
  EXPECT_EQ(flush.evicted, 0);
  EXPECT_EQ(flush.pinned, 2);
  EXPECT_INTACT(fixture);
  EXPECT_EQ(fixture.store->Unpin(fixture.root, head, fixture.Native("T")), 2 * kBlock);
  EXPECT_EQ(fixture.store->Unpin(fixture.root, head, fixture.Native("T")), 0);
  EXPECT_EQ(fixture.store->EvictAll().evicted, 2);
  EXPECT_INTACT(fixture);
}

TEST(Eviction, OverlappingPinsAreApart) {
  StoreFixture fixture(8);
  const Tokens tokens = SomeTokens(3 * kBlock);
  fixture.Serve("T", tokens);
  const auto head = absl::MakeConstSpan(tokens).first(kBlock);
  fixture.store->Pin(fixture.root, head, fixture.Native("T"));
  fixture.store->Pin(fixture.root, tokens, fixture.Native("T"));
  fixture.store->Unpin(fixture.root, tokens, fixture.Native("T"));
  EXPECT_EQ(fixture.store->EvictAll().evicted, 2);
  EXPECT_EQ(fixture.FindLevels(tokens), 1);
  // A removed version takes its pins along.
  fixture.store->RemoveVersion(VersionNamed("T"));
  EXPECT_EQ(fixture.pool->used(), 0);
  EXPECT_INTACT(fixture);
  EXPECT_EQ(fixture.store->Unpin(fixture.root, head, fixture.Native("T")), 0);
}

// An update's new caches must not push out the caches that carry it.
TEST(Eviction, SourcesKeepTheirReserve) {
  PrefixStoreOptions options;
  options.reserved_share = 0.5;
  StoreFixture fixture(8, options);
  fixture.store->SetReserved({fixture.Native("S")});
  const Tokens carried = SomeTokens(4 * kBlock, 1);
  fixture.Serve("S", carried);
  for (int seed = 2; seed < 12; ++seed) fixture.Serve("T", SomeTokens(2 * kBlock, seed));
  EXPECT_EQ(fixture.FindLevels(carried), 4);
  EXPECT_GT(fixture.Row(Tier::kDevice, fixture.Native("T"))
                .evictions[static_cast<int>(EvictionReason::kBudget)],
            0);
  EXPECT_EQ(fixture.Row(Tier::kDevice, fixture.Native("S")).blocks, 4);
  EXPECT_INTACT(fixture);
  // Beyond its reserve it is as any other: now the oldest.
  fixture.store->EvictAll();
  fixture.Serve("S", SomeTokens(6 * kBlock, 1));
  fixture.Serve("T", SomeTokens(2 * kBlock, 2));
  fixture.Serve("T", SomeTokens(2 * kBlock, 3));
  EXPECT_EQ(fixture.Row(Tier::kDevice, fixture.Native("S")).blocks, 4);
  // Background work leaves it alone; a request that has nothing else does not.
  EXPECT_EQ(fixture.store->EvictUntilFree(8, {.keep_reserved = true}).free, 4);
  EXPECT_EQ(fixture.store->EvictUntilFree(6).free, 6);
  EXPECT_EQ(fixture.Row(Tier::kDevice, fixture.Native("S")).blocks, 2);
  EXPECT_INTACT(fixture);
}

// --- Requests to evict (behaviour 4) ---

TEST(Flush, TellsWhatItDidAndWhatItLeft) {
  StoreFixture fixture(16);
  const Tokens idle = SomeTokens(2 * kBlock + 1, 1);
  const Tokens busy = SomeTokens(2 * kBlock + 1, 2);
  fixture.Serve("T", idle);
  Served running = fixture.Serve("T", busy);
  const EvictReport flush = fixture.store->EvictAll();
  EXPECT_EQ(flush.evicted, 2);
  EXPECT_EQ(flush.evicted_bytes, static_cast<int64_t>(2 * StoreFixture::kBytes));
  EXPECT_EQ(flush.in_use, 2);
  EXPECT_EQ(fixture.Serve("T", idle).cached, 0);
  EXPECT_EQ(fixture.Serve("T", busy).cached, 2);
  running.table.clear();
  EXPECT_EQ(fixture.store->EvictAll().in_use, 0);
  EXPECT_EQ(fixture.Serve("T", busy).cached, 0);
  EXPECT_INTACT(fixture);
}

TEST(Flush, ByVersionTakesWhatItComputed) {
  StoreFixture fixture(32);
  const Tokens tokens = SomeTokens(2 * kBlock + 1);
  fixture.Serve("S", tokens);
  fixture.Serve("T", SomeTokens(4 * kBlock), {fixture.Native("S")});
  fixture.Serve("U", tokens);
  EXPECT_EQ(fixture.store->EvictVersion(VersionNamed("T")).evicted, 2);
  EXPECT_EQ(fixture.store->EvictVersion(VersionNamed("T")).evicted, 0);
  EXPECT_TRUE(fixture.Has(tokens, 1, fixture.Native("S")));
  EXPECT_EQ(fixture.store->EvictVersion(VersionNamed("S")).evicted, 2);
  EXPECT_TRUE(fixture.Has(tokens, 1, fixture.Native("U")));
  EXPECT_EQ(fixture.pool->used(), 2);
  EXPECT_INTACT(fixture);
}

TEST(Flush, ByPrefixLeavesOthersPrefixes) {
  StoreFixture fixture(32);
  const Tokens shared = SomeTokens(2 * kBlock);
  Tokens a = shared, b = shared;
  for (int i = 0; i < 2 * kBlock; ++i) {
    a.push_back(500 + i);
    b.push_back(600 + i);
  }
  fixture.Serve("S", a);
  fixture.Serve("T", a);
  fixture.Serve("T", b);
  // Five blocks of T in three runs, four of S. The shared part stays as long as b needs it.
  const EvictReport report =
      fixture.store->EvictPrefix(fixture.root, absl::MakeConstSpan(a).first(3 * kBlock));
  EXPECT_EQ(report.evicted, 4);
  EXPECT_EQ(fixture.FindLevels(a), 2);
  EXPECT_EQ(fixture.FindLevels(b), 4);
  EXPECT_INTACT(fixture);
  EXPECT_EQ(fixture.store->EvictPrefix(fixture.root, b).evicted, 6);
  EXPECT_EQ(fixture.FindLevels(b), 0);
  EXPECT_EQ(fixture.store->stats().nodes, 0);
  // Everything that follows a prefix goes with it.
  fixture.Serve("T", a);
  fixture.Serve("T", b);
  EXPECT_EQ(fixture.store->EvictPrefix(fixture.root, shared).evicted, 6);
  EXPECT_EQ(fixture.pool->used(), 0);
  EXPECT_INTACT(fixture);
}

TEST(Flush, ByPrefixTellsWhatIsInUse) {
  StoreFixture fixture(32);
  const Tokens tokens = SomeTokens(3 * kBlock);
  fixture.Serve("S", tokens);
  const Served running = fixture.Serve("T", tokens);
  EXPECT_EQ(fixture.store->EvictPrefix(fixture.root, tokens).in_use, 3);
  EXPECT_FALSE(fixture.Has(tokens, 0, fixture.Native("S")));
  EXPECT_TRUE(fixture.Has(tokens, 2, fixture.Native("T")));
  EXPECT_INTACT(fixture);
}

TEST(Flush, RemovingAVersionTakesWhatDependsOnIt) {
  StoreFixture fixture(32);
  const Tokens tokens = SomeTokens(2 * kBlock + 1);
  fixture.Serve("S", tokens);
  fixture.Serve("T", SomeTokens(4 * kBlock), {fixture.Native("S")});
  fixture.Serve("T", tokens);
  fixture.store->Pin(fixture.root, tokens, fixture.Native("S"));
  const EvictReport report = fixture.store->RemoveVersion(VersionNamed("S"));
  EXPECT_EQ(report.evicted, 4);
  EXPECT_EQ(fixture.FindLevels(SomeTokens(4 * kBlock)), 2);
  EXPECT_TRUE(fixture.Has(tokens, 1, fixture.Native("T")));
  EXPECT_EQ(fixture.pool->used(), 2);
  EXPECT_INTACT(fixture);
}

}  // namespace
}  // namespace carryover
