#include "engine/carry_policy.h"

#include <cstring>
#include <random>

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

CarryPolicy::CarryPolicy(const FidelityOptions& options, const ProvenanceRegistry* registry,
                         Gate* gate)
    : options_(options),
      registry_(registry),
      gate_(gate),
      key_(options.sampling_key == Digest() ? RandomKey() : options.sampling_key) {}

double CarryPolicy::Draw(uint64_t ticket, absl::string_view purpose) const {
  const Digest digest = Hasher().AddDigest(key_).AddInt(ticket).Add(purpose).Finish();
  uint64_t bits;
  std::memcpy(&bits, digest.data(), sizeof(bits));
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

bool CarryPolicy::MayCarry(ActiveRequest* request, const ReusePlan& plan) {
  if (request->choice.has_value()) {
    // It may have waited, and the store may have moved on.
    if (!request->started) request->choice->native_levels = plan.NativeLevels();
    return request->choice->carry;
  }
  ShadowChoice& choice = request->choice.emplace();
  choice.source = plan.MainVersion(*registry_);
  choice.source_name = registry_->VersionName(choice.source);
  choice.native_levels = plan.NativeLevels();
  choice.prefix_tokens =
      static_cast<int>(plan.blocks.size()) * request->cache->layout.geometry.block_tokens;
  const CompletionRequest& ask = request->ask;
  choice.task = TaskLabel(options_.tasks, ask.task);

  if (ask.compared != nullptr) {  // somebody waits for all arms
    choice.sampled = choice.old = true;
    choice.control = ask.compare_control;
    choice.cell.plan = "direct";
    choice.cell.prefix_bucket = PrefixBucket(choice.prefix_tokens);
    return false;
  }
  if (!ask.judged) {
    choice.carry = ask.reuse == ReuseMode::kCarry;
    return choice.carry;
  }
  choice.cell.source = ToHex(choice.source);
  choice.cell.target = ToHex(request->version->fingerprint);
  choice.cell.task = choice.task;
  choice.cell.prefix_bucket = PrefixBucket(choice.prefix_tokens);
  choice.cell.answer =
      ask.sampling.max_tokens <= kShortAnswerTokens ? AnswerClass::kShort : AnswerClass::kLong;
  const GateDecision decision = gate_->Decide(choice.cell);
  choice.cell.plan = std::string(decision.shadow_plan);
  choice.gate = std::string(GateStateName(decision.state));
  const bool automatic = ask.reuse == ReuseMode::kAuto;
  choice.carry = !automatic || decision.carry;
  // No plan is being judged while a cell is closed.
  if (request->prefill_only() || decision.shadow_plan.empty()) return choice.carry;
  // Preempted, and only now there is something to carry: the first logits are gone.
  if (request->sequences[0]->output() > 0) return choice.carry;

  const double rate =
      decision.state == GateState::kLearning ? options_.learning_sample_rate : options_.sample_rate;
  choice.sampled = Draw(request->ticket, "sample") < rate;
  // Everything that keeps a request from being drawn stands above, so that both arms are alike.
  choice.trial = automatic && choice.carry && options_.hold_out_rate > 0;
  if (choice.trial && Draw(request->ticket, "hold out") < options_.hold_out_rate) {
    choice.carry = false;
    choice.held_out = choice.sampled = true;
  }
  if (!choice.sampled) return choice.carry;
  choice.prefix = PrefixName(*request, plan);
  if (!choice.carry) {
    choice.control = choice.held_out || Draw(request->ticket, "control") < options_.control_rate;
    choice.old = Draw(request->ticket, "old") < options_.old_rate;
  }
  return choice.carry;
}

}  // namespace carryover
