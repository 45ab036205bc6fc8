// Threads of an emulated block: stacks of execution that switch to one another by hand, at the cost
// of a function call. All fibers that switch to one another belong to one system thread.
#pragma once

#include <cstddef>

namespace carryover::emulation {

class Fiber {
 public:
  // The stack that the system thread runs on already.
  Fiber();
  // A stack of its own, entered by the first switch to it. `entry` never returns.
  explicit Fiber(void (*entry)());
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Leaves `from`, which is the running one, and goes on with `to`.
  static void Switch(Fiber& from, Fiber& to);

 private:
  static void Enter();

  void (*entry_)() = nullptr;
  void* stack_pointer_ = nullptr;  // while not running
  char* stack_ = nullptr;          // lowest address, above a page that faults; null: the system's
  const void* bottom_ = nullptr;   // what AddressSanitizer knows of the stack
  size_t size_ = 0;
  void* fake_stack_ = nullptr;  // AddressSanitizer's, while not running
  void* tsan_ = nullptr;        // ThreadSanitizer's idea of it
};

}  // namespace carryover::emulation
