// Random work on a prefix store whose blocks move between tiers, on a schedule of the test's or on
// a real worker, with the integrity check after every step and what must hold whatever moved when.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>

#include "tests/unit/store_fixture.h"

namespace carryover {
namespace {

constexpr int kBlock = StoreFixture::kBlock;
const char* const kVersions[] = {"S", "T", "U"};

class TieredRun {
 public:
  // Without a manual tier: a host tier with its worker.
  TieredRun(uint32_t seed, bool manual) : random_(seed) {
    std::vector<std::unique_ptr<KvTier>> tiers;
    if (manual) {
      auto tier = std::make_unique<ManualTier>(12 * 400);
      manual_ = tier.get();
      tiers.push_back(std::move(tier));
    } else {
      tiers.push_back(NewHostTier(12 * 500, CpuOps(), nullptr));
    }
    fixture_ = std::make_unique<StoreFixture>(12, PrefixStoreOptions{}, std::move(tiers));
  }

  void Step() {
    switch (random_() % 12) {
      case 0:
      case 1:
        fixture_->store->EvictUntilFree(static_cast<int>(random_() % 12));
        break;
      case 2:
        fixture_->store->EvictUntilFree(static_cast<int>(random_() % 3), {.drop = true});
        break;
      case 3:
      case 4:
        Advance();
        break;
      case 5:
        if (manual_ != nullptr && random_() % 3 == 0) manual_->fail_next_write = true;
        break;
      case 6:
        if (random_() % 6 == 0) Flush();
        break;
      case 7:
        if (!running_.empty()) running_.pop_back();
        break;
      default:
        Serve();
    }
    const absl::Status intact = fixture_->store->CheckIntegrity();
    ASSERT_TRUE(intact.ok()) << intact;
    ASSERT_EQ(fixture_->store->stats().provenance_violations, 0);
  }

  // Ends everything: nothing may be left over.
  void End() {
    running_.clear();
    Settle();
    fixture_->store->EvictAll();
    Settle();
    EXPECT_EQ(fixture_->pool->used(), 0);
    EXPECT_EQ(fixture_->store->stats().nodes, 0);
    EXPECT_EQ(fixture_->store->device_blocks(), 0);
    EXPECT_EQ(waiting_, 0);
    if (manual_ != nullptr) {
      EXPECT_TRUE(manual_->images.empty());
    }
  }

  int loaded = 0;
  int cancelled = 0;
  int64_t moved() const {
    int64_t moved = 0;
    for (const StoreStatsRow& row : fixture_->store->stats().rows) {
      if (row.tier == Tier::kHost) moved += row.hit_blocks;
    }
    return moved;
  }

 private:
  Tokens RandomTokens() {
    Tokens tokens;
    for (int depth = static_cast<int>(random_() % 4) + 1; depth > 0; --depth) {
      const int32_t kind = static_cast<int32_t>(random_() % 2);
      for (int i = 0; i < kBlock; ++i) tokens.push_back(10 * kind + i);
    }
    tokens.push_back(99);
    return tokens;
  }
  void Advance() {
    if (manual_ != nullptr) {
      manual_->Step(random_() % 4);
    } else if (random_() % 2 == 0) {
      Settle();
    }
    fixture_->store->Poll();
  }
  void Settle() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (;;) {
      if (manual_ != nullptr) manual_->Step();
      fixture_->store->Poll();
      const StoreStats stats = fixture_->store->stats();
      if (stats.moving_out + stats.loading == 0) break;
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
      if (manual_ == nullptr) std::this_thread::yield();
    }
    if (manual_ != nullptr) manual_->Step();
    fixture_->store->Poll();
  }
  void Flush() {
    const EvictReport report = random_() % 2 == 0
                                   ? fixture_->store->EvictAll()
                                   : fixture_->store->EvictPrefix(fixture_->root, RandomTokens());
    EXPECT_GE(report.evicted, 0);
  }
  void Serve() {
    const Tokens tokens = RandomTokens();
    // Sequences wait for what they load; some are gone by then.
    const ChainMatch match = fixture_->store->Find(fixture_->root, tokens);
    std::vector<EntryRef> entries;
    bool lower = false;
    for (int i = 0; i < match.levels(); ++i) {
      const auto level = match.level(i);
      const MatchEntry& entry = level[random_() % level.size()];
      entries.push_back(entry.entry);
      lower |= !entry.ready;
    }
    if (lower && random_() % 4 != 0) {
      const absl::StatusOr<PrefixStore::LoadId> load =
          fixture_->store->Load(entries, [this, tokens](LoadResult result) {
            --waiting_;
            for (size_t i = 0; i < result.blocks.size(); ++i) {
              if (!result.blocks[i].block) continue;
              fixture_->ExpectContent(result.blocks[i], tokens, static_cast<int>(i));
              ++loaded;
            }
          });
      if (!load.ok()) return;
      ++waiting_;
      if (random_() % 5 == 0) {
        fixture_->store->CancelLoad(*load);
        --waiting_;
        ++cancelled;
      }
      return;
    }
    const int needed = static_cast<int>(tokens.size()) / kBlock;
    if (fixture_->store->EvictUntilFree(needed, {.drop = true}).free < needed) return;
    Served served = fixture_->Serve(kVersions[random_() % 3], tokens,
                                    {fixture_->Native("S"), fixture_->Native("T")});
    if (running_.size() < 2 && random_() % 3 == 0) running_.push_back(std::move(served));
  }

  std::mt19937 random_;
  ManualTier* manual_ = nullptr;
  std::unique_ptr<StoreFixture> fixture_;
  std::vector<Served> running_;
  int waiting_ = 0;
};

void RunTiered(bool manual, int seeds, int steps) {
  int loaded = 0;
  int64_t moved = 0;
  int cancelled = 0;
  for (int seed = 1; seed <= seeds; ++seed) {
    TieredRun run(static_cast<uint32_t>(seed), manual);
    for (int step = 0; step < steps; ++step) {
      run.Step();
      if (testing::Test::HasFailure()) FAIL() << "seed " << seed << ", step " << step;
    }
    run.End();
    loaded += run.loaded;
    moved += run.moved();
    cancelled += run.cancelled;
  }
  // How much a worker gets done in between is up to the machine.
  EXPECT_GT(loaded, manual ? 50 : 0);
  EXPECT_GT(moved, manual ? 50 : 0);
  EXPECT_GT(cancelled, manual ? 5 : -1);
}

TEST(PrefixStoreMoves, InAnyOrder) { RunTiered(/*manual=*/true, 10, 300); }

TEST(PrefixStoreMoves, OnAWorker) { RunTiered(/*manual=*/false, 10, 300); }

}  // namespace
}  // namespace carryover
