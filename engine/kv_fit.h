// Fits KV maps (kv_map.h) from pairs of rows: what a source and a target computed for the same
// token in the same layer. Plain maths on one thread; each object is used by one thread at a time.
//
// Ridge regression of the difference y - x on x, from sums in double that do not grow with the
// text: with the centred sums S_xx = sum (x - mx)(x - mx)^T and S_yx,
//   W = S_yx (S_xx + lambda diag(S_xx))^-1,  b = mean(y - x) - W mx
// (Hoerl and Kennard 1970, with each input scaled by its own spread: K and V differ in size by
// orders). The bias is not penalised. Low rank is reduced-rank regression (Izenman 1975): W
// projected onto the leading directions of what it predicts, outputs scaled by their own spread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/kv_map.h"

namespace carryover {

// The sums of one layer: 2 (dim + 1)^2 doubles.
class KvFitSums {
 public:
  // Rows are as in kv_map.h.
  KvFitSums(int kv_heads, int head_dim);
  KvFitSums(KvFitSums&&) noexcept;
  KvFitSums& operator=(KvFitSums&&) noexcept;
  ~KvFitSums();

  // Both (rows, dim). The sums are of the values given: rows that are not finite make Solve fail.
  void Add(absl::Span<const float> source, absl::Span<const float> target);
  // As if all rows of another one had been added. REQUIRES: equal sizes.
  void Merge(const KvFitSums& other);
  int64_t rows() const;

  // INVALID_ARGUMENT when there are no rows, some were not finite, lambda is not positive or rank
  // is not from 1 to dim (kLowRank only). Inputs that never change get no weight. A cubic number of
  // steps in dim.
  absl::StatusOr<KvMapLayer> Solve(KvMapVariant variant, double lambda, int rank) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace carryover
