// config.json and generation_config.json, parted by a zero byte.
#include <cstddef>
#include <cstdint>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "engine/model_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t border = text.find('\0');
  const absl::string_view config = text.substr(0, border);
  const absl::string_view generation =
      border == absl::string_view::npos ? absl::string_view() : text.substr(border + 1);
  const auto parsed = carryover::ParseModelConfig(config, generation);
  if (!parsed.ok()) {
    CHECK(absl::StrContains(parsed.status().message(), "config.json: "));
    return 0;
  }
  // What passes is usable: no later product of these overflows, no division is by zero.
  CHECK(parsed->vocab > 0 && parsed->hidden > 0 && parsed->layers > 0 && parsed->head_dim > 0);
  CHECK(parsed->kv_heads > 0 && parsed->heads % parsed->kv_heads == 0);
  CHECK(parsed->head_dim % 2 == 0 && parsed->head_dim <= 256);
  CHECK(parsed->windows.size() == static_cast<size_t>(parsed->layers));
  for (int window : parsed->windows) CHECK(window >= 0);
  CHECK(parsed->rope.theta >= 1 && parsed->rope.factor >= 1);
  for (int32_t id : parsed->eos_ids) CHECK(id >= 0 && id < parsed->vocab);
  return 0;
}
