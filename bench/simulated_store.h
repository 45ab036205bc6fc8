// A prefix store whose blocks are a byte each, so that ten million of them fit. One thread.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/block_pool.h"
#include "engine/prefix_store.h"
#include "engine/provenance.h"

namespace carryover::bench {

class SimulatedStore {
 public:
  static constexpr int kBlockTokens = 16;
  static constexpr int kDepth = 500;  // blocks of a chain: 8,000 tokens

  static absl::StatusOr<std::unique_ptr<SimulatedStore>> Create(int blocks);

  // The tokens of a chain; no two chains share a block.
  static std::vector<int32_t> Chain(int chain);
  // How many blocks of a chain went in. REQUIRES: kDepth blocks are free.
  int Insert(int chain);
  // How many blocks of it are there.
  int Find(absl::Span<const int32_t> tokens) { return store_.Find(root_, tokens).levels(); }
  // How many blocks are free then.
  int EvictUntilFree(int blocks) { return store_.EvictUntilFree(blocks, {.drop = true}).free; }

 private:
  explicit SimulatedStore(std::unique_ptr<BlockPool> pool);

  ProvenanceRegistry registry_;
  const std::unique_ptr<BlockPool> pool_;
  PrefixStore store_;
  const CacheRoot root_;
  const Lineage lineage_;
};

}  // namespace carryover::bench
