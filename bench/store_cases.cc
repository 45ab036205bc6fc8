// The prefix store with simulated entries: blocks of a byte, so that ten million fit.
#include <malloc.h>

#include <cstdlib>
#include <ctime>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "bench/bench_case.h"
#include "engine/prefix_store.h"
#include "engine/provenance.h"

namespace carryover::bench {
namespace {

constexpr int kBlockTokens = 16;
constexpr int kDepth = 500;  // blocks of a prefix: 8,000 tokens

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

double CpuSeconds() {  // of this thread, so that neighbours count less
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

size_t HeapBytes() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

std::vector<int32_t> Chain(int chain) {
  std::vector<int32_t> tokens(static_cast<size_t>(kDepth) * kBlockTokens);
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] =
        static_cast<int32_t>((static_cast<size_t>(chain) * 2654435761u + i * 40503u) % 49152);
  }
  tokens[0] = chain;  // no two alike
  return tokens;
}

absl::StatusOr<nlohmann::json> Store(int blocks) {
  const int chains = blocks / kDepth;
  const size_t heap_before = HeapBytes();
  ProvenanceRegistry registry;
  ASSIGN_OR_RETURN(
      const std::unique_ptr<BlockPool> pool,
      BlockPool::Create(HostMemory(), nullptr,
                        {.block_bytes = 1, .blocks = blocks + kDepth, .poison = false}));
  const size_t heap_pool = HeapBytes();
  PrefixStore store({.block_tokens = kBlockTokens}, pool.get(), &registry, {});
  const CacheRoot root = RootKey("tenant", "", Digest{}, Digest{});
  const Lineage lineage(&registry, Sha256("a version"));
  const auto per_block_us = [](double seconds, double count) { return 1e6 * seconds / count; };
  const auto insert = [&](int chain) {
    const std::vector<int32_t> tokens = Chain(chain);
    std::vector<TableBlock> table;
    table.reserve(kDepth);
    for (int i = 0; i < kDepth; ++i) {
      table.push_back({.block = *pool->Allocate(), .origin = lineage.current()});
    }
    return store.Insert(root, tokens, table).inserted;
  };

  double start = CpuSeconds();
  for (int chain = 0; chain < chains; ++chain) {
    if (insert(chain) != kDepth) return absl::InternalError("a block was not inserted");
  }
  const double insert_s = CpuSeconds() - start;
  const size_t heap_full = HeapBytes();

  // Spread over the whole store, so that caches hold none of it.
  const int lookups = std::min(chains, 200);
  std::vector<double> find_us;
  for (int i = 0; i < lookups; ++i) {
    const std::vector<int32_t> tokens = Chain(static_cast<int>(int64_t{i} * chains / lookups));
    start = CpuSeconds();
    const int levels = store.Find(root, tokens).levels();
    find_us.push_back(per_block_us(CpuSeconds() - start, kDepth));
    if (levels != kDepth) return absl::InternalError("a prefix was not found");
  }
  std::vector<double> miss_us;
  for (int i = 0; i < lookups; ++i) {
    const std::vector<int32_t> tokens = Chain(chains + 1 + i);
    start = CpuSeconds();
    const int levels = store.Find(root, tokens).levels();
    miss_us.push_back(1e6 * (CpuSeconds() - start));
    if (levels != 0) return absl::InternalError("a prefix was found that nobody stored");
  }
  // A full store takes in what is new and gives up what is old.
  const int turns = std::min(chains, 20);
  start = CpuSeconds();
  for (int i = 0; i < turns; ++i) {
    if (store.EvictUntilFree(kDepth, {.drop = true}).free < kDepth ||
        insert(chains + 1000 + i) != kDepth) {
      return absl::InternalError("the full store took nothing in");
    }
  }
  const double turn_s = CpuSeconds() - start;
  const int evicted = blocks / 2;
  start = CpuSeconds();
  if (store.EvictUntilFree(evicted, {.drop = true}).free < evicted) {
    return absl::InternalError("too little was evicted");
  }
  const double evict_s = CpuSeconds() - start;

  nlohmann::json out = {{"blocks", blocks}, {"tokens", int64_t{blocks} * kBlockTokens}};
  out["insert_us_per_block"] = per_block_us(insert_s, blocks);
  AddQuartiles("find_us_per_block", find_us, &out);
  AddQuartiles("miss_us", miss_us, &out);
  out["replace_us_per_block"] = per_block_us(turn_s, static_cast<double>(turns) * kDepth);
  out["evict_us_per_block"] = per_block_us(evict_s, evicted);
  // As the allocator counts: of tree, entries, indices; the pool's own lists apart.
  out["bytes_per_block"] = static_cast<double>(heap_full - heap_pool) / blocks;
  out["bytes_per_token"] = static_cast<double>(heap_full - heap_pool) / blocks / kBlockTokens;
  out["pool_bytes_per_block"] =
      static_cast<double>(heap_pool - heap_before) / (blocks + kDepth) - 1;
  return out;
}

}  // namespace

void AddStoreCases(std::vector<Case>* cases) {
  for (const int blocks : {10'000, 100'000, 1'000'000, 10'000'000}) {
    cases->push_back({absl::StrCat("store/blocks=", blocks),
                      "insert, find, miss, replace and evict, CPU time; memory of a block", 0,
                      [=] { return Store(blocks); }});
  }
}

}  // namespace carryover::bench
