// Loading, promoting and removing versions while others serve.

#include <algorithm>
#include <chrono>
#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "engine/engine_impl.h"
#include "engine/map_ahead.h"

namespace carryover {
namespace {

constexpr size_t kMaxNameBytes = 128;
constexpr size_t kMaxSources = 16;

// Names become metric labels and parts of keys, so they are plain.
absl::Status CheckName(absl::string_view field, absl::string_view name) {
  if (name.empty()) return absl::InvalidArgumentError(absl::StrCat(field, ": required"));
  if (name.size() > kMaxNameBytes) {
    return absl::InvalidArgumentError(absl::StrCat(field, ": longer than ", kMaxNameBytes));
  }
  for (char c : name) {
    if (!absl::ascii_isalnum(c) && absl::string_view("-_./:").find(c) == absl::string_view::npos) {
      return absl::InvalidArgumentError(
          absl::StrCat(field, ": only letters, digits and -_./: are allowed"));
    }
  }
  return absl::OkStatus();
}

Digest Salted(const Digest& fingerprint, const std::string& salt) {
  return salt.empty() ? fingerprint
                      : Hasher().Add("distinct").AddDigest(fingerprint).Add(salt).Finish();
}

const Version* Named(const ModelEntry* model, absl::string_view name) {
  if (model == nullptr) return nullptr;
  for (const auto& version : model->versions) {
    if (version->name == name) return version.get();
  }
  return nullptr;
}

// That maps[index] is from one of the version's sources to it.
absl::Status CheckMap(const Version& version, absl::Span<const KvMap> maps, size_t index,
                      const ModelEntry* model) {
  const KvMap& map = maps[index];
  const KvGeometry& geometry = version.kv_layout.geometry;
  KvMapIdentity identity = {.target = version.fingerprint,
                            .kv_layout = version.kv_layout.sha256,
                            .layers = geometry.layers,
                            .kv_heads = geometry.kv_heads,
                            .head_dim = geometry.head_dim};
  for (const std::string& name : version.carry_from) {
    identity.source = Named(model, name)->fingerprint;
    if (identity.source == map.info.source) break;
  }
  if (version.carry_from.empty()) {
    return absl::FailedPreconditionError("the version carries from none");
  }
  RETURN_IF_ERROR(CheckKvMapFits(map, identity));
  for (const KvMap& other : maps.first(index)) {
    if (other.info.source == map.info.source) {
      return absl::FailedPreconditionError("another map is from the same source");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status EngineImpl::CheckLoad(const LoadOptions& options) const {
  RETURN_IF_ERROR(CheckName("model", options.model));
  RETURN_IF_ERROR(CheckName("version", options.version));
  if (options.path.empty()) return absl::InvalidArgumentError("path: required");
  if (options.carry_from.size() > kMaxSources) {
    return absl::InvalidArgumentError(absl::StrCat("carry_from: more than ", kMaxSources));
  }
  for (const std::string& source : options.carry_from) {
    RETURN_IF_ERROR(CheckName("carry_from", source));
    if (source == options.version) {
      return absl::InvalidArgumentError("carry_from: names the version itself");
    }
    if (std::count(options.carry_from.begin(), options.carry_from.end(), source) > 1) {
      return absl::InvalidArgumentError(absl::StrCat("carry_from: ", source, " stands twice"));
    }
  }
  if (options.maps.size() > kMaxSources) {
    return absl::InvalidArgumentError(absl::StrCat("map: more than ", kMaxSources));
  }
  if (options.weights == DType::kF16) {
    return absl::InvalidArgumentError("weights: BF16, F32 or INT8");
  }
  if (options.kv_dtype != DType::kBF16 && options.kv_dtype != DType::kF32) {
    return absl::InvalidArgumentError("kv_dtype: BF16 or F32");
  }
  return absl::OkStatus();
}

absl::StatusOr<VersionInfo> EngineImpl::Load(const LoadOptions& options,
                                             const std::function<void(double)>& progress) {
  RETURN_IF_ERROR(CheckLoad(options));
  MutexLock one_at_a_time(&load_mutex_);
  const auto begin = std::chrono::steady_clock::now();

  // What the table says cannot change to the worse while load_mutex_ is held, but for removals, and
  // those are looked at again when the table is edited.
  const std::shared_ptr<const VersionTable> before = table();
  const ModelEntry* model = nullptr;
  for (const ModelEntry& entry : before->models) {
    if (entry.name == options.model) model = &entry;
  }
  const Version* unloaded = Named(model, options.version);
  if (unloaded != nullptr && unloaded->weights != nullptr) {
    return absl::AlreadyExistsError(absl::StrCat("version: ", options.version, " is loaded"));
  }
  for (const std::string& source : options.carry_from) {
    if (Named(model, source) == nullptr) {
      return absl::NotFoundError(
          absl::StrCat("carry_from: model ", options.model, " has no version ", source));
    }
  }

  auto version = std::make_shared<Version>();
  std::vector<KvMap> maps;
  for (const std::string& path : options.maps) {
    absl::StatusOr<KvMap> read = ReadKvMap(path);
    if (!read.ok()) {
      return absl::Status(read.status().code(), absl::StrCat("map: ", read.status().message()));
    }
    maps.push_back(*std::move(read));
  }
  ASSIGN_OR_RETURN(std::shared_ptr<const Tokenizer> tokenizer, Tokenizer::Load(options.path));
  ModelOptions model_options;
  model_options.weights = !options.auto_dtype        ? options.weights
                          : ops_.fast_bf16(backend_) ? DType::kBF16
                                                     : DType::kF32;
  model_options.kv_dtype = options.kv_dtype;
  model_options.block_tokens = options_.block_tokens;
  model_options.progress = progress;
  ASSIGN_OR_RETURN(std::shared_ptr<Model> weights,
                   Model::Load(options.path, ops_, backend_, model_options));
  if (tokenizer->vocab_size() > weights->config().vocab) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.path, ": the tokenizer has ids up to ", tokenizer->vocab_size() - 1,
                     ", the model a vocabulary of ", weights->config().vocab));
  }
  version->model = options.model;
  version->name = options.version;
  version->path = options.path;
  version->carry_from = options.carry_from;
  version->fingerprint = Salted(weights->fingerprint(), options.distinct);
  version->weights_sha256 = weights->weights_sha256();
  version->config = weights->config();
  version->kv_layout = weights->kv_layout();
  version->weights_dtype = model_options.weights;
  version->weight_bytes = weights->weight_bytes();
  version->tokenizer = std::move(tokenizer);
  version->weights = std::move(weights);

  if (unloaded != nullptr && unloaded->fingerprint != version->fingerprint) {
    return absl::FailedPreconditionError(absl::StrCat(
        "version: ", options.version,
        " was another model before it was unloaded; remove it first, or choose another name"));
  }
  for (const std::string& source : options.carry_from) {
    RETURN_IF_ERROR(CheckCompatible(*Named(model, source), *version));
  }
  for (size_t i = 0; i < maps.size(); ++i) {
    if (const absl::Status fits = CheckMap(*version, maps, i, model); !fits.ok()) {
      return absl::Status(fits.code(),
                          absl::StrCat("map: ", options.maps[i], ": ", fits.message()));
    }
    ASSIGN_OR_RETURN(std::unique_ptr<DeviceKvMap> device,
                     DeviceKvMap::Create(maps[i], version->weights_dtype, ops_, backend_));
    version->maps.push_back({device->name(), maps[i].info, std::move(device)});
  }
  RETURN_IF_ERROR(Call([&]() -> absl::Status {
    RETURN_IF_ERROR(CacheFor(*version).status());
    // Of several names for one function the first is told, for as long as it is loaded.
    bool named = false;
    for (const ModelEntry& entry : table()->models) {
      for (const auto& other : entry.versions) {
        named |= other->fingerprint == version->fingerprint;
      }
    }
    if (!named) registry_.NameVersion(version->fingerprint, version->name);
    return absl::OkStatus();
  }));
  RETURN_IF_ERROR(EditTable([&](VersionTable* table) -> absl::Status {
    ModelEntry* entry = table->MutableModel(options.model);
    if (entry == nullptr) {
      table->models.emplace_back();
      entry = &table->models.back();
      entry->name = options.model;
    }
    for (const std::string& source : options.carry_from) {
      if (Named(entry, source) == nullptr) {
        return absl::NotFoundError(
            absl::StrCat("carry_from: ", source, " was removed while loading"));
      }
    }
    const auto old = std::find_if(entry->versions.begin(), entry->versions.end(),
                                  [&](const auto& v) { return v->name == options.version; });
    if (old != entry->versions.end()) {
      *old = version;
    } else {
      entry->versions.push_back(version);
    }
    if (entry->stable.empty()) entry->stable = options.version;
    return absl::OkStatus();
  }));
  Call([&] {
    RefreshReserved();
    TellUsablePlans(*version);
    for (const VersionPair& pair : PairsOf(*table(), *version)) {
      // Those that it is the target of; a target of this one came later and is told then.
      if (observer_ != nullptr && pair.target == version->name) observer_->OnPairDeclared(pair);
    }
    TellGateNow();  // what a restored gate knows of it can be told now
    PublishSnapshot();
    return true;
  });
  LogInfo("version_loaded",
          {{"model", version->model},
           {"version", version->name},
           {"fingerprint", ShortHex(version->fingerprint)},
           {"weights", DTypeName(version->weights_dtype)},
           {"kv", DTypeName(version->kv_layout.geometry.dtype)},
           {"seconds",
            std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()}});
  for (VersionInfo& info : ListVersions(options.model)) {
    if (info.version == options.version) return std::move(info);
  }
  return absl::NotFoundError("version: removed while loading");
}

absl::StatusOr<std::shared_ptr<KvCache>> EngineImpl::CacheFor(const Version& version) {
  std::shared_ptr<KvCache>& slot = caches_[version.kv_layout.sha256];
  if (slot != nullptr) return slot;
  auto cache = std::make_shared<KvCache>();
  cache->model = version.model;
  cache->layout = version.kv_layout;
  BlockPoolOptions pool;
  pool.block_bytes = version.kv_layout.geometry.BlockBytes();
  pool.blocks = static_cast<int32_t>(options_.kv_cache_bytes / pool.block_bytes);
  absl::Status failed;
  if (pool.blocks < 1) {
    failed =
        absl::InvalidArgumentError(absl::StrCat("kv_cache_bytes: ", options_.kv_cache_bytes,
                                                " is less than one block of ", pool.block_bytes));
  } else {
    auto made = BlockPool::Create(ops_, backend_, pool);
    if (made.ok()) {
      cache->pool = *std::move(made);
    } else {
      failed = made.status();
    }
  }
  if (!failed.ok()) {
    caches_.erase(version.kv_layout.sha256);
    return failed;
  }
  PrefixStoreOptions store;
  store.block_tokens = options_.block_tokens;
  store.reserved_share = options_.source_share;
  KvTierOptions tiers;
  tiers.host_bytes = static_cast<size_t>(options_.host_cache_bytes);
  cache->store = std::make_unique<PrefixStore>(store, cache->pool.get(), &registry_,
                                               NewKvTiers(tiers, ops_, backend_));
  cache->store->SetWakeup([this] {
    MutexLock lock(&mutex_);
    poll_tiers_ = true;
    wake_.Signal();
  });
  slot = std::move(cache);
  return slot;
}

absl::Status EngineImpl::EditTable(const std::function<absl::Status(VersionTable*)>& edit) {
  MutexLock lock(&mutex_);
  auto next = std::make_shared<VersionTable>(*table_);
  RETURN_IF_ERROR(edit(next.get()));
  table_ = std::move(next);
  return absl::OkStatus();
}

void EngineImpl::TellUsablePlans(const Version& target) {
  for (const ModelEntry& model : table()->models) {
    if (model.name != target.model) continue;
    for (const std::string& name : target.carry_from) {
      const Version* source = Named(&model, name);
      if (source == nullptr) continue;
      const bool has_map = target.Source(source->fingerprint).map != nullptr;
      std::vector<bool> unusable;
      for (const std::string& plan : options_.gate.ladder) {
        unusable.push_back(ParseCarryPlan(plan)->calibrated && !has_map);
      }
      TellTransitions(gate_->SetUnusable(ToHex(source->fingerprint), ToHex(target.fingerprint),
                                         std::move(unusable)));
    }
  }
}

void EngineImpl::StartMapAhead(const Digest& fingerprint) {
  const bool wanted =
      std::any_of(options_.gate.ladder.begin(), options_.gate.ladder.end(),
                  [](const auto& plan) { return ParseCarryPlan(plan)->calibrated; });
  if (!wanted || options_.map_ahead_share <= 0) return;
  auto ahead = std::make_shared<MapAhead>(&ops_, backend_, &registry_, mapper_.get(),
                                          options_.map_ahead_share);
  const double begin = Now();
  const auto slice = [this, ahead, fingerprint,
                      begin](const std::function<bool()>& yield) -> absl::StatusOr<bool> {
    // By name, so that a version that goes meanwhile goes at once.
    const std::shared_ptr<const Version> target = LoadedVersion(fingerprint);
    if (target == nullptr) return true;
    const auto cache = caches_.find(target->kv_layout.sha256);
    if (cache == caches_.end()) return true;
    std::vector<CarrySource> sources;
    for (const VersionMap& map : target->maps) sources.push_back({map.info.source, map.device});
    const int before = ahead->blocks();
    absl::StatusOr<bool> done = ahead->Run(*target, sources, cache->second.get(), yield);
    const int made = ahead->blocks() - before;
    if (made > 0 && observer_ != nullptr) observer_->OnMappedAhead(made);
    if (!done.ok()) {
      LogError("map_ahead_failed",
               {{"version", target->name}, {"error", done.status().ToString()}});
    } else if (*done && ahead->blocks() > 0) {
      LogInfo("mapped_ahead",
              {{"version", target->name}, {"blocks", ahead->blocks()}, {"seconds", Now() - begin}});
    }
    return done;
  };
  slices_.Add(std::make_shared<SliceJob>(slice));
}

void EngineImpl::RefreshReserved() {
  std::map<Digest, std::vector<ProvenanceId>> sources;
  for (const ModelEntry& model : table()->models) {
    for (const auto& version : model.versions) {
      if (version->weights == nullptr) continue;
      for (const std::string& name : version->carry_from) {
        const Version* source = Named(&model, name);
        if (source == nullptr) continue;
        std::vector<ProvenanceId>& of_layout = sources[version->kv_layout.sha256];
        of_layout.push_back(registry_.Native(source->fingerprint));
        if (const auto map = version->Source(source->fingerprint).map; map != nullptr) {
          of_layout.push_back(
              registry_.Intern(MappedBy(NativeOf(source->fingerprint), map->name())));
        }
      }
    }
  }
  for (const auto& [layout, cache] : caches_) {
    std::vector<ProvenanceId>& reserved = sources[layout];
    std::sort(reserved.begin(), reserved.end());
    reserved.erase(std::unique(reserved.begin(), reserved.end()), reserved.end());
    cache->store->SetReserved(reserved);
  }
}

VersionInfo EngineImpl::Describe(const ModelEntry& model, const Version& version,
                                 const EngineSnapshot& snapshot) const {
  VersionInfo info;
  info.model = version.model;
  info.version = version.name;
  info.path = version.path;
  info.state = version.weights != nullptr ? "ready" : "unloaded";
  info.fingerprint = ToHex(version.fingerprint);
  info.weights_sha256 = ToHex(version.weights_sha256);
  info.tokenizer_sha256 = ToHex(version.tokenizer->sha256());
  info.kv_layout_sha256 = ToHex(version.kv_layout.sha256);
  info.weights_dtype = DTypeName(version.weights_dtype);
  info.kv_dtype = DTypeName(version.kv_layout.geometry.dtype);
  info.carry_from = version.carry_from;
  for (const VersionMap& map : version.maps) info.maps.emplace_back(map.name, map.info);
  if (version.name == model.stable) {
    info.share = model.candidate.empty() ? 100 : 100 - model.candidate_share;
  } else if (version.name == model.candidate) {
    info.share = model.candidate_share;
  }
  info.max_positions = version.config.max_positions;
  info.weight_bytes = version.weights != nullptr ? version.weight_bytes : 0;
  for (const StoreRow& row : snapshot.store) {
    if (row.provenance == version.name) info.cached_tokens += row.blocks * options_.block_tokens;
  }
  return info;
}

std::vector<VersionInfo> EngineImpl::ListVersions(absl::string_view model_name) {
  const std::shared_ptr<const VersionTable> versions = table();
  const EngineSnapshot now = snapshot();
  std::vector<VersionInfo> out;
  for (const ModelEntry& model : versions->models) {
    if (!model_name.empty() && model.name != model_name) continue;
    for (const auto& version : model.versions) {
      VersionInfo info = Describe(model, *version, now);
      MutexLock lock(&mutex_);
      const auto running = alive_by_version_.find({version->model, version->name});
      info.running_requests = running == alive_by_version_.end() ? 0 : running->second;
      out.push_back(std::move(info));
    }
  }
  return out;
}

absl::Status EngineImpl::Promote(absl::string_view model_name, absl::string_view version_name,
                                 double share) {
  if (!(share >= 0 && share <= 100)) {
    return absl::InvalidArgumentError("share: must be between 0 and 100");
  }
  RETURN_IF_ERROR(EditTable([&](VersionTable* table) -> absl::Status {
    ASSIGN_OR_RETURN(const ModelEntry* found, table->FindModel(model_name));
    ModelEntry* model = table->MutableModel(found->name);
    ASSIGN_OR_RETURN(const std::shared_ptr<const Version> version,
                     FindVersion(*model, version_name));
    if (version->weights == nullptr && share > 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("version: ", version->name, " is unloaded"));
    }
    if (share == 100) {
      model->stable = version->name;
      model->candidate.clear();
      model->candidate_share = 0;
    } else if (version->name == model->stable) {
      return absl::FailedPreconditionError(
          absl::StrCat("version: ", version->name,
                       " serves what no other version does; give the other one its share instead"));
    } else if (share == 0) {
      if (model->candidate == version->name) model->candidate.clear();
      if (model->candidate.empty()) model->candidate_share = 0;
    } else {
      model->candidate = version->name;
      model->candidate_share = share;
    }
    return absl::OkStatus();
  }));
  if (share > 0) {
    Call([&] {
      for (const ModelEntry& model : table()->models) {
        if (const Version* version = model.name == model_name || model_name.empty()
                                         ? Named(&model, version_name)
                                         : nullptr) {
          StartMapAhead(version->fingerprint);
        }
      }
      return true;
    });
  }
  LogInfo("version_promoted", {{"model", model_name}, {"version", version_name}, {"share", share}});
  return absl::OkStatus();
}

std::vector<VersionPair> EngineImpl::PairsOf(const VersionTable& table, const Version& version) {
  std::vector<VersionPair> pairs;
  for (const ModelEntry& model : table.models) {
    if (model.name != version.model) continue;
    for (const auto& target : model.versions) {
      for (const std::string& source : target->carry_from) {
        if (target->name != version.name && source != version.name) continue;
        pairs.push_back({model.name, source, target->name, target->config.max_positions});
      }
    }
  }
  return pairs;
}

}  // namespace carryover
