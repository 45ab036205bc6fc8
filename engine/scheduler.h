// Which sequences run in the next step. Owns the queue and the blocks of running sequences; knows
// nothing of models' maths. Engine thread only.
#pragma once

#include <functional>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "engine/observer.h"
#include "engine/reuse_policy.h"
#include "engine/sequence.h"

namespace carryover {

struct SchedulerOptions {
  int max_running = 64;   // sequences
  int step_tokens = 512;  // rows of a step
  // Rows of a step for a sequence whose prompt log-probabilities are wanted: each needs all logits.
  int logprob_tokens = 32;
  int min_carried_tokens = 16;
};

// Tokens [computed, computed + count) of a sequence, with blocks for all of them. Or, where blocks
// are given, the next so many of its repairs, which follow one another, into these.
struct ScheduledRows {
  Sequence* sequence = nullptr;
  int count = 0;
  std::vector<BlockRef> repair = {};
};

class Scheduler {
 public:
  // Called with a sequence that cannot go on: it was taken out already.
  using FailFn = std::function<void(Sequence*, absl::Status)>;
  // Called when a sequence begins to run, its reused blocks in place, and each time it does so
  // again after a preemption.
  using StartFn = std::function<void(Sequence*)>;
  // Asked about a request that could carry blocks, with the most that it could: by which plan to
  // serve it. May be asked again for the same request, after a wait or a preemption.
  using CarryFn = std::function<CarryPlan(Sequence*, const ReusePlan& all, const ReuseByPlan&)>;
  // Takes back blocks of this cache that background work holds; false when it holds none.
  using ReclaimFn = std::function<bool(const KvCache&)>;

  // observer may be null.
  Scheduler(const SchedulerOptions& options, ProvenanceRegistry* registry, EngineObserver* observer,
            StartFn start, FailFn fail, CarryFn carry, ReclaimFn reclaim);

  void Enqueue(Sequence* sequence);
  // Takes a sequence out wherever it is and frees its blocks by the reference.
  void Remove(Sequence* sequence);

  // Moves sequences from the queue to the running set while there is room, by priority and arrival.
  void Admit();
  // Decodes first, then prompts by priority and arrival, within step_tokens. Preempts when blocks
  // run out: the least urgent sequence gives its blocks up and is computed again later.
  std::vector<ScheduledRows> NextBatch();

  // A pass of so many rows, more than one, found no device memory: until many steps later there are
  // at most half as many in one.
  void LowerRows(int rows);

  int running() const { return static_cast<int>(running_.size()); }  // loading ones included
  int waiting() const { return static_cast<int>(waiting_.size()); }
  int64_t preemptions() const { return preemptions_; }

 private:
  struct Urgency {  // more urgent first
    bool operator()(const Sequence* a, const Sequence* b) const;
  };

  // False when it has to wait for blocks.
  bool TryAdmit(Sequence* sequence);
  // Frees n blocks of the cache if it can: the store's first, then background work's.
  EvictOutcome Free(const KvCache& cache, int n);
  void Reuse(Sequence* sequence);
  void Start(Sequence* sequence);
  void FinishLoad(Sequence* sequence, const std::vector<size_t>& levels, LoadResult result);
  // Makes room for `blocks` more; false when even preemption of less urgent sequences could not.
  bool Reserve(Sequence* sequence, int blocks, const std::vector<ScheduledRows>& scheduled);
  bool Extend(Sequence* sequence, int tokens, const std::vector<ScheduledRows>& scheduled);
  // Sets what of its plan is to be renewed.
  void ListRepairs(Sequence* sequence);
  // Adds the sequence's next repairs to the batch, for at most about *budget rows of all layers.
  void ScheduleRepair(Sequence* sequence, int* budget, std::vector<ScheduledRows>* batch);
  void Preempt(Sequence* sequence);

  int StepRows();

  const SchedulerOptions options_;
  ProvenanceRegistry* registry_;
  EngineObserver* observer_;
  const StartFn start_;
  const FailFn fail_;
  const CarryFn carry_;
  const ReclaimFn reclaim_;
  std::set<Sequence*, Urgency> waiting_;
  std::set<Sequence*, Urgency> running_;  // kRunning and kLoading
  int64_t preemptions_ = 0;
  int most_rows_;          // of a step; options_.step_tokens where memory allows
  int steps_at_most_ = 0;  // since it was set
};

}  // namespace carryover
