#include "server/sample_feed.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/rpc_status.h"

namespace carryover {
namespace {

constexpr int kMaxWatchers = 16;
constexpr size_t kQueued = 1024;  // samples that the thread has not seen
constexpr size_t kUnread = 256;   // events that a watcher has not read
constexpr auto kLossInterval = std::chrono::milliseconds(100);

bool Lets(const v1::WatchSamplesRequest& filter, const v1::FidelitySample& sample) {
  return (filter.model().empty() || filter.model() == sample.model()) &&
         (filter.source().empty() || filter.source() == sample.source()) &&
         (filter.target().empty() || filter.target() == sample.target()) &&
         (filter.task().empty() || filter.task() == sample.task());
}

}  // namespace

void ToProto(const FidelitySample& sample, v1::FidelitySample* out) {
  out->set_model(sample.labels.model);
  out->set_source(sample.labels.source);
  out->set_target(sample.labels.target);
  out->set_plan(sample.labels.plan);
  out->set_task(sample.labels.task);
  out->set_prefix_bucket(sample.labels.prefix_bucket);
  out->set_comparison(FidelityComparisonName(sample.labels.comparison));
  out->set_along(AlongName(sample.along));
  for (const PositionFidelity& from : sample.positions) {
    v1::PositionFidelity* position = out->add_positions();
    position->set_valid(from.valid);
    position->set_flip(from.flip);
    position->set_fragile(from.fragile);
    position->set_kl(from.kl);
    position->set_js(from.js);
    position->set_tv(from.tv);
    position->set_overlap(from.overlap);
    position->set_native_margin(from.native_margin);
    position->set_carried_margin(from.carried_margin);
    position->set_delta_range(from.delta_range);
    position->set_native_stop(from.native_stop);
    position->set_carried_stop(from.carried_stop);
  }
  out->set_valid(sample.valid);
  out->set_first_token_flip(sample.first_token_flip);
  out->set_continuation(ContinuationName(sample.continuation));
  out->set_divergence(sample.divergence);
  if (sample.stop_disagreement.has_value()) out->set_stop_disagreement(*sample.stop_disagreement);
  for (double value : sample.gate_values) out->add_gate_values(value);
}

SampleFeed::SampleFeed() : thread_([this] { Work(); }) {}

SampleFeed::~SampleFeed() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    wake_.Signal();
  }
  thread_.join();
}

void SampleFeed::Tell(const FidelitySample& sample) {
  if (watching_ == 0) return;
  MutexLock lock(&mutex_);
  if (queue_.size() >= kQueued) {
    ++missed_;
  } else {
    queue_.push_back(sample);
  }
  wake_.Signal();
}

grpc::ServerWriteReactor<v1::WatchedSample>* SampleFeed::Watch(
    grpc::CallbackServerContext* context, const v1::WatchSamplesRequest& filter,
    absl::Status refused, CallEnd on_end) {
  int64_t id;
  {
    MutexLock lock(&mutex_);
    if (refused.ok() && closed_) refused = absl::UnavailableError("the server is draining");
    if (refused.ok() && calls_ >= kMaxWatchers) {
      refused = absl::ResourceExhaustedError(
          absl::StrCat("samples are watched by ", kMaxWatchers, " others"));
    }
    id = next_id_++;
    ++calls_;
  }
  // One more than are ever pushed, so that it never finds the client too slow.
  auto call = Call::Make(
      context, kUnread + 1,
      [this, id] {
        MutexLock lock(&mutex_);
        gone_.push_back(id);
        wake_.Signal();
      },
      std::move(on_end),
      [this] {
        MutexLock lock(&mutex_);
        --calls_;
        ended_.SignalAll();
      });
  if (!refused.ok()) {
    call->Close(ToGrpc(WithDetails(refused)));
    return call.get();
  }
  {
    MutexLock lock(&mutex_);
    arrived_[id] = {filter, call, 0};
    ++watching_;
    wake_.Signal();
  }
  call->SendHeaders();
  return call.get();
}

void SampleFeed::Offer(Watcher* watcher, const v1::FidelitySample& sample) {
  if (!Lets(watcher->filter, sample)) return;
  if (watcher->call->waiting() >= kUnread) {
    ++watcher->dropped;
    return;
  }
  v1::WatchedSample event;
  *event.mutable_sample() = sample;
  event.set_dropped(std::exchange(watcher->dropped, 0));
  watcher->call->Push(std::move(event));
}

void SampleFeed::Work() {
  std::map<int64_t, Watcher> watchers;
  bool losses = false;  // that somebody is to be told of once he has read what he has
  while (true) {
    std::deque<FidelitySample> samples;
    std::vector<int64_t> gone;
    int64_t missed;
    bool closed;
    {
      MutexLock lock(&mutex_);
      const auto idle = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
        return queue_.empty() && arrived_.empty() && gone_.empty() && !stopping_ &&
               !(closed_ && !watchers.empty());
      };
      if (losses) {
        if (idle()) wake_.WaitUntil(&mutex_, std::chrono::steady_clock::now() + kLossInterval);
      } else {
        while (idle()) wake_.Wait(&mutex_);
      }
      samples.swap(queue_);
      gone.swap(gone_);
      missed = std::exchange(missed_, 0);
      closed = closed_ || stopping_;
      watchers.merge(arrived_);
      arrived_.clear();
      if (stopping_ && watchers.empty()) return;
    }
    for (const FidelitySample& sample : samples) {
      v1::FidelitySample message;
      ToProto(sample, &message);
      for (auto& [id, watcher] : watchers) Offer(&watcher, message);
    }
    losses = false;
    for (auto& [id, watcher] : watchers) {
      watcher.dropped += missed;
      if (watcher.dropped > 0 && watcher.call->waiting() == 0) {
        v1::WatchedSample event;
        event.set_dropped(std::exchange(watcher.dropped, 0));
        watcher.call->Push(std::move(event));
      }
      losses |= watcher.dropped > 0;
    }
    for (const int64_t id : gone) {
      const auto at = watchers.find(id);
      if (at == watchers.end()) continue;
      at->second.call->Close(grpc::Status(grpc::StatusCode::CANCELLED, "cancelled"));
      watchers.erase(at);
      --watching_;
    }
    if (!closed) continue;
    for (auto& [id, watcher] : watchers) {
      watcher.call->Close(ToGrpc(absl::UnavailableError("the server is draining")));
      --watching_;
    }
    watchers.clear();
    losses = false;
  }
}

void SampleFeed::Close(double wait_seconds) {
  const auto deadline = std::chrono::steady_clock::now() +
                        std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                            std::chrono::duration<double>(wait_seconds));
  MutexLock lock(&mutex_);
  closed_ = true;
  wake_.Signal();
  while (calls_ > 0 && ended_.WaitUntil(&mutex_, deadline)) {
  }
}

}  // namespace carryover
