// Spreads the rows of an op over the threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/thread_pool.h"

namespace carryover::cpu {

// Calls body(row) for all rows, on several threads only where that pays: values_per_row is the work
// of a row, in values that are read and written once.
template <typename Body>
void ForRows(ThreadPool& pool, int rows, size_t values_per_row, const Body& body) {
  constexpr size_t kValuesPerPart = size_t{1} << 14;
  const size_t values = values_per_row * std::max(rows, 0);
  const int parts = static_cast<int>(
      std::min<size_t>({values / kValuesPerPart, static_cast<size_t>(4) * pool.threads(),
                        static_cast<size_t>(rows)}));
  if (parts <= 1) {
    for (int r = 0; r < rows; ++r) body(r);
    return;
  }
  pool.Run(parts, [&](int part, int) {
    const int last = static_cast<int>(static_cast<int64_t>(rows) * (part + 1) / parts);
    for (int r = static_cast<int>(static_cast<int64_t>(rows) * part / parts); r < last; ++r)
      body(r);
  });
}

}  // namespace carryover::cpu
