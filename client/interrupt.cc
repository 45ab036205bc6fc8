#include "client/interrupt.h"

#include <signal.h>
#include <unistd.h>

#include <thread>
#include <utility>

namespace carryover {

void Interrupt::Install() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::thread([this, signals] {
    int signal = 0;
    sigwait(&signals, &signal);
    Trigger();
    sigwait(&signals, &signal);
    _exit(128 + signal);
  }).detach();
}

int Interrupt::Add(std::function<void()> action) {
  MutexLock lock(&mutex_);
  if (requested_) action();
  const int id = next_id_++;
  actions_.emplace(id, std::move(action));
  return id;
}

void Interrupt::Remove(int id) {
  MutexLock lock(&mutex_);
  actions_.erase(id);
}

bool Interrupt::requested() {
  MutexLock lock(&mutex_);
  return requested_;
}

// Under the lock, so that what an action touches stays alive until Remove.
void Interrupt::Trigger() {
  MutexLock lock(&mutex_);
  if (requested_) return;
  requested_ = true;
  for (auto& [id, action] : actions_) action();
}

}  // namespace carryover
