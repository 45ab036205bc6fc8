// Administration of the prefix store: warming, evicting, pinning, listing.

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "engine/engine_impl.h"

namespace carryover {
namespace {

void AddReport(const EvictReport& report, EvictResult* result) {
  result->blocks_evicted += report.evicted;
  result->blocks_in_use += report.in_use;
  result->blocks_pinned += report.pinned;
}

}  // namespace

absl::StatusOr<EngineImpl::ResolvedPrefix> EngineImpl::Resolve(const PrefixSpec& prefix) {
  const std::shared_ptr<const VersionTable> versions = table();
  ASSIGN_OR_RETURN(const ModelEntry* model, versions->FindModel(prefix.model));
  ResolvedPrefix out;
  ASSIGN_OR_RETURN(out.version, prefix.version.empty() ? RouteVersion(*model, "")
                                                       : FindVersion(*model, prefix.version));
  ASSIGN_OR_RETURN(out.tokens, PromptTokens(*out.version, prefix.prompt, prefix.tokens,
                                            prefix.add_special_tokens));
  out.root = RootKey(prefix.tenant, prefix.salt, out.version->tokenizer->sha256(),
                     out.version->kv_layout.sha256);
  return out;
}

absl::StatusOr<WarmResult> EngineImpl::Warm(const PrefixSpec& prefix,
                                            const std::function<void(double)>& progress,
                                            const std::function<bool()>& cancelled) {
  CompletionRequest request;
  request.id = "warm";
  request.model = prefix.model;
  request.version = prefix.version;
  request.tenant = prefix.tenant;
  request.salt = prefix.salt;
  request.prompt = prefix.prompt;
  request.tokens = prefix.tokens;
  request.add_special_tokens = prefix.add_special_tokens;
  request.sampling.max_tokens = 0;
  request.reuse = ReuseMode::kNativeOnly;
  ASSIGN_OR_RETURN(const ResolvedPrefix resolved, Resolve(prefix));
  request.version = resolved.version->name;
  const int total = static_cast<int>(resolved.tokens.size());
  ASSIGN_OR_RETURN(const WaitingSink::Answer answer,
                   RunToEnd(std::move(request), cancelled, [&](int tokens) {
                     if (progress) progress(static_cast<double>(tokens) / total);
                   }));
  if (progress) progress(1);
  WarmResult result;
  result.version = resolved.version->name;
  result.tokens = total;
  result.cached_tokens = answer.done.usage.cached_tokens;
  result.computed_tokens = answer.done.usage.computed_tokens;
  result.stored_tokens = total / options_.block_tokens * options_.block_tokens;
  return result;
}

absl::StatusOr<EvictResult> EngineImpl::Evict(absl::string_view model_name,
                                              absl::string_view version_name) {
  const std::shared_ptr<const VersionTable> versions = table();
  std::vector<std::shared_ptr<const Version>> which;
  if (!model_name.empty() || !version_name.empty()) {
    ASSIGN_OR_RETURN(const ModelEntry* model, versions->FindModel(model_name));
    if (version_name.empty()) {
      which = model->versions;
    } else {
      ASSIGN_OR_RETURN(std::shared_ptr<const Version> version, FindVersion(*model, version_name));
      which.push_back(std::move(version));
    }
  }
  return Call([&] {
    EvictResult result;
    if (which.empty()) {
      for (const auto& [layout, cache] : caches_) AddReport(cache->store->EvictAll(), &result);
    }
    for (const auto& version : which) {
      const auto cache = caches_.find(version->kv_layout.sha256);
      if (cache == caches_.end()) continue;
      AddReport(cache->second->store->EvictVersion(version->fingerprint), &result);
    }
    PublishSnapshot();
    return result;
  });
}

absl::StatusOr<EvictResult> EngineImpl::EvictPrefix(const PrefixSpec& prefix) {
  ASSIGN_OR_RETURN(const ResolvedPrefix resolved, Resolve(prefix));
  return Call([&] {
    EvictResult result;
    const auto cache = caches_.find(resolved.version->kv_layout.sha256);
    if (cache != caches_.end()) {
      AddReport(cache->second->store->EvictPrefix(resolved.root, resolved.tokens), &result);
    }
    PublishSnapshot();
    return result;
  });
}

absl::StatusOr<int> EngineImpl::Pin(const PrefixSpec& prefix, bool pinned) {
  ASSIGN_OR_RETURN(const ResolvedPrefix resolved, Resolve(prefix));
  return Call([&]() -> int {
    const auto cache = caches_.find(resolved.version->kv_layout.sha256);
    if (cache == caches_.end()) return 0;
    PrefixStore& store = *cache->second->store;
    const ProvenanceId native = registry_.Native(resolved.version->fingerprint);
    return static_cast<int>(pinned ? store.Pin(resolved.root, resolved.tokens, native)
                                   : store.Unpin(resolved.root, resolved.tokens, native));
  });
}

std::vector<CachedPrefix> EngineImpl::ListPrefixes(absl::string_view model_name, int limit) {
  const std::shared_ptr<const VersionTable> versions = table();
  std::set<Digest> layouts;
  for (const ModelEntry& model : versions->models) {
    if (!model_name.empty() && model.name != model_name) continue;
    for (const auto& version : model.versions) layouts.insert(version->kv_layout.sha256);
  }
  return Call([&] {
    std::vector<CachedPrefix> out;
    for (const auto& [layout, cache] : caches_) {
      if (layouts.count(layout) == 0) continue;
      for (const PrefixListing& listing : cache->store->Hottest(limit)) {
        CachedPrefix prefix;
        prefix.key = ToHex(listing.key);
        prefix.provenance = registry_.Name(listing.provenance);
        prefix.tier = TierName(listing.tier);
        prefix.tokens = static_cast<int>(listing.tokens);
        prefix.hits = listing.hits;
        prefix.idle_seconds = listing.idle_seconds;
        prefix.pinned = listing.pinned;
        out.push_back(std::move(prefix));
      }
    }
    std::stable_sort(out.begin(), out.end(),
                     [](const auto& a, const auto& b) { return a.hits > b.hits; });
    if (out.size() > static_cast<size_t>(std::max(limit, 0))) out.resize(std::max(limit, 0));
    return out;
  });
}

absl::Status EngineImpl::CheckStore() {
  return Call([&]() -> absl::Status {
    for (const auto& [layout, cache] : caches_) {
      RETURN_IF_ERROR(cache->store->CheckIntegrity());
    }
    return absl::OkStatus();
  });
}

}  // namespace carryover
