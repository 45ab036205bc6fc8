// Where tests find models and references: the source tree, or, for a program that was carried to
// another machine (tests/gpu/run), what CARRYOVER_SOURCE_DIR in the environment says.
#pragma once

#include <cstdlib>
#include <string>

namespace carryover {

inline std::string SourceDir() {
  const char* const elsewhere = std::getenv("CARRYOVER_SOURCE_DIR");
  return elsewhere != nullptr ? elsewhere : CARRYOVER_SOURCE_DIR;
}

}  // namespace carryover
