// Random work on a prefix store against a naive model of it that predicts every eviction, with the
// integrity check after every step.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <tuple>

#include "tests/unit/store_fixture.h"

namespace carryover {
namespace {

constexpr int kBlock = StoreFixture::kBlock;
const char* const kVersions[] = {"S", "T", "U"};

// What a naive store knows of an entry.
struct ModelEntry {
  int32_t block = -1;
  uint32_t slot = 0;
  uint64_t last_use = 0;
};
using ModelKey = std::pair<Tokens, ProvenanceId>;  // the prefix up to the end of the block

struct Running {
  std::vector<TableBlock> table;
};

class StoreModel {
 public:
  StoreModel(uint32_t seed, int blocks)
      : random_(seed), fixture_(blocks, {.reserved_share = 0.4}), blocks_(blocks) {
    for (const char* version : kVersions) fixture_.Native(version);
  }

  void Step() {
    switch (random_() % 16) {
      case 0:
      case 1:
        EvictUntilFree(static_cast<int>(random_() % 6) + fixture_.pool->free(), random_() % 2 == 0);
        break;
      case 2:
        SetReserved();
        break;
      case 3:
        Pin();
        break;
      case 4:
        Unpin();
        break;
      case 5:
        if (random_() % 4 == 0) EvictVersion();
        break;
      case 6:
        if (random_() % 4 == 0) RemoveVersion();
        break;
      case 7:
      case 8:
        if (!running_.empty()) running_.erase(running_.begin() + random_() % running_.size());
        break;
      default:
        Serve();
    }
    Compare();
  }

  int evictions = 0;
  int carried = 0;

 private:
  // Prefixes of a small tree, so that they meet.
  Tokens RandomTokens() {
    Tokens tokens;
    for (int depth = static_cast<int>(random_() % 5) + 1; depth > 0; --depth) {
      const int32_t kind = static_cast<int32_t>(random_() % 2);
      for (int i = 0; i < kBlock; ++i) tokens.push_back(10 * kind + i);
    }
    tokens.push_back(99);
    return tokens;
  }
  std::string RandomVersion() { return kVersions[random_() % 3]; }
  ProvenanceId RandomProvenance() {
    return ProvenanceId{static_cast<int32_t>(random_() % fixture_.registry.size())};
  }
  static Tokens Head(const Tokens& tokens, size_t blocks) {
    return Tokens(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(blocks * kBlock));
  }
  bool InUse(const ModelEntry& entry) const {
    for (const Running& one : running_) {
      for (const TableBlock& block : one.table) {
        if (block.block.id() == entry.block) return true;
      }
    }
    return false;
  }
  bool HasChild(const ModelKey& key) const {
    for (const auto& [other, entry] : entries_) {
      if (other.second == key.second && other.first.size() == key.first.size() + kBlock &&
          Head(other.first, key.first.size() / kBlock) == key.first) {
        return true;
      }
    }
    return false;
  }
  bool Pinned(const ModelKey& key) const {
    for (const auto& [pin, last] : pins_) {
      if (last == key) return true;
    }
    return false;
  }
  void Forget(const ModelKey& key) {
    entries_.erase(key);
    std::erase_if(pins_, [&](const auto& pin) { return pin.second == key; });
  }
  std::set<ProvenanceId> Provenances() const {
    std::set<ProvenanceId> all;
    for (const auto& [key, entry] : entries_) all.insert(key.second);
    return all;
  }

  void Serve() {
    const Tokens tokens = RandomTokens();
    const std::string version = RandomVersion();
    Lineage lineage(&fixture_.registry, VersionNamed(version));
    const ChainMatch match = fixture_.store->Find(fixture_.root, tokens);
    ++tick_;
    Running served;
    running_.push_back({});  // so that InUse sees what is taken
    for (int i = 0; i < match.levels() && random_() % 8 != 0; ++i) {
      // Any entry, of whomever: plans stranger than the engine's.
      const auto level = match.level(i);
      const MatchEntry& chosen = level[random_() % level.size()];
      const MatchEntry* native = match.Find(i, fixture_.Native(version));
      const MatchEntry& taken = native != nullptr && random_() % 3 != 0 ? *native : chosen;
      std::optional<TableBlock> block = fixture_.store->Use(taken.entry);
      ASSERT_TRUE(block.has_value());
      fixture_.ExpectContent(*block, tokens, i);
      entries_.at({Head(tokens, i + 1), taken.provenance}).last_use = tick_;
      lineage.Attend(block->origin);
      carried += taken.provenance != fixture_.Native(version) ? 1 : 0;
      served.table.push_back(*block);
      running_.back().table.push_back(*block);
    }
    for (size_t i = served.table.size(); i < tokens.size() / kBlock; ++i) {
      if (fixture_.pool->free() == 0) EvictUntilFree(1, false);
      if (fixture_.pool->free() == 0) {  // all is in use or pinned
        running_.pop_back();
        return;
      }
      served.table.push_back(fixture_.Compute(tokens, static_cast<int>(i), lineage));
      running_.back().table.push_back(served.table.back());
    }
    const InsertResult result = fixture_.store->Insert(fixture_.root, tokens, served.table);
    ++tick_;
    EXPECT_EQ(result.refused, 0);
    for (size_t i = 0; i < served.table.size(); ++i) {
      const TableBlock& block = served.table[i];
      const ModelKey key{Head(tokens, i + 1), block.origin.provenance()};
      const auto [it, added] = entries_.try_emplace(key);
      it->second.last_use = tick_;
      if (!added) continue;
      EXPECT_FALSE(block.reused);
      it->second.block = block.block.id();
    }
    // Where the store put them: breaks ties of the LRU order.
    const ChainMatch after = fixture_.store->Find(fixture_.root, tokens);
    ++tick_;
    for (int i = 0; i < after.levels(); ++i) {
      for (const MatchEntry& entry : after.level(i)) {
        entries_.at({Head(tokens, i + 1), entry.provenance}).slot = entry.entry.slot;
      }
    }
    if (random_() % 3 != 0) running_.pop_back();
    if (running_.size() > 3) running_.erase(running_.begin());
  }

  void EvictUntilFree(int n, bool keep_reserved) {
    const EvictOutcome outcome =
        fixture_.store->EvictUntilFree(n, {.drop = true, .keep_reserved = keep_reserved});
    ++tick_;
    int free = blocks_ - ModelUsed();
    while (free < n) {
      std::optional<ModelKey> oldest, oldest_over;
      const auto order = [&](const ModelKey& key) {
        const ModelEntry& entry = entries_.at(key);
        return std::tuple(entry.last_use, -static_cast<int>(key.first.size()), entry.slot);
      };
      for (ProvenanceId provenance : Provenances()) {
        std::optional<ModelKey> front;
        for (;;) {
          front.reset();
          for (const auto& [key, entry] : entries_) {
            if (key.second != provenance || HasChild(key) || Pinned(key)) continue;
            if (!front || order(key) < order(*front)) front = key;
          }
          if (!front || !InUse(entries_.at(*front)) || entries_.at(*front).last_use == tick_) break;
          entries_.at(*front).last_use = tick_;
        }
        if (!front || InUse(entries_.at(*front))) continue;
        if (!oldest || order(*front) < order(*oldest)) oldest = front;
        const int64_t held = std::count_if(entries_.begin(), entries_.end(), [&](const auto& one) {
          return one.first.second == provenance;
        });
        const bool reserved = reserved_.contains(provenance);
        if (reserved && held <= static_cast<int64_t>(0.4 * blocks_ / reserved_.size())) continue;
        if (!oldest_over || order(*front) < order(*oldest_over)) oldest_over = front;
      }
      if (!oldest_over && !keep_reserved) oldest_over = oldest;
      if (!oldest_over) break;
      Forget(*oldest_over);
      ++free;
      ++evictions;
    }
    EXPECT_EQ(outcome.free, free);
  }

  // Distinct blocks of entries and running sequences.
  int ModelUsed() const {
    std::set<int32_t> used;
    for (const auto& [key, entry] : entries_) used.insert(entry.block);
    for (const Running& one : running_) {
      for (const TableBlock& block : one.table) used.insert(block.block.id());
    }
    return static_cast<int>(used.size());
  }

  void SetReserved() {
    reserved_.clear();
    for (int i = static_cast<int>(random_() % 3); i > 0; --i) reserved_.insert(RandomProvenance());
    fixture_.store->SetReserved(std::vector<ProvenanceId>(reserved_.begin(), reserved_.end()));
  }

  void Pin() {
    if (pins_.size() > 2) return;
    const Tokens tokens = RandomTokens();
    const ProvenanceId provenance = RandomProvenance();
    int64_t depth = 0;
    while (entries_.contains({Head(tokens, depth + 1), provenance}) &&
           (depth + 1) * kBlock < static_cast<int64_t>(tokens.size())) {
      ++depth;
    }
    EXPECT_EQ(fixture_.store->Pin(fixture_.root, tokens, provenance), depth * kBlock);
    if (depth > 0) pins_[{tokens, provenance}] = {Head(tokens, depth), provenance};
  }

  void Unpin() {
    if (pins_.empty()) return;
    const auto pin = pins_.begin();
    EXPECT_EQ(fixture_.store->Unpin(fixture_.root, pin->first.first, pin->first.second),
              static_cast<int64_t>(pin->second.first.size()));
    pins_.erase(pin);
  }

  void EvictVersion() {
    const Digest version = VersionNamed(RandomVersion());
    const EvictReport report = fixture_.store->EvictVersion(version);
    std::vector<ModelKey> order;
    for (const auto& [key, entry] : entries_) {
      if (fixture_.registry.Get(key.second).computed_by == version) order.push_back(key);
    }
    std::stable_sort(order.begin(), order.end(), [](const ModelKey& a, const ModelKey& b) {
      return a.first.size() > b.first.size();
    });
    EvictReport expected;
    for (const ModelKey& key : order) {
      if (InUse(entries_.at(key))) {
        ++expected.in_use;
      } else if (Pinned(key) || HasChild(key)) {
        ++expected.pinned;
      } else {
        ++expected.evicted;
        Forget(key);
      }
    }
    EXPECT_EQ(report.evicted, expected.evicted);
    EXPECT_EQ(report.in_use, expected.in_use);
    EXPECT_EQ(report.pinned, expected.pinned);
  }

  void RemoveVersion() {
    const Digest version = VersionNamed(RandomVersion());
    // As the engine does, after its sequences have ended.
    running_.clear();
    fixture_.store->RemoveVersion(version);
    std::vector<ModelKey> gone;
    for (const auto& [key, entry] : entries_) {
      if (fixture_.registry.Get(key.second).Involves(version)) gone.push_back(key);
    }
    for (const ModelKey& key : gone) Forget(key);
  }

  void Compare() {
    const absl::Status intact = fixture_.store->CheckIntegrity();
    ASSERT_TRUE(intact.ok()) << intact;
    ASSERT_EQ(fixture_.pool->used(), ModelUsed());
    ASSERT_EQ(fixture_.store->device_blocks(), static_cast<int64_t>(entries_.size()));
    ASSERT_EQ(fixture_.store->stats().provenance_violations, 0);
    std::map<ProvenanceId, int64_t> counts;
    for (const auto& [key, entry] : entries_) ++counts[key.second];
    for (const StoreStatsRow& row : fixture_.store->stats().rows) {
      ASSERT_EQ(row.blocks, counts[row.provenance]);
    }
    // Everything that Find can reach, and nothing that the model has not.
    std::set<Tokens> reachable;
    for (const auto& [key, entry] : entries_) {
      bool whole = true;
      for (size_t i = 1; i * kBlock < key.first.size(); ++i) {
        whole &= std::any_of(entries_.begin(), entries_.end(), [&](const auto& one) {
          return one.first.first == Head(key.first, i);
        });
      }
      const int level = static_cast<int>(key.first.size()) / kBlock - 1;
      ASSERT_EQ(fixture_.Has(key.first, level, key.second), whole);
      ++tick_;
    }
  }

  std::mt19937 random_;
  StoreFixture fixture_;
  const int blocks_;
  uint64_t tick_ = 0;
  std::map<ModelKey, ModelEntry> entries_;
  std::map<ModelKey, ModelKey> pins_;  // what was asked for, and the last block that it holds
  std::set<ProvenanceId> reserved_;
  std::vector<Running> running_;
};

TEST(PrefixStoreModel, EveryEvictionIsForeseen) {
  int evictions = 0;
  int carried = 0;
  for (uint32_t seed = 1; seed <= 6; ++seed) {
    StoreModel model(seed, 14 + static_cast<int>(seed) * 2);
    for (int step = 0; step < 150; ++step) {
      model.Step();
      if (testing::Test::HasFailure()) FAIL() << "seed " << seed << ", step " << step;
    }
    evictions += model.evictions;
    carried += model.carried;
  }
  EXPECT_GT(evictions, 100);
  EXPECT_GT(carried, 100);
}

}  // namespace
}  // namespace carryover
