// The memory of the emulated device. It is plain memory between guard zones that say when something
// wrote beyond an allocation. New memory and the zones are NaN in every type, so that results show
// what was read too early or too far. Any thread may call.
#pragma once

#include <cstddef>
#include <string>

namespace carryover::emulation {

// Null when that would make more than the limit, 8 GiB unless set.
void* AllocateDevice(size_t bytes);
// False when `p` is not the beginning of an allocation. *report says whether a zone was written to.
bool FreeDevice(void* p, std::string* report);
void SetDeviceLimit(size_t bytes);
size_t DeviceLimit();
size_t DeviceBytes();  // allocated

// Whether [p, p + bytes) lies within one allocation.
bool IsDevice(const void* p, size_t bytes);
// Empty, or which allocation was written beyond, and where.
std::string CheckGuards();

inline constexpr unsigned char kPoison = 0xff;

}  // namespace carryover::emulation
