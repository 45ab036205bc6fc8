// absl::Status to grpc::Status. Details travel as payloads of the absl::Status, under their type
// URL, and end up in the `grpc-status-details-bin` trailer. Thread-safe.
#pragma once

#include <grpcpp/support/status.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace carryover {

// Collects what is wrong with a request, field by field.
class FieldErrors {
 public:
  // Only the first 32 are kept.
  void Add(absl::string_view field, absl::string_view description);
  // OK when nothing was added; else INVALID_ARGUMENT with a google.rpc.BadRequest.
  absl::Status ToStatus() const;

 private:
  struct Violation {
    std::string field;
    std::string description;
  };
  std::vector<Violation> violations_;
};

// INVALID_ARGUMENT for one field.
absl::Status FieldError(absl::string_view field, absl::string_view description);

// Adds a google.rpc.RetryInfo.
absl::Status WithRetry(absl::Status status, double seconds);

// Adds the details that an engine's error lacks: the field of an INVALID_ARGUMENT ("field: what"),
// when to retry a RESOURCE_EXHAUSTED or UNAVAILABLE, and what stands in the way of a
// FAILED_PRECONDITION ("field: what", or "... these differ: field (a and b), field (a and b)").
absl::Status WithDetails(absl::Status status);

grpc::Status ToGrpc(const absl::Status& status);

}  // namespace carryover
