#include "bench/switched_ops.h"

#include <atomic>
#include <cstring>

namespace carryover::bench {
namespace {

std::atomic<Launches> launches{Launches::kAll};
std::atomic<bool> hold{false};
bool skip = false;  // the pass; engine thread

void BeginPass(Backend* backend, const PassLayout& layout) {
  hold.wait(true);
  const Launches now = launches.load(std::memory_order_relaxed);
  skip = now == Launches::kNone;
  if (now == Launches::kOnlyDecoding) {
    for (const SequenceRows& sequence : layout.sequences) skip = skip || sequence.row_count > 1;
  }
  CpuOps().begin_pass(backend, layout);
}

absl::StatusOr<void*> Alloc(Backend* backend, size_t bytes) {
  absl::StatusOr<void*> memory = CpuOps().alloc(backend, bytes);
  if (memory.ok()) std::memset(*memory, 0, bytes);
  return memory;
}

Ops MakeOps() {
  Ops ops = CpuOps();
  ops.alloc = Alloc;
  ops.begin_pass = BeginPass;
  // The one op in front of begin_pass.
  ops.embed = [](Backend* b, const void* table, DType type, absl::Span<const int32_t> tokens,
                 int dim, float* x) {
    if (launches.load(std::memory_order_relaxed) != Launches::kNone) {
      CpuOps().embed(b, table, type, tokens, dim, x);
    }
  };
  ops.rms_norm = [](Backend* b, const float* x, const float* weight, int rows, int dim, float eps,
                    void* out, DType type) {
    if (!skip) CpuOps().rms_norm(b, x, weight, rows, dim, eps, out, type);
  };
  ops.matmul = [](Backend* b, const void* x, const PackedMatrix* w, int rows, float* out,
                  bool accumulate) {
    if (!skip) CpuOps().matmul(b, x, w, rows, out, accumulate);
  };
  ops.rope_write = [](Backend* b, const RopeWriteArgs& args) {
    if (!skip) CpuOps().rope_write(b, args);
  };
  ops.attention = [](Backend* b, const AttentionArgs& args) {
    if (!skip) CpuOps().attention(b, args);
  };
  ops.silu_mul = [](Backend* b, const float* gate_up, int rows, int dim, void* out, DType type) {
    if (!skip) CpuOps().silu_mul(b, gate_up, rows, dim, out, type);
  };
  ops.gather_rows = [](Backend* b, const float* x, absl::Span<const int32_t> rows, int dim,
                       float* out) {
    if (!skip) CpuOps().gather_rows(b, x, rows, dim, out);
  };
  ops.download = [](Backend* b, void* host, const void* device, size_t bytes) {
    if (!skip) CpuOps().download(b, host, device, bytes);
  };
  return ops;
}

}  // namespace

const Ops& SwitchedOps() {
  static const Ops ops = MakeOps();
  return ops;
}

void SetLaunches(Launches value) { launches.store(value, std::memory_order_relaxed); }

void HoldPasses(bool value) {
  hold.store(value);
  hold.notify_all();
}

}  // namespace carryover::bench
