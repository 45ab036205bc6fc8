// What computed a KV block, and the law that follows from it: a block that was computed while
// attending to carried blocks is never native.
//
// A Provenance says it in full, a ProvenanceId stands for one in a ProvenanceRegistry, and a
// Lineage follows one sequence and says what its next block will be. Blocks for the store are
// labelled with an Origin, which only a Lineage (for computed blocks) and the store (for reused
// blocks) can make: no code can call a block native by writing down an id.
//
// Everything here belongs to the engine thread. Provenance itself is a plain value.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/hash.h"

namespace carryover {

struct Provenance {
  Digest computed_by{};         // fingerprint of the version that computed the block
  std::vector<Digest> sources;  // other versions whose K and V it depends on: sorted, unique, never
                                // computed_by itself
  // Words, sorted, with commas between: what changed the values of this very block ("bottom(2)", a
  // KvMap::Name()), and with a '~' in front what changed values that went into it.
  std::string map;

  // Computed by one version that attended to nothing but its own native blocks.
  bool IsNative() const { return sources.empty() && map.empty(); }
  // Whether `version` computed it or went into it.
  bool Involves(const Digest& version) const;
  bool operator==(const Provenance& other) const;
  bool operator<(const Provenance& other) const;
};

Provenance NativeOf(const Digest& version);

// Of a block that `version` computes while attending to blocks of `attended`: native exactly when
// all of these are native of the same version.
Provenance ComputedOver(const Digest& version, absl::Span<const Provenance> attended);

// Of a block of `source` whose values were changed by a map: as before, but for the word `map`.
Provenance MappedBy(const Provenance& source, absl::string_view map);

// The words of Provenance::map, without what stands in front of them, sorted.
std::vector<std::string> ChangesIn(const Provenance& provenance);
// Whether this very block's values are not what `computed_by` computed.
bool IsChanged(const Provenance& provenance);

// Of the fields, in order: names a provenance outside of this process.
Digest ProvenanceDigest(const Provenance& provenance);

// A small number for a Provenance: 0, 1, 2, ... in the order of their first use.
enum class ProvenanceId : int32_t { kNone = -1 };
constexpr int ProvenanceIndex(ProvenanceId id) { return static_cast<int>(id); }

class ProvenanceRegistry {
 public:
  ProvenanceRegistry() = default;
  ProvenanceRegistry(const ProvenanceRegistry&) = delete;
  ProvenanceRegistry& operator=(const ProvenanceRegistry&) = delete;

  // The id of an equal provenance, or a new one. Equal fingerprints are equal identities, whatever
  // the versions are called.
  ProvenanceId Intern(const Provenance& provenance);
  ProvenanceId Native(const Digest& version) { return Intern(NativeOf(version)); }

  // REQUIRES: an id that Intern returned.
  const Provenance& Get(ProvenanceId id) const;
  bool IsNativeOf(ProvenanceId id, const Digest& version) const;
  // Whether a block of `id` may have been computed while attending to a block of `attended`:
  // everything that went into `attended` has to be named in `id`.
  bool Covers(ProvenanceId id, ProvenanceId attended) const;
  int size() const { return static_cast<int>(all_.size()); }

  // Names a version for people and metric labels. Of two names for one fingerprint the later one
  // is shown.
  void NameVersion(const Digest& version, absl::string_view name);
  // "2026-11" when native, "2026-11 over 2026-09+2026-10" when tainted, with ":" and the words of
  // `map` where there are some. A version without a name appears as the first 12 hex digits of its
  // fingerprint, a KV map as "map-" and those of its name.
  std::string Name(ProvenanceId id) const;
  std::string VersionName(const Digest& version) const;

 private:
  std::vector<Provenance> all_;  // by id
  std::map<Provenance, ProvenanceId> ids_;
  std::map<Digest, std::string> version_names_;
};

// The label of a block in a sequence's table. kNone until somebody who knows has set it.
class Origin {
 public:
  Origin() = default;
  ProvenanceId provenance() const { return provenance_; }

 private:
  friend class Lineage;
  friend class PrefixStore;
  explicit Origin(ProvenanceId provenance) : provenance_(provenance) {}

  ProvenanceId provenance_ = ProvenanceId::kNone;
};

// What a sequence has attended to so far. Starts native of its version; can only become less so.
class Lineage {
 public:
  Lineage(ProvenanceRegistry* registry, const Digest& version);

  // To be called for every block that the sequence reuses, before it computes anything after it.
  void Attend(const Origin& reused);
  // The label of a block of `source` of which this version computed a part anew; `map` names which.
  // What the sequence has attended to went into it, too. Attend to it as to any reused block.
  Origin Repaired(const Origin& source, absl::string_view map) const;
  // The label of a copy of `source` changed by a KV map of that name.
  Origin Mapped(const Origin& source, absl::string_view map) const;
  // The sequence goes on with another version's weights over the KV that it has (CONTINUE). A block
  // that is half full at that moment is to be labelled with current() once it is full.
  void ContinueAs(const Digest& version);

  // The label for blocks that are computed from here on.
  Origin current() const { return Origin(current_); }
  ProvenanceId provenance() const { return current_; }
  const Digest& version() const { return version_; }

 private:
  ProvenanceRegistry* registry_;
  Digest version_;
  ProvenanceId current_;
};

}  // namespace carryover
