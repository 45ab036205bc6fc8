// The backend seam: everything that a model's forward pass asks of a device.
//
// An Ops is a constant table of functions over one Backend. All pointers named "device" are memory
// of that backend (plain memory on the CPU). Calls come from one thread, the engine thread, and run
// in order; only what a loader needs (alloc, release, upload, pack, release_matrix, fast_bf16) may
// also be called from another thread meanwhile, and is done when it returns; and what a tier needs
// (alloc_host, release_host, start_copy, finish_copy). Launches return
// nothing; what goes wrong surfaces at sync(). Shapes are written (outer, ..., inner), row-major,
// without padding.
//
// Batch invariance: a row's result never depends on which other rows are in the batch, on how a
// prompt was cut into chunks, or on the number of threads. On fp32 it holds bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/shapes.h"

namespace carryover {

// A tensor in host memory, as a checkpoint holds it: (rows, cols), alignment of 1.
struct HostMatrix {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
};

// One device with its threads or streams, its scratch memory and its first error.
struct Backend;

// Weights in the layout that the backend's matmul likes best, and its bias.
struct PackedMatrix;

// A copy between host and device beside the ops.
struct Copy;

enum class CopyWay : uint8_t { kToHost, kToDevice };

struct BackendOptions {
  int threads = 0;     // CPU: 0 means one a core
  bool graphs = true;  // a device that can replays passes which launch what others launched before
};

// What rope_write and attention need to know of a batch. Host pointers on every backend: a backend
// that needs them on its device uploads them once a pass (begin_pass).
struct PassLayout {
  absl::Span<const SequenceRows> sequences;
  absl::Span<const int32_t> positions;    // (rows)
  absl::Span<const int32_t> block_table;  // block ids; block b lies at kv_base + b * BlockBytes()
};

struct RopeWriteArgs {
  float* qkv = nullptr;  // device (rows, (heads + 2 kv_heads) * head_dim); q is rotated in place
  const float* q_norm = nullptr;  // device (head_dim) RMSNorm weight, or null
  const float* k_norm = nullptr;  // device (head_dim) RMSNorm weight, or null
  float norm_eps = 0;
  const float* cos_sin = nullptr;  // device (max_positions, 2, head_dim / 2)
  int heads = 0;
  int layer = 0;
  int table_begin = 0;      // into the pass's block table; added to that of each sequence
  void* kv_base = nullptr;  // device; blocks of `geometry`
  KvGeometry geometry;
};

struct ReadKvArgs {
  const float* cos_sin = nullptr;  // device (max_positions, 2, head_dim / 2)
  int layer = 0;
  int table_begin = 0;            // as above
  const void* kv_base = nullptr;  // device; blocks of `geometry`
  KvGeometry geometry;
  float* out = nullptr;            // device (rows, 2 kv_heads * head_dim): K of all heads, then V
  void* copy = nullptr;            // device, the same once more, of copy_type; or null
  DType copy_type = DType::kBF16;  // or kF32
};

// Block to[i] gets the layers [layer_begin, layer_end) of block from[i]: K and V, or of each only
// one. No block is both, nor twice in `to`.
struct CopyKvArgs {
  absl::Span<const int32_t> from;  // host, valid until sync(); block ids
  absl::Span<const int32_t> to;    // as many
  int layer_begin = 0;
  int layer_end = 0;
  void* kv_base = nullptr;  // device; blocks of `geometry`
  KvGeometry geometry;
  KvPlanes planes = KvPlanes::kBoth;
};

struct AttentionArgs {
  const float* qkv = nullptr;  // device, as rope_write left it
  int heads = 0;
  int layer = 0;
  float scale = 0;  // of the scores, usually 1 / sqrt(head_dim)
  int window = 0;   // a query at p sees keys p - window + 1 ... p; 0 means all up to p
  const void* kv_base = nullptr;
  KvGeometry geometry;
  void* out = nullptr;  // device (rows, heads * head_dim) of out_type
  DType out_type = DType::kF32;
};

struct DivergenceArgs {
  const float* native = nullptr;   // device (rows, vocab) raw logits z
  const float* carried = nullptr;  // device (rows, vocab) raw logits w
  int rows = 0;
  int vocab = 0;
  // Host, valid until sync(). Ids outside of the vocabulary and repeats are ignored.
  absl::Span<const int32_t> stop_tokens;
  absl::Span<const int32_t> answers;  // (rows), or empty; an id outside of the vocabulary: none
  DivergenceRow* out = nullptr;       // device (rows)
};

struct SampleArgs {
  float* logits = nullptr;  // device (rows, vocab); while a row is sampled its edits stand in it
  int vocab = 0;
  // Host, valid until sync(). Rows are unique. The edits of a row are of different tokens, all
  // within the vocabulary.
  absl::Span<const SampleSpec> rows;
  absl::Span<const LogitEdit> edits;
  SampledToken* out = nullptr;  // device (rows.size())
};

struct Ops {
  const char* name;       // "cpu", "cuda"
  const char* kv_format;  // names the order of values inside a layer of a block

  absl::StatusOr<Backend*> (*create)(const BackendOptions& options);
  void (*destroy)(Backend* backend);

  // Whether bf16 weights run at full speed here; where not, F32 is the better default.
  bool (*fast_bf16)(Backend* backend);

  // Memory. alloc fails with RESOURCE_EXHAUSTED; contents are undefined. Alignment is 64 bytes.
  absl::StatusOr<void*> (*alloc)(Backend* backend, size_t bytes);
  void (*release)(Backend* backend, void* device);
  void (*upload)(Backend* backend, void* device, const void* host, size_t bytes);
  void (*download)(Backend* backend, void* host, const void* device, size_t bytes);
  absl::Status (*sync)(Backend* backend);

  // Host memory that a device copies from and to at full speed. Fails with RESOURCE_EXHAUSTED.
  absl::StatusOr<void*> (*alloc_host)(Backend* backend, size_t bytes);
  void (*release_host)(Backend* backend, void* host);
  // A copy between memory of alloc_host and of the device that runs beside the ops, behind all that
  // was launched before prepare_copy. start_copy and finish_copy come from one thread, any;
  // finish_copy waits, frees the copy and tells how it went, also where it was never started. In
  // between nobody touches either memory.
  Copy* (*prepare_copy)(Backend* backend);
  void (*start_copy)(Backend* backend, Copy* copy, void* to, const void* from, size_t bytes,
                     CopyWay way);
  absl::Status (*finish_copy)(Backend* backend, Copy* copy);

  // Packs parts stacked on top of one another (fused QKV, fused gate and up) into weights of
  // `type`: y = x W^T + bias. All parts have the same cols. bias has sum(rows) values or is empty.
  // kI8: symmetric, with a scale for every 64 values of a row; where a backend has none,
  // INVALID_ARGUMENT. gated: for matmul_gated alone, of two parts with as many rows, gate and up.
  absl::StatusOr<PackedMatrix*> (*pack)(Backend* backend, absl::Span<const HostMatrix> parts,
                                        absl::Span<const float> bias, DType type, bool gated);
  void (*release_matrix)(Backend* backend, PackedMatrix* matrix);
  size_t (*matrix_bytes)(const PackedMatrix* matrix);

  // Once before the ops of a pass. The spans stay valid until sync().
  void (*begin_pass)(Backend* backend, const PassLayout& layout);

  // x (rows, dim) f32 = table[tokens]; table is device memory (vocab, dim) of `type`.
  void (*embed)(Backend* backend, const void* table, DType type, absl::Span<const int32_t> tokens,
                int dim, float* x);
  // out (rows, dim) of out_type = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019).
  void (*rms_norm)(Backend* backend, const float* x, const float* weight, int rows, int dim,
                   float eps, void* out, DType out_type);
  // out (rows, n) f32 = x (rows, k) W^T + bias, added to what out holds when accumulate is true. x
  // is of ActivationDType(the type that W was packed as); for kI8 it is rounded to 8 bits as W was,
  // and the sums over 64 values are exact.
  void (*matmul)(Backend* backend, const void* x, const PackedMatrix* w, int rows, float* out,
                 bool accumulate);
  // out (rows, n / 2) of x's type = silu(gate) * up, which are the halves of x W^T + bias.
  void (*matmul_gated)(Backend* backend, const void* x, const PackedMatrix* w, int rows, void* out);
  // QK norm where there are weights for it, rotary embedding in halves (Su et al. 2021, in the
  // rotate_half order of Hugging Face), then K and V into the blocks. With heads = 0 there are no
  // queries, and qkv is what read_kv gives.
  void (*rope_write)(Backend* backend, const RopeWriteArgs& args);
  // K and V of the rows of the pass, out of the blocks; K is turned back to position 0. With the
  // same cos_sin, rope_write with heads = 0 and no norms writes them as they were, up to rounding.
  void (*read_kv)(Backend* backend, const ReadKvArgs& args);
  // Needs no pass.
  void (*copy_kv)(Backend* backend, const CopyKvArgs& args);
  // Causal grouped-query attention of every row over its sequence's blocks.
  void (*attention)(Backend* backend, const AttentionArgs& args);
  // out (count, dim) f32 = x[rows].
  void (*gather_rows)(Backend* backend, const float* x, absl::Span<const int32_t> rows, int dim,
                      float* out);
  // Compares pairs of rows, each read twice. Of KL, JS and TV the CPU's are within 1e-13 and a
  // device's, however small, within 2e-6 of themselves (TV also 3e-10).
  void (*divergence)(Backend* backend, const DivergenceArgs& args);
  // Chooses a token a row: edits; temperature; top-k; top-p; min-p. kernels/host_sample.h has the
  // rules. Backends agree wherever what decides differs by more than 1e-5.
  void (*sample)(Backend* backend, const SampleArgs& args);

  // Passes that were replayed since the start (BackendOptions::graphs).
  int64_t (*replayed_passes)(const Backend* backend);
};

const Ops& CpuOps();
const Ops& CudaOps();          // kernels/cuda, where CARRYOVER_CUDA is defined
const Ops& EmulatedCudaOps();  // the same without a GPU (docs/cuda.md), where tests link it

}  // namespace carryover
