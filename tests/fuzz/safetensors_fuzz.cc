// A whole safetensors file; the same bytes are also tried as a shard index.
#include <cstddef>
#include <cstdint>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "engine/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view file(reinterpret_cast<const char*>(data), size);
  const auto tensors = carryover::ParseSafetensors(file, "fuzz.safetensors");
  if (tensors.ok()) {
    size_t covered = 0;
    unsigned sum = 0;
    for (const auto& [name, tensor] : *tensors) {
      size_t elements = 1;
      for (int64_t extent : tensor.shape) elements *= static_cast<size_t>(extent);
      CHECK(elements * carryover::DTypeBytes(tensor.dtype) == tensor.bytes.size());
      for (char byte : tensor.bytes) sum += static_cast<uint8_t>(byte);  // all of it can be read
      covered += tensor.bytes.size();
    }
    CHECK(covered <= size && sum <= 255 * covered);
  } else {
    CHECK(absl::StartsWith(tensors.status().message(), "fuzz.safetensors: "));
  }
  const auto index = carryover::ParseShardIndex(file);
  if (index.ok()) {
    for (const auto& [tensor, shard] : *index) {
      CHECK(!shard.empty() && !absl::StrContains(shard, "/") && shard[0] != '.');
    }
  }
  return 0;
}
