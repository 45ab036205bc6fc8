// A map that makes one version's K and V resemble another's: fitted offline (kv_fit.h), kept in a
// file, applied to carried blocks. Plain data; functions are thread-safe.
//
// A row x holds K of all heads, then V of all heads, of one token in one layer, with K rotated back
// to position 0 (Ops::read_kv). The map is x' = x + W x + b, one W and b a layer.
//
// The file is a safetensors file. Its metadata says between which versions it maps, how it was
// fitted and how well it did on texts that it was not fitted on; its tensors are F32:
//   layers.N.bias    (dim)
//   layers.N.weight  (dim, dim), or of a map per head (kv_heads, 2 head_dim, 2 head_dim)
//   layers.N.down, layers.N.up  (rank, dim) and (dim, rank) of a map of low rank, instead
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/hash.h"
#include "kernels/ops.h"

namespace carryover {

enum class KvMapVariant : uint8_t {
  kPerLayer,  // W is any matrix
  kPerHead,   // K and V of a head come from that head's K and V alone
  kLowRank,   // W = up down
};
const char* KvMapVariantName(KvMapVariant variant);  // "per_layer", "per_head", "low_rank"

// How far a target's outputs are from native ones. Means over positions; KL in nats.
struct KvMapQuality {
  double tv = 0;
  double kl = 0;
  double flips = 0;  // share of positions where the most likely token differs
};

struct KvMapInfo {
  Digest source{}, target{};  // fingerprints of versions
  Digest kv_layout{};         // KvLayout::sha256 of both
  int layers = 0;
  int kv_heads = 0;
  int head_dim = 0;
  KvMapVariant variant = KvMapVariant::kPerLayer;
  int rank = 0;            // of kLowRank, else 0
  double lambda = 0;       // of the ridge
  int64_t texts = 0;       // it was fitted on
  int64_t tokens = 0;      // in these
  int64_t held_texts = 0;  // others, that the figures below are from
  int64_t held_positions = 0;
  KvMapQuality direct;  // K and V as they are
  KvMapQuality mapped;

  int dim() const { return 2 * kv_heads * head_dim; }
};

struct KvMapLayer {
  std::vector<float> weight;    // as in the file; empty when of low rank
  std::vector<float> down, up;  // of low rank
  std::vector<float> bias;      // (dim)
};

struct KvMap {
  KvMapInfo info;
  std::vector<KvMapLayer> layers;

  // W of a layer written out, (dim, dim).
  std::vector<float> Weight(int layer) const;

  // What blocks changed by it carry in Provenance::map: a SHA-256 in hex over all that goes into
  // their values (identities, variant, tensors), and not over what the map is said to achieve.
  std::string Name() const;
};

// The bytes of a file. INVALID_ARGUMENT when the map is not whole (a size, a value that is not
// finite), or would be over the limits that ParseKvMap has.
absl::StatusOr<std::string> WriteKvMap(const KvMap& map);

// Checks a whole file, from anywhere. INVALID_ARGUMENT names file_name and the field or tensor.
// Allocates no more than the file's size several times over.
absl::StatusOr<KvMap> ParseKvMap(absl::string_view file, const std::string& file_name);

// Reads and parses one. NOT_FOUND, INVALID_ARGUMENT, DATA_LOSS (it changed meanwhile).
absl::StatusOr<KvMap> ReadKvMap(const std::string& path);

// OK when the map takes `source`'s blocks to `target`'s. FAILED_PRECONDITION names every field of
// the map that differs, with both values.
struct KvMapIdentity {
  Digest source{}, target{}, kv_layout{};
  int layers = 0;
  int kv_heads = 0;
  int head_dim = 0;
};
absl::Status CheckKvMapFits(const KvMap& map, const KvMapIdentity& identity);

}  // namespace carryover
