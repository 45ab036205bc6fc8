// Comparing the arms of sampled requests: what the engine hands to the shadow runner, and when that
// may run.

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "engine/engine_impl.h"

namespace carryover {
namespace {

// The engine thread looks at deadlines that often; background work must not keep it longer.
constexpr auto kMaxRun = std::chrono::milliseconds(20);
constexpr double kTickInterval = 0.5;  // seconds

bool IsGreedy(const SamplingParams& sampling) {
  return sampling.temperature == 0 && sampling.min_tokens == 0 && sampling.logit_bias.empty() &&
         sampling.presence_penalty == 0 && sampling.frequency_penalty == 0 &&
         sampling.repetition_penalty == 1;
}

}  // namespace

double EngineImpl::Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

ShadowRunner::Hooks EngineImpl::ShadowHooks() {
  ShadowRunner::Hooks hooks;
  hooks.sample = [this](const ShadowJob& job, const ArmToRun& arm, const FidelitySample& sample) {
    if (job.waiter != nullptr) return;  // picked by somebody, not by chance
    if (observer_ != nullptr) observer_->OnFidelitySample(sample);
    if (arm.kind != ShadowArm::kOld) {
      JudgeArm(job, arm, /*dropped=*/false, sample.gate_values);
    }
  };
  if (options_.fidelity.refresh_when_idle) {
    hooks.refresh = [this] { return NextRefresh(); };
  }
  hooks.ended = [this](const ShadowJob& job, const ArmToRun& arm, ShadowOutcome outcome) {
    if (job.refresh) {
      if (observer_ != nullptr) observer_->OnRefreshEnded(ShadowOutcomeName(outcome));
      return;
    }
    // Who is told of the end, or waits for a count of ends, finds the gauge right.
    if (shadows_ != nullptr) {
      MutexLock lock(&mutex_);
      snapshot_.shadows_waiting = shadows_->waiting();
    }
    if (job.waiter != nullptr) return;
    if (arm.kind != ShadowArm::kOld && outcome != ShadowOutcome::kCompleted) {
      JudgeArm(job, arm, /*dropped=*/true, {});
    }
    if (observer_ != nullptr) {
      observer_->OnShadowEnded(ShadowArmName(arm.kind), ShadowOutcomeName(outcome));
    }
  };
  hooks.lag = [this](double seconds) {
    if (observer_ != nullptr) observer_->OnShadowLag(seconds);
  };
  hooks.stored = [this](int blocks) {
    if (observer_ != nullptr) observer_->OnRefreshedBlocks(blocks);
  };
  hooks.computed = [this](int tokens) {
    if (observer_ != nullptr) observer_->OnShadowTokens(tokens);
  };
  return hooks;
}

void EngineImpl::JudgeArm(const ShadowJob& job, const ArmToRun& arm, bool dropped,
                          const GateValues& values) {
  // A request may end after its source or target was removed, and the cell must not come back.
  if (FindFingerprint(job.choice.cell.source) == nullptr ||
      FindFingerprint(job.choice.cell.target) == nullptr) {
    return;
  }
  gate_dirty_ = true;
  ++gate_samples_;
  GateSample sample;
  sample.cell = job.choice.cell;
  sample.cell.plan = arm.plan.name;
  sample.prefix = job.choice.prefix;
  sample.comparison =
      arm.kind == ShadowArm::kControl ? GateComparison::kControl : GateComparison::kCarried;
  sample.dropped = dropped;
  sample.values = values;
  TellTransitions(gate_->Observe(sample, Now()));
}

void EngineImpl::TellTransitions(absl::Span<const GateTransition> transitions) {
  if (!transitions.empty()) TellGateNow();  // they are rare
  gate_changes_ += static_cast<int64_t>(transitions.size());
  for (const GateTransition& transition : transitions) {
    GateChange change;
    change.cell = NameCell(transition.cell);
    change.from = std::string(GateStateName(transition.from));
    change.to = std::string(GateStateName(transition.to));
    change.cause = std::string(transition.cause);
    change.hidden = transition.hidden;
    LogInfo("gate_changed", {{"model", change.cell.model},
                             {"source", change.cell.source},
                             {"target", change.cell.target},
                             {"plan", change.cell.plan},
                             {"task", change.cell.task},
                             {"prefix_bucket", change.cell.prefix_bucket},
                             {"answer", change.cell.answer},
                             {"from", change.from},
                             {"to", change.to},
                             {"cause", change.cause},
                             {"reason", transition.reason}});
    if (observer_ != nullptr) observer_->OnGateChange(change);
  }
}

std::shared_ptr<const Version> EngineImpl::FindFingerprint(absl::string_view hex) {
  for (const ModelEntry& model : table()->models) {
    for (const auto& version : model.versions) {
      if (ToHex(version->fingerprint) == hex) return version;
    }
  }
  return nullptr;
}

std::string EngineImpl::VersionOf(const std::string& hex) {
  const auto version = FindFingerprint(hex);
  return version != nullptr ? version->name : hex.substr(0, 12);
}

GateCell EngineImpl::NameCell(const CellKey& key) {
  GateCell cell;
  cell.source = VersionOf(key.source);
  cell.target = VersionOf(key.target);
  if (const auto target = FindFingerprint(key.target)) cell.model = target->model;
  cell.plan = key.plan;
  cell.task = key.task;
  cell.prefix_bucket = key.prefix_bucket;
  cell.answer = std::string(AnswerClassName(key.answer));
  return cell;
}

std::vector<GateRow> EngineImpl::GateRows() {
  std::vector<GateRow> rows;
  for (const CellReport& report : gate_->Report(Now())) {
    // What was learned about versions that are not loaded, before a restart, is no series.
    if (FindFingerprint(report.cell.source) == nullptr) continue;
    if (FindFingerprint(report.cell.target) == nullptr) continue;
    GateRow row;
    row.cell = NameCell(report.cell);
    row.state = std::string(GateStateName(report.state));
    row.evidence_state = std::string(GateStateName(report.evidence_state));
    row.forced = report.forced;
    row.borrowed = report.borrowed;
    row.starved = report.starved;
    row.samples = report.samples;
    row.dropped = report.dropped;
    row.prefixes = report.prefixes;
    row.controls = report.controls;
    row.explanation = report.explanation;
    for (int i = 0; i < kGateMeasures; ++i) {
      const MeasureReport& measure = report.measures[i];
      row.bounds.push_back({std::string(GateMeasureName(i)), measure.mean, measure.lower,
                            measure.upper, measure.limit, measure.floor_mean});
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

void EngineImpl::TickGate() {
  const double now = Now();
  if (now - gate_ticked_ < kTickInterval) return;
  gate_ticked_ = now;
  TellTransitions(gate_->Tick(now));
}

void EngineImpl::RunShadows(bool users_ran, double user_seconds) {
  if (users_ran) {
    const double spent = shadows_->AfterUserStep(user_seconds);
    if (spent > 0 && observer_ != nullptr) observer_->OnShadowDelay(spent);
    return;
  }
  if (!shadows_->HasWork() && !slices_.HasWork()) return;
  const SteadyTime end = std::chrono::steady_clock::now() + kMaxRun;
  const auto yield = [&] {
    if (std::chrono::steady_clock::now() >= end) return true;
    MutexLock lock(&mutex_);
    return !mailbox_.empty() || poll_tiers_ || stopping_;
  };
  if (shadows_->HasWork()) {
    shadows_->Run(yield);
  } else {
    slices_.Run(yield);
  }
  if (observer_ == nullptr) return;
  std::optional<double> waited;
  {
    MutexLock lock(&mutex_);
    if (!mailbox_.empty()) {
      waited =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - mailbox_since_).count();
    }
  }
  if (waited.has_value()) observer_->OnShadowDelay(*waited);
}

void EngineImpl::NoteCarried(const Sequence& sequence) {
  const ActiveRequest& request = *sequence.request;
  if (!options_.fidelity.refresh_when_idle || sequence.forked || !request.ask.store ||
      !request.ask.judged) {
    return;
  }
  const auto last = std::find_if(sequence.plan.rbegin(), sequence.plan.rend(),
                                 [](const PlannedBlock& block) { return block.carried; });
  if (last == sequence.plan.rend()) return;
  const int blocks = static_cast<int>(sequence.plan.rend() - last);
  const int block_tokens = request.cache->layout.geometry.block_tokens;
  carried_.Used(request.version->fingerprint, request.root, last->entry.entry,
                absl::MakeConstSpan(sequence.tokens).first(blocks * block_tokens),
                request.usage.carried_tokens, Now());
  shadows_->OfferRefresh();
}

std::optional<ShadowJob> EngineImpl::NextRefresh() {
  while (std::optional<CarriedPrefix> prefix = carried_.TakeHottest()) {
    ShadowJob job;
    job.version = LoadedVersion(prefix->target);
    if (job.version == nullptr) continue;
    const auto cache = caches_.find(job.version->kv_layout.sha256);
    if (cache == caches_.end()) continue;
    job.weights = job.version->weights;
    job.cache = cache->second;
    job.root = prefix->root;
    job.tokens = std::move(prefix->tokens);
    job.refresh = true;
    job.offered = std::chrono::steady_clock::now();
    return job;
  }
  return std::nullopt;
}

bool EngineImpl::WantsLogits(const Sequence& sequence) const {
  const ActiveRequest& request = *sequence.request;
  return sequence.choice == 0 && request.choice.has_value() && request.choice->sampled &&
         sequence.output() < options_.fidelity.positions;
}

void EngineImpl::KeepLogits(ActiveRequest* request, absl::Span<const float> logits) {
  request->served_logits.insert(request->served_logits.end(), logits.begin(), logits.end());
}

void EngineImpl::OfferShadow(const Sequence& sequence) {
  ActiveRequest* request = sequence.request;
  if (!request->choice.has_value() || !request->choice->sampled) return;
  ShadowJob job;
  job.choice = *request->choice;
  job.served_carried = request->carried;
  job.version = request->version;
  job.weights = request->weights;
  job.cache = request->cache;
  job.root = request->root;
  job.sources = request->sources;
  job.prompt_tokens = request->prompt_tokens;
  const int positions = std::min(sequence.output(), options_.fidelity.positions);
  job.tokens.assign(sequence.tokens.begin(),
                    sequence.tokens.begin() + request->prompt_tokens + positions);
  job.served_logits = std::move(request->served_logits);
  const bool cancelled = sequence.finish.reason == FinishReason::kCancelled;
  job.complete = !cancelled && positions == sequence.output();
  job.greedy = IsGreedy(request->ask.sampling);
  job.store = request->ask.store;
  job.stop_tokens = request->stop_tokens;
  job.answers = request->ask.compare_answers;
  if (!job.answers.empty()) job.answers.resize(positions, -1);
  job.waiter = std::exchange(request->ask.compared, nullptr);
  if (job.choice.old) job.source = LoadedVersion(job.choice.source);
  // A client who leaves later than what is compared takes nothing from the comparison.
  if (positions == 0 || (cancelled && positions < options_.fidelity.positions)) {
    shadows_->Refuse(job, ShadowOutcome::kCancelled);
  } else if (job.choice.gone) {
    shadows_->Refuse(job, ShadowOutcome::kEvicted);
  } else {
    shadows_->Offer(std::move(job));
  }
}

void EngineImpl::TellTrial(const ActiveRequest& request) {
  const ShadowChoice& choice = *request.choice;
  TrialRecord record;
  record.pair.model = request.version->model;
  record.pair.source = choice.source_name;
  record.pair.target = request.version->name;
  record.plan = choice.serve.name;
  record.task = choice.task;
  record.prefix_bucket = choice.cell.prefix_bucket;
  record.held_out = choice.held_out;
  for (const auto& sequence : request.sequences) {
    record.reasons.push_back(sequence->finish.reason);
    record.answer_tokens.push_back(sequence->output());
  }
  if (request.timing.first_token > 0) record.first_token = request.timing.first_token;
  observer_->OnTrialDone(record);
}

std::shared_ptr<const Version> EngineImpl::LoadedVersion(const Digest& fingerprint) {
  for (const ModelEntry& model : table()->models) {
    for (const auto& version : model.versions) {
      if (version->fingerprint == fingerprint && version->weights != nullptr) return version;
    }
  }
  return nullptr;
}

}  // namespace carryover
