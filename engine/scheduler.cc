#include "engine/scheduler.h"

#include <algorithm>
#include <utility>

#include "engine/repair.h"

namespace carryover {
namespace {

int BlocksFor(const Sequence& sequence, int tokens) {
  const int block_tokens = sequence.request->cache->layout.geometry.block_tokens;
  return (tokens + block_tokens - 1) / block_tokens;
}

// Blocks that the sequence still lacks to run all the tokens that it has now.
int MissingBlocks(const Sequence& sequence) {
  const int repairs = static_cast<int>(sequence.repairs.size() - sequence.repairs_done);
  return repairs + std::max(0, BlocksFor(sequence, sequence.length()) -
                                   static_cast<int>(sequence.table.size()));
}

}  // namespace

void Scheduler::ListRepairs(Sequence* sequence) {
  sequence->repairs = RepairsOf(sequence->plan, sequence->request->sources, *registry_);
  sequence->repairs_done = 0;
}

bool Scheduler::Urgency::operator()(const Sequence* a, const Sequence* b) const {
  const ActiveRequest &x = *a->request, &y = *b->request;
  if (x.ask.priority != y.ask.priority) return x.ask.priority < y.ask.priority;
  if (x.arrival != y.arrival) return x.arrival < y.arrival;
  return a->choice < b->choice;
}

Scheduler::Scheduler(const SchedulerOptions& options, ProvenanceRegistry* registry,
                     EngineObserver* observer, StartFn start, FailFn fail, CarryFn carry,
                     ReclaimFn reclaim)
    : options_(options),
      registry_(registry),
      observer_(observer),
      start_(std::move(start)),
      fail_(std::move(fail)),
      carry_(std::move(carry)),
      reclaim_(std::move(reclaim)),
      most_rows_(options.step_tokens) {}

void Scheduler::LowerRows(int rows) {
  most_rows_ = std::max(1, std::min(most_rows_, rows / 2));
  steps_at_most_ = 0;
}

int Scheduler::StepRows() {
  // Memory may have come back, and a pass that finds none costs little.
  constexpr int kStepsBeforeMore = 1024;
  if (most_rows_ < options_.step_tokens && ++steps_at_most_ > kStepsBeforeMore) {
    most_rows_ = std::min(options_.step_tokens, 2 * most_rows_);
    steps_at_most_ = 0;
  }
  return most_rows_;
}

void Scheduler::Enqueue(Sequence* sequence) {
  sequence->state = SequenceState::kWaiting;
  waiting_.insert(sequence);
}

void Scheduler::Remove(Sequence* sequence) {
  if (sequence->state == SequenceState::kLoading) {
    sequence->request->cache->store->CancelLoad(sequence->load);
  }
  waiting_.erase(sequence);
  running_.erase(sequence);
  sequence->table.clear();
  sequence->state = SequenceState::kFinished;
}

void Scheduler::Preempt(Sequence* sequence) {
  Remove(sequence);
  sequence->plan.clear();
  sequence->repairs.clear();
  sequence->repairs_done = 0;
  sequence->computed = sequence->reused = sequence->offered = sequence->repaired = 0;
  sequence->forked = false;
  ++preemptions_;
  if (observer_ != nullptr) observer_->OnPreemption();
  Enqueue(sequence);
}

void Scheduler::Admit() {
  while (!waiting_.empty()) {
    Sequence* next = *waiting_.begin();
    if (running() >= options_.max_running) {
      Sequence* last = *running_.rbegin();
      if (last->request->ask.priority <= next->request->ask.priority) return;
      Preempt(last);
    }
    if (TryAdmit(next)) continue;
    // No blocks. What is less urgent makes room; what is as urgent is waited for.
    Sequence* last = running_.empty() ? nullptr : *running_.rbegin();
    if (last != nullptr && last->request->ask.priority > next->request->ask.priority &&
        last->request->cache == next->request->cache) {
      Preempt(last);
      continue;
    }
    const StoreStats stats = next->request->cache->store->stats();
    if (running_.empty() && stats.moving_out == 0 && stats.loading == 0) {
      Remove(next);
      fail_(next, absl::ResourceExhaustedError(
                      "not enough KV blocks, though nothing runs: pinned prefixes hold the rest"));
      continue;
    }
    return;
  }
}

bool Scheduler::TryAdmit(Sequence* sequence) {
  ActiveRequest& request = *sequence->request;
  KvCache& cache = *request.cache;
  if (!sequence->forked) Reuse(sequence);

  // Blocks that running sequences were admitted for but have not taken yet are spoken for.
  int spoken_for = 0;
  for (const Sequence* other : running_) {
    if (other->request->cache == request.cache) spoken_for += MissingBlocks(*other);
  }
  const int needed = MissingBlocks(*sequence) + spoken_for;
  if (cache.pool->free() < needed && Free(cache, needed).free < needed) {
    if (sequence->load != 0) cache.store->CancelLoad(std::exchange(sequence->load, 0));
    if (!sequence->forked) sequence->table.clear();
    return false;
  }
  waiting_.erase(sequence);
  running_.insert(sequence);
  if (request.admitted == SteadyTime()) request.admitted = std::chrono::steady_clock::now();
  if (sequence->load != 0) {
    sequence->state = SequenceState::kLoading;
  } else {
    Start(sequence);
  }
  return true;
}

EvictOutcome Scheduler::Free(const KvCache& cache, int n) {
  EvictOutcome outcome = cache.store->EvictUntilFree(n);
  while (outcome.free + outcome.pending < n && reclaim_(cache)) {
    outcome = cache.store->EvictUntilFree(n);
  }
  return outcome;
}

void Scheduler::Reuse(Sequence* sequence) {
  ActiveRequest& request = *sequence->request;
  PrefixStore& store = *request.cache->store;
  const int block_tokens = request.cache->layout.geometry.block_tokens;
  int max_blocks = request.prefill_only() ? sequence->length() / block_tokens
                                          : MaxReusableBlocks(sequence->length(), block_tokens);
  if (request.ask.sampling.prompt_logprobs.has_value() && sequence->output() == 0) max_blocks = 0;

  if (const int most = request.ask.max_reused_tokens; most > 0) {
    max_blocks = std::min(max_blocks, most / block_tokens);
  }

  ReuseQuery query;
  query.native = registry_->Native(request.version->fingerprint);
  query.min_carried_tokens = options_.min_carried_tokens;
  query.layers = request.cache->layout.geometry.layers;
  if (request.ask.reuse != ReuseMode::kNativeOnly) {
    AddSources(request.sources, registry_, &query);
  }
  const auto reusable = absl::MakeConstSpan(sequence->tokens).first(max_blocks * block_tokens);
  const ChainMatch match = store.Find(request.root, reusable);
  ReusePlan plan = PlanReuse(match, query, *registry_);
  if (plan.carried_blocks > 0) {
    const auto by_plan = [&](const CarryPlan& carry) {
      ReuseQuery other = query;
      other.carry = carry;
      return PlanReuse(match, other, *registry_);
    };
    sequence->carry = carry_(sequence, plan, by_plan);
    if (sequence->carry != query.carry) plan = by_plan(sequence->carry);
  }
  sequence->plan = std::move(plan.blocks);
  sequence->repaired = plan.repaired_blocks * block_tokens;
  sequence->lineage.emplace(registry_, request.version->fingerprint);
  sequence->table.clear();
  ListRepairs(sequence);

  std::vector<EntryRef> slow;
  std::vector<size_t> slow_levels;
  for (size_t i = 0; i < sequence->plan.size(); ++i) {
    const MatchEntry& entry = sequence->plan[i].entry;
    std::optional<TableBlock> block = entry.ready ? store.Use(entry.entry) : std::nullopt;
    if (!block.has_value()) {
      slow.push_back(entry.entry);
      slow_levels.push_back(i);
    }
    sequence->table.push_back(block.has_value() ? *std::move(block) : TableBlock());
  }
  if (slow.empty()) return;

  const auto begin_load = [&] {
    return store.Load(slow, [this, sequence, slow_levels](LoadResult result) {
      FinishLoad(sequence, slow_levels, std::move(result));
    });
  };
  auto load = begin_load();
  if (!load.ok()) {
    Free(*request.cache, store.BlocksToLoad(slow));
    load = begin_load();
  }
  if (!load.ok()) {  // go on with what lies in front of the first that cannot be had
    sequence->plan.resize(slow_levels[0]);
    sequence->table.resize(slow_levels[0]);
    sequence->repaired = 0;  // lies no longer behind what is reused
    ListRepairs(sequence);
    return;
  }
  sequence->load = *load;
}

void Scheduler::FinishLoad(Sequence* sequence, const std::vector<size_t>& levels,
                           LoadResult result) {
  sequence->load = 0;
  size_t good = sequence->table.size();
  for (size_t i = 0; i < levels.size(); ++i) {
    if (result.blocks[i].block) {
      sequence->table[levels[i]] = std::move(result.blocks[i]);
    } else {
      good = std::min(good, levels[i]);
    }
  }
  // Behind a block that failed its checks everything is computed anew.
  if (good < sequence->table.size()) sequence->repaired = 0;
  sequence->table.resize(good);
  sequence->plan.resize(good);
  ListRepairs(sequence);
  Start(sequence);
}

void Scheduler::Start(Sequence* sequence) {
  const int block_tokens = sequence->request->cache->layout.geometry.block_tokens;
  ActiveRequest& request = *sequence->request;
  if (request.loaded == SteadyTime()) request.loaded = std::chrono::steady_clock::now();
  sequence->state = SequenceState::kRunning;
  if (!sequence->forked) {
    for (const TableBlock& block : sequence->table) sequence->lineage->Attend(block.origin);
    sequence->reused = static_cast<int>(sequence->table.size()) * block_tokens;
    sequence->computed = sequence->reused;
    sequence->offered = static_cast<int>(sequence->table.size());
  }
  start_(sequence);
}

std::vector<ScheduledRows> Scheduler::NextBatch() {
  std::vector<ScheduledRows> batch;
  int budget = StepRows();
  const std::vector<Sequence*> order(running_.begin(), running_.end());
  for (const bool decoding : {true, false}) {
    for (Sequence* sequence : order) {
      if (budget == 0) return batch;
      // An earlier round of this loop may have preempted it.
      if (sequence->state != SequenceState::kRunning) continue;
      if (sequence->repairing()) {
        if (!decoding) ScheduleRepair(sequence, &budget, &batch);
        continue;
      }
      const int left = sequence->length() - sequence->computed;
      if ((left == 1) != decoding) continue;
      int count = std::min(left, budget);
      if (sequence->request->ask.sampling.prompt_logprobs.has_value() && sequence->output() == 0) {
        count = std::min(count, options_.logprob_tokens);
      }
      if (!Extend(sequence, count, batch)) continue;
      batch.push_back({sequence, count});
      budget -= count;
    }
  }
  return batch;
}

void Scheduler::ScheduleRepair(Sequence* sequence, int* budget, std::vector<ScheduledRows>* batch) {
  const KvGeometry& geometry = sequence->request->cache->layout.geometry;
  const int layers = RepairCost(sequence->repairs[sequence->repairs_done],
                                sequence->carry.BottomLayers(geometry.layers));
  // A row of a few layers costs so much less; one block fits always.
  const int64_t most =
      int64_t{*budget} * geometry.layers / (int64_t{layers} * geometry.block_tokens);
  const int blocks = RunOfRepairs(sequence->repairs, sequence->repairs_done, most);
  if (!Reserve(sequence, blocks, *batch)) return;
  ScheduledRows rows = {sequence, blocks * geometry.block_tokens};
  for (int i = 0; i < blocks; ++i) {
    rows.repair.push_back(*sequence->request->cache->pool->Allocate());
  }
  *budget -= std::min(*budget, std::max(1, rows.count * layers / geometry.layers));
  batch->push_back(std::move(rows));
}

bool Scheduler::Extend(Sequence* sequence, int tokens,
                       const std::vector<ScheduledRows>& scheduled) {
  KvCache& cache = *sequence->request->cache;
  const int more =
      BlocksFor(*sequence, sequence->computed + tokens) - static_cast<int>(sequence->table.size());
  if (more > 0 && !Reserve(sequence, more, scheduled)) return false;
  for (int i = 0; i < more; ++i) {
    TableBlock block;
    block.block = *cache.pool->Allocate();
    sequence->table.push_back(std::move(block));
  }
  return true;
}

bool Scheduler::Reserve(Sequence* sequence, int blocks,
                        const std::vector<ScheduledRows>& scheduled) {
  KvCache& cache = *sequence->request->cache;
  while (cache.pool->free() < blocks) {
    const EvictOutcome outcome = Free(cache, blocks);
    if (outcome.free >= blocks) break;
    if (outcome.pending > 0) return false;  // a step later they are there
    Sequence* victim = nullptr;
    bool alone = true;
    for (auto at = running_.rbegin(); at != running_.rend() && *at != sequence; ++at) {
      if ((*at)->request->cache != sequence->request->cache) continue;
      const bool in_batch =
          std::any_of(scheduled.begin(), scheduled.end(),
                      [&](const ScheduledRows& rows) { return rows.sequence == *at; });
      if (!in_batch) {
        victim = *at;
        break;
      }
    }
    for (const Sequence* other : running_) {
      alone &= other == sequence || other->request->cache != sequence->request->cache;
    }
    if (victim != nullptr) {
      Preempt(victim);
    } else if (alone) {
      Remove(sequence);
      fail_(sequence, absl::ResourceExhaustedError(
                          "not enough KV blocks to go on: pinned prefixes hold the rest"));
      return false;
    } else {
      Preempt(sequence);
      return false;
    }
  }
  return true;
}

}  // namespace carryover
