// The page for people: versions, shares of traffic and the cache, as HTML without scripts. No
// state.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "engine/engine.h"

namespace carryover {

std::string StatusPage(const std::vector<VersionInfo>& versions, const EngineSnapshot& now,
                       absl::string_view build_version);

}  // namespace carryover
