// Versions of models and which of them serves a request.
//
// A Version is immutable once made, but for its weights, which Unload drops. A VersionTable is a
// snapshot: a change makes a new table and swaps the pointer, so a request keeps what it started
// with.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/device_kv_map.h"
#include "engine/kv_layout.h"
#include "engine/kv_map.h"
#include "engine/model.h"
#include "engine/tokenizer.h"

namespace carryover {

// A map from a source's K and V to a version's.
struct VersionMap {
  std::string name;  // KvMap::Name()
  KvMapInfo info;
  std::shared_ptr<const DeviceKvMap> device;  // null once the version is unloaded
};

// A version whose blocks another one may read.
struct CarrySource {
  Digest fingerprint{};
  std::shared_ptr<const DeviceKvMap> map;  // from it to the other one; null: there is none
};

struct Version {
  std::string model;  // served name
  std::string name;
  std::string path;
  std::vector<std::string> carry_from;
  std::vector<VersionMap> maps;  // from versions in carry_from, one for each fingerprint at most
  // Of the Model, salted by LoadOptions::distinct where a test asks for that.
  Digest fingerprint{};
  Digest weights_sha256{};
  ModelConfig config;
  KvLayout kv_layout;
  DType weights_dtype = DType::kF32;
  size_t weight_bytes = 0;
  std::shared_ptr<const Tokenizer> tokenizer;
  // Null once unloaded. Held by requests while they run: the weights go with the last holder.
  std::shared_ptr<Model> weights;

  // A version in carry_from, with the map from it, where there is one.
  CarrySource Source(const Digest& fingerprint) const;
};

// One model's versions and its traffic.
struct ModelEntry {
  std::string name;
  std::vector<std::shared_ptr<const Version>> versions;  // in order of loading
  std::string stable;                                    // serves what the candidate does not
  std::string candidate;                                 // "" when stable serves all
  double candidate_share = 0;                            // percent
};

struct VersionTable {
  std::vector<ModelEntry> models;

  // name may be empty when there is just one model. NOT_FOUND lists the models that there are.
  absl::StatusOr<const ModelEntry*> FindModel(absl::string_view name) const;
  ModelEntry* MutableModel(absl::string_view name);
};

// NOT_FOUND lists the versions that there are.
absl::StatusOr<std::shared_ptr<const Version>> FindVersion(const ModelEntry& model,
                                                           absl::string_view name);

// The version that serves a request that names none: a function of the session key (or, without
// one, of the request's own key) and the candidate's share alone. A session that the candidate
// serves at some share is served by it at every larger share.
absl::StatusOr<std::shared_ptr<const Version>> RouteVersion(const ModelEntry& model,
                                                            absl::string_view session_key);

// OK when target may read source's blocks: equal tokenizer and KV layout. FAILED_PRECONDITION names
// every field that differs, with both values.
absl::Status CheckCompatible(const Version& source, const Version& target);

}  // namespace carryover
