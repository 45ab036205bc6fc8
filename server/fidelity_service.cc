#include "server/fidelity_service.h"

#include <array>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "server/admin_call.h"
#include "server/rpc_status.h"
#include "server/sample_feed.h"

namespace carryover {
namespace {

constexpr int kMaxWhoBytes = 64;
constexpr int kMinPrefixBucket = 256;
constexpr int kMaxPrefixBucket = 1 << 30;

v1::GateState ToProto(GateState state) {
  switch (state) {
    case GateState::kLearning:
      return v1::LEARNING;
    case GateState::kOpen:
      return v1::OPEN;
    case GateState::kRepaired:
      return v1::REPAIRED;
    case GateState::kClosed:
      return v1::CLOSED;
  }
  return v1::GATE_STATE_UNSPECIFIED;
}

absl::StatusOr<std::optional<GateState>> FromProto(v1::GateState state) {
  switch (state) {
    case v1::GATE_STATE_UNSPECIFIED:
      return std::nullopt;
    case v1::LEARNING:
      return GateState::kLearning;
    case v1::OPEN:
      return GateState::kOpen;
    case v1::REPAIRED:
      return GateState::kRepaired;
    case v1::CLOSED:
      return GateState::kClosed;
    default:
      return FieldError("state", "is unknown");
  }
}

absl::StatusOr<CellPattern> FromProto(const v1::GateCell& cell) {
  FieldErrors errors;
  CellPattern pattern;
  for (const auto& [field, name] :
       {std::pair("pattern.source", &cell.source()), std::pair("pattern.target", &cell.target()),
        std::pair("pattern.task", &cell.task())}) {
    if (name->empty()) continue;
    if (std::string problem = NameProblem(*name); !problem.empty()) errors.Add(field, problem);
  }
  if (!cell.plan().empty()) {
    errors.Add("pattern.plan", "must be empty: the ladder and the state decide the plan");
  }
  const int bucket = cell.prefix_bucket();
  if (bucket != 0 &&
      (bucket < kMinPrefixBucket || bucket > kMaxPrefixBucket || (bucket & (bucket - 1)) != 0)) {
    errors.Add("pattern.prefix_bucket", "must be 0 or a power of two from 256");
  }
  if (cell.answer() == v1::GateCell::SHORT) {
    pattern.answer = AnswerClass::kShort;
  } else if (cell.answer() == v1::GateCell::LONG) {
    pattern.answer = AnswerClass::kLong;
  } else if (cell.answer() != v1::GateCell::ANY) {
    errors.Add("pattern.answer", "is unknown");
  }
  RETURN_IF_ERROR(errors.ToStatus());
  pattern.source = cell.source();
  pattern.target = cell.target();
  pattern.task = cell.task();
  pattern.prefix_bucket = bucket;
  return pattern;
}

void ToProto(const std::array<MeasureReport, kGateMeasures>& measures,
             google::protobuf::RepeatedPtrField<v1::GateMeasure>* out) {
  for (int i = 0; i < kGateMeasures; ++i) {
    const MeasureReport& from = measures[i];
    v1::GateMeasure* measure = out->Add();
    measure->set_name(std::string(GateMeasureName(i)));
    measure->set_mean(from.mean);
    measure->set_lower(from.lower);
    measure->set_upper(from.upper);
    measure->set_limit(from.limit);
    measure->set_floor_mean(from.floor_mean);
    measure->set_floor_lower(from.floor_lower);
    measure->set_floor_upper(from.floor_upper);
  }
}

void ToProto(const RungReport& report, v1::GateRung* out) {
  out->set_plan(report.plan);
  out->set_state(report.state == RungState::kProved   ? v1::GateRung::PROVED
                 : report.state == RungState::kFailed ? v1::GateRung::FAILED
                                                      : v1::GateRung::UNPROVED);
  out->set_unusable(!report.usable);
  out->set_borrowed(report.borrowed);
  out->set_starved(report.starved);
  out->set_epoch(report.epoch);
  out->set_samples(report.samples);
  out->set_dropped(report.dropped);
  out->set_prefixes(report.prefixes);
  out->set_completion(report.completion);
  out->set_cooldown_seconds_left(report.cooldown_left);
  ToProto(report.measures, out->mutable_measures());
  out->set_explanation(report.explanation);
}

void ToProto(const CellReport& report, v1::GateCellReport* out) {
  v1::GateCell* cell = out->mutable_cell();
  cell->set_source(report.cell.source);
  cell->set_target(report.cell.target);
  cell->set_plan(report.cell.plan);
  cell->set_task(report.cell.task);
  cell->set_prefix_bucket(report.cell.prefix_bucket);
  cell->set_answer(report.cell.answer == AnswerClass::kShort ? v1::GateCell::SHORT
                                                             : v1::GateCell::LONG);
  out->set_state(ToProto(report.state));
  out->set_evidence_state(ToProto(report.evidence_state));
  out->set_forced(report.forced);
  out->set_borrowed(report.borrowed);
  out->set_starved(report.starved);
  out->set_epoch(report.epoch);
  out->set_samples(report.samples);
  out->set_dropped(report.dropped);
  out->set_prefixes(report.prefixes);
  out->set_completion(report.completion);
  out->set_controls(report.controls);
  out->set_cooldown_seconds_left(report.cooldown_left);
  ToProto(report.measures, out->mutable_measures());
  for (const RungReport& rung : report.rungs) ToProto(rung, out->add_rungs());
  out->set_explanation(report.explanation);
}

void ToProto(const GateRule& rule, v1::GateRule* out) {
  v1::GateCell* pattern = out->mutable_pattern();
  pattern->set_source(rule.pattern.source);
  pattern->set_target(rule.pattern.target);
  pattern->set_task(rule.pattern.task);
  pattern->set_prefix_bucket(rule.pattern.prefix_bucket);
  if (rule.pattern.answer.has_value()) {
    pattern->set_answer(*rule.pattern.answer == AnswerClass::kShort ? v1::GateCell::SHORT
                                                                    : v1::GateCell::LONG);
  }
  out->set_state(ToProto(rule.state));
  out->set_who(rule.who);
}

void ToProto(const EvaluatedAnswer& answer, v1::EvaluatedAnswer* out) {
  out->set_version(answer.version);
  out->set_plan(answer.plan);
  out->mutable_choice()->set_text(answer.text);
  out->mutable_choice()->mutable_token_ids()->Assign(answer.token_ids.begin(),
                                                     answer.token_ids.end());
  ToProto(answer.finish, out->mutable_choice()->mutable_finish());
  ToProto(answer.usage, out->mutable_usage());
  ToProto(answer.cache, out->mutable_cache());
  ToProto(answer.timing, out->mutable_timing());
}

void ToProto(const ProbeOutcome& outcome, v1::MixedOutcome* out) {
  out->set_valid(outcome.valid);
  if (!outcome.valid) return;
  out->set_kl(outcome.kl);
  out->set_tv(outcome.tv);
  out->set_flips(outcome.flips);
  out->set_first_token_flip(outcome.first_token_flip);
}

v1::CachePart::Kind ToProto(CachePart::Kind kind) {
  switch (kind) {
    case CachePart::Kind::kAll:
      return v1::CachePart::ALL;
    case CachePart::Kind::kLayers:
      return v1::CachePart::LAYERS;
    case CachePart::Kind::kKeys:
      return v1::CachePart::KEYS;
    case CachePart::Kind::kValues:
      return v1::CachePart::VALUES;
    case CachePart::Kind::kPositions:
      return v1::CachePart::POSITIONS;
  }
  return v1::CachePart::ALL;
}

void ToProto(const Sensitivity& sensitivity, v1::Sensitivity* out) {
  out->set_layers(sensitivity.layers);
  out->set_prefix_tokens(sensitivity.prefix_tokens);
  for (const Sensitivity::Row& row : sensitivity.rows) {
    v1::CachePart* part = out->add_parts();
    part->set_kind(ToProto(row.part.kind));
    part->set_name(row.part.name);
    part->set_begin(row.part.begin);
    part->set_end(row.part.end);
    ToProto(row.carried, part->mutable_carried());
    if (row.native.has_value()) ToProto(*row.native, part->mutable_native());
  }
}

}  // namespace

grpc::ServerUnaryReactor* FidelityService::Report(grpc::CallbackServerContext* context,
                                                  const v1::FidelityReportRequest* request,
                                                  v1::FidelityReportResponse* response) {
  return RunUnary(workers_.quick, CountAs(observer_, "FidelityReport"), [this, response] {
    for (const CellReport& cell : engine_->ReportGate()) ToProto(cell, response->add_cells());
    for (const GateRule& rule : engine_->ListGateRules()) ToProto(rule, response->add_rules());
    response->set_refused_cells(engine_->snapshot().gate_cells_refused);
    return absl::OkStatus();
  });
}

grpc::ServerWriteReactor<v1::WatchedSample>* FidelityService::WatchSamples(
    grpc::CallbackServerContext* context, const v1::WatchSamplesRequest* request) {
  FieldErrors errors;
  for (const auto& [field, name] :
       {std::pair("model", &request->model()), std::pair("source", &request->source()),
        std::pair("target", &request->target()), std::pair("task", &request->task())}) {
    if (name->empty()) continue;
    if (std::string problem = NameProblem(*name); !problem.empty()) errors.Add(field, problem);
  }
  return observer_->samples().Watch(context, *request, errors.ToStatus(),
                                    CountAs(observer_, "WatchSamples"));
}

grpc::ServerUnaryReactor* FidelityService::SetGate(grpc::CallbackServerContext* context,
                                                   const v1::SetGateRequest* request,
                                                   v1::SetGateResponse* response) {
  return RunUnary(
      workers_.quick, CountAs(observer_, "SetGate"), [this, request, response]() -> absl::Status {
        ASSIGN_OR_RETURN(CellPattern pattern, FromProto(request->pattern()));
        ASSIGN_OR_RETURN(const std::optional<GateState> state, FromProto(request->state()));
        const std::string who = request->who().empty() ? "an operator" : request->who();
        if (who.size() > kMaxWhoBytes) {
          return FieldError("who", absl::StrCat("is over ", kMaxWhoBytes, " bytes"));
        }
        for (const char c : who) {  // it goes into logs
          if (c < 32 || c > 126) return FieldError("who", "may only hold printable ASCII");
        }
        ASSIGN_OR_RETURN(const int changed, engine_->SetGate(std::move(pattern), state, who));
        response->set_changed_cells(changed);
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* FidelityService::Evaluate(grpc::CallbackServerContext* context,
                                                    const v1::EvaluateRequest* request,
                                                    v1::EvaluateResponse* response) {
  return RunUnary(
      workers_.slow, CountAs(observer_, "Evaluate"),
      [this, context, request, response]() -> absl::Status {
        EvaluateSpec spec;
        ASSIGN_OR_RETURN(spec.prompt, FromProto(request->prompt(), limits_));
        if (std::string problem = NameProblem(request->source()); !problem.empty()) {
          return FieldError("source", problem);
        }
        spec.source = request->source();
        spec.control = request->control();
        spec.hit = request->hit();
        spec.sensitivity = request->sensitivity();
        if (request->has_prefix_tokens()) {
          spec.prefix_tokens = request->prefix_tokens();
          if (spec.prefix_tokens < 1) {
            return FieldError("prefix_tokens", "must be at least 1");
          }
        }
        if (request->answer_ids_size() > kMaxFidelityPositions) {
          return FieldError("answer_ids", absl::StrCat("are over ", kMaxFidelityPositions));
        }
        spec.plans.assign(request->plans().begin(), request->plans().end());
        spec.answers.assign(request->answer_ids().begin(), request->answer_ids().end());
        // The bounds are those of a completion.
        v1::CompleteRequest as_completion;
        as_completion.mutable_tokens()->add_ids(0);
        if (request->has_max_tokens()) as_completion.set_max_tokens(request->max_tokens());
        *as_completion.mutable_stop() = request->stop();
        *as_completion.mutable_stop_token_ids() = request->stop_token_ids();
        if (request->has_ignore_eos()) as_completion.set_ignore_eos(request->ignore_eos());
        ASSIGN_OR_RETURN(CompletionRequest checked, FromProto(as_completion, limits_));
        if (checked.sampling.max_tokens < 1) {
          return FieldError("max_tokens", "must be at least 1");
        }
        spec.sampling = std::move(checked.sampling);
        ASSIGN_OR_RETURN(const Evaluation evaluation,
                         engine_->Evaluate(spec, [context] { return context->IsCancelled(); }));
        ToProto(evaluation.source, response->mutable_source());
        ToProto(evaluation.native, response->mutable_native());
        if (evaluation.hit) ToProto(*evaluation.hit, response->mutable_hit());
        for (const EvaluatedAnswer& answer : evaluation.carried) {
          ToProto(answer, response->add_carried());
        }
        for (const FidelitySample& sample : evaluation.samples) {
          ToProto(sample, response->add_samples());
        }
        if (evaluation.sensitivity) {
          ToProto(*evaluation.sensitivity, response->mutable_sensitivity());
        }
        return absl::OkStatus();
      });
}

}  // namespace carryover
