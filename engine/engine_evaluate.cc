// Answering a prompt in every way.

#include <algorithm>
#include <memory>
#include <optional>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "engine/engine_impl.h"

namespace carryover {
namespace {

// Of a cache that nobody else reads: what is found there is what Evaluate put there.
std::string PrivateSalt(const std::string& salt) {
  std::random_device device;
  return absl::StrCat(salt, "\x1f", "evaluate", device(), device(), device(), device());
}

EvaluatedAnswer ToEvaluated(const std::string& plan, WaitingSink::Answer answer) {
  EvaluatedAnswer out;
  out.version = answer.done.cache.target;
  out.plan = plan;
  out.text = std::move(answer.text);
  out.token_ids = std::move(answer.token_ids);
  out.finish = std::move(answer.finish);
  out.usage = answer.done.usage;
  out.cache = std::move(answer.done.cache);
  out.timing = answer.done.timing;
  return out;
}

// INVALID_ARGUMENT names the field.
absl::StatusOr<std::vector<NamedPlan>> ParsePlans(absl::Span<const std::string> names) {
  constexpr size_t kMaxPlans = 8;
  if (names.size() > kMaxPlans) {
    return absl::InvalidArgumentError(absl::StrCat("plans: more than ", kMaxPlans));
  }
  std::vector<NamedPlan> plans;
  for (size_t i = 0; i < names.size(); ++i) {
    absl::Status status = CheckRung(names[i]);
    for (size_t j = 0; j < i && status.ok(); ++j) {
      if (names[j] == names[i]) status = absl::InvalidArgumentError("stands there twice");
    }
    if (!status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("plans[", i, "]: ", status.message()));
    }
    plans.push_back({names[i], *ParseCarryPlan(names[i])});
  }
  return plans;
}

}  // namespace

absl::StatusOr<WaitingSink::Answer> EngineImpl::RunToEnd(
    CompletionRequest request, const std::function<bool()>& cancelled,
    const std::function<void(int tokens)>& progress) {
  auto sink = std::make_shared<WaitingSink>();
  ASSIGN_OR_RETURN(const uint64_t ticket, Submit(std::move(request), sink));
  int tokens = 0, told = -1;
  bool stopped = false;
  while (!sink->Wait(&tokens)) {
    if (progress && tokens != told) progress(tokens);
    told = tokens;
    if (!stopped && cancelled && cancelled()) {
      Cancel(ticket);
      stopped = true;
    }
  }
  WaitingSink::Answer answer = sink->answer();
  RETURN_IF_ERROR(answer.done.status);
  return answer;
}

absl::StatusOr<Evaluation> EngineImpl::Evaluate(const EvaluateSpec& spec,
                                                const std::function<bool()>& cancelled) {
  ASSIGN_OR_RETURN(std::vector<NamedPlan> plans,
                   ParsePlans(spec.plans.empty() ? options_.gate.ladder : spec.plans));
  PrefixSpec prefix = spec.prompt;
  prefix.salt = PrivateSalt(prefix.salt);
  ASSIGN_OR_RETURN(ResolvedPrefix target, Resolve(prefix));
  const int vocab = target.version->config.vocab;
  for (const int32_t id : spec.answers) {
    if (id < -1 || id >= vocab) {
      return absl::InvalidArgumentError(
          absl::StrCat("answer_ids: ", id, " is outside the vocabulary of ", vocab));
    }
  }
  const std::string name = target.version->name, model = target.version->model;
  const std::vector<std::string> declared = target.version->carry_from;
  bool has_map = false;
  for (const auto& other : (*table()->FindModel(model))->versions) {
    if (other->name == spec.source) {
      has_map = target.version->Source(other->fingerprint).map != nullptr;
    }
  }
  target.version.reset();  // the last holder of weights must not be this thread
  if (std::find(declared.begin(), declared.end(), spec.source) == declared.end()) {
    return absl::FailedPreconditionError(
        absl::StrCat("source: ", name, " does not carry from ", spec.source));
  }
  const auto lacks_map = [&](const NamedPlan& plan) { return plan.plan.calibrated && !has_map; };
  if (spec.plans.empty()) {  // the gate passes them over, too
    plans.erase(std::remove_if(plans.begin(), plans.end(), lacks_map), plans.end());
  }
  const auto without = std::find_if(plans.begin(), plans.end(), lacks_map);
  if (plans.empty() || without != plans.end()) {
    return absl::FailedPreconditionError(
        absl::StrCat("plans: ", plans.empty() ? "all of the ladder need" : without->name + " needs",
                     " a map from ", spec.source, ", and none was loaded with ", name));
  }
  prefix.model = model;
  prefix.prompt.reset();
  prefix.tokens = target.tokens;
  prefix.version = spec.source;
  const int length = static_cast<int>(target.tokens.size());
  if (spec.prefix_tokens > length) {
    return absl::InvalidArgumentError(absl::StrCat("prefix_tokens: ", spec.prefix_tokens,
                                                   " are more than the prompt's ", length));
  }
  PrefixSpec cached = prefix;
  if (spec.prefix_tokens > 0) cached.tokens.resize(spec.prefix_tokens);

  CompletionRequest ask;
  ask.id = "evaluate";
  ask.model = prefix.model;
  ask.tenant = prefix.tenant;
  ask.salt = prefix.salt;
  ask.tokens = target.tokens;
  ask.store = false;
  ask.judged = false;
  ask.sampling = spec.sampling;
  ask.sampling.temperature = 0;
  ask.max_reused_tokens = spec.prefix_tokens;

  const auto answer = [&]() -> absl::StatusOr<Evaluation> {
    RETURN_IF_ERROR(Warm(cached, nullptr, cancelled).status());
    Evaluation out;
    CompletionRequest request = ask;
    request.version = spec.source;
    request.reuse = ReuseMode::kNativeOnly;
    ASSIGN_OR_RETURN(auto source, RunToEnd(std::move(request), cancelled, nullptr));
    out.source = ToEvaluated("native", std::move(source));

    // Before the native answer: that leaves the target's own blocks, when a hit is asked for.
    for (const NamedPlan& plan : plans) {
      request = ask;
      request.version = name;
      request.reuse = ReuseMode::kCarry;
      request.carry_plan = plan.plan;
      ASSIGN_OR_RETURN(auto carried, RunToEnd(std::move(request), cancelled, nullptr));
      out.carried.push_back(ToEvaluated(plan.name, std::move(carried)));
    }

    const auto waiter = std::make_shared<ComparisonWaiter>();
    request = ask;
    request.version = name;
    request.store = spec.hit || spec.sensitivity;  // mixed caches are made of what is stored
    request.compare_control = spec.control;
    request.compare_answers = spec.answers;
    request.compare_plans = plans;
    request.compare_probes = spec.sensitivity;
    request.compared = waiter;
    ASSIGN_OR_RETURN(auto native, RunToEnd(std::move(request), cancelled, nullptr));
    out.native = ToEvaluated("native", std::move(native));
    std::optional<ComparisonWaiter::Outcome> outcome;
    while (!(outcome = waiter->Wait()).has_value()) {
      if (cancelled && cancelled()) {
        waiter->Leave();
        return absl::CancelledError("cancelled");
      }
    }
    ASSIGN_OR_RETURN(ComparisonWaiter::Compared compared, *std::move(outcome));
    out.samples = std::move(compared.samples);
    if (spec.sensitivity) out.sensitivity = MakeSensitivity(compared.probes);

    if (spec.hit) {
      request = ask;
      request.version = name;
      request.reuse = ReuseMode::kNativeOnly;
      ASSIGN_OR_RETURN(auto hit, RunToEnd(std::move(request), cancelled, nullptr));
      out.hit = ToEvaluated("native", std::move(hit));
    }
    return out;
  };
  absl::StatusOr<Evaluation> evaluation = answer();
  EvictPrefix(prefix).IgnoreError();
  return evaluation;
}

}  // namespace carryover
