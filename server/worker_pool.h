// A few threads for calls that take long, so that gRPC's own threads never wait. Thread-safe.
#pragma once

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "base/mutex.h"

namespace carryover {

class WorkerPool {
 public:
  // limit: jobs that may wait.
  WorkerPool(int threads, size_t limit);
  // Waits for all jobs, also those that have not started.
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // False when too many wait; the job is then not run.
  bool Run(std::function<void()> job);

 private:
  void Work();

  const size_t limit_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> jobs_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

// Of the admin services.
struct AdminWorkers {
  WorkerPool* quick;  // calls that ask or tell the engine something
  WorkerPool* slow;   // calls that wait for requests, files or weights
};

}  // namespace carryover
