// A std::mutex that clang's thread-safety analysis understands. Debian's absl::Mutex gives
// ThreadSanitizer false alarms, so it is not used here.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define CARRYOVER_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define CARRYOVER_THREAD_ATTRIBUTE(x)
#endif

#define CAPABILITY(x) CARRYOVER_THREAD_ATTRIBUTE(capability(x))
#define SCOPED_CAPABILITY CARRYOVER_THREAD_ATTRIBUTE(scoped_lockable)
#define GUARDED_BY(x) CARRYOVER_THREAD_ATTRIBUTE(guarded_by(x))
#define REQUIRES_LOCK(...) CARRYOVER_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define ACQUIRE(...) CARRYOVER_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define RELEASE(...) CARRYOVER_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))
#define EXCLUDES(...) CARRYOVER_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define NO_THREAD_SAFETY_ANALYSIS CARRYOVER_THREAD_ATTRIBUTE(no_thread_safety_analysis)

namespace carryover {

class CAPABILITY("mutex") Mutex {
 public:
  void Lock() ACQUIRE() { mutex_.lock(); }
  void Unlock() RELEASE() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex* mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_->Lock(); }
  ~MutexLock() RELEASE() { mutex_->Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex* mutex_;
};

// Waits give the mutex up and take it again, which the analysis cannot express.
class CondVar {
 public:
  void Wait(Mutex* mutex) REQUIRES_LOCK(mutex) NO_THREAD_SAFETY_ANALYSIS {
    std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
  }
  // False when the time ran out.
  template <typename Clock, typename Duration>
  bool WaitUntil(Mutex* mutex, std::chrono::time_point<Clock, Duration> deadline)
      REQUIRES_LOCK(mutex) NO_THREAD_SAFETY_ANALYSIS {
    std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
    const bool signalled = condition_.wait_until(lock, deadline) == std::cv_status::no_timeout;
    lock.release();
    return signalled;
  }
  void Signal() { condition_.notify_one(); }
  void SignalAll() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace carryover
