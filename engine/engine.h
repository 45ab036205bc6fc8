// The engine: versions, the prefix store, the scheduler and the thread that runs steps. Every
// method is thread-safe. One thread, started by Create, owns all mutable state; other threads hand
// it work through a mailbox.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/calibration.h"
#include "engine/fidelity_options.h"
#include "engine/gate.h"
#include "engine/observer.h"
#include "engine/request.h"
#include "engine/sensitivity.h"
#include "engine/tokenizer.h"
#include "kernels/ops.h"

namespace carryover {

struct EngineOptions {
  int threads = 0;                            // for the backend; 0: one a core
  bool graphs = true;                         // BackendOptions::graphs
  int64_t kv_cache_bytes = int64_t{1} << 30;  // device blocks, for each KV layout
  int64_t host_cache_bytes = 0;               // host tier, for each KV layout; 0: none
  int block_tokens = 16;
  int max_running = 64;   // sequences in a step
  int step_tokens = 512;  // rows in a step: chunked prefill
  int max_waiting_requests = 1024;
  int64_t max_waiting_tokens = int64_t{1} << 20;
  int min_carried_tokens = 16;  // fewer are not worth carrying
  bool store_tainted = true;    // keep T-over-S blocks for a conversation's next turn
  double source_share = 0.5;    // of the pool, that carried sources keep against newer blocks
  // Of the pool, that maps of a version's sources may fill when it begins to serve, hottest
  // prefixes first and in idle time; 0: they are made when a request needs them.
  double map_ahead_share = 0.25;
  FidelityOptions fidelity;
  GateConfig gate;
};

struct LoadOptions {
  std::string model;  // served name
  std::string version;
  std::string path;
  std::vector<std::string> carry_from;  // versions of the same model whose blocks may be read
  // Files of maps (kv_map.h) from versions in carry_from to this one; one for each at most.
  std::vector<std::string> maps;
  std::string distinct;  // tests only: salts the fingerprint
  DType weights = DType::kBF16;
  DType kv_dtype = DType::kBF16;
  bool auto_dtype = true;  // weights in BF16 where the CPU is fast at it, else F32
};

struct CalibrateSpec {
  std::string model;
  std::string source;  // versions of it, with weights; equal tokenizers and layouts
  std::string target;
  std::vector<std::string> texts;
  CalibrationOptions options;
};

struct CalibrateHooks {  // told from the calling thread; may be null
  std::function<void(const char* phase, int64_t done, int64_t total)> progress;
  std::function<void(const CalibrationCandidate&)> candidate;
  std::function<bool()> cancelled;
};

struct VersionInfo {
  std::string model;
  std::string version;
  std::string path;
  std::string state;             // "loading", "ready", "unloading", "unloaded"
  std::string fingerprint;       // hex
  std::string weights_sha256;    // hex
  std::string tokenizer_sha256;  // hex
  std::string kv_layout_sha256;  // hex
  std::string weights_dtype;
  std::string kv_dtype;
  std::vector<std::string> carry_from;
  std::vector<std::pair<std::string, KvMapInfo>> maps;  // by KvMap::Name
  double share = 0;  // of the model's traffic that names no version, 0 to 100
  int max_positions = 0;
  int64_t weight_bytes = 0;
  int running_requests = 0;
  int64_t cached_tokens = 0;  // in native blocks, over all tiers
};

struct PrefixSpec {
  std::string model;
  std::string version;  // empty: the promoted one
  std::string tenant;
  std::string salt;
  std::optional<std::string> prompt;
  std::vector<int32_t> tokens;
  bool add_special_tokens = true;
};

struct WarmResult {
  std::string version;
  int tokens = 0;         // of the prefix
  int cached_tokens = 0;  // that were there already, natively
  int computed_tokens = 0;
  int stored_tokens = 0;  // in full blocks
};

// One greedy answer.
struct EvaluatedAnswer {
  std::string version;
  std::string plan;  // "native", "direct", "tail(32)"
  std::string text;
  std::vector<int32_t> token_ids;
  ChoiceFinish finish;
  Usage usage;
  CacheInfo cache;
  Timing timing;
};

struct EvaluateSpec {
  PrefixSpec prompt;   // prompt.version is the target, and may be empty
  std::string source;  // version that the target names in carry_from
  SamplingParams sampling;
  bool control = false;            // also the native arm once more
  bool hit = false;                // also the target over its own cache of the prefix
  int prefix_tokens = 0;           // in front, that are cached; 0: the whole prompt
  std::vector<int32_t> answers;    // right ones, by generated position; -1: none
  std::vector<std::string> plans;  // ways of carrying, each once; empty: those of the gate's ladder
  bool sensitivity = false;        // also where the divergence of direct carrying comes from
};

struct Evaluation {
  EvaluatedAnswer source;                // over its own cache
  EvaluatedAnswer native;                // the target, from nothing
  std::vector<EvaluatedAnswer> carried;  // the target by each plan
  std::vector<FidelitySample> samples;   // along the native answer
  std::optional<EvaluatedAnswer> hit;    // the target over its own cache
  std::optional<Sensitivity> sensitivity;
};

// What an eviction did; blocks that running requests or pins hold stay and are told.
struct EvictResult {
  int64_t blocks_evicted = 0;
  int64_t blocks_in_use = 0;
  int64_t blocks_pinned = 0;
};

struct StoreRow {  // one (tier, provenance)
  std::string model;
  std::string tier;
  std::string provenance;  // "2026-10", "2026-11 over 2026-10"
  int64_t blocks = 0;
  int64_t bytes = 0;
  int64_t hit_tokens = 0;
};

struct CachedPrefix {  // the longest chains, hottest first; never any text
  std::string key;     // hex of the last block's key
  std::string provenance;
  std::string tier;
  int tokens = 0;
  int64_t hits = 0;
  double idle_seconds = 0;
  bool pinned = false;
};

struct CounterRow {
  std::string first;   // tier; "" where the count has none
  std::string second;  // reason
  int64_t count = 0;
};

struct EngineSnapshot {
  int running = 0;
  int waiting = 0;
  int64_t waiting_tokens = 0;
  int64_t device_blocks = 0;
  int64_t device_blocks_used = 0;    // by sequences or the store
  int64_t device_blocks_active = 0;  // by sequences alone: 0 when nothing runs
  std::vector<StoreRow> store;
  std::vector<CounterRow> evictions;  // tier, reason
  std::vector<CounterRow> rejects;    // reason
  // Shared, since there may be a thousand and copies are made under the engine's lock; may be null.
  std::shared_ptr<const std::vector<GateRow>> gates;
  int64_t provenance_violations = 0;
  int64_t preemptions = 0;
  int64_t steps = 0;
  int64_t replayed_passes = 0;  // of a device that replays those which launch what others launched
  int shadows_waiting = 0;      // arms' jobs that have not ended
  int64_t gate_cells = 0;
  int64_t gate_cells_refused = 0;  // decisions and samples that found no room
  bool draining = false;
};

// How often something happened that SaveGate would save, since the start.
struct GateActivity {
  int64_t samples = 0;  // arms that ended
  int64_t changes = 0;  // of states and overrides
};

class Engine {
 public:
  // observer outlives the engine; may be null.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineOptions& options,
                                                        const Ops& ops, EngineObserver* observer);
  virtual ~Engine() = default;

  // Queues a request. Errors are immediate: INVALID_ARGUMENT (message starts with the field),
  // NOT_FOUND, RESOURCE_EXHAUSTED (queue full), UNAVAILABLE (draining). On success the sink gets
  // its events, and OnDone exactly once.
  virtual absl::StatusOr<uint64_t> Submit(CompletionRequest request,
                                          std::shared_ptr<CompletionSink> sink) = 0;
  // Ends a request with CANCELLED by the next step. Unknown and ended tickets are ignored.
  virtual void Cancel(uint64_t ticket) = 0;

  // version may be empty. NOT_FOUND when there is none such.
  virtual absl::StatusOr<std::shared_ptr<const Tokenizer>> FindTokenizer(
      absl::string_view model, absl::string_view version) = 0;

  // Blocks the caller, for seconds on large models. progress (0 to 1) comes from this thread.
  // ALREADY_EXISTS; NOT_FOUND (folder, or a version in carry_from); INVALID_ARGUMENT (what is wrong
  // in the folder); FAILED_PRECONDITION (a source that is not compatible, with each field that
  // differs). The first version of a model is promoted to 100 % at once.
  virtual absl::StatusOr<VersionInfo> Load(const LoadOptions& options,
                                           const std::function<void(double)>& progress) = 0;
  virtual std::vector<VersionInfo> ListVersions(absl::string_view model) = 0;
  // share in percent; the rest stays with the version that had 100 % before.
  virtual absl::Status Promote(absl::string_view model, absl::string_view version,
                               double share) = 0;
  // Lets running requests finish, then drops the weights; caches stay readable by others.
  // FAILED_PRECONDITION while the version has a share of the traffic.
  virtual absl::Status Unload(absl::string_view model, absl::string_view version) = 0;
  // As Unload, and drops what the version computed from the store.
  virtual absl::Status Remove(absl::string_view model, absl::string_view version) = 0;

  // Computes a prefix natively and stores it. Blocks the caller; progress is the share of tokens
  // done. deadline and cancelled end it early.
  virtual absl::StatusOr<WarmResult> Warm(const PrefixSpec& prefix,
                                          const std::function<void(double)>& progress,
                                          const std::function<bool()>& cancelled) = 0;
  // Empty model: all; empty version: all.
  virtual absl::StatusOr<EvictResult> Evict(absl::string_view model, absl::string_view version) = 0;
  virtual absl::StatusOr<EvictResult> EvictPrefix(const PrefixSpec& prefix) = 0;
  // Returns how many tokens are pinned now (pinned = true) or were let go.
  virtual absl::StatusOr<int> Pin(const PrefixSpec& prefix, bool pinned) = 0;
  virtual std::vector<CachedPrefix> ListPrefixes(absl::string_view model, int limit) = 0;
  // Answers a prompt in every way and compares; leaves nothing in the store, moves neither the gate
  // nor a metric of fidelity. Blocks the caller.
  // FAILED_PRECONDITION when a version has no weights, the target does not carry from the source,
  // or the prompt is too short to carry anything.
  virtual absl::StatusOr<Evaluation> Evaluate(const EvaluateSpec& spec,
                                              const std::function<bool()>& cancelled) = 0;
  // Fits a map from a source's K and V to a target's, with work in the background: it waits while
  // there are users. Blocks the caller. NOT_FOUND; FAILED_PRECONDITION (a version has no weights,
  // the two cannot share K and V), INVALID_ARGUMENT (texts, options), RESOURCE_EXHAUSTED (another
  // calibration runs), CANCELLED, UNAVAILABLE (draining).
  virtual absl::StatusOr<Calibration> Calibrate(const CalibrateSpec& spec,
                                                const CalibrateHooks& hooks) = 0;
  virtual std::vector<CellReport> ReportGate() = 0;
  // By version names in the pattern; an empty state lets the evidence speak again. Returns how many
  // cells changed. NOT_FOUND (a version), INVALID_ARGUMENT, RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<int> SetGate(CellPattern pattern, std::optional<GateState> state,
                                      absl::string_view who) = 0;
  // Overrides that stand, the one that holds last. Names as in ReportGate.
  virtual std::vector<GateRule> ListGateRules() = 0;
  // Everything that the gate has learned and was told, as bytes for RestoreGate; versions by
  // fingerprint. Keeps the engine for tens of microseconds a cell.
  virtual std::string SaveGate() = 0;
  // Replaces all of it. Load the versions first: what is known of others only stays while it takes
  // no more than half of the cells that there may be. DATA_LOSS and FAILED_PRECONDITION as
  // Gate::Restore; nothing has changed then.
  virtual absl::Status RestoreGate(absl::string_view bytes) = 0;
  // Any thread, without waiting.
  virtual GateActivity gate_activity() = 0;
  // Walks the whole store; INTERNAL with what is wrong. For tests and operators.
  virtual absl::Status CheckStore() = 0;

  virtual EngineSnapshot snapshot() = 0;

  // Refuses new work from now on. Idempotent.
  virtual void StartDrain() = 0;
  // Waits for running and waiting requests to end; false when the time ran out first, and then
  // what is left is ended with UNAVAILABLE.
  virtual bool FinishDrain(double timeout_seconds) = 0;
};

}  // namespace carryover
