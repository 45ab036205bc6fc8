// Finds stop strings in text that comes in pieces. Holds back only what may still become one.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace carryover {

class StopMatcher {
 public:
  // include: the text that Add releases at a match ends with the stop string, else before it.
  StopMatcher(std::vector<std::string> stops, bool include);

  // Takes the next piece and returns the text that is safe to show. After a match `matched` names
  // the stop string and nothing more is released. The earliest match wins, and the longest stop
  // where several start at the same byte.
  std::string Add(absl::string_view piece);
  // The rest, when generation ended for another reason.
  std::string Finish();

  bool stopped() const { return stopped_; }
  const std::string& matched() const { return matched_; }

 private:
  const std::vector<std::string> stops_;
  const bool include_;
  size_t longest_ = 0;
  std::string held_;  // always shorter than the longest stop
  std::string matched_;
  bool stopped_ = false;
};

}  // namespace carryover
