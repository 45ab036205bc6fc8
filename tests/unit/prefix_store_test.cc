#include "engine/prefix_store.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <ctime>

#include "tests/unit/store_fixture.h"

namespace carryover {
namespace {

constexpr int kBlock = StoreFixture::kBlock;

TEST(MaxReusableBlocks, NeverTheLastToken) {
  EXPECT_EQ(MaxReusableBlocks(-1, 16), 0);
  EXPECT_EQ(MaxReusableBlocks(0, 16), 0);
  EXPECT_EQ(MaxReusableBlocks(1, 16), 0);
  EXPECT_EQ(MaxReusableBlocks(16, 16), 0);
  EXPECT_EQ(MaxReusableBlocks(17, 16), 1);
  EXPECT_EQ(MaxReusableBlocks(32, 16), 1);
  EXPECT_EQ(MaxReusableBlocks(33, 16), 2);
}

TEST(PrefixStore, LengthsAroundTheBlockSize) {
  for (int length : {0, 1, kBlock - 1, kBlock, kBlock + 1, 2 * kBlock, 2 * kBlock + 1}) {
    StoreFixture fixture(16);
    const Tokens tokens = SomeTokens(length);
    const Served first = fixture.Serve("T", tokens);
    EXPECT_EQ(first.cached, 0) << length;
    EXPECT_EQ(first.insert.inserted, length / kBlock) << length;
    EXPECT_EQ(fixture.FindLevels(tokens), length / kBlock) << length;
    const Served again = fixture.Serve("T", tokens);
    EXPECT_EQ(again.cached, MaxReusableBlocks(length, kBlock)) << length;
    // A longer prompt takes all of it.
    Tokens longer = tokens;
    longer.push_back(7);
    EXPECT_EQ(fixture.Serve("T", longer).cached, length / kBlock) << length;
    EXPECT_INTACT(fixture);
  }
}

TEST(PrefixStore, TenantSaltTokenizerAndLayoutSeparate) {
  StoreFixture fixture(16);
  const Tokens tokens = SomeTokens(9);
  fixture.Serve("T", tokens);
  const Digest tokenizer = Sha256("tokenizer");
  const Digest layout = Sha256("layout");
  ASSERT_EQ(fixture.store->Find(RootKey("tenant", "", tokenizer, layout), tokens).levels(), 2);
  for (const CacheRoot& other :
       {RootKey("tenant2", "", tokenizer, layout), RootKey("tenant", "s", tokenizer, layout),
        RootKey("tenan", "t", tokenizer, layout), RootKey("", "tenant", tokenizer, layout),
        RootKey("tenant", "", Sha256("other"), layout),
        RootKey("tenant", "", tokenizer, Sha256("other"))}) {
    EXPECT_EQ(fixture.store->Find(other, tokens).levels(), 0);
    EXPECT_EQ(fixture.store->EvictPrefix(other, tokens).evicted, 0);
    EXPECT_EQ(fixture.store->Pin(other, tokens, fixture.Native("T")), 0);
  }
}

TEST(PrefixStore, AnswersForEveryProvenanceAtOnce) {
  StoreFixture fixture(16);
  const Tokens tokens = SomeTokens(4 * kBlock + 1);
  fixture.Serve("S", tokens);
  fixture.Serve("T", SomeTokens(2 * kBlock + 1));
  const ChainMatch match = fixture.store->Find(fixture.root, tokens);
  EXPECT_EQ(match.levels(), 4);
  EXPECT_EQ(match.matched_tokens(), 16);
  EXPECT_EQ(match.resumable_tokens(), 16);
  EXPECT_EQ(match.level(0).size(), 2u);
  EXPECT_EQ(match.level(2).size(), 1u);
  EXPECT_EQ(match.Run(0, fixture.Native("S")), 4);
  EXPECT_EQ(match.Run(0, fixture.Native("T")), 2);
  EXPECT_EQ(match.Run(2, fixture.Native("T")), 0);
  EXPECT_EQ(match.Run(2, fixture.Native("S")), 2);
  EXPECT_TRUE(match.level(0)[0].ready);
  EXPECT_INTACT(fixture);
}

TEST(PrefixStore, CarriedTurnIsKeptAsWhatItIs) {
  StoreFixture fixture(32);
  const Tokens tokens = SomeTokens(2 * kBlock + 1);
  fixture.Serve("S", tokens);
  Tokens turn = SomeTokens(5 * kBlock);
  const Served carried = fixture.Serve("T", turn, {fixture.Native("S")});
  EXPECT_EQ(carried.carried, 2);
  EXPECT_EQ(carried.insert.inserted, 3);
  const ProvenanceId tainted = carried.table.back().origin.provenance();
  EXPECT_EQ(fixture.registry.Name(tainted), "T over S");
  EXPECT_TRUE(fixture.Has(turn, 4, tainted));
  EXPECT_FALSE(fixture.Has(turn, 2, fixture.Native("T")));
  // The next turn of the conversation reads it, and its own blocks stay tainted.
  Tokens further = turn;
  for (int i = 0; i < kBlock; ++i) further.push_back(77);
  const Served second = fixture.Serve("T", further, {fixture.Native("S"), tainted});
  EXPECT_EQ(second.carried, 5);
  EXPECT_EQ(second.table.back().origin.provenance(), tainted);
  // A native request of T finds nothing of all that.
  Tokens next = turn;
  next.push_back(1);
  EXPECT_EQ(fixture.Serve("T", next).cached, 0);
  EXPECT_EQ(fixture.store->stats().provenance_violations, 0);
  EXPECT_INTACT(fixture);
}

// Behaviour 18: equal hashes are not equal prefixes.
TEST(PrefixStore, ForcedCollisionsServeNobodyElsesBlocks) {
  int calls = 0;
  for (int bits : {0, 1, 2}) {
    PrefixStoreOptions options;
    options.hash = [&calls, bits](const Digest&, absl::Span<const int32_t> tokens) {
      ++calls;
      Digest weak{};
      weak[0] = static_cast<uint8_t>(tokens[0] & ((1 << bits) - 1));
      return weak;
    };
    StoreFixture fixture(64, options);
    // The same tokens behind different parents, and different tokens behind the same.
    for (int seed = 0; seed < 6; ++seed) {
      Tokens tokens = SomeTokens(kBlock, seed);
      for (int i = 0; i < kBlock + 1; ++i) tokens.push_back(5);
      EXPECT_EQ(fixture.Serve("T", tokens).cached, 0);
      const Served again = fixture.Serve("T", tokens);  // compares contents
      EXPECT_EQ(again.cached, 2);
      EXPECT_INTACT(fixture);
    }
    const CacheRoot other = RootKey("other", "", Sha256("tokenizer"), Sha256("layout"));
    EXPECT_EQ(fixture.store->Find(other, SomeTokens(kBlock)).levels(), 0);
    for (int seed = 0; seed < 3; ++seed) {
      EXPECT_EQ(fixture.store->EvictPrefix(fixture.root, SomeTokens(kBlock, seed)).evicted, 2);
      EXPECT_INTACT(fixture);
    }
    EXPECT_EQ(fixture.FindLevels(SomeTokens(kBlock, 1)), 0);
    EXPECT_EQ(fixture.FindLevels(SomeTokens(kBlock, 4)), 1);
  }
  EXPECT_GT(calls, 0);
}

TEST(PrefixStore, KeepsTheOldEntryOfTwo) {
  StoreFixture fixture(16);
  const Tokens tokens = SomeTokens(2 * kBlock);
  // Two sequences that ran at the same time.
  Lineage lineage(&fixture.registry, VersionNamed("T"));
  std::vector<TableBlock> a, b;
  for (int i = 0; i < 2; ++i) {
    a.push_back(fixture.Compute(tokens, i, lineage));
    b.push_back(fixture.Compute(tokens, i, lineage));
  }
  EXPECT_EQ(fixture.store->Insert(fixture.root, tokens, a).inserted, 2);
  const InsertResult second = fixture.store->Insert(fixture.root, tokens, b);
  EXPECT_EQ(second.inserted, 0);
  EXPECT_EQ(second.existing, 2);
  b.clear();
  a.clear();
  EXPECT_EQ(fixture.pool->used(), 2);
  EXPECT_INTACT(fixture);
}

TEST(PrefixStore, ASequenceMayInsertAsItGrows) {
  StoreFixture fixture(16);
  const Tokens tokens = SomeTokens(3 * kBlock);
  Lineage lineage(&fixture.registry, VersionNamed("T"));
  std::vector<TableBlock> table;
  for (int i = 0; i < 3; ++i) {
    table.push_back(fixture.Compute(tokens, i, lineage));
    const InsertResult result = fixture.store->Insert(
        fixture.root, absl::MakeConstSpan(tokens).first(table.size() * kBlock), table);
    EXPECT_EQ(result.inserted, 1);
    EXPECT_EQ(result.existing, i);
  }
  EXPECT_INTACT(fixture);
}

// --- The provenance law ---

TEST(ProvenanceLaw, ForgottenTaintIsRefusedAndCounted) {
  StoreFixture fixture(16);
  const Tokens tokens = SomeTokens(4 * kBlock);
  fixture.Serve("S", SomeTokens(2 * kBlock + 1));
  // A sequence of T that reads S's blocks and does not tell its lineage.
  const ChainMatch match = fixture.store->Find(fixture.root, tokens);
  Lineage lineage(&fixture.registry, VersionNamed("T"));
  std::vector<TableBlock> table;
  for (int i = 0; i < 2; ++i) table.push_back(*fixture.store->Use(match.level(i)[0].entry));
  for (int i = 2; i < 4; ++i) table.push_back(fixture.Compute(tokens, i, lineage));
  const InsertResult result = fixture.store->Insert(fixture.root, tokens, table);
  EXPECT_EQ(result.inserted, 0);
  EXPECT_EQ(result.refused, 2);
  EXPECT_EQ(fixture.store->stats().provenance_violations, 1);
  EXPECT_EQ(fixture.FindLevels(tokens), 2);
  EXPECT_INTACT(fixture);
  // Nor may such blocks pass as computed by itself, whatever label they carry.
  for (TableBlock& block : table) {
    block.reused = false;
    block.origin = lineage.current();
  }
  EXPECT_EQ(fixture.store->Insert(fixture.root, tokens, table).refused, 4);
  EXPECT_EQ(fixture.store->stats().provenance_violations, 2);
  EXPECT_EQ(fixture.store->stats().nodes, 2);
  EXPECT_INTACT(fixture);
}

TEST(ProvenanceLaw, TaintFromFurtherUpCounts) {
  StoreFixture fixture(32);
  const Tokens tokens = SomeTokens(3 * kBlock);
  fixture.Serve("S", tokens);
  fixture.Serve("T", tokens);
  const ChainMatch match = fixture.store->Find(fixture.root, tokens);
  // S, then native T, then something that says it is native of T: the direct parent is.
  Lineage lineage(&fixture.registry, VersionNamed("T"));
  std::vector<TableBlock> table;
  table.push_back(*fixture.store->Use(match.Find(0, fixture.Native("S"))->entry));
  table.push_back(*fixture.store->Use(match.Find(1, fixture.Native("T"))->entry));
  Tokens other = tokens;
  other.back() = -1;
  table.push_back(fixture.Compute(other, 2, lineage));
  EXPECT_EQ(fixture.store->Insert(fixture.root, other, table).refused, 1);
  EXPECT_EQ(fixture.store->stats().provenance_violations, 1);
}

TEST(ProvenanceLaw, AReusedBlockIsWhatTheStoreKnowsItToBe) {
  StoreFixture fixture(16);
  fixture.Serve("S", SomeTokens(kBlock + 1));
  const Tokens tokens = SomeTokens(2 * kBlock);
  Lineage lineage(&fixture.registry, VersionNamed("T"));
  std::vector<TableBlock> table;
  table.push_back(*fixture.store->Use(fixture.store->Find(fixture.root, tokens).level(0)[0].entry));
  table.back().origin = lineage.current();  // a lie
  table.push_back(fixture.Compute(tokens, 1, lineage));
  EXPECT_EQ(fixture.store->Insert(fixture.root, tokens, table).refused, 1);
  EXPECT_EQ(fixture.store->stats().provenance_violations, 1);
  EXPECT_EQ(fixture.FindLevels(tokens), 1);
}

TEST(ProvenanceLaw, AnUnlabelledOrMissingBlockIsRefused) {
  StoreFixture fixture(8);
  const Tokens tokens = SomeTokens(kBlock);
  TableBlock unlabelled{.block = *fixture.pool->Allocate()};
  EXPECT_EQ(fixture.store->Insert(fixture.root, tokens, {unlabelled}).refused, 1);
  TableBlock missing{.origin = Lineage(&fixture.registry, VersionNamed("T")).current()};
  EXPECT_EQ(fixture.store->Insert(fixture.root, tokens, {missing}).refused, 1);
  EXPECT_EQ(fixture.store->stats().provenance_violations, 2);
  EXPECT_EQ(fixture.store->stats().nodes, 0);
}

TEST(ProvenanceLaw, OneBlockIsNotTwoPrefixes) {
  StoreFixture fixture(8);
  const Served served = fixture.Serve("T", SomeTokens(kBlock));
  const InsertResult result =
      fixture.store->Insert(fixture.root, SomeTokens(kBlock, 1), served.table);
  EXPECT_EQ(result.refused, 1);
  EXPECT_EQ(fixture.FindLevels(SomeTokens(kBlock, 1)), 0);
  EXPECT_INTACT(fixture);
}

TEST(ProvenanceLaw, AMappedBlockStandsBesideWhatItWasMadeOf) {
  StoreFixture fixture(16);
  const Tokens tokens = SomeTokens(8);
  fixture.Serve("S", tokens);
  const ChainMatch match = fixture.store->Find(fixture.root, tokens);
  ASSERT_GE(match.levels(), 2);
  const EntryRef source = match.level(1)[0].entry;
  const std::optional<TableBlock> block = fixture.store->Use(source);
  Lineage lineage(&fixture.registry, VersionNamed("T"));
  TableBlock mapped;
  mapped.block = *fixture.pool->Allocate();
  mapped.origin = lineage.Mapped(block->origin, "fit");
  EXPECT_EQ(fixture.store->InsertMapped(source, mapped).inserted, 1);
  EXPECT_EQ(fixture.store->Find(fixture.root, tokens).level(1).size(), 2u);
  EXPECT_TRUE(fixture.store->CheckIntegrity().ok()) << fixture.store->CheckIntegrity();
  // Another copy changes nothing.
  TableBlock other = mapped;
  other.block = *fixture.pool->Allocate();
  EXPECT_EQ(fixture.store->InsertMapped(source, other).existing, 1);
  EXPECT_EQ(fixture.store->stats().provenance_violations, 0);

  // As native, or as another version's, it is refused; and nothing is stored behind what is gone.
  other.origin = block->origin;
  EXPECT_EQ(fixture.store->InsertMapped(source, other).refused, 1);
  other.origin = lineage.Mapped(lineage.current(), "fit");
  EXPECT_EQ(fixture.store->InsertMapped(source, other).refused, 1);
  EXPECT_EQ(fixture.store->stats().provenance_violations, 2);
  fixture.store->RemoveVersion(VersionNamed("S"));
  other.origin = mapped.origin;
  EXPECT_EQ(fixture.store->InsertMapped(source, other).inserted, 0);
}

TEST(ProvenanceLaw, NothingIsStoredBehindWhatIsGone) {
  StoreFixture fixture(16);
  fixture.Serve("S", SomeTokens(2 * kBlock + 1));
  Served carried = fixture.Serve("T", SomeTokens(2 * kBlock + 1), {fixture.Native("S")});
  const EvictReport removed = fixture.store->RemoveVersion(VersionNamed("S"));
  EXPECT_EQ(removed.in_use, 2);
  EXPECT_EQ(fixture.FindLevels(SomeTokens(2 * kBlock)), 0);
  const Tokens tokens = SomeTokens(3 * kBlock);
  Lineage lineage(&fixture.registry, VersionNamed("T"));
  for (const TableBlock& block : carried.table) lineage.Attend(block.origin);
  carried.table.push_back(fixture.Compute(tokens, 2, lineage));
  EXPECT_EQ(fixture.store->Insert(fixture.root, tokens, carried.table).refused, 1);
  EXPECT_EQ(fixture.Rejects(RejectReason::kOrphan), 1);
  EXPECT_EQ(fixture.store->stats().nodes, 0);
  carried.table.clear();
  EXPECT_EQ(fixture.pool->used(), 0);
  EXPECT_INTACT(fixture);
}

// --- Reports ---

TEST(Reports, CountHitsWhereTheyWereTaken) {
  StoreFixture fixture(32);
  const Tokens tokens = SomeTokens(4 * kBlock + 1);
  fixture.Serve("S", tokens);
  fixture.Serve("S", tokens);
  fixture.Serve("T", tokens, {fixture.Native("S")});
  fixture.store->Find(fixture.root, tokens);  // a look is no hit
  const StoreStatsRow row = fixture.Row(Tier::kDevice, fixture.Native("S"));
  EXPECT_EQ(row.hit_blocks, 8);
  EXPECT_EQ(row.blocks, 4);
  EXPECT_EQ(row.bytes, static_cast<int64_t>(4 * StoreFixture::kBytes));
  EXPECT_EQ(fixture.store->device_blocks(), fixture.pool->used());
}

TEST(Reports, HottestPrefixesEndWhereUseDrops) {
  StoreFixture fixture(64);
  Tokens system = SomeTokens(2 * kBlock);
  for (int user = 0; user < 3; ++user) {
    Tokens tokens = system;
    for (int i = 0; i < kBlock + 1; ++i) tokens.push_back(9000 + 10 * user + i);
    fixture.Serve("T", tokens);
    if (user == 2) fixture.Serve("T", tokens);
  }
  const std::vector<PrefixListing> hottest = fixture.store->Hottest(10);
  ASSERT_EQ(hottest.size(), 4u);
  EXPECT_EQ(hottest[0].tokens, 2 * kBlock);
  EXPECT_EQ(hottest[0].hits, 3);
  EXPECT_EQ(hottest[1].tokens, 3 * kBlock);
  EXPECT_EQ(hottest[1].hits, 1);
  EXPECT_EQ(hottest[2].hits, 0);
  EXPECT_GE(hottest[0].idle_seconds, 0);
  EXPECT_EQ(fixture.store->Hottest(1).size(), 1u);
  EXPECT_EQ(fixture.store->Hottest(0).size(), 0u);
  EXPECT_EQ(fixture.store->Hottest(-1).size(), 0u);
}

TEST(Reports, IntegrityCheckSeesAKeyThatDoesNotFit) {
  bool broken = false;
  PrefixStoreOptions options;
  options.hash = [&broken](const Digest& parent, absl::Span<const int32_t> tokens) {
    Hasher hasher;
    hasher.AddDigest(parent).AddTokens(tokens);
    return hasher.AddInt(broken).Finish();
  };
  StoreFixture fixture(8, options);
  fixture.Serve("T", SomeTokens(2 * kBlock));
  EXPECT_INTACT(fixture);
  broken = true;
  EXPECT_EQ(fixture.store->CheckIntegrity().code(), absl::StatusCode::kInternal);
}

TEST(Reports, SpeedOfALargeStore) {
  constexpr int kChains = 200, kDepth = 500;
  ProvenanceRegistry registry;
  auto pool = BlockPool::Create(PlainMemoryOps(), nullptr,
                                {.block_bytes = 64, .blocks = kChains * kDepth, .poison = false})
                  .value();
  PrefixStore store({.block_tokens = 16}, pool.get(), &registry, {});
  const CacheRoot root = RootKey("t", "", Digest{}, Digest{});
  // Of this process, so that neighbours do not count.
  const auto now = [] { return std::clock(); };
  const auto ns = [](std::clock_t ticks, int blocks) {
    return 1e9 * static_cast<double>(ticks) / CLOCKS_PER_SEC / blocks;
  };
  const Lineage lineage(&registry, VersionNamed("T"));
  const auto tokens_of = [](int chain) {
    Tokens tokens(kDepth * 16);
    for (int i = 0; i < kDepth * 16; ++i) tokens[i] = chain + i;
    return tokens;
  };
  auto start = now();
  for (int chain = 0; chain < kChains; ++chain) {
    std::vector<TableBlock> table;
    for (int i = 0; i < kDepth; ++i) {
      table.push_back({.block = *pool->Allocate(), .origin = lineage.current()});
    }
    ASSERT_EQ(store.Insert(root, tokens_of(chain), table).inserted, kDepth);
  }
  const double insert = ns(now() - start, kChains * kDepth);
  start = now();
  for (int chain = 0; chain < kChains; chain += 4) {
    ASSERT_EQ(store.Find(root, tokens_of(chain)).levels(), kDepth);
  }
  const double find = ns(now() - start, kChains * kDepth / 4);
  start = now();
  ASSERT_EQ(store.EvictUntilFree(kChains * kDepth / 2).free, kChains * kDepth / 2);
  const double evict = ns(now() - start, kChains * kDepth / 2);
  std::printf("store of %d blocks, CPU ns a block: insert %.0f, find %.0f, evict %.0f\n",
              kChains * kDepth, insert, find, evict);
}

}  // namespace
}  // namespace carryover
