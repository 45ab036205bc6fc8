#include "kernels/cpu/thread_pool.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace carryover {
namespace {

constexpr int kPartBits = 20;
constexpr int kMaxParts = (1 << kPartBits) - 1;

constexpr auto kSpin = std::chrono::microseconds(50);

inline void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  workers_.reserve(threads > 1 ? threads - 1 : 0);
  for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { Worker(t); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  wake_.fetch_add(1);
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::RunErased(int parts, Erased call, const void* body) {
  if (parts > kMaxParts) {  // never seen in practice; one thread does
    for (int i = 0; i < parts; ++i) call(body, i, 0);
    return;
  }
  call_.store(call, std::memory_order_relaxed);
  body_.store(body, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> (2 * kPartBits)) + 1;
  ticket_.store(job << (2 * kPartBits) | static_cast<uint64_t>(parts) << kPartBits,
                std::memory_order_release);
  // Sequentially consistent with the sleeper's own pair: either it sees the new number or we see
  // that it sleeps.
  wake_.store(static_cast<uint32_t>(job));
  if (sleepers_.load() > 0) wake_.notify_all();

  Work(0);
  while (done_.load(std::memory_order_acquire) != static_cast<uint32_t>(parts)) {
    // A claimed part is being run; when its thread lost the processor, give ours up.
    for (int i = 0; i < 256; ++i) {
      if (done_.load(std::memory_order_acquire) == static_cast<uint32_t>(parts)) return;
      Pause();
    }
    std::this_thread::yield();
  }
}

void ThreadPool::Work(int thread) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  for (;;) {
    const int part = static_cast<int>(ticket & kMaxParts);
    const int parts = static_cast<int>((ticket >> kPartBits) & kMaxParts);
    if (part >= parts) return;
    const Erased call = call_.load(std::memory_order_relaxed);
    const void* const body = body_.load(std::memory_order_relaxed);
    // Success means that this part was unfinished all along, so what was read is of its job.
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel,
                                       std::memory_order_acquire)) {
      continue;
    }
    call(body, part, thread);
    done_.fetch_add(1, std::memory_order_acq_rel);
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void ThreadPool::Worker(int thread) {
  uint32_t seen = 0;
  for (;;) {
    const auto until = std::chrono::steady_clock::now() + kSpin;
    bool found = false;
    do {
      for (int i = 0; i < 64 && !found; ++i) {
        found = wake_.load(std::memory_order_acquire) != seen;
        if (!found) Pause();
      }
    } while (!found && std::chrono::steady_clock::now() < until);
    if (!found) {
      sleepers_.fetch_add(1);
      wake_.wait(seen);
      sleepers_.fetch_sub(1);
    }
    if (stop_.load()) return;
    seen = wake_.load(std::memory_order_acquire);
    Work(thread);
  }
}

}  // namespace carryover
