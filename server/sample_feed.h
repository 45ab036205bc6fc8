// Passes samples on to those who watch them. The engine only puts them into a bounded queue; a
// thread of the feed's own writes them out, and who reads too slowly loses samples and is told how
// many. Thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "base/mutex.h"
#include "carryover/v1/fidelity.pb.h"
#include "engine/fidelity_measures.h"
#include "server/call.h"

namespace carryover {

void ToProto(const FidelitySample& sample, v1::FidelitySample* out);

class SampleFeed {
 public:
  SampleFeed();
  // REQUIRES: no call is left, so the servers are shut down.
  ~SampleFeed();
  SampleFeed(const SampleFeed&) = delete;
  SampleFeed& operator=(const SampleFeed&) = delete;

  // Never waits.
  void Tell(const FidelitySample& sample);

  // A call that gets the samples that filter lets through, from now on. It ends at once when
  // `refused` is an error, when too many watch, and after Close. The feed outlives the call.
  grpc::ServerWriteReactor<v1::WatchedSample>* Watch(grpc::CallbackServerContext* context,
                                                     const v1::WatchSamplesRequest& filter,
                                                     absl::Status refused, CallEnd on_end);

  // Ends all calls with UNAVAILABLE, after what they have not read yet, and waits for that up to so
  // long. Later calls are refused.
  void Close(double wait_seconds);

 private:
  using Call = StreamCall<v1::WatchedSample>;
  struct Watcher {
    v1::WatchSamplesRequest filter;
    std::shared_ptr<Call> call;
    int64_t dropped = 0;  // not told yet
  };

  void Work();
  static void Offer(Watcher* watcher, const v1::FidelitySample& sample);

  std::atomic<int> watching_{0};  // nobody: samples need not be copied

  Mutex mutex_;
  CondVar wake_;   // the thread waits here
  CondVar ended_;  // a call has
  std::deque<FidelitySample> queue_ ABSL_GUARDED_BY(mutex_);
  int64_t missed_ ABSL_GUARDED_BY(mutex_) = 0;                  // found no room in queue_
  std::map<int64_t, Watcher> arrived_ ABSL_GUARDED_BY(mutex_);  // not with the thread yet
  std::vector<int64_t> gone_ ABSL_GUARDED_BY(mutex_);
  int64_t next_id_ ABSL_GUARDED_BY(mutex_) = 0;
  int calls_ ABSL_GUARDED_BY(mutex_) = 0;  // not done
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace carryover
