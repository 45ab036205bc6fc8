#include "kernels/cuda/emulation/runtime.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "kernels/cuda/emulation/memory.h"

namespace carryover::emulated {

struct Work {
  std::string where;
  std::function<std::string()> run;  // empty, or what went wrong
};

struct Graph {
  std::vector<Work> work;
};
struct GraphExec {
  std::vector<Work> work;
};

struct Stream {
  std::deque<Work> work;
  uint64_t enqueued = 0;
  uint64_t done = 0;
  std::unique_ptr<Graph> capture;  // where its work goes meanwhile
};

struct Event {
  Stream* stream = nullptr;  // null until it is recorded
  uint64_t after = 0;        // done once its stream has done so much
};

}  // namespace carryover::emulated

namespace carryover::emulation {
namespace {

using emulated::Event;
using emulated::Stream;
using emulated::Work;

// Recursive: work of one stream waits for that of another.
struct Device {
  std::recursive_mutex mutex;
  std::set<Stream*> streams;
  Stream null_stream;
  std::map<uintptr_t, size_t> pinned;
  std::string report;
};

Device& Get() {
  static Device* const device = new Device;  // outlives all static objects
  return *device;
}

void Report(std::string what) {
  Device& device = Get();
  if (device.report.empty()) device.report = std::move(what);
}

void RunUntil(Stream* stream, uint64_t count) {
  while (stream->done < count && !stream->work.empty()) {
    Work work = std::move(stream->work.front());
    stream->work.pop_front();
    ++stream->done;
    // After an error a device does nothing any more, until somebody hears of it.
    if (!Get().report.empty()) continue;
    std::string report = work.run();
    if (!report.empty()) Report(work.where + report);
  }
}
void RunAll(Stream* stream) { RunUntil(stream, stream->enqueued); }

Stream* Resolve(Stream* stream) { return stream == nullptr ? &Get().null_stream : stream; }

void Append(Stream* stream, Work work) {
  stream = Resolve(stream);
  if (stream->capture != nullptr) {
    stream->capture->work.push_back(std::move(work));
    return;
  }
  stream->work.push_back(std::move(work));
  ++stream->enqueued;
}

// The thread that captures, and how many streams. What it may not do by then is told.
thread_local int capturing = 0;

bool MayNot(const char* call) {
  if (capturing == 0) return false;
  Report(std::string(call) + ": not while a stream is captured");
  return true;
}

bool IsPinned(const void* p, size_t bytes) {
  const auto& pinned = Get().pinned;
  const uintptr_t at = reinterpret_cast<uintptr_t>(p);
  auto found = pinned.upper_bound(at);
  if (found == pinned.begin()) return false;
  --found;
  return at - found->first <= found->second && bytes <= found->second - (at - found->first);
}

}  // namespace

void Enqueue(Stream* stream, std::string where, std::function<std::string()> work) {
  std::lock_guard<std::recursive_mutex> lock(Get().mutex);
  Append(stream, {std::move(where), std::move(work)});
}

void EnqueueKernel(Stream* stream, const Shape& shape, const std::source_location& site,
                   std::function<void()> body) {
  Enqueue(stream,
          "kernel of " + std::string(site.file_name()) + ":" + std::to_string(site.line()) + ": ",
          [shape, body = std::move(body)] {
            std::string report = RunKernel(shape, body);
            return report.empty() ? CheckGuards() : report;
          });
}

std::string TakeReport() {
  std::lock_guard<std::recursive_mutex> lock(Get().mutex);
  return std::exchange(Get().report, {});
}

}  // namespace carryover::emulation

namespace carryover::emulated {
namespace {

using emulation::Get;
using Lock = std::lock_guard<std::recursive_mutex>;

cudaError_t Result() { return Get().report.empty() ? cudaSuccess : cudaErrorLaunchFailure; }

bool NeedsDevice(cudaMemcpyKind kind, bool target) {
  return kind == cudaMemcpyDeviceToDevice ||
         kind == (target ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost);
}

}  // namespace

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 4;  // few: small inputs spread over all
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(emulation::kMaxShared);
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 8;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
  }
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = emulation::DeviceLimit();
  *free = *total - emulation::DeviceBytes();
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** p, size_t bytes) {
  {
    Lock lock(Get().mutex);
    if (emulation::MayNot("cudaMalloc")) return cudaErrorStreamCaptureUnsupported;
  }
  *p = emulation::AllocateDevice(bytes);
  return *p == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

cudaError_t cudaFree(void* p) {
  if (p == nullptr) return cudaSuccess;
  Lock lock(Get().mutex);
  cudaDeviceSynchronize();
  std::string report;
  if (!emulation::FreeDevice(p, &report)) return cudaErrorInvalidValue;
  if (!report.empty()) emulation::Report("cudaFree: " + report);
  return Result();
}

cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned /*flags*/) {
  {
    Lock lock(Get().mutex);
    if (emulation::MayNot("cudaHostAlloc")) return cudaErrorStreamCaptureUnsupported;
  }
  *p = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (*p == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*p, emulation::kPoison, bytes);
  Lock lock(Get().mutex);
  Get().pinned[reinterpret_cast<uintptr_t>(*p)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* p) {
  Lock lock(Get().mutex);
  cudaDeviceSynchronize();
  if (Get().pinned.erase(reinterpret_cast<uintptr_t>(p)) == 0) return cudaErrorInvalidValue;
  std::free(p);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  Lock lock(Get().mutex);
  *stream = new Stream;
  Get().streams.insert(*stream);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Lock lock(Get().mutex);
  emulation::RunAll(stream);
  Get().streams.erase(stream);
  delete stream;
  return Result();
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Lock lock(Get().mutex);
  if (emulation::MayNot("cudaStreamSynchronize")) return cudaErrorStreamCaptureUnsupported;
  emulation::RunAll(emulation::Resolve(stream));
  return Result();
}

cudaError_t cudaDeviceSynchronize() {
  Lock lock(Get().mutex);
  if (emulation::MayNot("cudaDeviceSynchronize")) return cudaErrorStreamCaptureUnsupported;
  for (Stream* stream : Get().streams) emulation::RunAll(stream);
  emulation::RunAll(&Get().null_stream);
  return Result();
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned /*flags*/) {
  // What the event stands for now; it may be recorded anew.
  emulation::Enqueue(stream, "", [recorded = *event] {
    if (recorded.stream != nullptr && Get().streams.count(recorded.stream) != 0) {
      emulation::RunUntil(recorded.stream, recorded.after);
    }
    return std::string();
  });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  *event = new Event;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Lock lock(Get().mutex);
  event->stream = emulation::Resolve(stream);
  event->after = event->stream->enqueued;
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Lock lock(Get().mutex);
  if (emulation::MayNot("cudaEventSynchronize")) return cudaErrorStreamCaptureUnsupported;
  if (event->stream != nullptr) emulation::RunUntil(event->stream, event->after);
  return Result();
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  Lock lock(Get().mutex);
  if (!Get().report.empty()) return cudaErrorLaunchFailure;
  // Asked once more it will be done: who polls is served, who relies on luck is not.
  const bool done = event->stream == nullptr || event->stream->done >= event->after;
  if (!done) emulation::RunUntil(event->stream, event->after);
  return done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  Lock lock(Get().mutex);
  if (emulation::MayNot("cudaMemcpyAsync")) return cudaErrorStreamCaptureUnsupported;
  if ((NeedsDevice(kind, true) && !emulation::IsDevice(to, bytes)) ||
      (NeedsDevice(kind, false) && !emulation::IsDevice(from, bytes))) {
    emulation::Report("cudaMemcpyAsync: " + std::to_string(bytes) +
                      " bytes that are not within an allocation");
    return cudaErrorInvalidValue;
  }
  stream = emulation::Resolve(stream);
  emulation::RunAll(stream);  // what may still use the target as it is
  std::shared_ptr<std::vector<char>> staged;
  if (!emulation::IsDevice(from, bytes) && !emulation::IsPinned(from, bytes)) {
    const char* const source = static_cast<const char*>(from);
    staged = std::make_shared<std::vector<char>>(source, source + bytes);
  }
  // From one place of an allocation to another, the target may be part of the source: not poisoned.
  const auto* const low = static_cast<const char*>(from);
  const auto* const target = static_cast<const char*>(to);
  if (target + bytes <= low || low + bytes <= target) std::memset(to, emulation::kPoison, bytes);
  emulation::Append(stream, {"cudaMemcpyAsync", [=] {
                               std::memmove(to, staged ? staged->data() : from, bytes);
                               return std::string();
                             }});
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  Lock lock(Get().mutex);
  if (!emulation::IsDevice(p, bytes)) {
    emulation::Report("cudaMemsetAsync: " + std::to_string(bytes) +
                      " bytes that are not within an allocation");
    return cudaErrorInvalidValue;
  }
  emulation::Append(stream, {"cudaMemsetAsync", [=] {
                               std::memset(p, value, bytes);
                               return std::string();
                             }});
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode /*mode*/) {
  Lock lock(Get().mutex);
  if (stream == nullptr || stream->capture != nullptr) return cudaErrorInvalidValue;
  stream->capture = std::make_unique<Graph>();
  ++emulation::capturing;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Lock lock(Get().mutex);
  *graph = nullptr;
  if (stream == nullptr || stream->capture == nullptr) return cudaErrorInvalidValue;
  --emulation::capturing;
  *graph = stream->capture.release();
  return Result();
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph,
                                 unsigned long long /*flags*/) {
  *made = new GraphExec{graph->work};
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  Lock lock(Get().mutex);
  for (const Work& work : graph->work) emulation::Append(stream, work);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

// The report stays for TakeReport, which a Status is made of.
cudaError_t cudaGetLastError() {
  Lock lock(Get().mutex);
  return Result();
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
  }
  return "unrecognized error code";
}

}  // namespace carryover::emulated
