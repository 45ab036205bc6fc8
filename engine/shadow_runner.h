// Computes the arms that did not serve, in time and memory that users leave over, and compares; and
// when there is nothing to compare, native copies of what is carried most.
//
// A job is one request that was sampled. Its arms run one after another as background passes, a
// chunk of tokens at a time, that stop between two layers when somebody else wants the device, and
// are compared a few positions at a time.
// What cannot be had soon is dropped and counted, never waited for long: every arm ends in exactly
// one outcome. Nothing here changes what a user gets.
//
// Engine thread only.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "engine/fidelity_options.h"
#include "engine/model.h"
#include "engine/prefix_store.h"
#include "engine/provenance.h"
#include "engine/repair.h"
#include "engine/shadow.h"

namespace carryover {

// How an arm ended. Only kCompleted gives a sample.
enum class ShadowOutcome : uint8_t {
  kCompleted,
  kQueueFull,
  kTooOld,
  kNoBlocks,   // not enough KV, or a user needed it
  kEvicted,    // what the plan carried is gone, or a part of it
  kCancelled,  // the request ended before it had the tokens that are compared
  kVersion,    // its version was unloaded or removed
  kDraining,
  kFailed,
};
inline constexpr int kShadowOutcomes = 9;
const char* ShadowOutcomeName(ShadowOutcome outcome);  // "completed", "queue_full", ...
const char* ShadowArmName(ShadowArm arm);  // "native", "carried", "control", "old", "refresh",
                                           // "mixed"

class ShadowRunner {
 public:
  struct Hooks {
    // Once an arm, when waiting() no longer counts a job that ends with it.
    std::function<void(const ShadowJob&, const ArmToRun&, ShadowOutcome)> ended;
    // Before that.
    std::function<void(const ShadowJob&, const ArmToRun&, const FidelitySample&)> sample;
    std::function<void(double seconds)> lag;   // from the request's end to the job's start
    std::function<void(int tokens)> computed;  // by background passes
    std::function<void(int blocks)> stored;    // native ones that were new to the store
    // The prefix that is most worth computing natively, when nothing else is to be done. May be
    // null: then nothing is refreshed.
    std::function<std::optional<ShadowJob>()> refresh;
  };

  ShadowRunner(const FidelityOptions& options, const Ops& ops, Backend* backend,
               ProvenanceRegistry* registry, KvMapper* mapper, Hooks hooks);
  ~ShadowRunner();

  // Jobs to compare; refreshing keeps nobody waiting.
  int waiting() const {
    return static_cast<int>(queue_.size()) + (job_.has_value() && !job_->refresh ? 1 : 0);
  }
  int BlocksOutsideStore(const KvCache& cache) const;

  void Offer(ShadowJob job);
  // Hooks::refresh has something to give.
  void OfferRefresh() { refresh_offered_ = hooks_.refresh != nullptr && !closed_; }
  // Counts a job that never gets that far.
  void Refuse(const ShadowJob& job, ShadowOutcome outcome);
  // Drops all jobs, and those offered from now on.
  void Close();

  // Whether Run would do something now: there is a job, and it does not wait for blocks.
  bool HasWork() const;
  // Works until yield, asked between layers and compared positions, returns true or nothing is
  // left.
  void Run(const std::function<bool()>& yield);
  // Tiers have told of transfers that ended.
  void OnPoll() { blocked_ = arm_.has_value() && arm_->load != 0; }
  // A user's step took so long. Every now and then that buys a layer of background work, for a job
  // that has waited long or that somebody waits for. Returns what was spent, in seconds.
  double AfterUserStep(double seconds);

  // Gives the running job's blocks of this cache back and drops the job.
  bool Reclaim(const KvCache& cache);
  // Drops every job that needs the version's weights or, when it is removed, its blocks.
  void DropVersion(const Digest& fingerprint, bool removed);

 private:
  // One arm on its way.
  struct Arm {
    ShadowArm kind = ShadowArm::kNative;
    std::shared_ptr<const Version> version;
    std::shared_ptr<Model> weights;
    std::vector<TableBlock> table;
    std::vector<std::pair<size_t, EntryRef>> slow;  // levels of the table that lie in other tiers
    int own_blocks = 0;                             // beyond what it reuses
    std::vector<BlockRepair> repairs;               // of the table, before anything else
    size_t repairs_done = 0;
    std::vector<BlockRef> spare;  // for those that are left
    RepairPass repair;            // under way
    int computed = 0;             // tokens, reused ones included
    int stored = 0;               // leading blocks that the store has
    int mapped_stored = 0;        // of the repaired ones
    std::optional<Lineage> lineage;
    PrefixStore::LoadId load = 0;
    bool ready = false;  // the table is complete
    bool in_pass = false;
    std::vector<float> logits;                   // (positions, vocab)
    std::unique_ptr<ArmsComparison> comparison;  // once they are all there; reads them
    int mixed_blocks = 0;                        // of a mixed arm: those that are made for it
    std::unique_ptr<MixedCache> mixed;
  };

  bool NextJob();
  // These three return false when there is nothing to go on with: the job was dropped, or waits.
  bool StartArm();   // finds what it reuses
  bool GetBlocks();  // has that on the device, and the arm's own blocks
  bool MakeRoom(int blocks);
  // ---- shadow_mixed.cc
  bool StartMixed();  // as StartArm: the table holds the native blocks, then the carried ones
  void Mix();         // puts the mixture in their place
  // ---- again shadow_runner.cc
  void Loaded(LoadResult result);
  // ---- shadow_passes.cc
  // False when no pass has begun: the job was dropped, or the repair needed none.
  bool BeginChunk();
  bool BeginRepair();
  bool Begin();  // the pass of pass_.batch
  void FinishChunk();
  void FinishRepair();
  // ---- again shadow_runner.cc
  void FinishRefresh();
  void Pause();  // the running refresh, for the sake of a comparison
  void StartCompare();
  void CompareMore();
  void FinishArm(FidelitySample sample);
  // Tells the running arm's outcome and goes on to the next.
  void EndArm(ShadowOutcome outcome);
  // The same for what only this arm lacks; drops the job where that is of no use.
  void DropArm(ShadowOutcome outcome);
  void ReleaseArm();
  void DropJob(ShadowOutcome outcome);
  void Fail(const absl::Status& status);  // the same, and logs it
  // Tells the outcome of the arms that a job still had to run.
  void End(const ShadowJob& job, absl::Span<const ArmToRun> arms, ShadowOutcome outcome);

  const FidelityOptions options_;
  const Ops& ops_;
  Backend* const backend_;
  ProvenanceRegistry* const registry_;
  KvMapper* const mapper_;
  const Hooks hooks_;
  std::deque<ShadowJob> queue_;
  std::optional<ShadowJob> job_;
  std::vector<ArmToRun> arms_;  // of the job, still to run; the running one first
  std::optional<Arm> arm_;
  ResumablePass pass_;
  std::vector<float> pass_logits_;
  std::optional<ShadowJob> paused_;  // a refresh that gave way; its blocks so far are stored
  bool refresh_offered_ = false;
  std::vector<FidelitySample> samples_;  // of the job's arms that are done
  std::vector<ProbeOutcome> probes_;     // of its mixed ones
  std::vector<float> native_logits_;     // (positions, vocab), where something else served
  bool blocked_ = false;                 // until OnPoll: blocks are on their way
  bool closed_ = false;
  double credit_ = 0;      // seconds that background work may take beside users' steps
  double last_layer_ = 0;  // seconds that the last layer took
};

}  // namespace carryover
