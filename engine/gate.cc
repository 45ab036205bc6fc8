#include "engine/gate.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "engine/carry_plan.h"
#include "engine/gate_impl.h"

namespace carryover {

absl::string_view GateStateName(GateState state) {
  switch (state) {
    case GateState::kLearning:
      return "learning";
    case GateState::kOpen:
      return "open";
    case GateState::kRepaired:
      return "repaired";
    case GateState::kClosed:
      return "closed";
  }
  return "";
}

absl::string_view RungStateName(RungState state) {
  constexpr absl::string_view kNames[] = {"unproved", "proved", "failed"};
  return kNames[static_cast<int>(state)];
}

absl::string_view AnswerClassName(AnswerClass answer) {
  return answer == AnswerClass::kShort ? "short" : "long";
}

absl::string_view GateMeasureName(int measure) {
  constexpr absl::string_view kNames[kGateMeasures] = {"flip", "tv", "stop"};
  return kNames[measure];
}

int PrefixBucket(int tokens) {
  int bucket = 256;
  while (bucket <= tokens / 2 && bucket < kMaxPrefixBucket) bucket *= 2;
  return bucket;
}

absl::Status ValidateGateConfig(const GateConfig& config) {
  const auto refuse = [](absl::string_view field, absl::string_view range) {
    return absl::InvalidArgumentError(absl::StrCat(field, ": must be ", range));
  };
  // Each condition is written so that NaN fails it.
  for (int i = 0; i < kGateMeasures; ++i) {
    if (!(config.limit[i] >= 1e-4 && config.limit[i] <= 0.5)) {
      return refuse(absl::StrCat("limit.", GateMeasureName(i)), "from 0.0001 to 0.5");
    }
    if (!(config.max_floor[i] >= 0 && config.max_floor[i] <= 0.4)) {
      return refuse(absl::StrCat("max_floor.", GateMeasureName(i)), "from 0 to 0.4");
    }
  }
  if (!(config.alpha >= 1e-6 && config.alpha <= 0.5)) return refuse("alpha", "from 1e-6 to 0.5");
  if (config.min_prefixes < 1 || config.min_prefixes > 1000) {
    return refuse("min_prefixes", "from 1 to 1000");
  }
  if (!(config.min_completion >= 0 && config.min_completion <= 1)) {
    return refuse("min_completion", "from 0 to 1");
  }
  if (!(config.cooldown_seconds >= 0 && config.cooldown_seconds <= 1e8)) {
    return refuse("cooldown_seconds", "from 0 to 1e8");
  }
  if (config.prefix_weight < 1 || config.prefix_weight > 255) {
    return refuse("prefix_weight", "from 1 to 255");
  }
  if (!(config.assume_dropped >= 0 && config.assume_dropped <= 1)) {
    return refuse("assume_dropped", "from 0 to 1");
  }
  if (config.max_cells < 1 || config.max_cells > 65536) {
    return refuse("max_cells", "from 1 to 65536");
  }
  if (config.ladder.empty() || config.ladder.size() > 8) return refuse("ladder", "1 to 8 plans");
  for (size_t i = 0; i < config.ladder.size(); ++i) {
    const std::string& plan = config.ladder[i];
    if (const absl::Status status = CheckRung(plan); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("ladder[", i, "]: ", status.message()));
    }
    if (std::count(config.ladder.begin(), config.ladder.end(), plan) > 1) {
      return refuse(absl::StrCat("ladder[", i, "]"), "another plan than the others");
    }
  }
  return absl::OkStatus();
}

bool Matches(const CellPattern& pattern, const CellKey& key) {
  return (pattern.source.empty() || pattern.source == key.source) &&
         (pattern.target.empty() || pattern.target == key.target) &&
         (pattern.task.empty() || pattern.task == key.task) &&
         (pattern.prefix_bucket == 0 || pattern.prefix_bucket == key.prefix_bucket) &&
         (!pattern.answer || *pattern.answer == key.answer);
}

bool IsPrintable(absl::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= 32 && c <= 126; });
}

bool IsOpen(GateState state) { return state == GateState::kOpen || state == GateState::kRepaired; }

double ShareOfEpoch(int epoch) {
  return epoch <= 1 ? 0.8 : 0.2 / (static_cast<double>(epoch) * (epoch - 1));
}

Gate::Impl::Impl(const GateConfig& config)
    : config(config),
      grids([&config] {
        std::array<GateGrid, kGateMeasures> grids;
        for (int i = 0; i < kGateMeasures; ++i) {
          grids[i] = MakeGateGrid(config.limit[i], config.max_floor[i]);
        }
        return grids;
      }()),
      no_floor(GateComparison::kControl, grids) {}

GateCell* Gate::Impl::FindOrAdd(const CellKey& key) {
  const auto found = cells.find(key);
  if (found != cells.end()) return found->second.get();
  bool sound = key.prefix_bucket >= 256 && key.prefix_bucket <= kMaxPrefixBucket;
  for (const std::string* text : {&key.source, &key.target, &key.task}) {
    sound = sound && text->size() <= kMaxKeyBytes;
  }
  if (!sound || static_cast<int>(cells.size()) >= config.max_cells) {
    ++refused;
    return nullptr;
  }
  CellKey bare = key;
  bare.plan.clear();
  auto cell = std::make_unique<GateCell>(bare, config.ladder.size(), grids);
  SettleState(cell.get());
  ApplyRules(cell.get());
  UpdateDecision(cell.get());
  return cells.emplace(std::move(bare), std::move(cell)).first->second.get();
}

void Gate::Impl::ApplyRules(GateCell* cell) const {
  cell->forced.reset();
  for (const GateRule& rule : rules) {
    if (Matches(rule.pattern, cell->key)) cell->forced = rule.state;
  }
}

bool Gate::Impl::Usable(const CellKey& key, int rung) const {
  if (unusable.empty()) return true;
  const auto found = unusable.find({key.source, key.target});
  return found == unusable.end() || !found->second[rung];
}

int Gate::Impl::FirstUsable(const CellKey& key) const {
  for (int i = 0; i < static_cast<int>(config.ladder.size()); ++i) {
    if (Usable(key, i)) return i;
  }
  return 0;
}

int Gate::Impl::LastUsable(const CellKey& key) const {
  for (int i = static_cast<int>(config.ladder.size()) - 1; i > 0; --i) {
    if (Usable(key, i)) return i;
  }
  return 0;
}

void Gate::Impl::UpdateDecision(GateCell* cell) const {
  GateDecision& decision = cell->decision;
  decision.state = cell->served();
  decision.forced = cell->forced.has_value();
  // A closed cell has nothing to learn until its retry.
  decision.shadow_plan =
      cell->state == GateState::kClosed ? absl::string_view() : config.ladder[cell->rung];
  cell->others.clear();
  for (size_t i = 0; i < cell->rungs.size(); ++i) {
    if (static_cast<int>(i) != cell->rung && cell->rungs[i].state != RungState::kFailed &&
        Usable(cell->key, static_cast<int>(i))) {
      cell->others.push_back(config.ladder[i]);
    }
  }
  decision.other_plans = cell->others;
  decision.carry = IsOpen(decision.state);
  decision.plan = "native";
  switch (decision.state) {
    case GateState::kLearning:
      decision.why = "not proved yet";
      if (const int first = FirstUsable(cell->key);
          config.when_learning_carry && cell->rungs[first].epoch == 1 &&
          cell->rungs[first].state == RungState::kUnproved) {
        decision.carry = true;
        decision.plan = config.ladder[first];
        decision.why = "not proved yet, carried by configuration";
      }
      break;
    case GateState::kOpen:
      decision.plan = config.ladder[FirstUsable(cell->key)];
      decision.why = cell->rungs[0].borrowed ? "proved together with its siblings" : "proved";
      break;
    case GateState::kRepaired:
      // An operator's "repaired" is the most faithful plan, the evidence's the one that it proved.
      decision.plan = cell->state == GateState::kRepaired
                          ? absl::string_view(config.ladder[cell->rung])
                          : absl::string_view(config.ladder[LastUsable(cell->key)]);
      decision.why = "proved with repair";
      break;
    case GateState::kClosed:
      decision.why = "over a limit";
      break;
  }
  if (decision.forced) decision.why = "set by an operator";
}

void Gate::Impl::SettleState(GateCell* cell) const {
  const auto& rungs = cell->rungs;
  // What never failed is judged before what gets another chance.
  int next = -1;
  bool usable = false;
  for (int i = 0; i < static_cast<int>(rungs.size()); ++i) {
    if (!Usable(cell->key, i)) continue;
    usable = true;
    if (rungs[i].state == RungState::kProved) {
      cell->rung = i;
      cell->state = i == 0 ? GateState::kOpen : GateState::kRepaired;
      return;
    }
    if (rungs[i].state == RungState::kFailed) continue;
    if (next < 0 || rungs[i].epoch < rungs[next].epoch) next = i;
  }
  cell->rung = next < 0 ? LastUsable(cell->key) : next;
  // With no plan to be had there is nothing to learn, and nothing that failed.
  cell->state = next < 0 && usable ? GateState::kClosed : GateState::kLearning;
}

void Gate::Impl::Settle(GateCell* cell, int plan, absl::string_view cause, std::string reason,
                        Transitions* out) {
  GateTransition transition;
  transition.from = cell->state;
  const int rung = cell->rung;
  SettleState(cell);
  UpdateDecision(cell);
  if (cell->state == transition.from && cell->rung == rung) return;
  transition.cell = cell->key;
  transition.cell.plan = config.ladder[plan];
  transition.to = cell->state;
  transition.cause = cause;
  transition.reason = std::move(reason);
  transition.hidden = cell->forced.has_value();
  out->push_back(std::move(transition));
}

Gate::Gate(const GateConfig& config) {
  CHECK(ValidateGateConfig(config).ok());
  impl_ = std::make_unique<Impl>(config);
}

Gate::~Gate() = default;

GateDecision Gate::Decide(const CellKey& key) {
  if (const GateCell* cell = impl_->FindOrAdd(key)) return cell->decision;
  GateDecision decision;
  decision.plan = "native";
  decision.why = "no room for another cell";
  return decision;
}

std::vector<GateTransition> Gate::Observe(const GateSample& sample, double now) {
  std::vector<GateTransition> out;
  if (sample.comparison == GateComparison::kControl) {
    for (bool own : {true, false}) {
      GateEvidence* floor = impl_->FindOrAddFloor(sample.cell, own);
      if (floor != nullptr) floor->Add(sample, impl_->config);
    }
    return out;
  }
  const auto& ladder = impl_->config.ladder;
  const auto plan = std::find(ladder.begin(), ladder.end(), sample.cell.plan);
  if (plan == ladder.end()) return out;
  GateCell* cell = impl_->FindOrAdd(sample.cell);
  if (cell == nullptr) return out;
  const int rung = static_cast<int>(plan - ladder.begin());
  // A shadow that was under way when its plan failed tells nothing.
  if (cell->rungs[rung].state == RungState::kFailed) return out;
  if (cell->rungs[rung].evidence.Add(sample, impl_->config)) impl_->Judge(cell, rung, now, &out);
  return out;
}

std::vector<GateTransition> Gate::SetUnusable(const std::string& source, const std::string& target,
                                              std::vector<bool> unusable) {
  CHECK(unusable.size() == impl_->config.ladder.size());
  std::vector<GateTransition> out;
  const std::pair<std::string, std::string> pair(source, target);
  if (std::find(unusable.begin(), unusable.end(), true) == unusable.end()) {
    if (impl_->unusable.erase(pair) == 0) return out;
  } else {
    std::vector<bool>& now = impl_->unusable[pair];
    if (now == unusable) return out;
    now = std::move(unusable);
  }
  for (auto& [key, cell] : impl_->cells) {
    if (key.source != source || key.target != target) continue;
    const int before = cell->rung;
    impl_->Settle(cell.get(), before, "plans", "the plans that can be used have changed", &out);
    impl_->UpdateDecision(cell.get());
  }
  return out;
}

std::vector<GateTransition> Gate::Tick(double now) {
  std::vector<GateTransition> out;
  for (auto& [key, cell] : impl_->cells) {
    for (int i = 0; i < static_cast<int>(cell->rungs.size()); ++i) {
      const GateRung& rung = cell->rungs[i];
      if (rung.state == RungState::kFailed && now >= rung.retry_at) {
        impl_->Retry(cell.get(), i, &out);
      }
    }
  }
  return out;
}

absl::Status Gate::Force(const CellPattern& pattern, std::optional<GateState> state,
                         absl::string_view who, std::vector<GateTransition>* transitions) {
  if (state == GateState::kRepaired && impl_->config.ladder.size() < 2) {
    return absl::InvalidArgumentError("state: repaired needs a ladder with a plan that repairs");
  }
  for (const std::string* text : {&pattern.source, &pattern.target, &pattern.task}) {
    if (text->size() > kMaxKeyBytes) return absl::InvalidArgumentError("pattern: too long");
  }
  if (who.size() > kMaxKeyBytes || !IsPrintable(who)) {
    return absl::InvalidArgumentError("who: must be up to 256 printable ASCII characters");
  }
  std::vector<GateRule>& rules = impl_->rules;
  // A pattern that asks for the same or more replaces what it covers.
  const auto covered = [&pattern](const GateRule& rule) {
    const CellPattern& other = rule.pattern;
    return (pattern.source.empty() || pattern.source == other.source) &&
           (pattern.target.empty() || pattern.target == other.target) &&
           (pattern.task.empty() || pattern.task == other.task) &&
           (pattern.prefix_bucket == 0 || pattern.prefix_bucket == other.prefix_bucket) &&
           (!pattern.answer || pattern.answer == other.answer);
  };
  const auto kept = std::count_if(rules.begin(), rules.end(),
                                  [&](const GateRule& rule) { return !covered(rule); });
  if (state && kept >= kMaxForceRules) {
    return absl::ResourceExhaustedError(
        absl::StrCat("there are ", kept, " overrides already; take some away first"));
  }
  rules.erase(std::remove_if(rules.begin(), rules.end(), covered), rules.end());
  if (state) rules.push_back({pattern, *state, std::string(who)});
  for (auto& [key, cell] : impl_->cells) {
    const GateState from = cell->served();
    const bool was_forced = cell->forced.has_value();
    impl_->ApplyRules(cell.get());
    impl_->UpdateDecision(cell.get());
    if (cell->served() == from && cell->forced.has_value() == was_forced) continue;
    GateTransition transition;
    transition.cell = cell->key;
    transition.cell.plan = impl_->config.ladder[cell->rung];
    transition.from = from;
    transition.to = cell->served();
    transition.cause = "operator";
    transition.reason = cell->forced ? absl::StrCat("set by ", who)
                                     : absl::StrCat("given back to the evidence by ", who);
    transitions->push_back(std::move(transition));
  }
  return absl::OkStatus();
}

std::vector<GateRule> Gate::Rules() const { return impl_->rules; }

void Gate::Forget(absl::string_view fingerprint) {
  absl::erase_if(impl_->cells, [&](const auto& entry) {
    return entry.first.source == fingerprint || entry.first.target == fingerprint;
  });
  absl::erase_if(impl_->floors,
                 [&](const auto& entry) { return entry.first.target == fingerprint; });
  impl_->target_floors.erase(std::string(fingerprint));
  std::erase_if(impl_->unusable, [&](const auto& entry) {
    return entry.first.first == fingerprint || entry.first.second == fingerprint;
  });
  auto& rules = impl_->rules;
  rules.erase(std::remove_if(rules.begin(), rules.end(),
                             [&](const GateRule& rule) {
                               return rule.pattern.source == fingerprint ||
                                      rule.pattern.target == fingerprint;
                             }),
              rules.end());
}

int64_t Gate::cells() const { return impl_->cells.size(); }
int64_t Gate::refused_cells() const { return impl_->refused; }

}  // namespace carryover
