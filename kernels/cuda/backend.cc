// The table of a device's ops, its memory and its errors.
#include "kernels/cuda/backend.h"

#include <algorithm>
#include <bit>
#include <string>

#include "absl/strings/str_cat.h"

namespace carryover {
namespace CARRYOVER_DEVICE {

absl::Status ToStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  std::string text = absl::StrCat(what, ": ", cudaGetErrorString(error));
#if defined(CARRYOVER_EMULATED)
  if (const std::string report = emulation::TakeReport(); !report.empty()) {
    absl::StrAppend(&text, ": ", report);
  }
#endif
  return error == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(text)
                                            : absl::InternalError(text);
}

absl::Status ToStatus(cublasStatus_t error, const char* what) {
  if (error == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": ", cublasLtGetStatusString(error)));
}

absl::Status AllocateDevice(void** p, size_t bytes, const char* what) {
  const cudaError_t error = cudaMalloc(p, std::max<size_t>(bytes, 1));
  if (error == cudaSuccess) return absl::OkStatus();
  *p = nullptr;
  cudaGetLastError();  // told here, and not once more by sync
  size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  return ToStatus(error, absl::StrCat(bytes, " bytes of device memory", what, ", of which ", free,
                                      " of ", total, " are free")
                             .c_str());
}

DeviceBackend::~DeviceBackend() {
  if (stream != nullptr) cudaStreamSynchronize(stream);
  for (const Mailbox* box : {&mailbox, &pass_mailbox}) {
    for (const Mailbox::Page& page : box->pages) {
      cudaFreeHost(page.host);
      cudaFree(page.device);
    }
  }
  for (const DeviceScratch* scratch :
       {&blas_workspace, &divergence, &attention, &edits, &gate_up}) {
    cudaFree(scratch->data);
  }
  if (preference != nullptr) cublasLtMatmulPreferenceDestroy(preference);
  if (blas != nullptr) cublasLtDestroy(blas);
  for (const cudaStream_t s : {stream, copies_out, copies_in}) {
    if (s != nullptr) cudaStreamDestroy(s);
  }
}

namespace {

// The backend, if any, that holds launches of this thread back.
thread_local DeviceBackend* holder = nullptr;

}  // namespace

void DeviceBackend::Hold() {
  Flush();
  holding = true;
  holder = this;
}

void DeviceBackend::Flush() {
  if (!holding) return;
  holding = false;
  holder = nullptr;
  if (!held.empty()) Note(graphs.Run(rows, std::exchange(held, {}), stream));
}

void* DeviceBackend::Reserve(DeviceScratch* scratch, size_t wanted) {
  if (wanted > scratch->bytes || scratch->data == nullptr) {
    if (scratch->data != nullptr) Flush();
    cudaFree(scratch->data);  // waits for who uses it
    *scratch = {};
    const size_t bytes = wanted + wanted / 4 + 256;
    if (const absl::Status grown = AllocateDevice(&scratch->data, bytes, " as scratch");
        !grown.ok()) {
      Note(grown);
      return nullptr;
    }
    scratch->bytes = bytes;
  }
  return scratch->data;
}

void* DeviceBackend::SendBytes(const void* host, size_t bytes, Mailbox* box) {
  constexpr size_t kPage = size_t{1} << 20;
  constexpr size_t kAlignment = 256;
  // Passes of about a size find their inputs at the same places.
  const size_t space = std::bit_ceil(std::max(kAlignment, bytes));
  Mailbox::Page* page = nullptr;
  for (Mailbox::Page& p : box->pages) {
    if (p.bytes - p.used >= space) page = &p;
  }
  if (page == nullptr) {
    Mailbox::Page fresh;
    fresh.bytes = std::max(kPage, space);
    void* pinned = nullptr;
    void* device = nullptr;
    absl::Status made =
        ToStatus(cudaHostAlloc(&pinned, fresh.bytes, cudaHostAllocDefault), "pinned memory");
    if (made.ok()) made = AllocateDevice(&device, fresh.bytes, " for inputs");
    if (!made.ok()) {
      cudaFreeHost(pinned);
      cudaGetLastError();
      Note(made);
      return nullptr;
    }
    fresh.host = static_cast<char*>(pinned);
    fresh.device = static_cast<char*>(device);
    box->pages.push_back(fresh);
    page = &box->pages.back();
  }
  if (bytes != 0) std::memcpy(page->host + page->used, host, bytes);
  char* const to = page->device + page->used;
  Note(ToStatus(cudaMemcpyAsync(to, page->host + page->used, bytes, cudaMemcpyHostToDevice, stream),
                "cudaMemcpyAsync of inputs"));
  page->used += space;
  box->drained = false;
  return to;
}

namespace {

absl::Status Open(DeviceBackend* backend) {
  int devices = 0;
  const cudaError_t counted = cudaGetDeviceCount(&devices);
  if (counted != cudaSuccess || devices == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("backend CUDA finds no device: ",
                     counted == cudaSuccess ? "there is none" : cudaGetErrorString(counted)));
  }
  auto status = ToStatus(cudaSetDevice(0), "cudaSetDevice");
  int major = 0, minor = 0;
  status.Update(ToStatus(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0),
                         "compute capability"));
  status.Update(ToStatus(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0),
                         "compute capability"));
  if (status.ok() && major < 8) {
    return absl::UnimplementedError(
        absl::StrCat("backend CUDA needs compute capability 8.0, and "
                     "the GPU has ",
                     major, ".", minor));
  }
  status.Update(ToStatus(cudaStreamCreateWithFlags(&backend->stream, cudaStreamNonBlocking),
                         "cudaStreamCreate"));
  for (cudaStream_t* const copies : {&backend->copies_out, &backend->copies_in}) {
    status.Update(ToStatus(cudaStreamCreateWithFlags(copies, cudaStreamNonBlocking),
                           "cudaStreamCreate of copies"));
  }
  status.Update(ToStatus(cublasLtCreate(&backend->blas), "cublasLtCreate"));
  status.Update(ToStatus(cublasLtMatmulPreferenceCreate(&backend->preference), "cuBLASLt"));
  int multiprocessors = 1, shared = 0;
  status.Update(
      ToStatus(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0),
               "number of multiprocessors"));
  status.Update(
      ToStatus(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0),
               "shared memory"));
  if (!status.ok()) return status;
  constexpr size_t kBlasWorkspace = size_t{32} << 20;
  constexpr size_t kAttentionScratch = size_t{256} << 20;
  backend->limits = {multiprocessors, static_cast<size_t>(shared), kAttentionScratch};
#if !defined(CARRYOVER_EMULATED)
  backend->Reserve(&backend->blas_workspace, kBlasWorkspace);
#else
  backend->Reserve(&backend->blas_workspace, kBlasWorkspace >> 12);
#endif
  const uint64_t workspace = backend->blas_workspace.bytes;
  backend->Note(ToStatus(cublasLtMatmulPreferenceSetAttribute(
                             backend->preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                             &workspace, sizeof(workspace)),
                         "cuBLASLt workspace"));
  return std::exchange(backend->status, absl::OkStatus());
}

absl::StatusOr<Backend*> Create(const BackendOptions& options) {
  auto backend = std::make_unique<DeviceBackend>();
  backend->graphs_wanted = options.graphs;
  if (absl::Status opened = Open(backend.get()); !opened.ok()) return opened;
  return reinterpret_cast<Backend*>(backend.release());
}

void Destroy(Backend* backend) { delete Of(backend); }

bool FastBf16(Backend* /*backend*/) { return true; }

absl::StatusOr<void*> Alloc(Backend* /*backend*/, size_t bytes) {
  void* p = nullptr;
  const absl::Status made = AllocateDevice(&p, bytes, "");
  if (!made.ok()) return made;
  return p;
}

void Release(Backend* /*backend*/, void* device) { cudaFree(device); }

// From memory that is not pinned the source is read before this returns, and the target is there
// for all that the stream does afterwards.
void Upload(Backend* backend, void* device, const void* host, size_t bytes) {
  if (bytes == 0) return;
  if (holder == Of(backend)) holder->Flush();  // else a loader's, of what no pass knows
  const cudaError_t error =
      cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, Of(backend)->stream);
  if (error != cudaSuccess) Of(backend)->Note(ToStatus(error, "upload"));
}

void Download(Backend* backend, void* host, const void* device, size_t bytes) {
  if (bytes == 0) return;
  Of(backend)->Flush();
  Of(backend)->Note(
      ToStatus(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, Of(backend)->stream),
               "download"));
}

absl::StatusOr<void*> AllocHost(Backend* /*backend*/, size_t bytes) {
  void* p = nullptr;
  const cudaError_t error = cudaHostAlloc(&p, std::max<size_t>(bytes, 1), cudaHostAllocDefault);
  if (error == cudaSuccess) return p;
  cudaGetLastError();
  return ToStatus(error, absl::StrCat(bytes, " bytes of pinned host memory").c_str());
}

void ReleaseHost(Backend* /*backend*/, void* host) { cudaFreeHost(host); }

struct DeviceCopy {
  cudaEvent_t before = nullptr;  // what the copy waits for
  cudaEvent_t after = nullptr;
  absl::Status status;  // the first error
};

DeviceCopy* CopyOf(Copy* copy) { return reinterpret_cast<DeviceCopy*>(copy); }

Copy* PrepareCopy(Backend* backend) {
  Of(backend)->Flush();
  auto copy = std::make_unique<DeviceCopy>();
  for (cudaEvent_t* const event : {&copy->before, &copy->after}) {
    copy->status.Update(
        ToStatus(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "event of a copy"));
  }
  if (copy->status.ok()) {
    copy->status = ToStatus(cudaEventRecord(copy->before, Of(backend)->stream), "cudaEventRecord");
  }
  return reinterpret_cast<Copy*>(copy.release());
}

void StartCopy(Backend* backend, Copy* copy, void* to, const void* from, size_t bytes,
               CopyWay way) {
  DeviceCopy& the = *CopyOf(copy);
  if (!the.status.ok() || bytes == 0) return;
  const bool out = way == CopyWay::kToHost;
  const cudaStream_t stream = out ? Of(backend)->copies_out : Of(backend)->copies_in;
  the.status = ToStatus(cudaStreamWaitEvent(stream, the.before, 0), "cudaStreamWaitEvent");
  if (!the.status.ok()) return;
  the.status =
      ToStatus(cudaMemcpyAsync(to, from, bytes,
                               out ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, stream),
               "copy of a block");
  // Also where the copy failed: nothing before it may be on its way any more.
  the.status.Update(ToStatus(cudaEventRecord(the.after, stream), "cudaEventRecord"));
}

absl::Status FinishCopy(Backend* /*backend*/, Copy* copy) {
  const std::unique_ptr<DeviceCopy> the(CopyOf(copy));
  if (the->after != nullptr) {
    the->status.Update(ToStatus(cudaEventSynchronize(the->after), "copy of a block"));
    cudaEventDestroy(the->after);
  }
  if (the->before != nullptr) cudaEventDestroy(the->before);
  return the->status;
}

absl::Status Sync(Backend* backend) {
  DeviceBackend& device = *Of(backend);
  device.Flush();
  device.Note(ToStatus(cudaStreamSynchronize(device.stream), "device"));
  device.Note(ToStatus(cudaGetLastError(), "launch"));
  device.mailbox.Empty();
  device.pass_mailbox.drained = true;
  return std::exchange(device.status, absl::OkStatus());
}

int64_t ReplayedPasses(const Backend* backend) {
  return reinterpret_cast<const DeviceBackend*>(backend)->graphs.replayed();
}

}  // namespace
}  // namespace CARRYOVER_DEVICE

#if defined(CARRYOVER_EMULATED)
const Ops& EmulatedCudaOps() {
#else
const Ops& CudaOps() {
#endif
  namespace device = CARRYOVER_DEVICE;
  static constexpr Ops kOps = {
#if defined(CARRYOVER_EMULATED)
    .name = "emulated",
#else
    .name = "cuda",
#endif
    .kv_format = kDeviceKvFormat,
    .create = device::Create,
    .destroy = device::Destroy,
    .fast_bf16 = device::FastBf16,
    .alloc = device::Alloc,
    .release = device::Release,
    .upload = device::Upload,
    .download = device::Download,
    .sync = device::Sync,
    .alloc_host = device::AllocHost,
    .release_host = device::ReleaseHost,
    .prepare_copy = device::PrepareCopy,
    .start_copy = device::StartCopy,
    .finish_copy = device::FinishCopy,
    .pack = device::Pack,
    .release_matrix = device::ReleaseMatrix,
    .matrix_bytes = device::MatrixBytes,
    .begin_pass = device::BeginPass,
    .embed = device::Embed,
    .rms_norm = device::RmsNorm,
    .matmul = device::MatMul,
    .matmul_gated = device::MatMulGated,
    .rope_write = device::RopeWrite,
    .read_kv = device::ReadKv,
    .copy_kv = device::CopyKv,
    .attention = device::Attention,
    .gather_rows = device::GatherRows,
    .divergence = device::Divergence,
    .sample = device::Sample,
    .replayed_passes = device::ReplayedPasses,
  };
  return kOps;
}

}  // namespace carryover
