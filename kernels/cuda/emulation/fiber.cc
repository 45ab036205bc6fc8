#include "kernels/cuda/emulation/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace carryover::emulation {
namespace {

// Kernels keep tiles in local arrays, and sanitizers pad them.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t kStackBytes = size_t{256} << 10;
#else
constexpr size_t kStackBytes = size_t{64} << 10;
#endif

size_t PageBytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

// The fibers of the switch under way: on another stack, only these tell where it came from.
thread_local Fiber* entering = nullptr;
thread_local Fiber* leaving = nullptr;

#if defined(__x86_64__)
// Saves what a callee must keep on the stack, exchanges stacks, and returns there. The floating
// point control words are the same on all fibers.
extern "C" void CarryoverSwitchStack(void** save, void* load);
asm(R"(
.text
.globl CarryoverSwitchStack
.type CarryoverSwitchStack, @function
CarryoverSwitchStack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size CarryoverSwitchStack, . - CarryoverSwitchStack
)");
#endif

}  // namespace

Fiber::Fiber() {
#if defined(__SANITIZE_THREAD__)
  tsan_ = __tsan_get_current_fiber();
#endif
#if !defined(__x86_64__)
  stack_pointer_ = new ucontext_t;
#endif
}

Fiber::Fiber(void (*entry)()) : entry_(entry) {
  const size_t page = PageBytes();
  void* const memory = mmap(nullptr, kStackBytes + page, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) {
    std::perror("emulation: no stack for a thread");
    std::abort();
  }
  stack_ = static_cast<char*>(memory) + page;
  bottom_ = stack_;
  size_ = kStackBytes;
#if defined(__x86_64__)
  // As if it had called CarryoverSwitchStack from the start of Enter: six registers, then where to
  // return to, with the stack as it is right behind a call.
  auto* top = reinterpret_cast<uintptr_t*>(stack_ + kStackBytes);
  *--top = 0;
  *--top = reinterpret_cast<uintptr_t>(&Fiber::Enter);
  top -= 6;
  for (int i = 0; i < 6; ++i) top[i] = 0;
  stack_pointer_ = top;
#else
  auto* const context = new ucontext_t;
  getcontext(context);
  context->uc_stack.ss_sp = stack_;
  context->uc_stack.ss_size = kStackBytes;
  context->uc_link = nullptr;
  makecontext(context, &Fiber::Enter, 0);
  stack_pointer_ = context;
#endif
#if defined(__SANITIZE_THREAD__)
  tsan_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#if !defined(__x86_64__)
  delete static_cast<ucontext_t*>(stack_pointer_);
#endif
  if (stack_ == nullptr) return;
#if defined(__SANITIZE_THREAD__)
  __tsan_destroy_fiber(tsan_);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stack_, size_);  // whoever maps memory here next
#endif
  munmap(stack_ - PageBytes(), kStackBytes + PageBytes());
}

void Fiber::Enter() {
  Fiber* const self = entering;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &leaving->bottom_, &leaving->size_);
#endif
  self->entry_();
  std::abort();  // an entry never returns
}

void Fiber::Switch(Fiber& from, Fiber& to) {
  entering = &to;
  leaving = &from;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.fake_stack_, to.bottom_, to.size_);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(to.tsan_, 0);
#endif
#if defined(__x86_64__)
  CarryoverSwitchStack(&from.stack_pointer_, to.stack_pointer_);
#else
  swapcontext(static_cast<ucontext_t*>(from.stack_pointer_),
              static_cast<ucontext_t*>(to.stack_pointer_));
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack_, &leaving->bottom_, &leaving->size_);
#endif
}

}  // namespace carryover::emulation
