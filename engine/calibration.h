// Finds the KV map (kv_map.h) from one version to another: runs texts through both, fits maps of
// several kinds to what they computed, and chooses by what a target says over mapped K and V of
// texts that no map was fitted on; not by how near K and V are, which says little about it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/hash.h"
#include "engine/background_slices.h"
#include "engine/kv_map.h"
#include "engine/model.h"

namespace carryover {

struct CalibrationOptions {
  int piece_tokens = 1024;        // texts are cut into pieces of so many tokens
  int64_t max_tokens = 48 << 10;  // to fit on; pieces are picked evenly where there are more
  int held_pieces = 10;           // at most; to compare on
  int positions = 16;             // compared behind each held piece
  std::vector<double> lambdas = {1e-4, 1e-3, 1e-2};
  int chunk_tokens = 256;
  std::vector<int32_t> lead;  // tokens that every prompt begins with, as every piece does
};

// A kind of map and how it did on the held pieces.
struct CalibrationCandidate {
  KvMapVariant variant = KvMapVariant::kPerLayer;
  int rank = 0;
  double lambda = 0;
  int64_t tokens = 0;  // it was fitted on
  KvMapQuality quality;
};

struct Calibration {
  KvMap map;  // the best of the candidates that were fitted on all tokens
  std::vector<CalibrationCandidate> candidates;  // the first ones were fitted on a part
};

struct CalibrationHooks {
  // Starts a slice and waits for its end; other work may go on between the two. One at a time. Wait
  // returns the slice's error, or CANCELLED.
  std::function<void(Slice)> start;
  std::function<absl::Status()> wait;
  // "held out", "fit" and "choose": pieces, tokens and candidates that are done. May be null.
  std::function<void(const char* phase, int64_t done, int64_t total)> progress;
  // Each as it is known; the first one is `direct`, with no tokens. May be null.
  std::function<void(const CalibrationCandidate&)> candidate;
};

struct CalibrationPair {
  const Ops* ops = nullptr;
  Backend* backend = nullptr;
  Model* source = nullptr;
  Model* target = nullptr;
  Digest source_fingerprint{}, target_fingerprint{};
};

// Blocks the caller, whose thread does the fitting, beside the slices. Memory: for the sums,
// 16 dim^2 bytes a layer; at most 1 GiB or two prefixes for held pieces; a map.
// INVALID_ARGUMENT (too little text, an option out of range), RESOURCE_EXHAUSTED, what wait
// returns.
absl::StatusOr<Calibration> Calibrate(const CalibrationPair& pair,
                                      const std::vector<std::vector<int32_t>>& texts,
                                      const CalibrationOptions& options,
                                      const CalibrationHooks& hooks);

// How texts are cut: pieces of piece_tokens + positions tokens, lead included, or what is left of a
// text when it is at least 64 + positions; every fifth is held out, whole texts where there are ten
// or more. In an order of chance, always the same.
struct CalibrationPieces {
  std::vector<std::vector<int32_t>> fit, held;
  int64_t fit_tokens = 0;
};
CalibrationPieces CutPieces(const std::vector<std::vector<int32_t>>& texts,
                            const CalibrationOptions& options, int block_tokens);

}  // namespace carryover
