// For tests that need something of the machine: a program, a Python, a model that is fetched.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace carryover {

// Where scripts/setup and scripts/test have run, nothing may be missing.
inline bool InCi() {
  const char* const ci = std::getenv("CI");
  return ci != nullptr && std::string(ci) == "true";
}

}  // namespace carryover

// Ends the test: as skipped, but as failed when the environment says CI=true, so that a green round
// has run everything.
#define SKIP_OR_FAIL_IN_CI(message)             \
  do {                                          \
    if (::carryover::InCi()) FAIL() << message; \
    GTEST_SKIP() << message;                    \
  } while (false)
