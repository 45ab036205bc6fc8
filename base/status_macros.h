// Early return for absl::Status and absl::StatusOr.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define CARRYOVER_CONCAT_INNER(a, b) a##b
#define CARRYOVER_CONCAT(a, b) CARRYOVER_CONCAT_INNER(a, b)

// RETURN_IF_ERROR(DoThing());
#define RETURN_IF_ERROR(expr)                                                           \
  do {                                                                                  \
    if (absl::Status status_macro_ = (expr); !status_macro_.ok()) return status_macro_; \
  } while (false)

// ASSIGN_OR_RETURN(Thing thing, MakeThing());
#define ASSIGN_OR_RETURN(lhs, expr) \
  ASSIGN_OR_RETURN_INNER(CARRYOVER_CONCAT(statusor_, __LINE__), lhs, expr)
#define ASSIGN_OR_RETURN_INNER(tmp, lhs, expr)   \
  auto tmp = (expr);                             \
  if (!tmp.ok()) return std::move(tmp).status(); \
  lhs = std::move(tmp).value()

// For invariants of ours only; what input or environment can cause is a Status.
#define CHECK(cond)                                                   \
  do {                                                                \
    if (!(cond)) ::carryover::CheckFailed(__FILE__, __LINE__, #cond); \
  } while (false)

namespace carryover {
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition);
}  // namespace carryover
