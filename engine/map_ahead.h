// Maps the hottest prefixes of a version's sources when it begins to serve, before a request asks
// for them. Works in slices (background_slices.h), while nobody else wants the device.
#pragma once

#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/device_kv_map.h"
#include "engine/kv_cache.h"
#include "engine/prefix_store.h"
#include "engine/provenance.h"
#include "engine/version.h"
#include "kernels/ops.h"

namespace carryover {

// One run over what the store holds when it starts. Engine thread only.
class MapAhead {
 public:
  // Everything outlives it. It fills at most `share` of the pool: by free blocks, and by such as
  // others have not used for longest, but for those that the store reserves.
  MapAhead(const Ops* ops, Backend* backend, ProvenanceRegistry* registry, KvMapper* mapper,
           double share)
      : ops_(ops), backend_(backend), registry_(registry), mapper_(mapper), share_(share) {}

  // Goes on until nothing is left (true) or yield, asked after every few blocks, returns true.
  // The same target and cache each time. Prefixes in other tiers stay there.
  absl::StatusOr<bool> Run(const Version& target, absl::Span<const CarrySource> sources,
                           KvCache* cache, const std::function<bool()>& yield);

  int blocks() const { return blocks_; }  // made so far

 private:
  struct Chain {
    CarrySource source;
    ProvenanceId mapped = ProvenanceId::kNone;
    EntryRef last;
  };
  void List(absl::Span<const CarrySource> sources, const PrefixStore& store);
  // The next few blocks of the front chain; false when it has none left.
  absl::StatusOr<bool> MapSome(const Version& target, KvCache* cache);

  const Ops* ops_;
  Backend* backend_;
  ProvenanceRegistry* registry_;
  KvMapper* mapper_;
  const double share_;
  bool listed_ = false;
  bool full_ = false;          // no block is to be had
  bool waiting_ = false;       // blocks are on their way
  std::vector<Chain> chains_;  // the hottest last
  int blocks_ = 0;
};

}  // namespace carryover
