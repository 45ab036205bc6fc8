#include "server/rpc_status.h"

#include <cmath>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "google/rpc/status_details.pb.h"

namespace carryover {
namespace {

constexpr size_t kMaxViolations = 32;
constexpr size_t kMaxMessageBytes = 4096;  // of a status: it travels in a header
constexpr double kRetrySeconds = 1;

template <class Detail>
std::string TypeUrl() {
  return absl::StrCat("type.googleapis.com/", Detail::descriptor()->full_name());
}

template <class Detail>
void SetDetail(const Detail& detail, absl::Status* status) {
  status->SetPayload(TypeUrl<Detail>(), absl::Cord(detail.SerializeAsString()));
}

bool IsFieldPath(absl::string_view text) {
  return !text.empty() && text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_.[]") ==
                              absl::string_view::npos;
}

google::rpc::PreconditionFailure Violations(absl::string_view message) {
  google::rpc::PreconditionFailure detail;
  const auto add = [&](absl::string_view type, absl::string_view subject, absl::string_view text) {
    auto* violation = detail.add_violations();
    violation->set_type(std::string(type));
    violation->set_subject(std::string(subject));
    violation->set_description(std::string(text));
  };
  constexpr absl::string_view kList = "these differ: ";
  if (const size_t at = message.find(kList); at != absl::string_view::npos) {
    for (absl::string_view item : absl::StrSplit(message.substr(at + kList.size()), ", ")) {
      const size_t space = item.find(' ');
      const absl::string_view values =
          space == absl::string_view::npos ? "" : item.substr(space + 1);
      add("INCOMPATIBLE", item.substr(0, space),
          absl::StripSuffix(absl::StripPrefix(values, "("), ")"));
    }
    return detail;
  }
  const size_t colon = message.find(':');
  const bool named = colon != absl::string_view::npos && IsFieldPath(message.substr(0, colon));
  add("STATE", named ? message.substr(0, colon) : "",
      named ? absl::StripLeadingAsciiWhitespace(message.substr(colon + 1)) : message);
  return detail;
}

}  // namespace

void FieldErrors::Add(absl::string_view field, absl::string_view description) {
  if (violations_.size() >= kMaxViolations) return;
  violations_.push_back({std::string(field), std::string(description)});
}

absl::Status FieldErrors::ToStatus() const {
  if (violations_.empty()) return absl::OkStatus();
  google::rpc::BadRequest detail;
  for (const Violation& violation : violations_) {
    auto* added = detail.add_field_violations();
    added->set_field(violation.field);
    added->set_description(violation.description);
  }
  absl::Status status = absl::InvalidArgumentError(
      absl::StrJoin(violations_, "; ", [](std::string* out, const Violation& violation) {
        absl::StrAppend(out, violation.field, ": ", violation.description);
      }));
  SetDetail(detail, &status);
  return status;
}

absl::Status FieldError(absl::string_view field, absl::string_view description) {
  FieldErrors errors;
  errors.Add(field, description);
  return errors.ToStatus();
}

absl::Status WithRetry(absl::Status status, double seconds) {
  google::rpc::RetryInfo detail;
  const double whole = std::floor(seconds);
  detail.mutable_retry_delay()->set_seconds(static_cast<int64_t>(whole));
  detail.mutable_retry_delay()->set_nanos(static_cast<int32_t>((seconds - whole) * 1e9));
  SetDetail(detail, &status);
  return status;
}

absl::Status WithDetails(absl::Status status) {
  const absl::string_view message = status.message();
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument: {
      if (status.GetPayload(TypeUrl<google::rpc::BadRequest>())) break;
      const size_t colon = message.find(':');
      if (colon == absl::string_view::npos || !IsFieldPath(message.substr(0, colon))) break;
      return FieldError(message.substr(0, colon),
                        absl::StripLeadingAsciiWhitespace(message.substr(colon + 1)));
    }
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kUnavailable:
      return WithRetry(std::move(status), kRetrySeconds);
    case absl::StatusCode::kFailedPrecondition:
      SetDetail(Violations(message), &status);
      break;
    default:
      break;
  }
  return status;
}

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  google::rpc::Status details;
  details.set_code(static_cast<int>(status.code()));
  const std::string message(status.message().substr(0, kMaxMessageBytes));
  details.set_message(message);
  status.ForEachPayload([&](absl::string_view type, const absl::Cord& value) {
    auto* any = details.add_details();
    any->set_type_url(std::string(type));
    any->set_value(std::string(value));
  });
  // absl's codes are gRPC's.
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message,
                      details.details_size() > 0 ? details.SerializeAsString() : "");
}

}  // namespace carryover
