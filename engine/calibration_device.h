// What a calibration asks of the device: pairs of native prefills, K and V read back, and a target
// run over K and V of the source, as they are or mapped. Keeps K and V in memory of its own, beside
// the cache: nothing of it is ever found by a request.
//
// The methods that return a Slice may be called from any thread, one at a time; the slice runs on
// the engine thread, and the spans and pointers given must live until it has ended. Create, Pack
// and the destructor may run on another thread than the engine's.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/background_slices.h"
#include "engine/device_kv_map.h"
#include "engine/kv_map.h"
#include "engine/model.h"

namespace carryover {

// Rows of the same tokens: what either version computed. (layers, rows, dim), as read_kv gives it.
struct PairedRows {
  int rows = 0;
  std::vector<float> source, target;
};

// Sums over positions.
struct QualitySums {
  int64_t positions = 0;
  double tv = 0, kl = 0, flips = 0;
  KvMapQuality Mean() const;
};

class CalibrationDevice {
 public:
  struct Options {
    int kept = 0;           // prefixes of the source that are kept at the same time
    int prefix_tokens = 0;  // of a kept prefix at most, a multiple of the block size
    int positions = 0;      // compared behind a prefix
    int chunk_tokens = 256;
  };
  // The models have equal layouts, and outlive it. RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<CalibrationDevice>> Create(const Ops& ops, Backend* backend,
                                                                   Model* source, Model* target,
                                                                   const Options& options);
  ~CalibrationDevice();

  // Both versions go on by `count` tokens from `begin` on; all before that was computed by such
  // slices before. rows get what they computed.
  Slice ComputePair(absl::Span<const int32_t> tokens, int begin, int count, PairedRows* rows);
  // The source computes the tokens, which are kept as number `kept`.
  Slice KeepPrefix(absl::Span<const int32_t> tokens, int kept);
  // The target computes tokens natively. logits (positions, vocab) of the last positions.
  Slice ComputeNative(absl::Span<const int32_t> tokens, std::vector<float>* logits);
  // The same over a kept prefix, which all but the last positions are in; mapped, where there is a
  // map. Compares with the native logits.
  Slice Compare(absl::Span<const int32_t> tokens, int kept, const DeviceKvMap* map,
                absl::Span<const float> native, QualitySums* sums);

  absl::StatusOr<std::unique_ptr<DeviceKvMap>> Pack(const KvMap& map);

 private:
  struct Impl;
  explicit CalibrationDevice(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace carryover
