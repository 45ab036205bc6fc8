// The part of the CUDA runtime that kernels/cuda uses, over the emulated device: same names, same
// order of arguments, in a namespace of its own. kernels/cuda/runtime.h chooses.
//
// Streams are lists of work that nobody does before it must be done: a stream, an event or the
// device is waited for. What runs too early therefore sees what is not there yet. The target of an
// asynchronous copy is NaN until the copy was waited for. One lock serves the whole device; any
// thread may call.
#pragma once

#include <cstddef>
#include <functional>
#include <source_location>
#include <string>

#include "kernels/cuda/emulation/block.h"

namespace carryover::emulated {

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorNotReady = 600,
  cudaErrorLaunchFailure = 719,
  cudaErrorStreamCaptureUnsupported = 900,
};
enum cudaMemcpyKind {
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4,
};
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
inline constexpr unsigned cudaStreamNonBlocking = 1;
inline constexpr unsigned cudaEventDisableTiming = 2;
inline constexpr unsigned cudaHostAllocDefault = 0;

using cudaStream_t = struct Stream*;
using cudaEvent_t = struct Event*;
using cudaGraph_t = struct Graph*;
using cudaGraphExec_t = struct GraphExec*;

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaMemGetInfo(size_t* free, size_t* total);

cudaError_t cudaMalloc(void** p, size_t bytes);
cudaError_t cudaFree(void* p);
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* p);

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);  // as a device that has had no time yet
cudaError_t cudaDeviceSynchronize();

// From memory that cudaHostAlloc did not give, the source is read at once, as CUDA does.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream);

// Kernels that a stream gets in between are not done but kept as a graph. Whatever else a stream or
// memory is asked for by then fails.
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph,
                                 unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);

cudaError_t cudaGetLastError();  // of the device; clears it
const char* cudaGetErrorString(cudaError_t error);

}  // namespace carryover::emulated

namespace carryover::emulation {

// Work at the end of a stream. `where` names it in reports.
void Enqueue(emulated::cudaStream_t stream, std::string where, std::function<std::string()> work);
void EnqueueKernel(emulated::cudaStream_t stream, const Shape& shape,
                   const std::source_location& site, std::function<void()> body);

// What went wrong first since the last call, in words.
std::string TakeReport();

}  // namespace carryover::emulation
