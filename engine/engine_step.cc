// What happens to requests on the engine thread: from the mailbox through steps to their end.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "engine/engine_impl.h"
#include "engine/reuse_report.h"

namespace carryover {
namespace {

constexpr double kGateInterval = 1;  // seconds
constexpr double kGateCost = 0.002;  // of a report, that an ended request may wait for
constexpr auto kPublishInterval = std::chrono::milliseconds(20);

double Seconds(SteadyTime from, SteadyTime to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

void EngineImpl::Accept(std::unique_ptr<ActiveRequest> request) {
  ActiveRequest* raw = request.get();
  requests_.emplace(raw->ticket, std::move(request));
  const auto cache = caches_.find(raw->version->kv_layout.sha256);
  if (cache == caches_.end()) {  // the version was removed in between
    EndRequest(raw, absl::NotFoundError(absl::StrCat("version: ", raw->version->name, " is gone")));
    return;
  }
  raw->cache = cache->second;
  scheduler_->Enqueue(raw->sequences[0].get());
}

bool EngineImpl::Step() {
  ended_requests_.clear();
  EndCancelledAndLate();
  TickGate();
  scheduler_->Admit();
  std::vector<ScheduledRows> batch = scheduler_->NextBatch();
  const bool users_ran = !batch.empty();
  const SteadyTime begin = std::chrono::steady_clock::now();
  for (const ScheduledRows& rows : batch) {
    if (!rows.repair.empty()) RunRepair(rows);
  }
  batch.erase(std::remove_if(batch.begin(), batch.end(),
                             [](const ScheduledRows& rows) { return !rows.repair.empty(); }),
              batch.end());
  // One pass for each model; in a canary there are two.
  while (!batch.empty()) {
    Model* model = batch[0].sequence->request->weights.get();
    const auto others = std::stable_partition(
        batch.begin(), batch.end(),
        [&](const ScheduledRows& rows) { return rows.sequence->request->weights.get() == model; });
    ++steps_;  // before the clients hear of it
    RunBatch(model, absl::MakeConstSpan(batch).first(others - batch.begin()));
    batch.erase(batch.begin(), others);
  }
  RunShadows(users_ran, Seconds(begin, std::chrono::steady_clock::now()));
  const bool busy = std::any_of(requests_.begin(), requests_.end(), [](const auto& entry) {
    return std::any_of(entry.second->sequences.begin(), entry.second->sequences.end(),
                       [](const auto& s) { return s->state == SequenceState::kRunning; });
  });
  if (!busy || Seconds(published_, std::chrono::steady_clock::now()) >
                   std::chrono::duration<double>(kPublishInterval).count()) {
    PublishSnapshot();
  }
  return busy || shadows_->HasWork() || slices_.HasWork();
}

void EngineImpl::EndCancelledAndLate() {
  const SteadyTime now = std::chrono::steady_clock::now();
  std::vector<ActiveRequest*> cancelled, late;
  for (const auto& [ticket, request] : requests_) {
    if (request->cancelled) {
      cancelled.push_back(request.get());
    } else if (request->ask.deadline.has_value() && *request->ask.deadline <= now) {
      late.push_back(request.get());
    }
  }
  for (ActiveRequest* request : cancelled) EndRequest(request, absl::CancelledError("cancelled"));
  for (ActiveRequest* request : late) {
    EndRequest(request, absl::DeadlineExceededError("the deadline passed"));
  }
}

void EngineImpl::OnStart(Sequence* sequence) {
  ActiveRequest* request = sequence->request;
  if (!sequence->forked) ReportReuse(*sequence, registry_, request);
  NoteCarried(*sequence);
  if (request->choice.has_value()) {
    request->info.gate = request->choice->gate;
    request->info.shadowed = request->choice->sampled;
  }
  if (!request->started) {
    request->started = true;
    if (ShadowChoice* choice = request->choice ? &*request->choice : nullptr;
        choice != nullptr && choice->carry) {
      // It waited, or blocks failed their check: what it would show is not what its cell is about.
      choice->gone = sequence->reused + sequence->repaired < choice->prefix_tokens;
    }
    request->timing.queue = Seconds(request->accepted, request->admitted);
    request->timing.load = Seconds(request->admitted, request->loaded);
    {
      MutexLock lock(&mutex_);
      --queued_requests_;
      queued_tokens_ -= request->reserved_tokens;
    }
    if (observer_ != nullptr) {
      observer_->OnStoreLookup(request->prompt_tokens);
      for (const CacheSegment& segment : request->info.segments) {
        if (!segment.tier.empty()) {
          observer_->OnStoreHit(segment.source, segment.tier, segment.tokens);
          if (segment.tier != "device") observer_->OnBlockLoad(segment.tier, request->timing.load);
        }
      }
    }
    request->sink->OnStart(request->version->model, request->usage, request->info);
  }
  // A prefix that is all there already needs no step.
  if (request->prefill_only() && sequence->computed == sequence->length()) PromptDone(request);
}

void EngineImpl::PromptDone(ActiveRequest* request) {
  const SamplingParams& sampling = request->ask.sampling;
  request->timing.prefill = Seconds(request->loaded, std::chrono::steady_clock::now());
  if (sampling.prompt_logprobs.has_value()) {
    request->sink->OnPromptLogprobs(std::move(request->prompt_logprobs));
  }
  if (sampling.echo) {
    const Sequence& first = *request->sequences[0];
    const auto prompt = absl::MakeConstSpan(first.tokens).first(request->prompt_tokens);
    for (const auto& sequence : request->sequences) {
      ChoiceDelta delta;
      delta.index = sequence->choice;
      delta.text = request->ask.prompt.has_value()
                       ? *request->ask.prompt
                       : request->version->tokenizer->Decode(prompt, sampling.skip_special_tokens);
      delta.token_ids.assign(prompt.begin(), prompt.end());
      request->sink->OnDelta(std::move(delta));
    }
  }
  if (!request->prefill_only()) {
    Fork(request);
    return;
  }
  for (const auto& sequence : request->sequences) {
    FinishSequence(sequence.get(), FinishReason::kLength);
  }
}

void EngineImpl::Fork(ActiveRequest* request) {
  const Sequence& first = *request->sequences[0];
  const int block_tokens = request->cache->layout.geometry.block_tokens;
  const int shared = MaxReusableBlocks(request->prompt_tokens, block_tokens);
  for (size_t i = 1; i < request->sequences.size(); ++i) {
    // The other choices share all full blocks and compute the rest of the prompt, a block at most,
    // for themselves.
    Sequence* sequence = request->sequences[i].get();
    sequence->table.assign(first.table.begin(), first.table.begin() + shared);
    sequence->lineage = first.lineage;
    sequence->reused = sequence->computed = shared * block_tokens;
    sequence->offered = shared;
    sequence->forked = true;
    scheduler_->Enqueue(sequence);
  }
}

void EngineImpl::EmitToken(Sequence* sequence, absl::Span<float> logits,
                           const SampledToken* sampled) {
  ActiveRequest* request = sequence->request;
  const SamplingParams& sampling = request->ask.sampling;
  const SteadyTime now = std::chrono::steady_clock::now();
  const int position = sequence->output();

  ChoiceDelta delta;
  delta.index = sequence->choice;
  if (sampled == nullptr && WantsLogits(*sequence)) KeepLogits(request, logits);
  const int32_t token =
      sampled != nullptr ? sampled->token : sequence->sampler->Sample(logits, position);
  sequence->sampler->Accept(token);
  sequence->tokens.push_back(token);
  delta.token_ids.push_back(token);
  if (sampling.logprobs.has_value()) {
    const Tokenizer& tokenizer = *request->version->tokenizer;
    delta.logprobs.push_back(sampled != nullptr
                                 ? MakeLogprobs(*sampled, tokenizer)
                                 : MakeLogprobs(logits, token, *sampling.logprobs, tokenizer));
  }
  ++request->usage.completion_tokens;
  if (position == 0) {
    if (request->timing.first_token == 0) {
      request->timing.first_token = Seconds(request->accepted, now);
    }
  } else if (observer_ != nullptr) {
    observer_->OnInterTokenLatency(Seconds(sequence->last_token, now));
  }
  sequence->last_token = now;

  const auto& stops = request->stop_tokens;
  const bool stop_token = std::find(stops.begin(), stops.end(), token) != stops.end();
  FinishReason reason = FinishReason::kNone;
  if (!stop_token || sampling.include_stop) {
    const std::string piece = sequence->decoder->Add(token);
    // Text before min_tokens is shown as it is: no stop is looked for.
    delta.text = position + 1 < sampling.min_tokens ? piece : sequence->matcher->Add(piece);
  }
  if (sequence->matcher->stopped()) {
    reason = FinishReason::kStopString;
  } else if (stop_token) {
    reason = FinishReason::kStopToken;
    sequence->finish.matched_token = token;
  } else if (position + 1 >= sampling.max_tokens) {
    reason = FinishReason::kLength;
  }
  if (reason == FinishReason::kLength || reason == FinishReason::kStopToken) {
    delta.text += sequence->matcher->Add(sequence->decoder->Finish());
    if (sequence->matcher->stopped()) reason = FinishReason::kStopString;
    delta.text += sequence->matcher->Finish();
  }
  if (reason == FinishReason::kStopString) {
    sequence->finish.matched = sequence->matcher->matched();
    sequence->finish.matched_token = -1;
  }
  request->sink->OnDelta(std::move(delta));
  if (reason != FinishReason::kNone) FinishSequence(sequence, reason);
}

void EngineImpl::FinishSequence(Sequence* sequence, FinishReason reason) {
  ActiveRequest* request = sequence->request;
  sequence->finish.reason = reason;
  if (sequence->state == SequenceState::kRunning) StoreBlocks(sequence);
  scheduler_->Remove(sequence);
  request->sink->OnFinish(sequence->finish);
  if (sequence->choice == 0) OfferShadow(*sequence);
  const bool all =
      std::all_of(request->sequences.begin(), request->sequences.end(),
                  [](const auto& other) { return other->finish.reason != FinishReason::kNone; });
  if (all) EndRequest(request, absl::OkStatus());
}

void EngineImpl::EndRequest(ActiveRequest* request, absl::Status status) {
  for (const auto& sequence : request->sequences) {
    if (sequence->finish.reason != FinishReason::kNone) continue;
    sequence->finish.reason = FinishReason::kCancelled;
    // What was computed is still worth keeping for the next one who asks.
    if (sequence->state == SequenceState::kRunning) StoreBlocks(sequence.get());
    scheduler_->Remove(sequence.get());
    if (request->started) request->sink->OnFinish(sequence->finish);
    if (sequence->choice == 0) OfferShadow(*sequence);
  }
  if (request->ask.compared != nullptr) {
    std::exchange(request->ask.compared, nullptr)
        ->Tell(status.ok() ? absl::FailedPreconditionError(
                                 "prompt: nothing could be carried; it is too short")
                           : status);
  }
  const SteadyTime now = std::chrono::steady_clock::now();
  request->timing.total = Seconds(request->accepted, now);
  if (!request->started) request->timing.queue = request->timing.total;
  request->usage.prompt_tokens = request->prompt_tokens;
  if (observer_ != nullptr) {
    RequestRecord record;
    record.code = status.code();
    record.plan = request->carried ? request->choice->serve.name : "native";
    for (const auto& sequence : request->sequences) {
      record.reasons.push_back(sequence->finish.reason);
    }
    record.usage = request->usage;
    record.timing = request->timing;
    record.started = request->timing.first_token > 0;
    observer_->OnRequestDone(record);
    if (request->choice.has_value() && request->choice->trial) TellTrial(*request);
  }
  CompletionDone done;
  done.status = std::move(status);
  done.usage = request->usage;
  done.cache = request->info;
  done.timing = request->timing;

  const auto at = requests_.find(request->ticket);
  ended_requests_.push_back(std::move(at->second));
  requests_.erase(at);
  // Gauges are right by the time that the client hears of the end.
  PublishSnapshot();
  {
    MutexLock lock(&mutex_);
    if (!request->started) {
      --queued_requests_;
      queued_tokens_ -= request->reserved_tokens;
    }
    const auto version = alive_by_version_.find({request->version->model, request->version->name});
    if (--version->second == 0) alive_by_version_.erase(version);
  }
  request->sink->OnDone(done);
  MutexLock lock(&mutex_);
  --alive_;
  ended_.SignalAll();
}

void EngineImpl::PublishSnapshot() {
  EngineSnapshot next;
  next.running = scheduler_->running();
  next.preemptions = scheduler_->preemptions();
  next.steps = steps_;
  next.replayed_passes = ops_.replayed_passes(backend_);
  std::map<std::pair<std::string, std::string>, int64_t> evictions;
  std::map<std::string, int64_t> rejects;
  for (const auto& [layout, cache] : caches_) {
    next.device_blocks += cache->pool->capacity();
    next.device_blocks_used += cache->pool->used();
    next.device_blocks_active +=
        cache->pool->used() - cache->store->device_blocks() - shadows_->BlocksOutsideStore(*cache);
    const StoreStats stats = cache->store->stats();
    const int block_tokens = cache->layout.geometry.block_tokens;
    for (const StoreStatsRow& row : stats.rows) {
      StoreRow out;
      out.model = cache->model;
      out.tier = TierName(row.tier);
      out.provenance = registry_.Name(row.provenance);
      out.blocks = row.blocks;
      out.bytes = row.bytes;
      out.hit_tokens = row.hit_blocks * block_tokens;
      next.store.push_back(std::move(out));
      for (int reason = 0; reason < kEvictionReasons; ++reason) {
        evictions[{TierName(row.tier), EvictionReasonName(static_cast<EvictionReason>(reason))}] +=
            row.evictions[reason];
      }
    }
    for (int reason = 0; reason < kRejectReasons; ++reason) {
      rejects[RejectReasonName(static_cast<RejectReason>(reason))] += stats.rejects[reason];
    }
    next.provenance_violations += stats.provenance_violations;
  }
  for (const auto& [key, count] : evictions)
    next.evictions.push_back({key.first, key.second, count});
  for (const auto& [reason, count] : rejects) next.rejects.push_back({"", reason, count});
  // Bounds cost more than counts do, and nobody looks at them that often.
  gate_dirty_ |= gate_->cells() != gate_cells_told_;
  const double now = Now();
  const bool soon = next.running == 0 && gate_rows_cost_ < kGateCost;
  if (gate_dirty_ && (now - gate_told_ > kGateInterval || soon)) {
    gate_rows_ = std::make_shared<const std::vector<GateRow>>(GateRows());
    gate_told_ = Now();
    gate_rows_cost_ = gate_told_ - now;
    gate_cells_told_ = gate_->cells();
    gate_dirty_ = false;
  }
  next.gates = gate_rows_;
  next.shadows_waiting = shadows_->waiting();
  next.gate_cells = gate_->cells();
  next.gate_cells_refused = gate_->refused_cells();
  published_ = std::chrono::steady_clock::now();
  MutexLock lock(&mutex_);
  snapshot_ = std::move(next);
}

}  // namespace carryover
