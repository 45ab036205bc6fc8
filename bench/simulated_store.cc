#include "bench/simulated_store.h"

#include <cstdlib>
#include <utility>

#include "base/status_macros.h"

namespace carryover::bench {
namespace {

const Ops& HostMemory() {
  static const Ops ops = [] {
    Ops plain{};
    plain.name = "host memory";
    plain.alloc = [](Backend*, size_t bytes) -> absl::StatusOr<void*> {
      void* const memory = std::malloc(bytes);
      if (memory == nullptr) return absl::ResourceExhaustedError("no memory");
      return memory;
    };
    plain.release = [](Backend*, void* memory) { std::free(memory); };
    return plain;
  }();
  return ops;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SimulatedStore>> SimulatedStore::Create(int blocks) {
  ASSIGN_OR_RETURN(std::unique_ptr<BlockPool> pool,
                   BlockPool::Create(HostMemory(), nullptr,
                                     {.block_bytes = 1, .blocks = blocks, .poison = false}));
  return std::unique_ptr<SimulatedStore>(new SimulatedStore(std::move(pool)));
}

SimulatedStore::SimulatedStore(std::unique_ptr<BlockPool> pool)
    : pool_(std::move(pool)),
      store_({.block_tokens = kBlockTokens}, pool_.get(), &registry_, {}),
      root_(RootKey("tenant", "", Digest{}, Digest{})),
      lineage_(&registry_, Sha256("a version")) {}

std::vector<int32_t> SimulatedStore::Chain(int chain) {
  std::vector<int32_t> tokens(static_cast<size_t>(kDepth) * kBlockTokens);
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] =
        static_cast<int32_t>((static_cast<size_t>(chain) * 2654435761u + i * 40503u) % 49152);
  }
  tokens[0] = chain;  // no two alike
  return tokens;
}

int SimulatedStore::Insert(int chain) {
  const std::vector<int32_t> tokens = Chain(chain);
  std::vector<TableBlock> table;
  table.reserve(kDepth);
  for (int i = 0; i < kDepth; ++i) {
    table.push_back({.block = *pool_->Allocate(), .origin = lineage_.current()});
  }
  return store_.Insert(root_, tokens, table).inserted;
}

}  // namespace carryover::bench
