// A whole file of a KV map: what is taken can be written again, and is then the same map.
#include <cstddef>
#include <cstdint>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "engine/kv_map.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view file(reinterpret_cast<const char*>(data), size);
  const auto map = carryover::ParseKvMap(file, "fuzz.safetensors");
  if (!map.ok()) {
    CHECK(absl::StartsWith(map.status().message(), "fuzz.safetensors: "));
    return 0;
  }
  const auto written = carryover::WriteKvMap(*map);
  CHECK(written.ok());
  const auto again = carryover::ParseKvMap(*written, "again.safetensors");
  CHECK(again.ok() && again->Name() == map->Name());
  const int64_t dim = map->info.dim();
  if (dim > 4096) return 0;
  for (int layer = 0; layer < map->info.layers; ++layer) {
    CHECK(static_cast<int64_t>(map->Weight(layer).size()) == dim * dim);
  }
  return 0;
}
