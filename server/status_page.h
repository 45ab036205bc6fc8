// The page for people: server/page/index.html, with versions, shares of traffic and the cache as
// plain tables for browsers that run no scripts. The others get more from /status.json. No state.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "engine/engine.h"

namespace carryover {

std::string StatusPage(const std::vector<VersionInfo>& versions, const EngineSnapshot& now,
                       absl::string_view build_version);

}  // namespace carryover
