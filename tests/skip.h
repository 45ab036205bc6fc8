// For tests that need something of the machine: a program, a Python, a model that is fetched.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "absl/status/status.h"

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

// Ends the test as skipped when a backend could not be made for want of a GPU or its driver. That
// is the machine's matter, in CI too; where one was promised (tests/gpu/run), the test goes on to
// fail.
#define SKIP_WITHOUT_GPU(status)                          \
  do {                                                    \
    const absl::Status without_gpu = (status);            \
    if (absl::IsFailedPrecondition(without_gpu) &&        \
        std::getenv("CARRYOVER_EXPECT_GPU") == nullptr) { \
      GTEST_SKIP() << without_gpu.message();              \
    }                                                     \
  } while (false)
