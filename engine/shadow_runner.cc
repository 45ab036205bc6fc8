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
  return arms;
}

// The rows of a job's arm: every token but the last, whose successor nobody compares.
int Rows(const ShadowJob& job) {
  return static_cast<int>(job.tokens.size()) - (job.refresh ? 0 : 1);
}

// Whole blocks of the tokens that may come from the store.
int ReusableBlocks(const ShadowJob& job) {
  const int block_tokens = job.cache->layout.geometry.block_tokens;
  return job.refresh ? Rows(job) / block_tokens
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
  constexpr const char* kNames[] = {"native", "carried", "control", "old", "refresh"};
  return kNames[static_cast<int>(arm)];
}

ShadowRunner::ShadowRunner(const FidelityOptions& options, const Ops& ops, Backend* backend,
                           ProvenanceRegistry* registry, Hooks hooks)
    : options_(options),
      ops_(ops),
      backend_(backend),
      registry_(registry),
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
  return static_cast<int>(arm_->table.size() + arm_->repairs.size()) - arm_->stored;
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
    if (!arm_->in_pass && !BeginChunk()) continue;
    const auto done =
        arm_->weights->Advance(&pass_, job_->cache->pool->base(), yield, &pass_logits_);
    if (!done.ok()) {
      LogError("shadow_failed", {{"error", done.status().ToString()}});
      DropJob(ShadowOutcome::kFailed);
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

  ReuseQuery query;
  query.native = registry_->Native(arm.version->fingerprint);
  if (arm.kind == ShadowArm::kCarried) {
    query.native_levels = job.choice.native_levels;
    query.carry = arms_.front().plan.plan;
    query.layers = job.cache->layout.geometry.layers;
    for (const Digest& source : job.sources) query.sources.push_back(registry_->Native(source));
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
      (Rows(job) + block_tokens - 1) / block_tokens - static_cast<int>(plan.blocks.size());
  if (job.refresh && arm.own_blocks == 0) {  // somebody else was faster
    FinishRefresh();
    return false;
  }
  if (arm.own_blocks > options_.kv_share * job.cache->pool->capacity()) {
    DropArm(ShadowOutcome::kNoBlocks);
    return false;
  }
  for (size_t i = 0; i < plan.blocks.size(); ++i) {
    const MatchEntry& entry = plan.blocks[i].entry;
    if (plan.blocks[i].repair) arm.repairs.push_back(static_cast<int>(i));
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
  if (!MakeRoom(arm.own_blocks + static_cast<int>(arm.repairs.size()))) return false;
  for (size_t i = 0; i < arm.repairs.size(); ++i) arm.spare.push_back(*cache.pool->Allocate());
  for (const TableBlock& block : arm.table) arm.lineage->Attend(block.origin);
  arm.computed = static_cast<int>(arm.table.size()) * cache.layout.geometry.block_tokens;
  arm.stored = static_cast<int>(arm.table.size());
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

bool ShadowRunner::BeginChunk() {
  Arm& arm = *arm_;
  const int chunk =
      arm.kind == ShadowArm::kControl ? options_.control_chunk_tokens : options_.chunk_tokens;
  const int count = std::min(chunk, Rows(*job_) - arm.computed);
  ForwardBatch& batch = pass_.batch;
  batch = ForwardBatch();
  if (arm.repairs_done < arm.repairs.size()) {
    BeginRepair();
    return Begin();
  }
  batch.sequences.push_back({.row_begin = 0, .row_count = count, .kv_begin = arm.computed});
  for (int i = 0; i < count; ++i) {
    const int position = arm.computed + i;
    batch.tokens.push_back(job_->tokens[position]);
    batch.positions.push_back(position);
    if (!job_->refresh && position + 1 >= job_->prompt_tokens) batch.logit_rows.push_back(i);
  }
  for (const TableBlock& block : arm.table) batch.block_table.push_back(block.block.id());
  return Begin();
}

void ShadowRunner::BeginRepair() {
  Arm& arm = *arm_;
  const KvGeometry& geometry = job_->cache->layout.geometry;
  const int first = arm.repairs[arm.repairs_done];
  size_t end = arm.repairs_done + 1;
  while (end < arm.repairs.size() && arm.repairs[end] == arm.repairs[end - 1] + 1 &&
         static_cast<int>(end + 1 - arm.repairs_done) * geometry.block_tokens <=
             options_.chunk_tokens) {
    ++end;
  }
  const int blocks = static_cast<int>(end - arm.repairs_done);
  const int begin = first * geometry.block_tokens, count = blocks * geometry.block_tokens;
  CopyKvArgs copy;
  copy.layer_begin = arms_.front().plan.plan.BottomLayers(geometry.layers);
  copy.layer_end = geometry.layers;
  copy.kv_base = job_->cache->pool->base();
  copy.geometry = geometry;
  arm.copy_from.clear();
  arm.copy_to.clear();
  const std::string map = BottomMap(arms_.front().plan.plan, geometry.layers);
  for (int i = first; i < first + blocks; ++i) {
    TableBlock repaired;
    repaired.block = std::move(arm.spare.back());
    arm.spare.pop_back();
    repaired.origin = arm.lineage->Repaired(arm.table[i].origin, map);
    arm.lineage->Attend(repaired.origin);
    arm.copy_from.push_back(arm.table[i].block.id());
    arm.copy_to.push_back(repaired.block.id());
    arm.replaced.push_back(std::exchange(arm.table[i], std::move(repaired)));
  }
  copy.from = arm.copy_from;
  copy.to = arm.copy_to;
  ops_.copy_kv(backend_, copy);
  ForwardBatch& batch = pass_.batch;
  batch.kv_layers = copy.layer_begin;
  batch.sequences.push_back({.row_begin = 0, .row_count = count, .kv_begin = begin});
  for (int i = begin; i < begin + count; ++i) {
    batch.tokens.push_back(job_->tokens[i]);
    batch.positions.push_back(i);
  }
  for (const TableBlock& block : arm.table) batch.block_table.push_back(block.block.id());
}

void ShadowRunner::FinishRepair() {
  Arm& arm = *arm_;
  const KvGeometry& geometry = job_->cache->layout.geometry;
  const int count = static_cast<int>(pass_.batch.tokens.size());
  arm.in_pass = false;
  arm.replaced.clear();
  arm.repairs_done += count / geometry.block_tokens;
  // In tokens of all layers.
  hooks_.computed((count * pass_.batch.kv_layers + geometry.layers - 1) / geometry.layers);
}

bool ShadowRunner::Begin() {
  Arm& arm = *arm_;
  const absl::Status begun = arm.weights->Begin(&pass_);
  if (!begun.ok()) {
    LogError("shadow_failed", {{"error", begun.ToString()}});
    DropJob(ShadowOutcome::kFailed);
    return false;
  }
  arm.in_pass = true;
  return true;
}

void ShadowRunner::FinishChunk() {
  Arm& arm = *arm_;
  if (pass_.batch.kv_layers > 0) return FinishRepair();
  const int count = static_cast<int>(pass_.batch.tokens.size());
  const int block_tokens = job_->cache->layout.geometry.block_tokens;
  arm.in_pass = false;
  for (int i = arm.computed / block_tokens; i < (arm.computed + count) / block_tokens; ++i) {
    arm.table[i].origin = arm.lineage->current();
  }
  arm.computed += count;
  arm.logits.insert(arm.logits.end(), pass_logits_.begin(), pass_logits_.end());
  hooks_.computed(count);
  const int full = arm.computed / block_tokens;
  const bool keep =
      job_->refresh || (arm.kind == ShadowArm::kNative && options_.store_native && job_->store);
  if (keep && full > arm.stored) {
    const InsertResult result = job_->cache->store->Insert(
        job_->root, absl::MakeConstSpan(job_->tokens).first(full * block_tokens),
        absl::MakeConstSpan(arm.table).first(full));
    arm.stored = full;
    hooks_.stored(result.inserted);
  }
  if (job_->refresh) {
    if (arm.computed == Rows(*job_)) {
      FinishRefresh();
    } else if (!queue_.empty()) {  // what is to be compared goes first
      Pause();
    }
  } else if (arm.computed == Rows(*job_)) {
    StartCompare();
  }
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
  if (!comparison.ok()) {
    LogError("shadow_failed", {{"error", comparison.status().ToString()}});
    return DropJob(ShadowOutcome::kFailed);
  }
  arm_->comparison = *std::move(comparison);
}

void ShadowRunner::CompareMore() {
  const absl::StatusOr<bool> done = arm_->comparison->Step();
  if (!done.ok()) {
    LogError("shadow_failed", {{"error", done.status().ToString()}});
    DropJob(ShadowOutcome::kFailed);
  } else if (*done) {
    FinishArm(arm_->comparison->Finish());
  }
}

void ShadowRunner::FinishArm(FidelitySample sample) {
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
  const std::vector<FidelitySample> samples = std::exchange(samples_, {});
  native_logits_.clear();
  hooks_.ended(job, arm, outcome);
  if (job.waiter != nullptr) job.waiter->Tell(samples);
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
  native_logits_.clear();
  const ShadowJob job = *std::exchange(job_, std::nullopt);
  End(job, std::exchange(arms_, {}), outcome);
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
