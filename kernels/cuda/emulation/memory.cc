#include "kernels/cuda/emulation/memory.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace carryover::emulation {
namespace {

constexpr size_t kGuard = 256;  // bytes on either side; also the alignment of allocations
constexpr uint16_t kGuardWord = 0xffcd;

struct Memory {
  std::mutex mutex;
  std::map<uintptr_t, size_t> sizes;  // by the address of what an allocation's user sees
  size_t limit = size_t{8} << 30;
  size_t bytes = 0;
};

Memory& Get() {
  static Memory* const memory = new Memory;  // outlives all static objects
  return *memory;
}

size_t Padding(size_t bytes) { return (kGuard - bytes % kGuard) % kGuard; }

// Where the bytes behind an allocation begin need not be even, so words are read byte by byte.
unsigned char GuardByte(uintptr_t address) {
  return static_cast<unsigned char>(address % 2 == 0 ? kGuardWord & 0xff : kGuardWord >> 8);
}

void Fill(uintptr_t begin, uintptr_t end) {
  for (uintptr_t p = begin; p < end; ++p) *reinterpret_cast<unsigned char*>(p) = GuardByte(p);
}

// The first address in [begin, end) that was written to, or end.
uintptr_t FirstWritten(uintptr_t begin, uintptr_t end) {
  uintptr_t p = begin;
  for (; p < end && p % 8 != 0; ++p) {
    if (*reinterpret_cast<const unsigned char*>(p) != GuardByte(p)) return p;
  }
  constexpr uint64_t kGuardLong = 0x0001000100010001u * kGuardWord;
  for (; p + 8 <= end; p += 8) {
    uint64_t value;
    std::memcpy(&value, reinterpret_cast<const void*>(p), 8);
    if (value != kGuardLong) break;
  }
  for (; p < end; ++p) {
    if (*reinterpret_cast<const unsigned char*>(p) != GuardByte(p)) return p;
  }
  return end;
}

std::string CheckOne(uintptr_t at, size_t bytes) {
  const uintptr_t before = FirstWritten(at - kGuard, at);
  const uintptr_t last = at + bytes + Padding(bytes) + kGuard;
  const uintptr_t behind = FirstWritten(at + bytes, last);
  if (before == at && behind == last) return "";
  Fill(at - kGuard, at);  // each time it happens is told once
  Fill(at + bytes, last);
  return "device memory was written at " +
         (before != at ? std::to_string(at - before) + " bytes before"
                       : "byte " + std::to_string(behind - at) + " of") +
         " an allocation of " + std::to_string(bytes) + " bytes";
}

}  // namespace

void* AllocateDevice(size_t bytes) {
  Memory& memory = Get();
  std::lock_guard<std::mutex> lock(memory.mutex);
  if (bytes > memory.limit || memory.bytes > memory.limit - bytes) return nullptr;
  const size_t whole = kGuard + bytes + Padding(bytes) + kGuard;
  void* const p = std::aligned_alloc(kGuard, whole);
  if (p == nullptr) return nullptr;
  const uintptr_t at = reinterpret_cast<uintptr_t>(p) + kGuard;
  std::memset(reinterpret_cast<void*>(at), kPoison, bytes);
  Fill(at - kGuard, at);
  Fill(at + bytes, at + bytes + Padding(bytes) + kGuard);
  memory.sizes[at] = bytes;
  memory.bytes += bytes;
  return reinterpret_cast<void*>(at);
}

bool FreeDevice(void* p, std::string* report) {
  Memory& memory = Get();
  std::lock_guard<std::mutex> lock(memory.mutex);
  const auto found = memory.sizes.find(reinterpret_cast<uintptr_t>(p));
  if (found == memory.sizes.end()) return false;
  *report = CheckOne(found->first, found->second);
  memory.bytes -= found->second;
  std::free(reinterpret_cast<void*>(found->first - kGuard));
  memory.sizes.erase(found);
  return true;
}

void SetDeviceLimit(size_t bytes) {
  std::lock_guard<std::mutex> lock(Get().mutex);
  Get().limit = bytes;
}

size_t DeviceLimit() {
  std::lock_guard<std::mutex> lock(Get().mutex);
  return Get().limit;
}

size_t DeviceBytes() {
  std::lock_guard<std::mutex> lock(Get().mutex);
  return Get().bytes;
}

bool IsDevice(const void* p, size_t bytes) {
  Memory& memory = Get();
  std::lock_guard<std::mutex> lock(memory.mutex);
  const uintptr_t at = reinterpret_cast<uintptr_t>(p);
  auto found = memory.sizes.upper_bound(at);
  if (found == memory.sizes.begin()) return false;
  --found;
  const uintptr_t offset = at - found->first;
  return offset <= found->second && bytes <= found->second - offset;
}

std::string CheckGuards() {
  Memory& memory = Get();
  std::lock_guard<std::mutex> lock(memory.mutex);
  for (const auto& [at, bytes] : memory.sizes) {
    std::string report = CheckOne(at, bytes);
    if (!report.empty()) return report;
  }
  return "";
}

}  // namespace carryover::emulation
