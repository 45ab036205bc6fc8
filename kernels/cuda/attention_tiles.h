// Sizes of the attention kernels' tiles, for those who plan and for the kernels.
#pragma once

#include <cstddef>

#include "kernels/cuda/runtime.h"

namespace carryover::CARRYOVER_DEVICE {

inline constexpr int kMaxHeadDim = 256;

// Plain: a warp has kPlainQueries / kPlainWarps queries, a lane one of kPlainTile tokens.
inline constexpr int kPlainWarps = 4;
inline constexpr int kPlainQueries = 16;
inline constexpr int kPlainTile = 32;
constexpr size_t PlainSharedBytes(int head_dim) {
  return sizeof(float) *
         (static_cast<size_t>(kPlainQueries + kPlainTile) * head_dim +
          static_cast<size_t>(kPlainTile) * (head_dim + 1) + kPlainQueries * kPlainTile);
}

// Tensor cores: a warp has 16 queries. K and V of a tile of tokens lie in shared memory twice, so
// that the next one comes while this one is used. Rows are 16 bytes longer than they need be: their
// stride is then an odd number of 16-byte units, and eight of them meet all banks.
inline constexpr int kWarpQueries = 16;
inline constexpr int kStages = 2;
constexpr int TileTokens(int head_dim) { return head_dim <= 128 ? 64 : 32; }
constexpr int TileStride(int head_dim) { return head_dim + 8; }  // bf16 values
constexpr size_t TileBytes(int head_dim) {                       // of K or V
  return sizeof(short) * static_cast<size_t>(TileTokens(head_dim)) * TileStride(head_dim);
}
// The places in KV of two tiles' groups of 16 tokens.
constexpr size_t PlacesBytes(int head_dim) {
  return 2 * sizeof(long long) * TileTokens(head_dim) / 16;
}
constexpr size_t TilesBytes(int head_dim) {
  return 2 * kStages * TileBytes(head_dim) + (PlacesBytes(head_dim) + 15) / 16 * 16;
}

// Wide: up to so many warps. Their queries stay in registers where those suffice.
inline constexpr int kWideWarps = 8;
constexpr bool QueriesInRegisters(int head_dim) { return head_dim <= 128; }
constexpr size_t WideSharedBytes(int head_dim, int warps) {
  const size_t queries = static_cast<size_t>(warps) * kWarpQueries;
  return TilesBytes(head_dim) +
         (QueriesInRegisters(head_dim) ? 0 : sizeof(short) * queries * head_dim);
}

// Narrow: the 16 queries of a block are all its warps'; each has some of the tokens' scores, which
// it shows the others, and some of the values' columns.
inline constexpr int kNarrowWarps = 4;
inline constexpr int kNarrowQueries = kWarpQueries;
constexpr size_t NarrowSharedBytes(int head_dim) {
  return TilesBytes(head_dim) + sizeof(float) * kNarrowQueries * TileTokens(head_dim);
}

}  // namespace carryover::CARRYOVER_DEVICE
