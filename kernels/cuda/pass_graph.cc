#include "kernels/cuda/pass_graph.h"

#include <algorithm>

#include "kernels/cuda/backend.h"

namespace carryover::CARRYOVER_DEVICE {
namespace {

constexpr size_t kMostEntries = 128;  // the one that was used longest ago makes room

absl::Status RunAll(const HeldLaunches& launches, cudaStream_t stream) {
  absl::Status status;
  for (const auto& launch : launches) status.Update(launch->Run(stream));
  return status;
}

}  // namespace

PassGraphs::~PassGraphs() {
  for (const Entry& entry : entries_) {
    if (entry.graph != nullptr) cudaGraphExecDestroy(entry.graph);
  }
  if (capture_ != nullptr) cudaStreamDestroy(capture_);
}

PassGraphs::Entry* PassGraphs::Find(int rows, const HeldLaunches& launches) {
  for (Entry& entry : entries_) {
    if (entry.rows == rows &&
        std::equal(launches.begin(), launches.end(), entry.launches.begin(), entry.launches.end(),
                   [](const auto& a, const auto& b) { return a->Equals(*b); })) {
      return &entry;
    }
  }
  return nullptr;
}

absl::Status PassGraphs::Run(int rows, HeldLaunches launches, cudaStream_t stream) {
  ++passes_;
  Entry* entry = Find(rows, launches);
  if (entry == nullptr) {
    if (entries_.size() >= kMostEntries) {
      const auto oldest =
          std::min_element(entries_.begin(), entries_.end(),
                           [](const Entry& a, const Entry& b) { return a.used < b.used; });
      if (oldest->graph != nullptr) cudaGraphExecDestroy(oldest->graph);
      entries_.erase(oldest);
    }
    const absl::Status status = RunAll(launches, stream);
    if (status.ok()) {
      entries_.push_back({.rows = rows, .launches = std::move(launches), .used = passes_});
    }
    return status;
  }
  entry->used = passes_;
  if (entry->graph != nullptr) {
    ++replayed_;
  } else if (!entry->captured) {
    // All kernels ran before: none has to be loaded now, which a capture would not bear.
    entry->captured = true;
    entry->graph = Capture(launches);
  }
  if (entry->graph == nullptr) return RunAll(launches, stream);
  return ToStatus(cudaGraphLaunch(entry->graph, stream), "cudaGraphLaunch");
}

cudaGraphExec_t PassGraphs::Capture(const HeldLaunches& launches) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t made = nullptr;
  bool good = capture_ != nullptr ||
              cudaStreamCreateWithFlags(&capture_, cudaStreamNonBlocking) == cudaSuccess;
  if (good && cudaStreamBeginCapture(capture_, cudaStreamCaptureModeThreadLocal) == cudaSuccess) {
    good = RunAll(launches, capture_).ok();
    good = cudaStreamEndCapture(capture_, &graph) == cudaSuccess && good;
    if (good && cudaGraphInstantiate(&made, graph, 0) != cudaSuccess) made = nullptr;
    if (graph != nullptr) cudaGraphDestroy(graph);
  }
  cudaGetLastError();  // of a capture that failed: the pass runs without
  return made;
}

}  // namespace carryover::CARRYOVER_DEVICE
