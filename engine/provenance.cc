#include "engine/provenance.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"

namespace carryover {
namespace {

std::set<std::string> Maps(const std::string& map) {
  if (map.empty()) return {};
  return absl::StrSplit(map, ',');
}

}  // namespace

bool Provenance::Involves(const Digest& version) const {
  return computed_by == version || std::binary_search(sources.begin(), sources.end(), version);
}

bool Provenance::operator==(const Provenance& other) const {
  return std::tie(computed_by, sources, map) ==
         std::tie(other.computed_by, other.sources, other.map);
}

bool Provenance::operator<(const Provenance& other) const {
  return std::tie(computed_by, sources, map) <
         std::tie(other.computed_by, other.sources, other.map);
}

Provenance NativeOf(const Digest& version) {
  Provenance native;
  native.computed_by = version;
  return native;
}

Provenance ComputedOver(const Digest& version, absl::Span<const Provenance> attended) {
  std::set<Digest> sources;
  std::set<std::string> maps;
  for (const Provenance& one : attended) {
    sources.insert(one.computed_by);
    sources.insert(one.sources.begin(), one.sources.end());
    maps.merge(Maps(one.map));
  }
  sources.erase(version);
  Provenance result = NativeOf(version);
  result.sources.assign(sources.begin(), sources.end());
  result.map = absl::StrJoin(maps, ",");
  return result;
}

Digest ProvenanceDigest(const Provenance& provenance) {
  Hasher hasher;
  hasher.AddDigest(provenance.computed_by).AddInt(provenance.sources.size());
  for (const Digest& source : provenance.sources) hasher.AddDigest(source);
  return hasher.Add(provenance.map).Finish();
}

ProvenanceId ProvenanceRegistry::Intern(const Provenance& provenance) {
  auto [it, inserted] = ids_.try_emplace(provenance, ProvenanceId{size()});
  if (inserted) all_.push_back(provenance);
  return it->second;
}

const Provenance& ProvenanceRegistry::Get(ProvenanceId id) const {
  CHECK(ProvenanceIndex(id) >= 0 && ProvenanceIndex(id) < size());
  return all_[ProvenanceIndex(id)];
}

bool ProvenanceRegistry::IsNativeOf(ProvenanceId id, const Digest& version) const {
  const Provenance& provenance = Get(id);
  return provenance.IsNative() && provenance.computed_by == version;
}

bool ProvenanceRegistry::Covers(ProvenanceId id, ProvenanceId attended) const {
  if (id == attended) return true;
  const Provenance& result = Get(id);
  const Provenance& input = Get(attended);
  if (!result.Involves(input.computed_by)) return false;
  for (const Digest& source : input.sources) {
    if (!result.Involves(source)) return false;
  }
  const std::set<std::string> named = Maps(result.map);
  for (const std::string& map : Maps(input.map)) {
    if (!named.contains(map)) return false;
  }
  return true;
}

void ProvenanceRegistry::NameVersion(const Digest& version, absl::string_view name) {
  version_names_[version] = std::string(name);
}

std::string ProvenanceRegistry::VersionName(const Digest& version) const {
  const auto it = version_names_.find(version);
  return it == version_names_.end() ? ShortHex(version) : it->second;
}

std::string ProvenanceRegistry::Name(ProvenanceId id) const {
  if (id == ProvenanceId::kNone) return "none";
  const Provenance& provenance = Get(id);
  std::string name = VersionName(provenance.computed_by);
  if (!provenance.sources.empty()) {
    std::vector<std::string> sources;
    for (const Digest& source : provenance.sources) sources.push_back(VersionName(source));
    // By name: the order of fingerprints means nothing to people.
    std::sort(sources.begin(), sources.end());
    name += " over " + absl::StrJoin(sources, "+");
  }
  if (!provenance.map.empty()) name += ":" + provenance.map;
  return name;
}

Lineage::Lineage(ProvenanceRegistry* registry, const Digest& version)
    : registry_(registry), version_(version), current_(registry->Native(version)) {}

void Lineage::Attend(const Origin& reused) {
  CHECK(reused.provenance() != ProvenanceId::kNone);
  if (registry_->Covers(current_, reused.provenance())) return;
  const Provenance attended[] = {registry_->Get(current_), registry_->Get(reused.provenance())};
  current_ = registry_->Intern(ComputedOver(version_, attended));
}

Origin Lineage::Repaired(const Origin& source, absl::string_view map) const {
  CHECK(source.provenance() != ProvenanceId::kNone && !map.empty());
  Provenance named = NativeOf(version_);
  named.map = std::string(map);
  const Provenance parts[] = {registry_->Get(current_), registry_->Get(source.provenance()), named};
  return Origin(registry_->Intern(ComputedOver(version_, parts)));
}

void Lineage::ContinueAs(const Digest& version) {
  version_ = version;
  const Provenance attended[] = {registry_->Get(current_)};
  current_ = registry_->Intern(ComputedOver(version_, attended));
}

}  // namespace carryover
