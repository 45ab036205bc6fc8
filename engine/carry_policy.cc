#include "engine/carry_policy.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

#include "base/status_macros.h"

namespace carryover {
namespace {

Digest RandomKey() {
  std::random_device device;
  Hasher hasher;
  for (int i = 0; i < 8; ++i) hasher.AddInt(device());
  return hasher.Finish();
}

// Equal for requests that share what the plan reuses.
uint64_t PrefixName(const ActiveRequest& request, const ReusePlan& plan) {
  const size_t tokens = plan.blocks.size() * request.cache->layout.geometry.block_tokens;
  const Digest digest =
      Hasher()
          .AddDigest(request.root.key)
          .AddTokens(absl::MakeConstSpan(request.sequences[0]->tokens).first(tokens))
          .Finish();
  uint64_t name;
  std::memcpy(&name, digest.data(), sizeof(name));
  return name;
}

}  // namespace

CarryPolicy::CarryPolicy(const FidelityOptions& options, absl::Span<const std::string> ladder,
                         const ProvenanceRegistry* registry, Gate* gate)
    : options_(options),
      registry_(registry),
      gate_(gate),
      key_(options.sampling_key == Digest() ? RandomKey() : options.sampling_key) {
  for (const std::string& name : ladder) {
    auto plan = ParseCarryPlan(name);
    CHECK(plan.ok());
    ladder_.push_back({name, *std::move(plan)});
  }
}

double CarryPolicy::Draw(uint64_t ticket, absl::string_view purpose) const {
  const Digest digest = Hasher().AddDigest(key_).AddInt(ticket).Add(purpose).Finish();
  uint64_t bits;
  std::memcpy(&bits, digest.data(), sizeof(bits));
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

const NamedPlan& CarryPolicy::Rung(absl::string_view name) const {
  const auto found = std::find_if(ladder_.begin(), ladder_.end(),
                                  [&](const NamedPlan& rung) { return rung.name == name; });
  CHECK(found != ladder_.end());
  return *found;
}

const NamedPlan& CarryPolicy::MostFaithful(
    const std::function<bool(const NamedPlan&)>& carries) const {
  const auto found = std::find_if(ladder_.rbegin(), ladder_.rend(), carries);
  return found == ladder_.rend() ? ladder_.back() : *found;
}

CarryPlan CarryPolicy::Choose(ActiveRequest* request, const ReusePlan& all,
                              const ReuseByPlan& by_plan) {
  if (request->choice.has_value()) {
    // It may have waited, and the store may have moved on.
    if (!request->started) request->choice->native_levels = all.NativeLevels();
    return request->choice->carry ? request->choice->serve.plan : NativePlan();
  }
  ShadowChoice& choice = request->choice.emplace();
  choice.source = all.MainVersion(*registry_);
  choice.source_name = registry_->VersionName(choice.source);
  choice.native_levels = all.NativeLevels();
  choice.prefix_tokens =
      static_cast<int>(all.blocks.size()) * request->cache->layout.geometry.block_tokens;
  choice.cell.prefix_bucket = PrefixBucket(choice.prefix_tokens);
  const CompletionRequest& ask = request->ask;
  choice.task = TaskLabel(options_.tasks, ask.task);

  if (ask.compared != nullptr) {  // somebody waits for all arms
    choice.sampled = choice.old = true;
    choice.control = ask.compare_control;
    choice.probes = ask.compare_probes;
    choice.compared = ask.compare_plans;
    if (!choice.compared.empty()) choice.cell.plan = choice.compared[0].name;
  } else if (ask.judged) {
    ChooseJudged(request, all, by_plan);
  } else {
    choice.carry = ask.reuse == ReuseMode::kCarry;
    choice.serve = {CarryPlanName(ask.carry_plan), ask.carry_plan};
  }
  return choice.carry ? choice.serve.plan : NativePlan();
}

void CarryPolicy::ChooseJudged(ActiveRequest* request, const ReusePlan& all,
                               const ReuseByPlan& by_plan) {
  ShadowChoice& choice = *request->choice;
  const CompletionRequest& ask = request->ask;
  choice.cell.source = ToHex(choice.source);
  choice.cell.target = ToHex(request->version->fingerprint);
  choice.cell.task = choice.task;
  choice.cell.answer =
      ask.sampling.max_tokens <= kShortAnswerTokens ? AnswerClass::kShort : AnswerClass::kLong;
  const GateDecision decision = gate_->Decide(choice.cell);
  choice.cell.plan = std::string(decision.shadow_plan);
  choice.gate = std::string(GateStateName(decision.state));
  const bool automatic = ask.reuse == ReuseMode::kAuto;
  choice.carry = !automatic || decision.carry;
  // A tail may cover all that there is to carry. Then there is nothing to compare, either.
  const auto carries = [&](const NamedPlan& plan) { return by_plan(plan.plan).carried_blocks > 0; };
  if (decision.carry) {
    choice.serve = Rung(decision.plan);
  } else if (choice.carry) {
    // Carried as the request wants it, though nothing is proved: by the plan that is judged now, or
    // where all have failed by the most faithful one.
    choice.serve =
        decision.shadow_plan.empty() ? MostFaithful(carries) : Rung(decision.shadow_plan);
  }
  if (choice.carry && !carries(choice.serve)) choice.carry = false;

  if (request->prefill_only()) return;
  // Preempted, and only now there is something to carry: the first logits are gone.
  if (request->sequences[0]->output() > 0) return;
  // No plan is being judged while a cell is closed. Who carries all the same, by an operator's word
  // or the request's, is to see how far off it is.
  const bool closed = decision.shadow_plan.empty();
  if (closed) choice.cell.plan = choice.serve.name;
  if (choice.carry) choice.compared.push_back(choice.serve);
  if (!closed) {
    const NamedPlan& judged = Rung(decision.shadow_plan);
    if (!(choice.carry && judged.name == choice.serve.name) && carries(judged)) {
      choice.compared.push_back(judged);
    }
  }
  if (choice.compared.empty()) return;

  double rate =
      decision.state == GateState::kLearning ? options_.learning_sample_rate : options_.sample_rate;
  // Held out requests are compared on top of those that are drawn. Those that nobody may hold out
  // are drawn so much more often, or a cell would be judged by some of its requests more than by
  // others.
  if (decision.carry && !automatic) rate += (1 - rate) * options_.hold_out_rate;
  choice.sampled = Draw(request->ticket, "sample") < rate;
  // Everything that keeps a request from being drawn stands above, so that both arms are alike.
  choice.trial = automatic && choice.carry && options_.hold_out_rate > 0;
  if (choice.trial && Draw(request->ticket, "hold out") < options_.hold_out_rate) {
    choice.carry = false;
    choice.held_out = choice.sampled = true;
  }
  if (!choice.sampled) return;
  choice.prefix = PrefixName(*request, all);
  if (!decision.other_plans.empty() && Draw(request->ticket, "rungs") < options_.rungs_rate) {
    for (const absl::string_view name : decision.other_plans) {
      const NamedPlan& rung = Rung(name);
      if (rung.name != choice.serve.name && carries(rung)) choice.compared.push_back(rung);
    }
  }
  if (!choice.carry) {
    choice.control = choice.held_out || Draw(request->ticket, "control") < options_.control_rate;
    choice.old = Draw(request->ticket, "old") < options_.old_rate;
  }
}

}  // namespace carryover
