// The gate from outside: what it says, an operator's word, and its state over a restart.

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "engine/engine_impl.h"

namespace carryover {

std::vector<CellReport> EngineImpl::ReportGate() {
  return Call([this] {
    std::vector<CellReport> cells = gate_->Report(Now());
    for (CellReport& cell : cells) {
      cell.cell.source = VersionOf(cell.cell.source);
      cell.cell.target = VersionOf(cell.cell.target);
    }
    PublishSnapshot();  // a caller who asks for counts next gets those of now
    return cells;
  });
}

absl::StatusOr<std::vector<std::string>> EngineImpl::FingerprintsOf(const std::string& name) {
  if (name.empty()) return std::vector<std::string>{""};  // any
  std::vector<std::string> found;
  for (const ModelEntry& model : table()->models) {
    for (const auto& version : model.versions) {
      if (version->name == name) found.push_back(ToHex(version->fingerprint));
    }
  }
  if (found.empty()) return absl::NotFoundError(absl::StrCat("version: there is no ", name));
  return found;
}

absl::StatusOr<int> EngineImpl::SetGate(CellPattern pattern, std::optional<GateState> state,
                                        absl::string_view who) {
  ASSIGN_OR_RETURN(const std::vector<std::string> sources, FingerprintsOf(pattern.source));
  ASSIGN_OR_RETURN(const std::vector<std::string> targets, FingerprintsOf(pattern.target));
  const std::string source = pattern.source, target = pattern.target;  // names, for the log
  const auto& tasks = options_.fidelity.tasks;
  if (!pattern.task.empty() && pattern.task != TaskLabel(tasks, pattern.task)) {
    return absl::InvalidArgumentError(
        absl::StrCat("pattern.task: ", pattern.task, " is not one of the configured tasks"));
  }
  return Call([&]() -> absl::StatusOr<int> {
    std::vector<GateTransition> transitions;
    absl::Status status;
    for (const std::string& source : sources) {
      for (const std::string& target : targets) {
        pattern.source = source;
        pattern.target = target;
        status.Update(gate_->Force(pattern, state, who, &transitions));
      }
    }
    ++gate_changes_;  // also where the word is for cells that come later
    TellTransitions(transitions);
    TellGateNow();
    PublishSnapshot();
    RETURN_IF_ERROR(status);
    // Said also where no cell matches yet, and what each cell made of it is in lines of its own.
    LogInfo("gate_override",
            {{"state", state.has_value() ? GateStateName(*state) : "evidence"},
             {"who", who},
             {"source", source},
             {"target", target},
             {"task", pattern.task},
             {"prefix_bucket", pattern.prefix_bucket},
             {"answer", pattern.answer.has_value() ? AnswerClassName(*pattern.answer) : ""},
             {"changed_cells", transitions.size()}});
    return static_cast<int>(transitions.size());
  });
}

std::vector<GateRule> EngineImpl::ListGateRules() {
  return Call([this] {
    std::vector<GateRule> rules = gate_->Rules();
    for (GateRule& rule : rules) {
      rule.pattern.source = VersionOf(rule.pattern.source);
      rule.pattern.target = VersionOf(rule.pattern.target);
    }
    return rules;
  });
}

std::string EngineImpl::SaveGate() {
  return Call([this] { return gate_->Save(Now()); });
}

absl::Status EngineImpl::RestoreGate(absl::string_view bytes) {
  return Call([&]() -> absl::Status {
    RETURN_IF_ERROR(gate_->Restore(bytes, Now()));
    ForgetStrangers();
    TellGateNow();
    PublishSnapshot();
    return absl::OkStatus();
  });
}

void EngineImpl::ForgetStrangers() {
  if (gate_->cells() <= options_.gate.max_cells / 2) return;
  std::set<std::string> strangers;
  for (const CellReport& cell : gate_->Report(Now())) {
    for (const std::string* fingerprint : {&cell.cell.source, &cell.cell.target}) {
      if (FindFingerprint(*fingerprint) == nullptr) strangers.insert(*fingerprint);
    }
  }
  const int64_t before = gate_->cells();
  for (const std::string& fingerprint : strangers) gate_->Forget(fingerprint);
  if (strangers.empty()) return;
  LogInfo("gate_forgot", {{"versions_not_loaded", strangers.size()},
                          {"cells", before - gate_->cells()},
                          {"reason", "cells take more than half of max_cells"}});
}

}  // namespace carryover
