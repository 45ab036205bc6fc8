// Taking versions' weights, or all that is of them, away while others serve.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "engine/engine_impl.h"

namespace carryover {

absl::StatusOr<std::shared_ptr<const Version>> EngineImpl::Retire(absl::string_view model_name,
                                                                  absl::string_view version_name,
                                                                  bool remove) {
  std::shared_ptr<const Version> retired;
  RETURN_IF_ERROR(EditTable([&](VersionTable* table) -> absl::Status {
    ASSIGN_OR_RETURN(const ModelEntry* found, table->FindModel(model_name));
    ModelEntry* model = table->MutableModel(found->name);
    ASSIGN_OR_RETURN(retired, FindVersion(*model, version_name));
    const bool only = model->versions.size() == 1;
    if (!only && (retired->name == model->stable || retired->name == model->candidate)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "version: ", retired->name, " has a share of the traffic; promote another one first"));
    }
    const auto at = std::find(model->versions.begin(), model->versions.end(), retired);
    if (!remove) {
      auto empty = std::make_shared<Version>(*retired);
      empty->weights = nullptr;
      for (VersionMap& map : empty->maps) map.device = nullptr;
      *at = std::move(empty);
    } else if (only) {
      table->models.erase(table->models.begin() + (model - table->models.data()));
    } else {
      model->versions.erase(at);
    }
    return absl::OkStatus();
  }));
  // Requests that started on it finish on it.
  {
    MutexLock lock(&mutex_);
    while (alive_by_version_.count({retired->model, retired->name}) > 0) ended_.Wait(&mutex_);
  }
  return retired;
}

absl::Status EngineImpl::Unload(absl::string_view model, absl::string_view version) {
  ASSIGN_OR_RETURN(std::shared_ptr<const Version> retired,
                   Retire(model, version, /*remove=*/false));
  Call([&] {
    ended_requests_.clear();
    shadows_->DropVersion(retired->fingerprint, /*removed=*/false);
    carried_.Forget(retired->fingerprint);
    retired.reset();  // on the engine thread: nothing else runs on the backend meanwhile
    RefreshReserved();
    PublishSnapshot();
    return true;
  });
  LogInfo("version_unloaded", {{"model", model}, {"version", version}});
  return absl::OkStatus();
}

absl::Status EngineImpl::Remove(absl::string_view model, absl::string_view version) {
  const std::shared_ptr<const VersionTable> before = table();
  ASSIGN_OR_RETURN(std::shared_ptr<const Version> retired, Retire(model, version, /*remove=*/true));
  Call([&] {
    ended_requests_.clear();
    shadows_->DropVersion(retired->fingerprint, /*removed=*/true);
    carried_.Forget(retired->fingerprint);
    // Another name for the same function keeps the blocks.
    bool alive = false, layout_used = false;
    for (const ModelEntry& entry : table()->models) {
      for (const auto& other : entry.versions) {
        if (other->fingerprint == retired->fingerprint) {
          if (!alive) registry_.NameVersion(other->fingerprint, other->name);
          alive = true;
        }
        layout_used |= other->kv_layout.sha256 == retired->kv_layout.sha256;
      }
    }
    const auto cache = caches_.find(retired->kv_layout.sha256);
    if (!alive) {
      gate_->Forget(ToHex(retired->fingerprint));
      TellGateNow();
      ++gate_changes_;
    }
    if (!alive && cache != caches_.end()) cache->second->store->RemoveVersion(retired->fingerprint);
    const bool in_use = std::any_of(requests_.begin(), requests_.end(), [&](const auto& request) {
      return cache != caches_.end() && request.second->cache == cache->second;
    });
    for (const VersionPair& pair : PairsOf(*before, *retired)) {
      if (observer_ != nullptr) observer_->OnPairRemoved(pair);
    }
    if (!layout_used && !in_use && cache != caches_.end()) caches_.erase(cache);
    retired.reset();
    RefreshReserved();
    PublishSnapshot();
    return true;
  });
  LogInfo("version_removed", {{"model", model}, {"version", version}});
  return absl::OkStatus();
}

}  // namespace carryover
