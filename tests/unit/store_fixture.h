// A small engine around a prefix store, for its tests: plain memory as the device, blocks filled
// with what they stand for, and sequences that reuse and compute as the real engine's do.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/prefix_store.h"

namespace carryover {

// alloc and release alone.
inline const Ops& PlainMemoryOps() {
  static const Ops ops = [] {
    Ops plain{};
    plain.name = "plain";
    plain.alloc = [](Backend*, size_t bytes) -> absl::StatusOr<void*> {
      void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
      if (memory == nullptr) return absl::ResourceExhaustedError("no memory");
      return memory;
    };
    plain.release = [](Backend*, void* memory) { std::free(memory); };
    return plain;
  }();
  return ops;
}

using Tokens = std::vector<int32_t>;

inline Digest VersionNamed(const std::string& name) { return Sha256("version " + name); }

// A tier whose transfers happen when the test says so, or fail.
class ManualTier : public KvTier {
 public:
  explicit ManualTier(size_t budget) : budget_(budget) {}

  Tier tier() const override { return Tier::kHost; }
  absl::Status StartWrite(ImageId image, const KvImageHeader& header, const void* device,
                          Done done) override {
    const size_t bytes = ImageBytes(header);
    if (used_ + bytes > budget_) return absl::ResourceExhaustedError("full");
    used_ += bytes;
    sizes_[image] = bytes;
    queue_.push_back([this, image, header = EncodeKvImageHeader(header), device,
                      bytes = header.payload_bytes, done = std::move(done)] {
      absl::Status status;
      if (fail_next_write) {
        fail_next_write = false;
        status = absl::InternalError("injected");
        GiveBack(image);
      } else {
        images[image] = {header, std::string(static_cast<const char*>(device), bytes)};
      }
      finished_.push_back([done, status] { done(status); });
    });
    return absl::OkStatus();
  }
  void StartRead(ImageId image, const KvImageHeader& expected, void* device, Done done) override {
    queue_.push_back(
        [this, image, header = EncodeKvImageHeader(expected), device, done = std::move(done)] {
          absl::Status status;
          const auto it = images.find(image);
          if (it == images.end()) {
            status = absl::NotFoundError("gone");
          } else if (it->second.first != header) {
            status = absl::DataLossError("another block");
          } else {
            std::memcpy(device, it->second.second.data(), it->second.second.size());
          }
          finished_.push_back([done, status] { done(status); });
        });
  }
  void Remove(ImageId image) override {
    GiveBack(image);
    queue_.push_back([this, image] { images.erase(image); });
  }
  size_t used_bytes() const override { return used_ + lie; }
  size_t budget_bytes() const override { return budget_; }
  size_t ImageBytes(const KvImageHeader& header) const override {
    return header.payload_bytes + EncodeKvImageHeader(header).size();
  }
  int Poll() override {
    const auto finished = std::exchange(finished_, {});
    for (const auto& callback : finished) callback();
    return static_cast<int>(finished.size());
  }
  void SetWakeup(std::function<void()>) override {}

  // Does the oldest n transfers and removals.
  void Step(size_t n = SIZE_MAX) {
    for (; n > 0 && !queue_.empty(); --n) {
      queue_.front()();
      queue_.pop_front();
    }
  }

  bool fail_next_write = false;
  size_t lie = 0;  // wrong accounting, for the integrity check
  std::map<ImageId, std::pair<std::string, std::string>> images;  // header, payload

 private:
  void GiveBack(ImageId image) {
    if (const auto it = sizes_.find(image); it != sizes_.end()) {
      used_ -= it->second;
      sizes_.erase(it);
    }
  }

  size_t budget_;
  size_t used_ = 0;
  std::map<ImageId, size_t> sizes_;
  std::deque<std::function<void()>> queue_;
  std::vector<std::function<void()>> finished_;
};

// What one request did.
struct Served {
  int cached = 0;   // blocks, native
  int carried = 0;  // blocks, of others
  int computed = 0;
  InsertResult insert;
  std::vector<TableBlock> table;  // holds the blocks for as long as it lives
};

struct StoreFixture {
  static constexpr int kBlock = 4;      // tokens
  static constexpr size_t kBytes = 64;  // of a block

  explicit StoreFixture(int blocks, PrefixStoreOptions options = {},
                        std::vector<std::unique_ptr<KvTier>> tiers = {}) {
    auto made = BlockPool::Create(PlainMemoryOps(), nullptr,
                                  {.block_bytes = kBytes, .blocks = blocks, .poison = true});
    EXPECT_TRUE(made.ok());
    pool = *std::move(made);
    options.block_tokens = kBlock;
    store = std::make_unique<PrefixStore>(options, pool.get(), &registry, std::move(tiers));
    for (const char* name : {"S", "T", "U"}) registry.NameVersion(VersionNamed(name), name);
  }

  ProvenanceId Native(const std::string& version) { return registry.Native(VersionNamed(version)); }

  // What the memory of the block at depth i of a prefix holds when `provenance` computed it.
  std::string Content(const Tokens& tokens, int i, ProvenanceId provenance) const {
    const Digest digest = Hasher()
                              .AddTokens(absl::MakeConstSpan(tokens).first((i + 1) * kBlock))
                              .AddInt(ProvenanceIndex(provenance))
                              .Finish();
    std::string content(reinterpret_cast<const char*>(digest.data()), digest.size());
    return content + content;
  }
  void Fill(const TableBlock& block, const Tokens& tokens, int i) {
    std::memcpy(block.block.data(), Content(tokens, i, block.origin.provenance()).data(), kBytes);
  }
  void ExpectContent(const TableBlock& block, const Tokens& tokens, int i) const {
    ASSERT_TRUE(block.block);
    EXPECT_EQ(std::string(static_cast<const char*>(block.block.data()), kBytes),
              Content(tokens, i, block.origin.provenance()))
        << "block " << i << " of " << registry.Name(block.origin.provenance());
  }

  // A new block under a label. Evicts when the pool is empty.
  TableBlock Compute(const Tokens& tokens, int i, const Lineage& lineage) {
    std::optional<BlockRef> block = pool->Allocate();
    if (!block) {
      store->EvictUntilFree(1, {.drop = true});
      block = pool->Allocate();
    }
    EXPECT_TRUE(block.has_value());
    TableBlock computed{.block = *block, .origin = lineage.current()};
    Fill(computed, tokens, i);
    return computed;
  }

  // The plans native (nothing in `carry`) and direct: native blocks first, then blocks of what
  // `carry` names, then fresh ones. Only what is on the device.
  Served Serve(const std::string& version, const Tokens& tokens,
               const std::set<ProvenanceId>& carry = {}) {
    Served served;
    Lineage lineage(&registry, VersionNamed(version));
    const ChainMatch match = store->Find(
        root, absl::MakeConstSpan(tokens).first(
                  MaxReusableBlocks(static_cast<int64_t>(tokens.size()), kBlock) * kBlock));
    for (int i = 0; i < match.levels(); ++i) {
      const MatchEntry* chosen = match.Find(i, lineage.provenance());
      if (served.carried > 0 || chosen == nullptr || !chosen->ready) {
        for (const MatchEntry& entry : match.level(i)) {
          if (carry.contains(entry.provenance) && entry.ready) chosen = &entry;
        }
      }
      if (chosen == nullptr || !chosen->ready) break;
      std::optional<TableBlock> block = store->Use(chosen->entry);
      EXPECT_TRUE(block.has_value());
      ExpectContent(*block, tokens, i);
      ++(registry.IsNativeOf(chosen->provenance, VersionNamed(version)) ? served.cached
                                                                        : served.carried);
      lineage.Attend(block->origin);
      served.table.push_back(*block);
    }
    const int full = static_cast<int>(tokens.size()) / kBlock;
    for (int i = static_cast<int>(served.table.size()); i < full; ++i) {
      served.table.push_back(Compute(tokens, i, lineage));
      ++served.computed;
    }
    served.insert = store->Insert(root, tokens, served.table);
    return served;
  }

  int FindLevels(const Tokens& tokens) { return store->Find(root, tokens).levels(); }
  bool Has(const Tokens& tokens, int i, ProvenanceId provenance) {
    const ChainMatch match = store->Find(root, tokens);
    return i < match.levels() && match.Find(i, provenance) != nullptr;
  }
  StoreStatsRow Row(Tier tier, ProvenanceId provenance) const {
    for (const StoreStatsRow& row : store->stats().rows) {
      if (row.tier == tier && row.provenance == provenance) return row;
    }
    return {};
  }
  int64_t Rejects(RejectReason reason) const {
    return store->stats().rejects[static_cast<int>(reason)];
  }

  ProvenanceRegistry registry;
  std::unique_ptr<BlockPool> pool;
  std::unique_ptr<PrefixStore> store;
  CacheRoot root = RootKey("tenant", "", Sha256("tokenizer"), Sha256("layout"));
};

#define EXPECT_INTACT(fixture)                                     \
  do {                                                             \
    const absl::Status intact = (fixture).store->CheckIntegrity(); \
    EXPECT_TRUE(intact.ok()) << intact;                            \
  } while (false)

// n tokens that differ by seed from the first one on.
inline Tokens SomeTokens(int n, int seed = 0) {
  Tokens tokens(n);
  for (int i = 0; i < n; ++i) tokens[i] = seed * 1000 + i;
  return tokens;
}

}  // namespace carryover
