// The CPU backend's table, its memory and its threads.
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "hwy/targets.h"
#include "kernels/cpu/backend.h"
#include "kernels/cpu/bf16_dot.h"

namespace carryover {

void FreeDeleter::operator()(void* p) const { std::free(p); }

AlignedBytes AllocateAligned(size_t bytes) {
  constexpr size_t kHuge = size_t{2} << 20;
  // Weights and KV are read from end to end; large pages keep that at memory speed.
  const size_t alignment = bytes >= kHuge / 2 ? kHuge : 64;
  // The system promises more memory than it has, and kills who uses it.
  static const size_t physical = static_cast<size_t>(std::max(sysconf(_SC_PHYS_PAGES), 0L)) *
                                 static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (bytes > physical) return nullptr;
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* const p = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
  if (p != nullptr && alignment == kHuge) (void)madvise(p, rounded, MADV_HUGEPAGE);
  return AlignedBytes(p);
}

void* Scratch::Reserve(size_t bytes, absl::Status* status) {
  if (bytes > size_ || data_ == nullptr) {
    data_.reset();
    size_ = 0;
    data_ = AllocateAligned(bytes + bytes / 4);
    if (data_ == nullptr) {
      if (status->ok()) {
        *status = absl::ResourceExhaustedError(absl::StrCat("no ", bytes, " bytes of scratch"));
      }
      return nullptr;
    }
    size_ = bytes + bytes / 4;
  }
  return data_.get();
}

namespace cpu {

bool PreferBf16Dot() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

namespace {

int AvailableCpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  const unsigned count = std::thread::hardware_concurrency();
  return count == 0 ? 1 : static_cast<int>(count);
}

#if defined(__x86_64__)
// Before the first kernel runs.
void ChooseTargets() {
  static const bool once = [] {
    if (!PreferBf16Dot()) hwy::DisableTargets(HWY_AVX3_DL);
    return true;
  }();
  (void)once;
}
#else
void ChooseTargets() {}
#endif

absl::StatusOr<Backend*> Create(const BackendOptions& options) {
  constexpr int kMaxThreads = 1024;
  if (options.threads < 0 || options.threads > kMaxThreads) {
    return absl::InvalidArgumentError(
        absl::StrCat("threads is ", options.threads, ", not within 0 and ", kMaxThreads));
  }
  ChooseTargets();
  return new Backend(options.threads == 0 ? AvailableCpus() : options.threads);
}

void Destroy(Backend* backend) { delete backend; }

// bf16 weights are widened in registers at next to no cost, on every CPU.
bool FastBf16(Backend* /*backend*/) { return true; }

absl::StatusOr<void*> Alloc(Backend* /*backend*/, size_t bytes) {
  AlignedBytes p = AllocateAligned(bytes);
  if (p == nullptr) return absl::ResourceExhaustedError(absl::StrCat("no ", bytes, " bytes"));
  return p.release();
}

void Release(Backend* /*backend*/, void* device) { std::free(device); }

void CopyBytes(void* to, const void* from, size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}
void Upload(Backend* /*backend*/, void* device, const void* host, size_t bytes) {
  CopyBytes(device, host, bytes);
}
void Download(Backend* /*backend*/, void* host, const void* device, size_t bytes) {
  CopyBytes(host, device, bytes);
}

absl::Status Sync(Backend* backend) {
  absl::Status status = std::move(backend->status);
  backend->status = absl::OkStatus();
  return status;
}

absl::StatusOr<void*> AllocHost(Backend* /*backend*/, size_t bytes) {
  // No huge pages: blocks are smaller, and a tier is filled bit by bit.
  constexpr size_t kAlignment = 64;
  void* const p = std::aligned_alloc(
      kAlignment, std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment));
  if (p == nullptr) return absl::ResourceExhaustedError(absl::StrCat("no ", bytes, " bytes"));
  return p;
}

void ReleaseHost(Backend* /*backend*/, void* host) { std::free(host); }

// Host and device are one, and every op is done when it returns: a copy is memcpy.
Copy* PrepareCopy(Backend* /*backend*/) { return nullptr; }
void StartCopy(Backend* /*backend*/, Copy* /*copy*/, void* to, const void* from, size_t bytes,
               CopyWay /*way*/) {
  CopyBytes(to, from, bytes);
}
absl::Status FinishCopy(Backend* /*backend*/, Copy* /*copy*/) { return absl::OkStatus(); }

int64_t ReplayedPasses(const Backend* /*backend*/) { return 0; }

void BeginPass(Backend* backend, const PassLayout& layout) { backend->layout = layout; }

}  // namespace

absl::Status CheckGeometry(const KvGeometry& g, int heads, int layer) {
  const bool good = g.layers > 0 && layer >= 0 && layer < g.layers && g.kv_heads > 0 &&
                    heads >= 0 && heads % g.kv_heads == 0 && g.head_dim > 0 &&
                    g.head_dim % 2 == 0 && g.head_dim <= 256 && g.block_tokens > 0 &&
                    g.block_tokens % 16 == 0 && (g.dtype == DType::kBF16 || g.dtype == DType::kF32);
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("unsupported attention: layer ", layer, " of ", g.layers, ", ", heads,
                   " heads over ", g.kv_heads, " of size ", g.head_dim, ", blocks of ",
                   g.block_tokens, " tokens of ", DTypeName(g.dtype)));
}

}  // namespace cpu

const Ops& CpuOps() {
  static constexpr Ops kOps = {
      .name = "cpu",
      .kv_format = cpu::kKvFormat,
      .create = cpu::Create,
      .destroy = cpu::Destroy,
      .fast_bf16 = cpu::FastBf16,
      .alloc = cpu::Alloc,
      .release = cpu::Release,
      .upload = cpu::Upload,
      .download = cpu::Download,
      .sync = cpu::Sync,
      .alloc_host = cpu::AllocHost,
      .release_host = cpu::ReleaseHost,
      .prepare_copy = cpu::PrepareCopy,
      .start_copy = cpu::StartCopy,
      .finish_copy = cpu::FinishCopy,
      .pack = cpu::Pack,
      .release_matrix = cpu::ReleaseMatrix,
      .matrix_bytes = cpu::MatrixBytes,
      .begin_pass = cpu::BeginPass,
      .embed = cpu::Embed,
      .rms_norm = cpu::RmsNorm,
      .matmul = cpu::MatMul,
      .matmul_gated = cpu::MatMulGated,
      .rope_write = cpu::RopeWrite,
      .read_kv = cpu::ReadKv,
      .copy_kv = cpu::CopyKv,
      .attention = cpu::Attention,
      .gather_rows = cpu::GatherRows,
      .divergence = cpu::Divergence,
      .sample = cpu::Sample,
      .replayed_passes = cpu::ReplayedPasses,
  };
  return kOps;
}

}  // namespace carryover
