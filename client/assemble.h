// The events of a stream, checked against the contract and put together into the response that a
// unary call would have given. For one stream, one thread at a time.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "carryover/v1/completions.pb.h"

namespace carryover {

class StreamAssembler {
 public:
  // choices: what the request's n says. request_id: what it sent.
  StreamAssembler(int choices, std::string request_id);

  // INTERNAL, naming what is wrong, where the event cannot come now: another stream's id, an index
  // out of range, a delta after its choice's finish, anything before `started` or after `done`.
  absl::Status Add(const v1::CompleteEvent& event);
  // After the stream ended with OK: whether all that must come came, and the counts agree.
  absl::Status Complete() const;

  // What came so far.
  const v1::CompleteResponse& response() const { return response_; }

 private:
  absl::Status CheckIndex(int index, const char* what) const;

  v1::CompleteResponse response_;
  std::string request_id_;
  std::vector<bool> finished_;
  bool started_ = false;
  bool done_ = false;
};

}  // namespace carryover
