// Drives a load test: starts streams as they are due and gathers what happened to each.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "carryover/v1/completions.grpc.pb.h"
#include "client/interrupt.h"
#include "client/load_stats.h"

namespace carryover {

struct LoadRunOptions {
  int64_t requests = 0;
  int max_in_flight = 0;         // 0: no bound
  std::vector<double> arrivals;  // seconds from the start, upwards; empty: as soon as there is room
  double max_seconds = 0;        // starts nothing after that; 0: no bound
  double request_timeout = 0;    // seconds; 0: none
  int output_tokens = 0;         // that each must bring exactly; 0: any number
  bool keep_tokens = false;      // in the records
};

struct LoadProgress {
  double seconds = 0;
  int64_t started = 0;
  int64_t in_flight = 0;
  int64_t completed = 0;
  int64_t failed = 0;
  int64_t output_tokens = 0;
};

struct LoadResult {
  std::vector<RequestRecord> records;  // one for each that was started, in the order of their ends
  double duration = 0;                 // seconds
  int64_t max_in_flight = 0;
};

// Runs it to the end, or until the interrupt, which cancels what is in flight. make_request gives
// the request of an index with a request_id that no other has; it is called from the caller's
// thread, and so is on_progress, about five times a second. stubs are used in turn.
LoadResult RunLoad(const LoadRunOptions& options,
                   const std::vector<std::unique_ptr<v1::Completions::Stub>>& stubs,
                   const std::function<v1::CompleteRequest(int64_t)>& make_request,
                   const std::function<void(const LoadProgress&)>& on_progress,
                   Interrupt* interrupt);

}  // namespace carryover
