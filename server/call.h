// Reactors of gRPC's callback API, which turn a call into something that other threads push to.
// Both may be used from any thread, never block, and call Finish exactly once: when their producer
// closes them, and never from OnCancel. A producer that promised to Close must do so even when the
// client is gone, or the server cannot shut down.
//
// Lifetime: Make gives one reference to the caller and keeps one until gRPC is done with the call.
#pragma once

#include <grpcpp/grpcpp.h>

#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include "base/mutex.h"
#include "engine/engine.h"

namespace carryover {

// Told once, with a call's final code, just before the client can have it: what is counted here is
// right for who asks after his call.
using CallEnd = std::function<void(grpc::StatusCode)>;
// Told once when gRPC is done with a call.
using CallDone = std::function<void()>;

class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  // on_gone: called at most once, from a gRPC thread, when the client went away before Close. May
  // be null, as may on_end and on_done.
  static std::shared_ptr<UnaryCall> Make(std::function<void()> on_gone, CallEnd on_end,
                                         CallDone on_done = nullptr) {
    auto call = std::shared_ptr<UnaryCall>(
        new UnaryCall(std::move(on_gone), std::move(on_end), std::move(on_done)));
    call->self_ = call;
    return call;
  }

  // Ends the call; the response object is not touched from here on.
  void Close(grpc::Status status) {
    {
      MutexLock lock(&mutex_);
      if (closed_) return;
      closed_ = true;
    }
    if (on_end_) on_end_(status.error_code());
    Finish(std::move(status));
  }

 private:
  UnaryCall(std::function<void()> on_gone, CallEnd on_end, CallDone on_done)
      : on_gone_(std::move(on_gone)), on_end_(std::move(on_end)), on_done_(std::move(on_done)) {}

  void OnCancel() override {
    if (on_gone_) on_gone_();
  }
  void OnDone() override {
    if (on_done_) on_done_();
    self_.reset();
  }

  const std::function<void()> on_gone_;
  const CallEnd on_end_;
  const CallDone on_done_;
  std::shared_ptr<UnaryCall> self_;
  Mutex mutex_;
  bool closed_ GUARDED_BY(mutex_) = false;
};

// A server stream. Events wait in a bounded queue, one write is in flight at a time.
template <class Event>
class StreamCall final : public grpc::ServerWriteReactor<Event> {
 public:
  // limit: events that may wait; one more and the client is cancelled as too slow. on_gone: called
  // at most once, from a gRPC thread or from Push, when the client went away or was too slow.
  static std::shared_ptr<StreamCall> Make(grpc::CallbackServerContext* context, size_t limit,
                                          std::function<void()> on_gone, CallEnd on_end,
                                          CallDone on_done = nullptr) {
    auto call = std::shared_ptr<StreamCall>(
        new StreamCall(context, limit, std::move(on_gone), std::move(on_end), std::move(on_done)));
    call->self_ = call;
    return call;
  }

  // Lets the client know that the call was taken, before there is an event. REQUIRES: nothing was
  // pushed.
  void SendHeaders() { this->StartSendInitialMetadata(); }

  // Events that gRPC has not taken off our hands.
  size_t waiting() {
    MutexLock lock(&mutex_);
    return queue_.size() + (writing_ ? 1 : 0);
  }

  // False when nothing can be sent any more. What is pushed after Close is dropped.
  bool Push(Event event) {
    bool too_slow = false;
    {
      MutexLock lock(&mutex_);
      if (closed_ || gone_) return false;
      if (queue_.size() >= limit_) {
        too_slow = true;
        gone_ = true;
        holding_ = true;
        queue_.clear();
      } else {
        queue_.push_back(std::move(event));
      }
    }
    if (too_slow) {
      // The context lives as long as Finish was not called, which holding_ prevents. A write that
      // waits for the client's flow control fails by this.
      context_->TryCancel();
      if (on_gone_) on_gone_();
      MutexLock lock(&mutex_);
      holding_ = false;
    }
    Advance();
    return !too_slow;
  }

  // Ends the call once what was pushed is written.
  void Close(grpc::Status status) {
    {
      MutexLock lock(&mutex_);
      if (closed_) return;
      closed_ = true;
      status_ = std::move(status);
    }
    Advance();
  }

  // The client went away or was too slow.
  bool gone() {
    MutexLock lock(&mutex_);
    return gone_;
  }

 private:
  StreamCall(grpc::CallbackServerContext* context, size_t limit, std::function<void()> on_gone,
             CallEnd on_end, CallDone on_done)
      : context_(context),
        limit_(limit),
        on_gone_(std::move(on_gone)),
        on_end_(std::move(on_end)),
        on_done_(std::move(on_done)) {}

  // Starts what comes next. gRPC is called without the lock: writing_ and finished_ see to it that
  // only one thread gets there.
  void Advance() {
    bool write = false;
    grpc::Status status;
    {
      MutexLock lock(&mutex_);
      if (writing_ || holding_ || finished_) return;
      if (!queue_.empty()) {
        current_ = std::move(queue_.front());
        queue_.pop_front();
        writing_ = write = true;
      } else if (closed_) {
        finished_ = true;
        status = status_;
      } else {
        return;
      }
    }
    if (write) {
      this->StartWrite(&current_);
    } else {
      if (on_end_) on_end_(status.error_code());
      this->Finish(std::move(status));
    }
  }

  // The client is lost: nothing more is written, and the producer is told.
  void Lose() {
    {
      MutexLock lock(&mutex_);
      queue_.clear();
      if (gone_ || finished_) return;
      gone_ = true;
    }
    if (on_gone_) on_gone_();
  }

  void OnWriteDone(bool ok) override {
    {
      MutexLock lock(&mutex_);
      writing_ = false;
    }
    if (!ok) Lose();
    Advance();
  }
  void OnCancel() override { Lose(); }
  void OnDone() override {
    if (on_done_) on_done_();
    self_.reset();
  }

  grpc::CallbackServerContext* const context_;
  const size_t limit_;
  const std::function<void()> on_gone_;
  const CallEnd on_end_;
  const CallDone on_done_;
  std::shared_ptr<StreamCall> self_;

  Mutex mutex_;
  std::deque<Event> queue_ GUARDED_BY(mutex_);
  Event current_;  // owned by gRPC while writing_
  bool writing_ GUARDED_BY(mutex_) = false;
  bool holding_ GUARDED_BY(mutex_) = false;   // no Finish now
  bool gone_ GUARDED_BY(mutex_) = false;      // the client is
  bool closed_ GUARDED_BY(mutex_) = false;    // the producer has nothing more
  bool finished_ GUARDED_BY(mutex_) = false;  // Finish was called
  grpc::Status status_ GUARDED_BY(mutex_);
};

// Cancels a request of the engine that may not have its ticket yet. Thread-safe.
class CancelHandle {
 public:
  void Set(Engine* engine, uint64_t ticket) {
    bool now;
    {
      MutexLock lock(&mutex_);
      engine_ = engine;
      ticket_ = ticket;
      now = wanted_;
    }
    if (now) engine->Cancel(ticket);
  }
  void Cancel() {
    Engine* engine;
    uint64_t ticket;
    {
      MutexLock lock(&mutex_);
      wanted_ = true;
      engine = engine_;
      ticket = ticket_;
    }
    if (engine != nullptr) engine->Cancel(ticket);
  }

 private:
  Mutex mutex_;
  Engine* engine_ GUARDED_BY(mutex_) = nullptr;
  uint64_t ticket_ GUARDED_BY(mutex_) = 0;
  bool wanted_ GUARDED_BY(mutex_) = false;
};

}  // namespace carryover
