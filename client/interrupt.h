// Ctrl-C and SIGTERM: the first cancels the calls that are running, the second ends the process.
#pragma once

#include <functional>
#include <map>

#include "base/mutex.h"

namespace carryover {

class Interrupt {
 public:
  // Takes SIGINT and SIGTERM over from here on. Call once, before any other thread starts, so that
  // all threads leave those signals to the one that waits for them.
  void Install();

  // Thread-safe. An action runs on the waiting thread, once, at the first signal; at once when that
  // has been. Remove waits for an action that is running.
  int Add(std::function<void()> action);
  void Remove(int id);
  bool requested();
  // What a signal does. For tests.
  void Trigger();

 private:
  Mutex mutex_;
  bool requested_ ABSL_GUARDED_BY(mutex_) = false;
  int next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<int, std::function<void()>> actions_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace carryover
