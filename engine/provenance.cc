#include "engine/provenance.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"

namespace carryover {
namespace {

constexpr char kWentInto = '~';

std::set<std::string> Words(const std::string& map) {
  if (map.empty()) return {};
  return absl::StrSplit(map, ',');
}

std::string Change(const std::string& word) { return word[0] == kWentInto ? word.substr(1) : word; }

// A change to the block itself says all that one to what went into it would.
std::string JoinWords(std::set<std::string> words) {
  std::erase_if(words, [&](const std::string& word) {
    return word[0] == kWentInto && words.contains(Change(word));
  });
  return absl::StrJoin(words, ",");
}

// For people: a digest in full says no more than its beginning.
std::string ShortWord(const std::string& word) {
  const std::string change = Change(word);
  const std::string went = word.substr(0, word.size() - change.size());
  const bool digest = change.size() == 2 * sizeof(Digest) &&
                      change.find_first_not_of("0123456789abcdef") == std::string::npos;
  return digest ? absl::StrCat(went, "map-", change.substr(0, 12)) : word;
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
  std::set<std::string> words;
  for (const Provenance& one : attended) {
    sources.insert(one.computed_by);
    sources.insert(one.sources.begin(), one.sources.end());
    for (const std::string& word : Words(one.map)) words.insert(kWentInto + Change(word));
  }
  sources.erase(version);
  Provenance result = NativeOf(version);
  result.sources.assign(sources.begin(), sources.end());
  result.map = JoinWords(std::move(words));
  return result;
}

Provenance MappedBy(const Provenance& source, absl::string_view map) {
  Provenance result = source;
  std::set<std::string> words = Words(source.map);
  words.emplace(map);
  result.map = JoinWords(std::move(words));
  return result;
}

std::vector<std::string> ChangesIn(const Provenance& provenance) {
  std::set<std::string> changes;
  for (const std::string& word : Words(provenance.map)) changes.insert(Change(word));
  return {changes.begin(), changes.end()};
}

bool IsChanged(const Provenance& provenance) {
  const std::set<std::string> words = Words(provenance.map);
  return std::any_of(words.begin(), words.end(),
                     [](const std::string& word) { return word[0] != kWentInto; });
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
  const std::vector<std::string> named = ChangesIn(result), needed = ChangesIn(input);
  return std::includes(named.begin(), named.end(), needed.begin(), needed.end());
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
  if (provenance.map.empty()) return name;
  std::vector<std::string> words;
  for (const std::string& word : Words(provenance.map)) words.push_back(ShortWord(word));
  return absl::StrCat(name, ":", absl::StrJoin(words, ","));
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
  const Provenance& from = registry_->Get(source.provenance());
  const Provenance parts[] = {registry_->Get(current_), from};
  Provenance result = MappedBy(ComputedOver(version_, parts), map);
  // What was changed in the layers that stay as they are is changed in this block, too.
  for (const std::string& word : Words(from.map)) result = MappedBy(result, word);
  return Origin(registry_->Intern(result));
}

Origin Lineage::Mapped(const Origin& source, absl::string_view map) const {
  CHECK(source.provenance() != ProvenanceId::kNone && !map.empty());
  return Origin(registry_->Intern(MappedBy(registry_->Get(source.provenance()), map)));
}

void Lineage::ContinueAs(const Digest& version) {
  version_ = version;
  const Provenance attended[] = {registry_->Get(current_)};
  current_ = registry_->Intern(ComputedOver(version_, attended));
}

}  // namespace carryover
