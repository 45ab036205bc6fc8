// Which parts of a carried cache its divergence comes from: layers, keys or values, positions of
// the prefix. A probe has the target compute what follows the prefix over a mixed cache, of which
// one part is carried and all else native, or the other way round, and compares that with the
// native answer.
//
// A mixed cache is nobody's: its blocks have no label, so no store takes them, and what is computed
// over them is labelled as computed over the carried ones. Engine thread only, but for the plain
// values and PartsOf.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "engine/fidelity_measures.h"
#include "engine/prefix_store.h"
#include "engine/provenance.h"
#include "kernels/ops.h"

namespace carryover {

// A part of a prefix's cache.
struct CachePart {
  enum class Kind : uint8_t { kAll, kLayers, kKeys, kValues, kPositions };
  Kind kind = Kind::kAll;
  std::string name;  // "all", "layer 3", "layers 4-5", "keys", "first block", "2/8"
  int begin = 0;     // kPositions: tokens, whole blocks; else layers
  int end = 0;
};

struct CacheProbe {
  CachePart part;
  bool carried = true;  // the part is carried and all else native; false: the other way round
};

// All; groups of layers, at most 32; keys; values; the first block, up to eight runs of those
// between, the last block.
std::vector<CachePart> PartsOf(int layers, int prefix_blocks, int block_tokens);
// Each part carried, and native, but for those mixtures that another probe or the arms give anyway.
std::vector<CacheProbe> ProbesOf(absl::Span<const CachePart> parts);

// What a probe found: means over the positions.
struct ProbeOutcome {
  CacheProbe probe;
  bool valid = false;  // all positions; else the rest is unset
  double kl = 0;       // nats; may be +inf
  double tv = 0;
  double flips = 0;  // share of positions
  bool first_token_flip = false;
};
ProbeOutcome OutcomeOf(const CacheProbe& probe, const FidelitySample& sample);

struct Sensitivity {
  struct Row {
    CachePart part;
    ProbeOutcome carried;
    std::optional<ProbeOutcome> native;  // not of kAll
  };
  int layers = 0;
  int prefix_tokens = 0;
  std::vector<Row> rows;
};
// From the outcomes of all of ProbesOf, in its order.
Sensitivity MakeSensitivity(absl::Span<const ProbeOutcome> outcomes);

// The blocks of one probe.
struct MixedCache {
  // How many new blocks a probe of such a prefix takes.
  static int NewBlocks(const CachePart& part, int prefix_blocks);

  // native and carried hold the prefix's blocks, equally many; new_blocks has NewBlocks(). Has
  // `lineage` attend to all that goes in.
  void Make(const CacheProbe& probe, std::vector<TableBlock> native,
            std::vector<TableBlock> carried, std::vector<BlockRef> new_blocks,
            const KvGeometry& geometry, void* kv_base, Lineage* lineage);

  std::vector<TableBlock> table;  // of the prefix; to be taken
  // To run in this order before the first pass; they read the vectors below.
  std::vector<CopyKvArgs> copies;

  MixedCache() = default;
  MixedCache(const MixedCache&) = delete;
  MixedCache& operator=(const MixedCache&) = delete;

 private:
  std::vector<int32_t> base_ids_, part_ids_, new_ids_;
  std::vector<TableBlock> read_;  // held until the copies have run
};

}  // namespace carryover
