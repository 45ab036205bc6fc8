// The server's configuration: a ServerConfig in protobuf text format, read and checked once at
// start. Not thread-safe; used by main alone.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "carryover/v1/config.pb.h"
#include "engine/engine.h"
#include "server/convert.h"

namespace carryover {

// Parses and checks the text, and fills in every default. INVALID_ARGUMENT lists what is wrong, one
// line each, as NAME:LINE: FIELD: MESSAGE. Relative paths of versions are taken from folder.
absl::StatusOr<v1::ServerConfig> ParseConfig(absl::string_view text, const std::string& name,
                                             const std::string& folder);

// The same from a file of at most 1 MiB.
absl::StatusOr<v1::ServerConfig> LoadConfig(const std::string& path);

// In text format, as ParseConfig takes it.
std::string PrintConfig(const v1::ServerConfig& config);

// True for addresses that only this machine can reach: 127.0.0.0/8, [::1], localhost, unix:.
bool IsLoopback(absl::string_view address);

EngineOptions ToEngineOptions(const v1::ServerConfig& config);
RequestLimits ToRequestLimits(const v1::ServerConfig& config);
LoadOptions ToLoadOptions(const v1::StartVersion& version);

}  // namespace carryover
