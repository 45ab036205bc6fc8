#include "bench/switched_ops.h"

#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/bench_case.h"
#include "kernels/cpu/backend.h"

namespace carryover::bench {
namespace {

std::atomic<Launches> launches{Launches::kAll};
std::atomic<bool> hold{false};
bool skip = false;  // the pass; engine thread

std::atomic<bool> timing{false};
OpTimes times;  // engine thread while timing is on, the caller's when it is off

// Runs a launch, unless all of its pass is left out, and takes its time under its name.
template <typename Launch>
void Run(const char* name, const Launch& launch) {
  if (skip) return;
  if (!timing.load(std::memory_order_relaxed)) return launch();
  const double began = Now();
  launch();
  times[name] += 1e3 * (Now() - began);
}

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
    Run("rms_norm", [&] { CpuOps().rms_norm(b, x, weight, rows, dim, eps, out, type); });
  };
  ops.matmul = [](Backend* b, const void* x, const PackedMatrix* w, int rows, float* out,
                  bool accumulate) {
    const std::string name = timing ? absl::StrCat("matmul ", w->k, "x", w->n) : "";
    Run(name.c_str(), [&] { CpuOps().matmul(b, x, w, rows, out, accumulate); });
  };
  ops.rope_write = [](Backend* b, const RopeWriteArgs& args) {
    Run("rope_write", [&] { CpuOps().rope_write(b, args); });
  };
  ops.attention = [](Backend* b, const AttentionArgs& args) {
    Run("attention", [&] { CpuOps().attention(b, args); });
  };
  ops.matmul_gated = [](Backend* b, const void* x, const PackedMatrix* w, int rows, void* out) {
    const std::string name = timing ? absl::StrCat("matmul ", w->k, "x", w->n, ", gated") : "";
    Run(name.c_str(), [&] { CpuOps().matmul_gated(b, x, w, rows, out); });
  };
  ops.gather_rows = [](Backend* b, const float* x, absl::Span<const int32_t> rows, int dim,
                       float* out) {
    Run("gather_rows", [&] { CpuOps().gather_rows(b, x, rows, dim, out); });
  };
  ops.download = [](Backend* b, void* host, const void* device, size_t bytes) {
    Run("download", [&] { CpuOps().download(b, host, device, bytes); });
  };
  ops.sample = [](Backend* b, const SampleArgs& args) {
    Run("sample", [&] { CpuOps().sample(b, args); });
  };
  return ops;
}

}  // namespace

const Ops& SwitchedOps() {
  static const Ops ops = MakeOps();
  return ops;
}

void SetLaunches(Launches value) { launches.store(value, std::memory_order_relaxed); }

void StartTiming() {
  times.clear();
  timing = true;
}

OpTimes StopTiming() {
  timing = false;
  return std::exchange(times, {});
}

void HoldPasses(bool value) {
  hold.store(value);
  hold.notify_all();
}

}  // namespace carryover::bench
