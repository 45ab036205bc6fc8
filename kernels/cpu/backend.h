// The CPU backend's state and its ops; kernels/ops.h says what each does. Everything here belongs
// to the engine thread except Pack, ReleaseMatrix, Alloc and Release, which any thread may call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/ops.h"

namespace carryover {

struct FreeDeleter {
  void operator()(void* p) const;
};
using AlignedBytes = std::unique_ptr<void, FreeDeleter>;

// 64-byte aligned, on huge pages where large; null when there is no memory.
AlignedBytes AllocateAligned(size_t bytes);

// Memory that only grows, so that a warmed-up pass allocates nothing.
class Scratch {
 public:
  // Contents are lost. Null, with *status set, when there is no memory.
  template <typename T>
  T* Get(size_t count, absl::Status* status) {
    return static_cast<T*>(Reserve(count * sizeof(T), status));
  }

 private:
  void* Reserve(size_t bytes, absl::Status* status);
  AlignedBytes data_;
  size_t size_ = 0;
};

struct Backend {
  explicit Backend(int threads) : pool(threads) {}

  ThreadPool pool;
  PassLayout layout;    // of the pass
  absl::Status status;  // the first error since the last sync
  Scratch activations;  // matmul: x in row tiles
  Scratch scales;       // matmul: (rows, groups), of x, for i8
  Scratch attention;    // attention: per-thread state
  Scratch partials;     // attention: results of splits
  Scratch items;        // attention: work list
};

// W in panels of kPanel rows (output features). Inside a panel, bf16 is (ceil(k / 2), kPanel, 2),
// so that one 32-bit lane holds two neighbours in k, i8 likewise (ceil(k / 4), kPanel, 4), and f32
// is (k, kPanel). Padding is zero. A panel of a gated matrix has kPanel / 2 rows of gate and then
// those of up.
struct PackedMatrix {
  static constexpr int kPanel = 32;
  static constexpr int kI8Group = 64;

  int I8Groups() const { return (k + kI8Group - 1) / kI8Group; }

  DType type = DType::kF32;
  bool gated = false;
  int n = 0;
  int k = 0;
  int panels = 0;
  size_t panel_bytes = 0;
  AlignedBytes data;
  std::unique_ptr<float[]> bias;  // (panels * kPanel), zero where there is none
  // i8 alone, each (panels, groups, kPanel), a group being kI8Group values of k: W = scale * i8,
  // and 128 times the sum of the group's i8, by which a product with x + 128 is too large.
  std::unique_ptr<float[]> scale;
  std::unique_ptr<int32_t[]> excess;
};

namespace cpu {

absl::StatusOr<PackedMatrix*> Pack(Backend* backend, absl::Span<const HostMatrix> parts,
                                   absl::Span<const float> bias, DType type, bool gated);
void ReleaseMatrix(Backend* backend, PackedMatrix* matrix);
size_t MatrixBytes(const PackedMatrix* matrix);

void Embed(Backend* backend, const void* table, DType type, absl::Span<const int32_t> tokens,
           int dim, float* x);
void RmsNorm(Backend* backend, const float* x, const float* weight, int rows, int dim, float eps,
             void* out, DType out_type);
void MatMul(Backend* backend, const void* x, const PackedMatrix* w, int rows, float* out,
            bool accumulate);
void MatMulGated(Backend* backend, const void* x, const PackedMatrix* w, int rows, void* out);
void RopeWrite(Backend* backend, const RopeWriteArgs& args);
void ReadKv(Backend* backend, const ReadKvArgs& args);
void CopyKv(Backend* backend, const CopyKvArgs& args);
void Attention(Backend* backend, const AttentionArgs& args);
void GatherRows(Backend* backend, const float* x, absl::Span<const int32_t> rows, int dim,
                float* out);
void Divergence(Backend* backend, const DivergenceArgs& args);
void Sample(Backend* backend, const SampleArgs& args);

// Where K or V of one layer and KV head of a block begins. The order inside is kKvFormat's.
//   K, bf16: (block_tokens / 16, head_dim / 2, 16, 2)   16 keys are 16 lanes; no sums across lanes
//   K, f32:  (block_tokens / 16, head_dim, 16)
//   V, bf16: (block_tokens / 2, head_dim, 2)            a lane holds two neighbouring tokens
//   V, f32:  (block_tokens, head_dim)
inline constexpr char kKvFormat[] = "k16t2-v2t-v1";

inline size_t HeadBytes(const KvGeometry& g) {
  return static_cast<size_t>(g.block_tokens) * g.head_dim * DTypeBytes(g.dtype);
}
inline size_t KvOffset(const KvGeometry& g, int32_t block, int layer, bool value, int kv_head) {
  return static_cast<size_t>(block) * g.BlockBytes() + static_cast<size_t>(layer) * g.LayerBytes() +
         (value ? g.PlaneBytes() : 0) + static_cast<size_t>(kv_head) * HeadBytes(g);
}

// INVALID_ARGUMENT when a geometry is not one that the kernels know. heads may be 0 where there are
// no queries.
absl::Status CheckGeometry(const KvGeometry& geometry, int heads, int layer);

}  // namespace cpu
}  // namespace carryover
