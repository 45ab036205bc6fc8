// The launches of a pass, held back until the pass is whole, and graphs of passes that launched the
// same: replaying one costs the host a single launch. Everything belongs to the engine thread.
#pragma once

#include <cstdint>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cuda/runtime.h"

namespace carryover::CARRYOVER_DEVICE {

// A call that launches kernels, with all that they are given.
class HeldLaunch {
 public:
  virtual ~HeldLaunch() = default;
  virtual absl::Status Run(cudaStream_t stream) const = 0;
  // Whether the other one launches the same kernels with the same arguments.
  virtual bool Equals(const HeldLaunch& other) const = 0;
};

// function(args..., stream), which returns nothing or a status.
template <typename F, typename... A>
class HeldCall final : public HeldLaunch {
 public:
  explicit HeldCall(F* function, A... args) : function_(function), args_(std::move(args)...) {}
  absl::Status Run(cudaStream_t stream) const override {
    const auto call = [&](const A&... args) { return function_(args..., stream); };
    if constexpr (std::is_void_v<decltype(std::apply(call, args_))>) {
      std::apply(call, args_);
      return absl::OkStatus();
    } else {
      return std::apply(call, args_);
    }
  }
  bool Equals(const HeldLaunch& other) const override {
    const auto* const same = dynamic_cast<const HeldCall*>(&other);
    return same != nullptr && same->function_ == function_ && same->args_ == args_;
  }

 private:
  F* const function_;
  const std::tuple<A...> args_;
};

using HeldLaunches = std::vector<std::unique_ptr<HeldLaunch>>;

class PassGraphs {
 public:
  ~PassGraphs();

  // Runs a pass's launches on the stream. The first pass of so many rows that launches them does so
  // one by one; the second makes a graph of them; all others replay that.
  absl::Status Run(int rows, HeldLaunches launches, cudaStream_t stream);
  int64_t replayed() const { return replayed_; }

 private:
  struct Entry {
    int rows = 0;
    HeldLaunches launches;
    bool captured = false;            // or it was tried
    cudaGraphExec_t graph = nullptr;  // null: one by one
    int64_t used = 0;                 // the last pass
  };
  Entry* Find(int rows, const HeldLaunches& launches);
  // Null where they cannot be captured; nothing ran then.
  cudaGraphExec_t Capture(const HeldLaunches& launches);

  std::vector<Entry> entries_;
  cudaStream_t capture_ = nullptr;  // a stream of its own: loaders copy on the others meanwhile
  int64_t passes_ = 0;
  int64_t replayed_ = 0;
};

}  // namespace carryover::CARRYOVER_DEVICE
