// What a pass over a model's layers must cost at least on this machine, from the pieces that it is
// made of, each measured alone with weights of zeros.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/ops.h"

namespace carryover::bench {

struct FloorShape {  // of a model; SmolLM2-135M's by default
  int layers = 30;
  int hidden = 576;
  int heads = 9;
  int kv_heads = 3;
  int head_dim = 64;
  int intermediate = 1536;
  int vocab = 49152;
  DType type = DType::kBF16;  // of weights and KV
  int threads = 0;
};

struct FloorTimes {      // medians, milliseconds
  double matmul_ms = 0;  // the products with all layers' weights
  double head_ms = 0;    // the LM head of one row
  size_t kv_bytes = 0;   // that the rows attend to
  double kv_read_ms = 0;
  // Apart, in no sum: the two products of attention, Q K^T and P V, as ordinary matrix products of
  // the same shapes, without softmax, mask and paging.
  double attention_products_ms = 0;

  double FloorMs() const { return matmul_ms + head_ms + kv_read_ms; }
};

// One thread uses it, and while it measures the machine has nothing else to do.
class FloorModel {
 public:
  explicit FloorModel(const FloorShape& shape);
  ~FloorModel();
  FloorModel(const FloorModel&) = delete;
  FloorModel& operator=(const FloorModel&) = delete;

  // Of `rows` new tokens behind `context` others.
  FloorTimes Measure(int rows, int context, int repeats, bool attention);
  // Reading so many bytes once, all threads each a part.
  double ReadMs(size_t bytes, int repeats);
  size_t layer_weight_bytes() const;

 private:
  PackedMatrix* Matrix(int n, int k);

  const FloorShape shape_;
  Backend* const backend_;
  std::vector<PackedMatrix*> layers_;
  PackedMatrix* head_;
};

}  // namespace carryover::bench
