// The prefix store with simulated entries: blocks of a byte, so that ten million fit.
#include <malloc.h>

#include <algorithm>
#include <ctime>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "bench/bench_case.h"
#include "bench/simulated_store.h"

namespace carryover::bench {
namespace {

constexpr int kBlockTokens = SimulatedStore::kBlockTokens;
constexpr int kDepth = SimulatedStore::kDepth;

double CpuSeconds() {  // of this thread, so that neighbours count less
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

size_t HeapBytes() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

absl::StatusOr<nlohmann::json> Store(int blocks) {
  const int chains = blocks / kDepth;
  const size_t heap_before = HeapBytes();
  // One chain more than the store is filled with.
  ASSIGN_OR_RETURN(const std::unique_ptr<SimulatedStore> store,
                   SimulatedStore::Create(blocks + kDepth));
  const size_t heap_empty = HeapBytes();
  const auto per_block_us = [](double seconds, double count) { return 1e6 * seconds / count; };

  double start = CpuSeconds();
  for (int chain = 0; chain < chains; ++chain) {
    if (store->Insert(chain) != kDepth) return absl::InternalError("a block was not inserted");
  }
  const double insert_s = CpuSeconds() - start;
  const size_t heap_full = HeapBytes();

  // Spread over the whole store, so that caches hold none of it.
  const int lookups = std::min(chains, 200);
  std::vector<double> find_us;
  for (int i = 0; i < lookups; ++i) {
    const std::vector<int32_t> tokens =
        SimulatedStore::Chain(static_cast<int>(int64_t{i} * chains / lookups));
    start = CpuSeconds();
    const int levels = store->Find(tokens);
    find_us.push_back(per_block_us(CpuSeconds() - start, kDepth));
    if (levels != kDepth) return absl::InternalError("a prefix was not found");
  }
  std::vector<double> miss_us;
  for (int i = 0; i < lookups; ++i) {
    const std::vector<int32_t> tokens = SimulatedStore::Chain(chains + 1 + i);
    start = CpuSeconds();
    const int levels = store->Find(tokens);
    miss_us.push_back(1e6 * (CpuSeconds() - start));
    if (levels != 0) return absl::InternalError("a prefix was found that nobody stored");
  }
  // A full store takes in what is new and gives up what is old.
  const int turns = std::min(chains, 20);
  start = CpuSeconds();
  for (int i = 0; i < turns; ++i) {
    if (store->EvictUntilFree(kDepth) < kDepth || store->Insert(chains + 1000 + i) != kDepth) {
      return absl::InternalError("the full store took nothing in");
    }
  }
  const double turn_s = CpuSeconds() - start;
  const int evicted = blocks / 2;
  start = CpuSeconds();
  if (store->EvictUntilFree(evicted) < evicted) {
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
  out["bytes_per_block"] = static_cast<double>(heap_full - heap_empty) / blocks;
  out["bytes_per_token"] = static_cast<double>(heap_full - heap_empty) / blocks / kBlockTokens;
  out["pool_bytes_per_block"] =
      static_cast<double>(heap_empty - heap_before) / (blocks + kDepth) - 1;
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
