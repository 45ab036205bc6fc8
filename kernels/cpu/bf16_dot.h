// Which CPUs multiply bf16 by their own dot product of pairs, VDPBF16PS.
#pragma once

namespace carryover::cpu {

// AVX512-BF16 at twice the rate of f32 multiply-add, which is so on AMD's CPUs (Zen 4 and later).
// On Intel's the instruction runs at half that rate (docs/performance.md), and widening in
// registers is no slower and more exact. By the CPU's name, not by a measurement: one machine gives
// the same bits after every start.
bool PreferBf16Dot();

}  // namespace carryover::cpu
