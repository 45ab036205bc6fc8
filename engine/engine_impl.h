// The engine behind engine.h. Split by subject: engine_impl.cc (threads, submission, drain),
// engine_step.cc (what one step does), engine_pass.cc (its passes), engine_shadow.cc (comparing
// arms), engine_evaluate.cc, engine_calibrate.cc, engine_gate.cc, engine_versions.cc,
// engine_retire.cc and engine_cache.cc (administration).
#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "base/mutex.h"
#include "engine/background_slices.h"
#include "engine/carried_prefixes.h"
#include "engine/carry_policy.h"
#include "engine/engine.h"
#include "engine/gate.h"
#include "engine/kv_cache.h"
#include "engine/model.h"
#include "engine/provenance.h"
#include "engine/scheduler.h"
#include "engine/sequence.h"
#include "engine/shadow_runner.h"
#include "engine/version.h"
#include "engine/waiting_sink.h"

namespace carryover {

class EngineImpl final : public Engine {
 public:
  EngineImpl(const EngineOptions& options, const Ops& ops, Backend* backend,
             EngineObserver* observer);
  ~EngineImpl() override;

  absl::StatusOr<uint64_t> Submit(CompletionRequest request,
                                  std::shared_ptr<CompletionSink> sink) override;
  void Cancel(uint64_t ticket) override;
  absl::StatusOr<std::shared_ptr<const Tokenizer>> FindTokenizer(
      absl::string_view model, absl::string_view version) override;

  absl::StatusOr<VersionInfo> Load(const LoadOptions& options,
                                   const std::function<void(double)>& progress) override;
  std::vector<VersionInfo> ListVersions(absl::string_view model) override;
  absl::Status Promote(absl::string_view model, absl::string_view version, double share) override;
  absl::Status Unload(absl::string_view model, absl::string_view version) override;
  absl::Status Remove(absl::string_view model, absl::string_view version) override;

  absl::StatusOr<WarmResult> Warm(const PrefixSpec& prefix,
                                  const std::function<void(double)>& progress,
                                  const std::function<bool()>& cancelled) override;
  absl::StatusOr<EvictResult> Evict(absl::string_view model, absl::string_view version) override;
  absl::StatusOr<EvictResult> EvictPrefix(const PrefixSpec& prefix) override;
  absl::StatusOr<int> Pin(const PrefixSpec& prefix, bool pinned) override;
  std::vector<CachedPrefix> ListPrefixes(absl::string_view model, int limit) override;
  absl::Status CheckStore() override;
  absl::StatusOr<Evaluation> Evaluate(const EvaluateSpec& spec,
                                      const std::function<bool()>& cancelled) override;
  absl::StatusOr<Calibration> Calibrate(const CalibrateSpec& spec,
                                        const CalibrateHooks& hooks) override;
  std::vector<CellReport> ReportGate() override;
  absl::StatusOr<int> SetGate(CellPattern pattern, std::optional<GateState> state,
                              absl::string_view who) override;
  std::vector<GateRule> ListGateRules() override;
  std::string SaveGate() override;
  absl::Status RestoreGate(absl::string_view bytes) override;
  GateActivity gate_activity() override { return {gate_samples_, gate_changes_}; }

  EngineSnapshot snapshot() override;
  void StartDrain() override;
  bool FinishDrain(double timeout_seconds) override;

 private:
  // What a prefix is once its version and tokens are known.
  struct ResolvedPrefix {
    std::shared_ptr<const Version> version;
    std::vector<int32_t> tokens;
    CacheRoot root;
  };

  // ---- engine_impl.cc, any thread
  std::shared_ptr<const VersionTable> table();
  void Post(std::function<void()> work);
  void PostLocked(std::function<void()> work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Runs work on the engine thread and waits for its result.
  template <typename Work>
  auto Call(Work work) -> decltype(work()) {
    std::promise<decltype(work())> promise;
    auto future = promise.get_future();
    Post([&] { promise.set_value(work()); });
    return future.get();
  }
  void ThreadMain();
  absl::StatusOr<std::vector<int32_t>> PromptTokens(const Version& version,
                                                    const std::optional<std::string>& prompt,
                                                    std::vector<int32_t> tokens,
                                                    bool add_special_tokens) const;
  absl::Status CheckRequest(const CompletionRequest& request, const Version& version,
                            int prompt_tokens) const;
  absl::StatusOr<std::shared_ptr<const Version>> ChooseVersion(const VersionTable& table,
                                                               const CompletionRequest& request,
                                                               absl::string_view session_key) const;

  // ---- engine_step.cc, engine thread
  void Accept(std::unique_ptr<ActiveRequest> request);
  // False when there was nothing to run.
  bool Step();
  void OnStart(Sequence* sequence);
  void PromptDone(ActiveRequest* request);
  // sampled: what the device chose; null: logits (vocab) are here to choose from.
  void EmitToken(Sequence* sequence, absl::Span<float> logits, const SampledToken* sampled);
  void Fork(ActiveRequest* request);
  void FinishSequence(Sequence* sequence, FinishReason reason);
  void EndRequest(ActiveRequest* request, absl::Status status);
  void EndCancelledAndLate();
  void PublishSnapshot();

  // ---- engine_pass.cc, engine thread
  void RunBatch(Model* model, absl::Span<const ScheduledRows> batch);
  // What found no device memory as one pass of several rows.
  void RunInParts(Model* model, absl::Span<const ScheduledRows> batch);
  void RunRepair(const ScheduledRows& rows);
  void AfterRows(const ScheduledRows& rows, absl::Span<float> logits, const SampledToken* sampled);
  void LabelBlocks(Sequence* sequence);
  void StoreBlocks(Sequence* sequence);

  // ---- engine_shadow.cc, engine thread
  ShadowRunner::Hooks ShadowHooks();
  void JudgeArm(const ShadowJob& job, const ArmToRun& arm, bool dropped, const GateValues& values);
  static double Now();  // as the gate counts, in seconds
  void TickGate();
  void TellTransitions(absl::Span<const GateTransition> transitions);
  // The gate knows versions by fingerprint, people by name.
  GateCell NameCell(const CellKey& key);
  // Null: there is none such.
  std::shared_ptr<const Version> FindFingerprint(absl::string_view hex);
  std::string VersionOf(const std::string& hex);  // its name, or the first digits
  std::vector<GateRow> GateRows();
  // A state changed, or somebody changed the gate: the next snapshot tells it, whatever that costs.
  void TellGateNow() {
    gate_dirty_ = true;
    gate_told_ = 0;
  }
  // Background work: all that fits where users leave the device idle, a little beside them.
  void RunShadows(bool users_ran, double user_seconds);
  // Whether the logits that its next token is chosen from are kept, for a comparison later.
  bool WantsLogits(const Sequence& sequence) const;
  static void KeepLogits(ActiveRequest* request, absl::Span<const float> logits);
  // The request's first choice has ended, with an answer or without.
  void OfferShadow(const Sequence& sequence);
  // An ended request that chance had carry or not.
  void TellTrial(const ActiveRequest& request);
  // Remembers what the sequence carries, to be computed natively when there is time.
  void NoteCarried(const Sequence& sequence);
  std::optional<ShadowJob> NextRefresh();
  // Null when there is none, or none with weights.
  std::shared_ptr<const Version> LoadedVersion(const Digest& fingerprint);

  // ---- engine_versions.cc
  absl::Status CheckLoad(const LoadOptions& options) const;
  absl::StatusOr<std::shared_ptr<KvCache>> CacheFor(const Version& version);  // engine thread
  VersionInfo Describe(const ModelEntry& model, const Version& version,
                       const EngineSnapshot& snapshot) const;
  // Replaces the table by what edit makes of a copy. Any thread.
  absl::Status EditTable(const std::function<absl::Status(VersionTable*)>& edit);
  void RefreshReserved();  // engine thread
  // Which plans of the ladder its sources' maps allow. Engine thread.
  void TellUsablePlans(const Version& target);
  // Has the sources' hottest prefixes mapped, where a plan of the ladder wants that. Engine thread.
  void StartMapAhead(const Digest& fingerprint);
  // That the version is a part of.
  static std::vector<VersionPair> PairsOf(const VersionTable& table, const Version& version);

  // ---- engine_retire.cc
  absl::StatusOr<std::shared_ptr<const Version>> Retire(absl::string_view model,
                                                        absl::string_view version, bool remove);

  // ---- engine_gate.cc
  absl::StatusOr<std::vector<std::string>> FingerprintsOf(const std::string& name);
  // Of versions that are not there, when they take much of the room. Engine thread.
  void ForgetStrangers();

  // ---- engine_evaluate.cc
  // Submits, waits, and returns the answer, or the request's own error. cancelled is asked and
  // progress told from this thread; both may be null.
  absl::StatusOr<WaitingSink::Answer> RunToEnd(CompletionRequest request,
                                               const std::function<bool()>& cancelled,
                                               const std::function<void(int tokens)>& progress);

  // ---- engine_cache.cc
  absl::StatusOr<ResolvedPrefix> Resolve(const PrefixSpec& prefix);

  const EngineOptions options_;
  const Ops& ops_;
  Backend* const backend_;
  EngineObserver* const observer_;

  Mutex mutex_;
  CondVar wake_;   // the engine thread waits here
  CondVar ended_;  // signalled when a request has ended
  std::vector<std::function<void()>> mailbox_ ABSL_GUARDED_BY(mutex_);
  SteadyTime mailbox_since_ ABSL_GUARDED_BY(mutex_){};  // of its first entry
  bool poll_tiers_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  int queued_requests_ ABSL_GUARDED_BY(mutex_) = 0;  // submitted and not yet running
  int64_t queued_tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  int alive_ ABSL_GUARDED_BY(mutex_) = 0;  // submitted and not yet ended
  std::map<std::pair<std::string, std::string>, int> alive_by_version_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_ticket_ ABSL_GUARDED_BY(mutex_) = 1;
  std::shared_ptr<const VersionTable> table_ ABSL_GUARDED_BY(mutex_);
  EngineSnapshot snapshot_ ABSL_GUARDED_BY(mutex_);
  Mutex load_mutex_;  // one Load at a time
  std::atomic<bool> calibrating_{false};

  // Engine thread only.
  ProvenanceRegistry registry_;
  std::map<Digest, std::shared_ptr<KvCache>> caches_;                      // by KV layout
  std::unordered_map<uint64_t, std::unique_ptr<ActiveRequest>> requests_;  // by ticket
  // Ended in this step. Lists made before may still point at them, so they go at its start.
  std::vector<std::unique_ptr<ActiveRequest>> ended_requests_;
  std::unique_ptr<Gate> gate_;
  double gate_ticked_ = 0, gate_told_ = 0;
  double gate_rows_cost_ = 0;  // of making gate_rows_, seconds
  bool gate_dirty_ = false;    // gate_rows_ are not what the gate would say now
  std::shared_ptr<const std::vector<GateRow>> gate_rows_ =
      std::make_shared<std::vector<GateRow>>();  // as of gate_told_
  int64_t gate_cells_told_ = 0;
  std::atomic<int64_t> gate_samples_{0}, gate_changes_{0};
  std::unique_ptr<CarryPolicy> carry_policy_;
  CarriedPrefixes carried_{/*max_prefixes=*/1024, /*max_tokens=*/1 << 22};
  std::unique_ptr<ShadowRunner> shadows_;
  BackgroundSlices slices_;
  std::unique_ptr<KvMapper> mapper_;
  std::unique_ptr<Scheduler> scheduler_;
  std::vector<float> logits_;  // of a pass, as Model::Forward gives them
  std::vector<SampledToken> sampled_;
  int64_t steps_ = 0;
  SteadyTime published_{};

  std::thread thread_;
};

}  // namespace carryover
