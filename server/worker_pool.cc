#include "server/worker_pool.h"

#include <utility>

namespace carryover {

WorkerPool::WorkerPool(int threads, size_t limit) : limit_(limit) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
}

WorkerPool::~WorkerPool() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  changed_.SignalAll();
  for (std::thread& thread : threads_) thread.join();
}

bool WorkerPool::Run(std::function<void()> job) {
  {
    MutexLock lock(&mutex_);
    if (stopping_ || jobs_.size() >= limit_) return false;
    jobs_.push_back(std::move(job));
  }
  changed_.Signal();
  return true;
}

void WorkerPool::Work() {
  while (true) {
    std::function<void()> job;
    {
      MutexLock lock(&mutex_);
      while (jobs_.empty() && !stopping_) changed_.Wait(&mutex_);
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    job();
  }
}

}  // namespace carryover
