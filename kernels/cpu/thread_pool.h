// The threads that run one op of the CPU backend in parts. Run() is called from one thread at a
// time, the engine thread, which works along.
//
// Parts are claimed one by one, and Run() waits only for parts that a worker has begun: a worker
// that the system does not schedule costs nothing, where a barrier over all threads would cost its
// time slice. Idle workers spin for some tens of microseconds, then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace carryover {

class ThreadPool {
 public:
  // threads counts the caller of Run(); at least 1.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(part, thread) once for each part in [0, parts), in no order, with thread in
  // [0, threads()). What the body wrote is visible when Run returns.
  template <typename Body>
  void Run(int parts, const Body& body) {
    if (parts <= 1 || workers_.empty()) {
      for (int i = 0; i < parts; ++i) body(i, 0);
      return;
    }
    RunErased(
        parts,
        [](const void* b, int part, int thread) { (*static_cast<const Body*>(b))(part, thread); },
        &body);
  }

 private:
  using Erased = void (*)(const void* body, int part, int thread);

  void RunErased(int parts, Erased call, const void* body);
  void Worker(int thread);
  // Claims and runs parts of the current job until none is left.
  void Work(int thread);

  // The job. Written only while no part is unfinished; a worker that reads it late fails to claim.
  std::atomic<Erased> call_{nullptr};
  std::atomic<const void*> body_{nullptr};

  // Job number (24 bits), number of parts (20), next part (20): one word, so that a claim can only
  // succeed on the job whose count was compared.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> done_{0};  // finished parts of the job
  alignas(64) std::atomic<uint32_t> wake_{0};  // job number again, to sleep on
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace carryover
