// The last changes of the gate's cells, for the status page. Thread-safe; a call takes one short
// lock.
#pragma once

#include <deque>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "engine/observer.h"

namespace carryover {

struct LoggedGateChange {
  GateChange change;
  double unix_seconds = 0;
};

class GateChangeLog {
 public:
  static constexpr size_t kKept = 20;

  void Add(const GateChange& change);
  std::vector<LoggedGateChange> Latest() const;  // the last one first

 private:
  mutable Mutex mutex_;
  std::deque<LoggedGateChange> changes_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace carryover
