// A device with its stream, its scratch memory and its first error; kernels/ops.h says what the ops
// do. Compiled for NVIDIA's runtime and for the emulated device. Everything belongs to the engine
// thread except what kernels/ops.h lets any thread call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cuda/attention.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/pass_graph.h"
#include "kernels/cuda/runtime.h"
#include "kernels/ops.h"

#if defined(CARRYOVER_EMULATED)
#include "kernels/cuda/emulation/cublaslt.h"
#else
#include <cublasLt.h>
#endif

namespace carryover::CARRYOVER_DEVICE {

// OK, RESOURCE_EXHAUSTED for a lack of memory, INTERNAL otherwise. `what` names the call.
absl::Status ToStatus(cudaError_t error, const char* what);
absl::Status ToStatus(cublasStatus_t error, const char* what);

// cudaMalloc; without memory RESOURCE_EXHAUSTED with the figures. `what` it is for.
absl::Status AllocateDevice(void** p, size_t bytes, const char* what);

// Device memory that only grows, at a multiple of 256.
struct DeviceScratch {
  void* data = nullptr;
  size_t bytes = 0;
};

// Small inputs of kernels on their way from the host: pinned pages and as many on the device. What
// was sent stays until its mailbox is emptied, after a sync, so that nothing is overwritten on its
// way.
struct Mailbox {
  struct Page {
    char* host = nullptr;
    char* device = nullptr;
    size_t bytes = 0;
    size_t used = 0;
  };
  std::vector<Page> pages;
  bool drained = true;  // nothing was sent since the last sync

  void Empty() {
    for (Page& page : pages) page.used = 0;
  }
};

// A row count's class, and the algorithm that cuBLASLt found for it.
struct MatMulChoice {
  cublasLtMatmulAlgo_t algo;
  bool found = false;
};

// W as a checkpoint has it, (n, k), which column-major is (k, n): y^T = op(W) x^T.
struct DeviceMatrix {
  static constexpr int kClasses = 4;

  DType type = DType::kF32;
  bool gated = false;
  int n = 0;
  int k = 0;
  void* data = nullptr;
  float* bias = nullptr;  // (n) or null
  MatMulChoice choices[kClasses];
  uint64_t id = 0;  // no other matrix ever has it
};

struct DeviceBackend {
  ~DeviceBackend();

  // Launches function(args..., stream), or holds that back until the pass is whole.
  template <typename F, typename... A>
  void Do(F* function, A... args) {
    if (holding) {
      held.push_back(std::make_unique<HeldCall<F, A...>>(function, std::move(args)...));
    } else {
      Note(HeldCall<F, A...>(function, std::move(args)...).Run(stream));
    }
  }
  void Hold();
  // Launches what is held back; and holds nothing back any more.
  void Flush();

  // The first error since the last sync is kept.
  void Note(const absl::Status& error) { status.Update(error); }
  void* Reserve(DeviceScratch* scratch, size_t wanted);  // null, and noted, without memory
  void* SendBytes(const void* host, size_t bytes, Mailbox* mailbox);  // the same
  // To the device, until the next sync.
  template <typename T>
  const T* Send(absl::Span<const T> values) {
    return static_cast<const T*>(SendBytes(values.data(), values.size() * sizeof(T), &mailbox));
  }
  // Until the next pass.
  template <typename T>
  const T* SendForPass(absl::Span<const T> values) {
    return static_cast<const T*>(
        SendBytes(values.data(), values.size() * sizeof(T), &pass_mailbox));
  }

  cudaStream_t stream = nullptr;
  cudaStream_t copies_out = nullptr;  // of blocks, beside the ops
  cudaStream_t copies_in = nullptr;
  cublasLtHandle_t blas = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  absl::Status status;
  AttentionLimits limits;
  Mailbox mailbox;
  Mailbox pass_mailbox;
  DeviceScratch blas_workspace;
  DeviceScratch divergence;
  DeviceScratch attention;
  DeviceScratch edits;
  DeviceScratch gate_up;

  // Passes of single tokens are held back and run as a whole.
  bool graphs_wanted = true;
  bool holding = false;
  HeldLaunches held;
  PassGraphs graphs;

  // Of the pass.
  std::vector<SequenceRows> sequences;
  int rows = 0;
  bool decoding = false;  // each sequence has one row
  const RowPlace* places = nullptr;
  const int32_t* block_table = nullptr;
  struct Plan {
    int heads = 0;
    int window = 0;
    KvGeometry geometry;
    AttentionPlan plan;
    const AttentionItem* items = nullptr;  // on the device; null: not of this pass
  };
  std::vector<std::unique_ptr<Plan>> plans;
};

inline DeviceBackend* Of(Backend* backend) { return reinterpret_cast<DeviceBackend*>(backend); }

absl::StatusOr<PackedMatrix*> Pack(Backend* backend, absl::Span<const HostMatrix> parts,
                                   absl::Span<const float> bias, DType type, bool gated);
void ReleaseMatrix(Backend* backend, PackedMatrix* matrix);
size_t MatrixBytes(const PackedMatrix* matrix);
void MatMul(Backend* backend, const void* x, const PackedMatrix* w, int rows, float* out,
            bool accumulate);
void MatMulGated(Backend* backend, const void* x, const PackedMatrix* w, int rows, void* out);

void BeginPass(Backend* backend, const PassLayout& layout);
void Embed(Backend* backend, const void* table, DType type, absl::Span<const int32_t> tokens,
           int dim, float* x);
void RmsNorm(Backend* backend, const float* x, const float* weight, int rows, int dim, float eps,
             void* out, DType out_type);
void RopeWrite(Backend* backend, const RopeWriteArgs& args);
void ReadKv(Backend* backend, const ReadKvArgs& args);
void CopyKv(Backend* backend, const CopyKvArgs& args);
void Attention(Backend* backend, const AttentionArgs& args);
void GatherRows(Backend* backend, const float* x, absl::Span<const int32_t> rows, int dim,
                float* out);
void Divergence(Backend* backend, const DivergenceArgs& args);
void Sample(Backend* backend, const SampleArgs& args);

}  // namespace carryover::CARRYOVER_DEVICE
