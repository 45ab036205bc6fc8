#include "engine/shadow_runner.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "engine/reuse_policy.h"

namespace carryover {
namespace {

constexpr double kMaxCredit = 0.1;  // seconds: a long quiet time must not buy a long pause later
// Of the age that a job may reach: only then does it cost users anything. Before that it has to
// find a moment when nobody else wants the device.
constexpr double kPatience = 0.25;

double SecondsSince(SteadyTime from) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - from).count();
}

std::vector<CachePart> PartsOfJob(const ShadowJob& job) {
  const KvGeometry& geometry = job.cache->layout.geometry;
  return PartsOf(geometry.layers, job.choice.prefix_tokens / geometry.block_tokens,
                 geometry.block_tokens);
}

// Where something was carried the native arm comes first: all others are compared with it.
std::vector<ArmToRun> ArmsOf(const ShadowJob& job) {
  if (job.refresh) return {{ShadowArm::kRefresh, {}}};
  std::vector<ArmToRun> arms;
  if (job.served_carried) arms.push_back({ShadowArm::kNative, job.choice.serve});
  for (const NamedPlan& plan : job.choice.compared) {
    if (job.served_carried && plan.name == job.choice.serve.name) continue;
    arms.push_back({ShadowArm::kCarried, plan});
  }
  if (job.served_carried) return arms;
  const NamedPlan none = {job.choice.cell.plan, {}};
  if (job.choice.control) arms.push_back({ShadowArm::kControl, none});
  if (job.choice.old && job.source != nullptr) arms.push_back({ShadowArm::kOld, none});
  if (job.choice.probes) {
    for (CacheProbe& probe : ProbesOf(PartsOfJob(job))) {
      arms.push_back({ShadowArm::kMixed, none, std::move(probe)});
    }
  }
  return arms;
}

// Whole blocks of the tokens that may come from the store.
int ReusableBlocks(const ShadowJob& job) {
  const int block_tokens = job.cache->layout.geometry.block_tokens;
  return job.refresh ? job.rows() / block_tokens
                     : MaxReusableBlocks(job.prompt_tokens, block_tokens);
}

}  // namespace

const char* ShadowOutcomeName(ShadowOutcome outcome) {
  constexpr const char* kNames[kShadowOutcomes] = {"completed", "queue_full", "too_old",
                                                   "no_blocks", "evicted",    "cancelled",
                                                   "version",   "draining",   "failed"};
  return kNames[static_cast<int>(outcome)];
}

const char* ShadowArmName(ShadowArm arm) {
  constexpr const char* kNames[] = {"native", "carried", "control", "old", "refresh", "mixed"};
  return kNames[static_cast<int>(arm)];
}

ShadowRunner::ShadowRunner(const FidelityOptions& options, const Ops& ops, Backend* backend,
                           ProvenanceRegistry* registry, KvMapper* mapper, Hooks hooks)
    : options_(options),
      ops_(ops),
      backend_(backend),
      registry_(registry),
      mapper_(mapper),
      hooks_(std::move(hooks)),
      pass_(&ops, backend) {}

ShadowRunner::~ShadowRunner() { Close(); }

void ShadowRunner::Offer(ShadowJob job) {
  job.offered = std::chrono::steady_clock::now();
  if (closed_) {
    Refuse(job, ShadowOutcome::kDraining);
  } else if (job.waiter != nullptr) {
    queue_.push_front(std::move(job));
  } else if (static_cast<int>(queue_.size()) >= options_.max_queue) {
    Refuse(job, ShadowOutcome::kQueueFull);
  } else {
    queue_.push_back(std::move(job));
  }
}

bool ShadowRunner::HasWork() const {
  if (job_.has_value()) return !blocked_;
  return !queue_.empty() || paused_.has_value() || refresh_offered_;
}

int ShadowRunner::BlocksOutsideStore(const KvCache& cache) const {
  if (!arm_.has_value() || !arm_->ready || job_->cache.get() != &cache) return 0;
  return static_cast<int>(arm_->table.size() + arm_->repairs.size()) - arm_->stored -
         arm_->mapped_stored;
}

void ShadowRunner::Run(const std::function<bool()>& yield) {
  while (true) {
    if (!job_.has_value() && !NextJob()) return;
    if (blocked_) return;
    if (!arm_.has_value() && !StartArm()) continue;
    if (!arm_->ready && !GetBlocks()) continue;
    if (arm_->comparison != nullptr) {
      CompareMore();
      if (yield()) return;
      continue;
    }
    if (!arm_->in_pass && !BeginChunk()) {
      if (yield()) return;
      continue;
    }
    const auto done =
        arm_->weights->Advance(&pass_, job_->cache->pool->base(), yield, &pass_logits_);
    if (!done.ok()) {
      Fail(done.status());
      continue;
    }
    if (!*done) return;
    FinishChunk();
    if (yield()) return;
  }
}

double ShadowRunner::AfterUserStep(double seconds) {
  // A layer that took long has to be saved up for, or nothing would ever run again.
  credit_ = std::min(std::max(kMaxCredit, last_layer_), credit_ + seconds * options_.time_share);
  if (options_.time_share <= 0 || credit_ < last_layer_ || !HasWork()) return 0;
  // A refresh takes nothing from users, and keeps no comparison from its share.
  if (!job_.has_value() || job_->refresh) {
    if (queue_.empty()) return 0;
    if (job_.has_value()) Pause();
  }
  const ShadowJob& next = job_.has_value() ? *job_ : queue_.front();
  if (next.waiter == nullptr && SecondsSince(next.offered) < kPatience * options_.max_age_seconds) {
    return 0;
  }
  const auto start = std::chrono::steady_clock::now();
  Run([] { return true; });
  last_layer_ = SecondsSince(start);
  credit_ -= last_layer_;
  return last_layer_;
}

bool ShadowRunner::NextJob() {
  while (!queue_.empty()) {
    ShadowJob job = std::move(queue_.front());
    queue_.pop_front();
    if (job.waiter != nullptr && job.waiter->left()) {
      Refuse(job, ShadowOutcome::kCancelled);
      continue;
    }
    if (job.waiter == nullptr && SecondsSince(job.offered) > options_.max_age_seconds) {
      Refuse(job, ShadowOutcome::kTooOld);
      continue;
    }
    hooks_.lag(SecondsSince(job.offered));
    arms_ = ArmsOf(job);
    job_ = std::move(job);
    return true;
  }
  job_ = std::exchange(paused_, std::nullopt);
  if (!job_.has_value() && refresh_offered_) job_ = hooks_.refresh();
  if (!job_.has_value()) {
    refresh_offered_ = false;
    return false;
  }
  arms_ = ArmsOf(*job_);
  return true;
}

bool ShadowRunner::StartArm() {
  const ShadowJob& job = *job_;
  const int block_tokens = job.cache->layout.geometry.block_tokens;
  PrefixStore& store = *job.cache->store;
  Arm& arm = arm_.emplace();
  arm.kind = arms_.front().kind;
  arm.version = arm.kind == ShadowArm::kOld ? job.source : job.version;
  arm.weights = arm.kind == ShadowArm::kOld ? job.source->weights : job.weights;
  arm.lineage.emplace(registry_, arm.version->fingerprint);
  if (arm.kind == ShadowArm::kMixed) return StartMixed();

  ReuseQuery query;
  query.native = registry_->Native(arm.version->fingerprint);
  if (arm.kind == ShadowArm::kCarried) {
    query.native_levels = job.choice.native_levels;
    query.carry = arms_.front().plan.plan;
    query.layers = job.cache->layout.geometry.layers;
    AddSources(job.sources, registry_, &query);
  }
  ReusePlan plan;
  if (arm.kind != ShadowArm::kControl) {
    int most = ReusableBlocks(job) * block_tokens;
    // What the cell is about, all of it and no more: a prefix that has lost its end bends less than
    // a whole one, and another source's bends otherwise.
    if (arm.kind == ShadowArm::kCarried) most = std::min(most, job.choice.prefix_tokens);
    const ChainMatch match = store.Find(job.root, absl::MakeConstSpan(job.tokens).first(most));
    plan = PlanReuse(match, query, *registry_);
    if (arm.kind == ShadowArm::kCarried) {
      ReuseQuery direct = query;
      direct.carry = CarryPlan();
      const ReusePlan all = PlanReuse(match, direct, *registry_);
      const int reused = static_cast<int>(all.blocks.size()) * block_tokens;
      // Somebody who waits wants to see, too, that a repair of everything changes nothing.
      const bool nothing = plan.carried_blocks == 0 && job.waiter == nullptr;
      if (nothing || all.carried_blocks == 0 || reused < most ||
          all.MainVersion(*registry_) != job.choice.source) {
        DropArm(ShadowOutcome::kEvicted);
        return false;
      }
    }
  }
  arm.own_blocks =
      (job.rows() + block_tokens - 1) / block_tokens - static_cast<int>(plan.blocks.size());
  if (job.refresh && arm.own_blocks == 0) {  // somebody else was faster
    FinishRefresh();
    return false;
  }
  if (arm.own_blocks > options_.kv_share * job.cache->pool->capacity()) {
    DropArm(ShadowOutcome::kNoBlocks);
    return false;
  }
  arm.repairs = RepairsOf(plan.blocks, job.sources, *registry_);
  for (size_t i = 0; i < plan.blocks.size(); ++i) {
    const MatchEntry& entry = plan.blocks[i].entry;
    std::optional<TableBlock> block = entry.ready ? store.Use(entry.entry) : std::nullopt;
    if (!block.has_value()) arm.slow.emplace_back(i, entry.entry);
    arm.table.push_back(block.has_value() ? *std::move(block) : TableBlock());
  }
  return true;
}

bool ShadowRunner::GetBlocks() {
  Arm& arm = *arm_;
  KvCache& cache = *job_->cache;
  if (!arm.slow.empty()) {
    std::vector<EntryRef> entries;
    for (const auto& [level, entry] : arm.slow) entries.push_back(entry);
    if (!MakeRoom(cache.store->BlocksToLoad(entries))) return false;
    const auto load =
        cache.store->Load(entries, [this](LoadResult result) { Loaded(std::move(result)); });
    if (!load.ok()) {
      DropJob(ShadowOutcome::kNoBlocks);
      return false;
    }
    arm.load = *load;
    blocked_ = true;
    return false;
  }
  if (!MakeRoom(arm.own_blocks + static_cast<int>(arm.repairs.size()) + arm.mixed_blocks)) {
    return false;
  }
  for (size_t i = 0; i < arm.repairs.size(); ++i) arm.spare.push_back(*cache.pool->Allocate());
  if (arm.kind == ShadowArm::kMixed) {
    Mix();
  } else {
    for (const TableBlock& block : arm.table) arm.lineage->Attend(block.origin);
  }
  arm.computed = static_cast<int>(arm.table.size()) * cache.layout.geometry.block_tokens;
  arm.stored = static_cast<int>(arm.table.size()) - arm.mixed_blocks;
  for (int i = 0; i < arm.own_blocks; ++i) {
    TableBlock block;
    block.block = *cache.pool->Allocate();
    arm.table.push_back(std::move(block));
  }
  arm.ready = true;
  return true;
}

bool ShadowRunner::MakeRoom(int blocks) {
  KvCache& cache = *job_->cache;
  if (cache.pool->free() >= blocks) return true;
  EvictOptions options;
  options.keep_reserved = true;
  const EvictOutcome outcome = cache.store->EvictUntilFree(blocks, options);
  if (outcome.free >= blocks) return true;
  if (outcome.free + outcome.pending >= blocks) {
    blocked_ = true;  // until Poll brings them
  } else {
    DropJob(ShadowOutcome::kNoBlocks);
  }
  return false;
}

void ShadowRunner::Loaded(LoadResult result) {
  arm_->load = 0;
  for (size_t i = 0; i < arm_->slow.size(); ++i) {
    arm_->table[arm_->slow[i].first] = std::move(result.blocks[i]);
  }
  arm_->slow.clear();
  if (result.failed > 0) DropJob(ShadowOutcome::kEvicted);
}

void ShadowRunner::Pause() {
  ReleaseArm();
  paused_ = std::exchange(job_, std::nullopt);
}

void ShadowRunner::FinishRefresh() {
  ReleaseArm();
  const ShadowJob job = *std::exchange(job_, std::nullopt);
  hooks_.ended(job, {ShadowArm::kRefresh, {}}, ShadowOutcome::kCompleted);
}

void ShadowRunner::StartCompare() {
  const ShadowJob& job = *job_;
  const bool native = arm_->kind == ShadowArm::kNative;
  if (native) native_logits_ = std::exchange(arm_->logits, {});
  ArmsToCompare arms;
  arms.native = job.served_carried ? native_logits_ : job.served_logits;
  arms.carried = native ? job.served_logits : arm_->logits;
  arms.along = job.served_carried ? Along::kServed : Along::kNative;
  arms.vocab = job.version->config.vocab;
  arms.served = absl::MakeConstSpan(job.tokens).subspan(job.prompt_tokens);
  arms.stop_tokens = job.stop_tokens;
  arms.answers = job.answers;
  arms.complete = job.complete;
  arms.greedy = job.greedy;
  arms.labels.model = job.version->model;
  arms.labels.source = job.choice.source_name;
  arms.labels.target = job.version->name;
  arms.labels.plan = arms_.front().plan.name;
  arms.labels.task = job.choice.task;
  arms.labels.prefix_bucket = job.choice.cell.prefix_bucket;
  arms.labels.comparison = arm_->kind == ShadowArm::kControl ? FidelityComparison::kControl
                           : arm_->kind == ShadowArm::kOld   ? FidelityComparison::kOld
                                                             : FidelityComparison::kCarried;
  auto comparison = ArmsComparison::Start(ops_, backend_, arms);
  if (!comparison.ok()) return Fail(comparison.status());
  arm_->comparison = *std::move(comparison);
}

void ShadowRunner::CompareMore() {
  const absl::StatusOr<bool> done = arm_->comparison->Step();
  if (!done.ok()) {
    Fail(done.status());
  } else if (*done) {
    FinishArm(arm_->comparison->Finish());
  }
}

void ShadowRunner::FinishArm(FidelitySample sample) {
  if (arm_->kind == ShadowArm::kMixed) {
    probes_.push_back(OutcomeOf(arms_.front().probe, sample));
    return EndArm(ShadowOutcome::kCompleted);
  }
  hooks_.sample(*job_, arms_.front(), sample);
  samples_.push_back(std::move(sample));
  EndArm(ShadowOutcome::kCompleted);
}

void ShadowRunner::EndArm(ShadowOutcome outcome) {
  ReleaseArm();
  const ArmToRun arm = std::move(arms_.front());
  arms_.erase(arms_.begin());
  if (!arms_.empty()) return hooks_.ended(*job_, arm, outcome);
  const ShadowJob job = *std::exchange(job_, std::nullopt);
  ComparisonWaiter::Compared compared = {std::exchange(samples_, {}), std::exchange(probes_, {})};
  native_logits_.clear();
  hooks_.ended(job, arm, outcome);
  if (job.waiter != nullptr) job.waiter->Tell(std::move(compared));
}

void ShadowRunner::DropArm(ShadowOutcome outcome) {
  // Who waits wants all of them, and the native arm is what the others are compared with.
  if (job_->waiter != nullptr || arm_->kind == ShadowArm::kNative) return DropJob(outcome);
  EndArm(outcome);
}

void ShadowRunner::Refuse(const ShadowJob& job, ShadowOutcome outcome) {
  End(job, ArmsOf(job), outcome);
}

void ShadowRunner::End(const ShadowJob& job, absl::Span<const ArmToRun> arms,
                       ShadowOutcome outcome) {
  for (const ArmToRun& arm : arms) hooks_.ended(job, arm, outcome);
  if (job.waiter == nullptr) return;
  job.waiter->Tell(absl::UnavailableError(
      absl::StrCat("the arms were not compared: ", ShadowOutcomeName(outcome))));
}

void ShadowRunner::ReleaseArm() {
  if (arm_.has_value() && arm_->load != 0) job_->cache->store->CancelLoad(arm_->load);
  arm_.reset();
  blocked_ = false;
}

void ShadowRunner::DropJob(ShadowOutcome outcome) {
  ReleaseArm();
  samples_.clear();
  probes_.clear();
  native_logits_.clear();
  const ShadowJob job = *std::exchange(job_, std::nullopt);
  End(job, std::exchange(arms_, {}), outcome);
}

void ShadowRunner::Fail(const absl::Status& status) {
  LogError("shadow_failed", {{"error", status.ToString()}});
  DropJob(ShadowOutcome::kFailed);
}

bool ShadowRunner::Reclaim(const KvCache& cache) {
  if (!job_.has_value() || job_->cache.get() != &cache || !arm_.has_value()) return false;
  DropJob(ShadowOutcome::kNoBlocks);
  return true;
}

void ShadowRunner::DropVersion(const Digest& fingerprint, bool removed) {
  const auto is = [&](const std::shared_ptr<const Version>& version) {
    return version != nullptr && version->fingerprint == fingerprint;
  };
  const auto needs = [&](const ShadowJob& job) {
    return is(job.version) || (removed && job.choice.source == fingerprint);
  };
  std::deque<ShadowJob> kept;
  for (ShadowJob& job : queue_) {
    if (needs(job)) {
      Refuse(job, ShadowOutcome::kVersion);
    } else {
      if (is(job.source)) {  // its weights go, its blocks stay
        hooks_.ended(job, {ShadowArm::kOld, {}}, ShadowOutcome::kVersion);
        job.source.reset();
      }
      kept.push_back(std::move(job));
    }
  }
  queue_ = std::move(kept);
  if (job_.has_value() && (needs(*job_) || is(job_->source))) DropJob(ShadowOutcome::kVersion);
  if (paused_.has_value() && needs(*paused_)) {
    Refuse(*std::exchange(paused_, std::nullopt), ShadowOutcome::kVersion);
  }
}

void ShadowRunner::Close() {
  closed_ = true;
  refresh_offered_ = false;
  if (paused_.has_value()) {
    Refuse(*std::exchange(paused_, std::nullopt), ShadowOutcome::kDraining);
  }
  if (job_.has_value()) DropJob(ShadowOutcome::kDraining);
  while (!queue_.empty()) {
    const ShadowJob job = std::move(queue_.front());
    queue_.pop_front();
    Refuse(job, ShadowOutcome::kDraining);
  }
}

}  // namespace carryover
