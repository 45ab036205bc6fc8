// A model's passes over the rows of a step, and what follows from them. Engine thread.

#include "base/log.h"
#include "engine/engine_impl.h"
#include "engine/repair.h"

namespace carryover {
namespace {

// What a request is told of a pass that failed: for want of memory, that it may work later.
absl::Status PassError(const absl::Status& status) {
  return absl::IsResourceExhausted(status) ? status : absl::InternalError(status.message());
}

}  // namespace

void EngineImpl::RunBatch(Model* model, absl::Span<const ScheduledRows> batch) {
  ForwardBatch forward;
  for (const ScheduledRows& rows : batch) {
    const Sequence& sequence = *rows.sequence;
    const ActiveRequest& request = *sequence.request;
    SequenceRows span;
    span.row_begin = static_cast<int32_t>(forward.tokens.size());
    span.row_count = rows.count;
    span.kv_begin = sequence.computed;
    span.table_begin = static_cast<int32_t>(forward.block_table.size());
    forward.sequences.push_back(span);
    const SamplingParams& sampling = request.ask.sampling;
    const bool all_logits = sampling.prompt_logprobs.has_value() && sequence.output() == 0;
    const bool sample =
        !all_logits && !WantsLogits(sequence) && sampling.logprobs.value_or(0) <= kSampleTop;
    for (int i = 0; i < rows.count; ++i) {
      const int position = sequence.computed + i;
      const bool last = position + 1 == sequence.length();
      if (all_logits || (last && !request.prefill_only())) {
        forward.logit_rows.push_back(static_cast<int32_t>(forward.tokens.size()));
        if (sample) {
          SampleSpec spec = sequence.sampler->Spec(sequence.output(), &forward.edits);
          spec.row = static_cast<int32_t>(forward.logit_rows.size()) - 1;
          forward.samples.push_back(spec);
        }
      }
      forward.tokens.push_back(sequence.tokens[position]);
      forward.positions.push_back(position);
    }
    for (const TableBlock& block : sequence.table) forward.block_table.push_back(block.block.id());
  }

  const absl::Status status =
      model->Forward(forward, batch[0].sequence->request->cache->pool->base(), &logits_, &sampled_);
  const int rows = static_cast<int>(forward.tokens.size());
  if (absl::IsResourceExhausted(status) && rows > 1) {
    LogError("device_memory_short", {{"error", status.ToString()}, {"rows", rows}});
    scheduler_->LowerRows(rows);
    return RunInParts(model, batch);
  }
  if (!status.ok()) {
    LogError("forward_failed", {{"error", status.ToString()}});
    for (const ScheduledRows& rows : batch) {
      if (rows.sequence->state == SequenceState::kRunning) {
        EndRequest(rows.sequence->request, PassError(status));
      }
    }
    return;
  }
  const size_t vocab = model->config().vocab;
  size_t logit_row = 0, sample = 0;
  absl::Span<float> logits = absl::MakeSpan(logits_);  // of the rows that are not sampled
  for (size_t i = 0; i < batch.size(); ++i) {
    const size_t row_end = forward.sequences[i].row_begin + forward.sequences[i].row_count;
    const bool sampled =
        sample < forward.samples.size() &&
        static_cast<size_t>(forward.logit_rows[forward.samples[sample].row]) < row_end;
    size_t count = 0;  // of its logit rows
    while (logit_row + count < forward.logit_rows.size() &&
           static_cast<size_t>(forward.logit_rows[logit_row + count]) < row_end) {
      ++count;
    }
    logit_row += count;
    const size_t values = sampled ? 0 : count * vocab;
    // An error in an earlier choice may have ended the request.
    if (batch[i].sequence->state == SequenceState::kRunning) {
      AfterRows(batch[i], logits.first(values), sampled ? &sampled_[sample] : nullptr);
    }
    logits.remove_prefix(values);
    if (sampled) ++sample;
  }
}

void EngineImpl::RunInParts(Model* model, absl::Span<const ScheduledRows> batch) {
  if (batch.size() == 1) {
    ScheduledRows half = batch[0];  // the next step goes on where this ends
    half.count /= 2;
    return RunBatch(model, {half});
  }
  const size_t half = batch.size() / 2;
  for (const auto part : {batch.first(half), batch.subspan(half)}) {
    std::vector<ScheduledRows> running;
    // What became of the first part may have ended requests of the second.
    for (const ScheduledRows& rows : part) {
      if (rows.sequence->state == SequenceState::kRunning) running.push_back(rows);
    }
    if (!running.empty()) RunBatch(model, running);
  }
}

void EngineImpl::RunRepair(const ScheduledRows& rows) {
  Sequence* sequence = rows.sequence;
  ActiveRequest* request = sequence->request;
  if (sequence->state != SequenceState::kRunning) return;
  KvCache& cache = *request->cache;
  const KvGeometry& geometry = cache.layout.geometry;
  RepairPass pass;
  const auto renewed =
      absl::MakeConstSpan(sequence->repairs).subspan(sequence->repairs_done, rows.repair.size());
  pass.Make(sequence->tokens, sequence->table, renewed, rows.repair,
            sequence->carry.BottomLayers(geometry.layers), geometry, cache.pool->base());
  ++steps_;
  absl::Status status = pass.CopyOrMap(ops_, backend_, mapper_.get(), request->weights.get());
  if (status.ok() && pass.bottom > 0) {
    status = request->weights->Forward(pass.forward, cache.pool->base(), &logits_);
  }
  if (!status.ok()) {
    LogError("forward_failed", {{"error", status.ToString()}});
    return EndRequest(request, PassError(status));
  }
  pass.Enter(BottomMap(sequence->carry, geometry.layers), &*sequence->lineage, &sequence->table,
             request->ask.store ? cache.store.get() : nullptr);
  sequence->repairs_done += rows.repair.size();
  if (sequence->repairing() || !request->ask.store || !options_.store_tainted) return;
  const auto reused = absl::MakeConstSpan(sequence->tokens).first(sequence->reused);
  cache.store->Insert(request->root, reused, sequence->table);
}

void EngineImpl::AfterRows(const ScheduledRows& rows, absl::Span<float> logits,
                           const SampledToken* sampled) {
  Sequence* sequence = rows.sequence;
  ActiveRequest* request = sequence->request;
  const SamplingParams& sampling = request->ask.sampling;
  const size_t vocab = request->version->config.vocab;
  const int begin = sequence->computed;
  sequence->computed += rows.count;

  if (sampling.prompt_logprobs.has_value() && sequence->output() == 0 && sequence->choice == 0) {
    for (int i = 0; i < rows.count && begin + i + 1 < request->prompt_tokens; ++i) {
      request->prompt_logprobs.push_back(
          MakeLogprobs(logits.subspan(i * vocab, vocab), sequence->tokens[begin + i + 1],
                       *sampling.prompt_logprobs, *request->version->tokenizer));
    }
  }
  LabelBlocks(sequence);
  if (sequence->output() == 0) {
    request->sink->OnPrefillProgress(sequence->computed, request->prompt_tokens);
    StoreBlocks(sequence);
  }
  if (sequence->computed < sequence->length()) return;
  if (sequence->output() == 0 && sequence->choice == 0) PromptDone(request);
  if (sequence->state == SequenceState::kRunning) {
    EmitToken(sequence, sampled != nullptr ? logits : logits.last(vocab), sampled);
  }
}

void EngineImpl::LabelBlocks(Sequence* sequence) {
  const int block_tokens = sequence->request->cache->layout.geometry.block_tokens;
  for (size_t i = sequence->reused / block_tokens;
       i < static_cast<size_t>(sequence->computed / block_tokens); ++i) {
    sequence->table[i].origin = sequence->lineage->current();
  }
}

void EngineImpl::StoreBlocks(Sequence* sequence) {
  ActiveRequest* request = sequence->request;
  if (!request->ask.store || !sequence->lineage.has_value()) return;
  const bool native = registry_.Get(sequence->lineage->provenance()).IsNative();
  if (!native && !options_.store_tainted) return;
  const int full = sequence->computed / request->cache->layout.geometry.block_tokens;
  if (full <= sequence->offered) return;
  request->cache->store->Insert(request->root,
                                absl::MakeConstSpan(sequence->tokens).first(sequence->computed),
                                absl::MakeConstSpan(sequence->table).first(full));
  sequence->offered = full;
}

}  // namespace carryover
