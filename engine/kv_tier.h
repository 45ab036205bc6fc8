// A place for KV blocks below device memory: host memory today; disk and a remote store fit behind
// the same interface.
//
// A tier is asynchronous. The engine thread starts transfers and calls Poll; copying, checksums and
// waiting happen on the tier's own workers. Every method is for the engine thread, and callbacks
// run on it, inside Poll. A moved block carries a header that says all that identifies it, and a
// checksum over header and payload; both are verified before a read is called good.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/hash.h"
#include "engine/provenance.h"
#include "kernels/ops.h"

namespace carryover {

enum class Tier : uint8_t { kDevice, kHost, kDisk, kRemote };
inline constexpr int kTierCount = 4;
const char* TierName(Tier tier);  // "device", "host", "disk", "remote"

// Everything that has to agree before a block of bytes may be used as KV.
struct KvImageHeader {
  static constexpr uint32_t kFormat = 1;

  uint32_t format = kFormat;
  Digest tokenizer_sha256{};
  Digest kv_layout_sha256{};
  uint32_t shard = 0;  // of the model's layers or heads over several devices
  uint32_t shards = 1;
  Provenance provenance;
  Digest root{};    // PrefixStore's RootKey
  Digest parent{};  // key of the block before; the root where it is the first
  Digest key{};
  std::vector<int32_t> tokens;  // (block_tokens)
  uint64_t payload_bytes = 0;
};

// Little-endian, self-delimiting. Decode fails with DATA_LOSS on anything that Encode cannot have
// written, without ever allocating more than the input's size.
std::string EncodeKvImageHeader(const KvImageHeader& header);
absl::StatusOr<KvImageHeader> DecodeKvImageHeader(absl::string_view bytes);

// Over header and payload.
Digest KvImageChecksum(absl::string_view header, const void* payload, size_t bytes);

class KvTier {
 public:
  // Addresses an image within this process; chosen by the store, never reused.
  using ImageId = uint64_t;
  using Done = std::function<void(absl::Status)>;

  // Waits for running transfers; callbacks that were not yet delivered never are.
  virtual ~KvTier() = default;

  virtual Tier tier() const = 0;

  // Copies a block out. The block's memory stays untouched until done runs. RESOURCE_EXHAUSTED at
  // once, and done never runs, when the image is over what is left of the budget. done gets an
  // error when the copy failed, and the image then does not exist.
  virtual absl::Status StartWrite(ImageId image, const KvImageHeader& header, const void* device,
                                  Done done) = 0;
  // Copies an image back into a block, which stays reserved until done runs. done gets NOT_FOUND
  // when there is no such image, DATA_LOSS when header or checksum disagree: the block's content
  // is then undefined. The image stays until Remove.
  virtual void StartRead(ImageId image, const KvImageHeader& expected, void* device, Done done) = 0;
  // Takes effect after the transfers that were started before it. Unknown images are ignored. The
  // budget is given back at once.
  virtual void Remove(ImageId image) = 0;

  virtual size_t used_bytes() const = 0;  // images, and writes on their way
  virtual size_t budget_bytes() const = 0;
  // What a block with this header and payload takes from the budget.
  virtual size_t ImageBytes(const KvImageHeader& header) const = 0;

  // Runs the callbacks of finished transfers; returns how many.
  virtual int Poll() = 0;
  // Called from a worker's thread whenever Poll has something to deliver. Set before the first
  // transfer; must be thread-safe and quick.
  virtual void SetWakeup(std::function<void()> wakeup) = 0;
};

// Images lie in memory of ops.alloc_host. The backend outlives the tier.
std::unique_ptr<KvTier> NewHostTier(size_t budget_bytes, const Ops& ops, Backend* backend);

struct KvTierOptions {
  size_t host_bytes = 0;  // 0: no host tier
};

// The configured tiers, fastest first. The backend outlives them.
std::vector<std::unique_ptr<KvTier>> NewKvTiers(const KvTierOptions& options, const Ops& ops,
                                                Backend* backend);

}  // namespace carryover
