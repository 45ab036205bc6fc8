#include "server/gate_change_log.h"

#include <chrono>

namespace carryover {

void GateChangeLog::Add(const GateChange& change) {
  const double now =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  MutexLock lock(&mutex_);
  changes_.push_front({change, now});
  if (changes_.size() > kKept) changes_.pop_back();
}

std::vector<LoggedGateChange> GateChangeLog::Latest() const {
  MutexLock lock(&mutex_);
  return {changes_.begin(), changes_.end()};
}

}  // namespace carryover
