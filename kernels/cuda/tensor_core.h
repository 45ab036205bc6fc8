// The tensor-core and asynchronous-copy instructions that kernels use, each with a twin for the
// emulated device that agrees with it lane by lane (PTX ISA 9.0, sections 9.7.14 and 9.7.9.25).
// All are for sm_80 and up. Warp operations: all 32 lanes call them together.
//
// Fragments of m16n8k16 with g = lane / 4 and t = lane % 4; a register holds two bf16, the lower
// column (A), row (B) in its low half:
//   A (16, 16)  a[0] row g, columns 2t and 2t + 1; a[1] row g + 8; a[2] row g, columns 2t + 8 and
//               2t + 9; a[3] row g + 8 of those
//   B (16, 8)   b[0] rows 2t and 2t + 1 of column g; b[1] rows 2t + 8 and 2t + 9
//   C (16, 8)   c[0], c[1] row g, columns 2t and 2t + 1; c[2], c[3] row g + 8 of those
#pragma once

#include "kernels/cuda/device.h"

#if defined(CARRYOVER_EMULATED)
#include <cstring>
#include <vector>
#endif

namespace carryover::CARRYOVER_DEVICE {

// c += a b, bf16 products summed in f32.
__device__ inline void MultiplyAdd16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1, Site site = Site::current());

// Four matrices of 8 x 8 bf16 from shared memory. Lane i names row i % 8 of matrix i / 8: 16 bytes
// at a multiple of 16. r[m] gets of matrix m row lane / 4, columns 2 (lane % 4) and the next; when
// transposed, rows 2 (lane % 4) and the next of column lane / 4.
__device__ inline void LoadMatrices(uint32_t (&r)[4], const void* row, Site site = Site::current());
__device__ inline void LoadMatricesTransposed(uint32_t (&r)[4], const void* row,
                                              Site site = Site::current());

// Starts to copy 16 bytes from global to shared memory, past L1, or to fill them with zeros when
// `valid` is false; `from` must be readable memory all the same. Both are multiples of 16. Nobody
// may read `to` until the thread that asked has waited, and other threads until a barrier after.
__device__ inline void CopyAsync16(void* to, const void* from, bool valid,
                                   Site site = Site::current());
// Ends a group of copies of this thread.
__device__ inline void CommitCopies();
// Waits until of this thread's groups at most the kPending newest are not done.
template <int kPending>
__device__ inline void WaitForCopies();

// Two floats rounded to bf16, `low` in the low half.
__device__ inline uint32_t PackBf16(float low, float high);

#if !defined(CARRYOVER_EMULATED) && defined(__CUDACC__)

__device__ inline void MultiplyAdd16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1, Site) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ inline void LoadMatrices(uint32_t (&r)[4], const void* row, Site) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(SharedAddress(row))
               : "memory");
}

__device__ inline void LoadMatricesTransposed(uint32_t (&r)[4], const void* row, Site) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(SharedAddress(row))
               : "memory");
}

__device__ inline void CopyAsync16(void* to, const void* from, bool valid, Site) {
  const int bytes = valid ? 16 : 0;  // what is left of 16 is filled with zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(SharedAddress(to)), "l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
}

__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ inline void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
}

__device__ inline uint32_t PackBf16(float low, float high) {
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

#elif defined(CARRYOVER_EMULATED)

inline float HalfOf(uint32_t pair, int half) {
  return ToFloat(Bf16{static_cast<uint16_t>(half == 0 ? pair & 0xffffu : pair >> 16)});
}

inline void MultiplyAdd16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                               Site site) {
  struct Operands {
    uint32_t a[4];
    uint32_t b[2];
  };
  const Operands* const lanes =
      emulation::WarpGather(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}}, site);
  const int g = LaneId() / 4, t = LaneId() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    float sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const uint32_t a_pair = lanes[row % 8 * 4 + k % 8 / 2].a[k / 8 * 2 + row / 8];
      const uint32_t b_pair = lanes[column * 4 + k % 8 / 2].b[k / 8];
      sum += HalfOf(a_pair, k % 2) * HalfOf(b_pair, k % 2);
    }
    c[i] = sum;
  }
}

inline void LoadMatricesAs(uint32_t (&r)[4], const void* row, bool transposed, Site site) {
  CheckAligned(row, 16, site);
  const void* const* const rows = emulation::WarpGather(row, site);
  const int g = LaneId() / 4, t = LaneId() % 4;
  for (int m = 0; m < 4; ++m) {
    uint16_t pair[2];
    for (int i = 0; i < 2; ++i) {
      const int at_row = transposed ? 2 * t + i : g, column = transposed ? g : 2 * t + i;
      std::memcpy(&pair[i], static_cast<const char*>(rows[8 * m + at_row]) + 2 * column, 2);
    }
    r[m] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
  }
}

inline void LoadMatrices(uint32_t (&r)[4], const void* row, Site site) {
  LoadMatricesAs(r, row, false, site);
}
inline void LoadMatricesTransposed(uint32_t (&r)[4], const void* row, Site site) {
  LoadMatricesAs(r, row, true, site);
}

// The copies that a thread has asked for and not waited for. Until then their targets are NaN.
struct PendingCopies {
  struct Copy {
    void* to;
    const void* from;  // null: zeros
    int group;
  };
  std::vector<Copy> copies;
  int group = 0;  // that copies now go to
};

inline void CopyAsync16(void* to, const void* from, bool valid, Site site) {
  CheckAligned(to, 16, site);
  CheckAligned(from, 16, site);
  PendingCopies& pending = emulation::PerThread<PendingCopies>();
  std::memset(to, 0xff, 16);
  pending.copies.push_back({to, valid ? from : nullptr, pending.group});
}

inline void CommitCopies() { ++emulation::PerThread<PendingCopies>().group; }

template <int kPending>
inline void WaitForCopies() {
  PendingCopies& pending = emulation::PerThread<PendingCopies>();
  size_t kept = 0;
  for (const PendingCopies::Copy& copy : pending.copies) {
    if (copy.group >= pending.group - kPending) {
      pending.copies[kept++] = copy;
    } else if (copy.from == nullptr) {
      std::memset(copy.to, 0, 16);
    } else {
      std::memcpy(copy.to, copy.from, 16);
    }
  }
  pending.copies.resize(kept);
}

inline uint32_t PackBf16(float low, float high) {
  return ToBf16(low).bits | static_cast<uint32_t>(ToBf16(high).bits) << 16;
}

#endif

}  // namespace carryover::CARRYOVER_DEVICE
