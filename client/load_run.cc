#include "client/load_run.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "client/assemble.h"
#include "client/command.h"

namespace carryover {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kTick(200);

double SecondsBetween(SteadyClock::time_point from, SteadyClock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

// What the streams and the thread that starts them share.
struct Board {
  Mutex mutex;
  CondVar changed;
  std::set<std::shared_ptr<grpc::ClientContext>> live ABSL_GUARDED_BY(mutex);  // streams in flight
  std::vector<RequestRecord> records ABSL_GUARDED_BY(mutex);
  int64_t completed ABSL_GUARDED_BY(mutex) = 0;
  int64_t output_tokens ABSL_GUARDED_BY(mutex) = 0;
  bool interrupted ABSL_GUARDED_BY(mutex) = false;
  SteadyClock::time_point last_end ABSL_GUARDED_BY(mutex);
};

// One stream. Deletes itself when it is done. gRPC calls its methods one at a time.
class StreamCall : public grpc::ClientReadReactor<v1::CompleteEvent> {
 public:
  StreamCall(const LoadRunOptions& options, v1::CompleteRequest request, int64_t index,
             SteadyClock::time_point run_start, Board* board)
      : options_(options),
        board_(board),
        context_(std::make_shared<grpc::ClientContext>()),
        request_(std::move(request)),
        assembler_(1, request_.request_id()),
        run_start_(run_start) {
    record_.index = index;
    if (options.request_timeout > 0) {
      context_->set_deadline(std::chrono::system_clock::now() +
                             std::chrono::duration_cast<std::chrono::system_clock::duration>(
                                 std::chrono::duration<double>(options.request_timeout)));
    }
  }

  void Start(v1::Completions::Stub* stub) {
    start_ = SteadyClock::now();
    record_.start = SecondsBetween(run_start_, start_);
    stub->async()->CompleteStream(context_.get(), &request_, this);
    StartRead(&event_);
    StartCall();
  }

  const std::shared_ptr<grpc::ClientContext>& context() const { return context_; }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (sound_.ok()) {
      if (event_.has_delta() && event_.delta().token_ids_size() > 0) NoteTokens();
      sound_ = assembler_.Add(event_);
      if (!sound_.ok()) context_->TryCancel();
    }
    StartRead(&event_);
  }

  void OnDone(const grpc::Status& status) override {
    const auto now = SteadyClock::now();
    record_.e2el = SecondsBetween(start_, now);
    if (status.ok() && sound_.ok()) sound_ = CheckWhole();
    record_.broken = !sound_.ok();
    record_.completed = status.ok() && sound_.ok();
    record_.code = record_.broken ? "BROKEN_STREAM" : StatusCodeName(status.error_code());
    record_.error = record_.broken ? std::string(sound_.message()) : status.error_message();
    const v1::Usage& usage = assembler_.response().usage();
    record_.version = assembler_.response().version();
    record_.server_ttft = assembler_.response().timing().first_token();
    record_.server_e2el = assembler_.response().timing().total();
    record_.prompt_tokens = usage.prompt_tokens();
    record_.output_tokens = assembler_.response().choices(0).token_ids_size();
    record_.cached_tokens = usage.cached_tokens();
    record_.carried_tokens = usage.carried_tokens();
    record_.repaired_tokens = usage.repaired_tokens();
    record_.computed_tokens = usage.computed_tokens();
    if (options_.keep_tokens) {
      const auto& ids = assembler_.response().choices(0).token_ids();
      record_.token_ids.assign(ids.begin(), ids.end());
    }
    Board* board = board_;
    {
      // Signalled under the lock: the board may be gone as soon as it is given up.
      MutexLock lock(&board->mutex);
      board->live.erase(context_);
      board->completed += record_.completed ? 1 : 0;
      board->last_end = std::max(board->last_end, now);
      board->records.push_back(std::move(record_));
      board->changed.Signal();
    }
    delete this;
  }

 private:
  void NoteTokens() {
    const auto now = SteadyClock::now();
    if (record_.ttft == 0) {
      record_.ttft = SecondsBetween(start_, now);
    } else {
      record_.itl.push_back(SecondsBetween(last_, now));
    }
    last_ = now;
    MutexLock lock(&board_->mutex);
    board_->output_tokens += event_.delta().token_ids_size();
  }

  absl::Status CheckWhole() const {
    if (absl::Status status = assembler_.Complete(); !status.ok()) return status;
    const v1::CompleteResponse& response = assembler_.response();
    if (request_.has_tokens() && response.usage().prompt_tokens() != request_.tokens().ids_size()) {
      return absl::InternalError(absl::StrCat("mixed up: ", request_.tokens().ids_size(),
                                              " prompt tokens were sent, and usage counts ",
                                              response.usage().prompt_tokens()));
    }
    const int generated = response.choices(0).token_ids_size();
    if (options_.output_tokens > 0 && generated != options_.output_tokens) {
      return absl::InternalError(absl::StrCat("lost: ", options_.output_tokens,
                                              " tokens were asked for, and ", generated, " came"));
    }
    return absl::OkStatus();
  }

  const LoadRunOptions& options_;
  Board* board_;
  std::shared_ptr<grpc::ClientContext> context_;
  v1::CompleteRequest request_;
  v1::CompleteEvent event_;
  StreamAssembler assembler_;
  absl::Status sound_;
  SteadyClock::time_point run_start_, start_, last_;
  RequestRecord record_;
};

LoadProgress ProgressOf(const Board& board, double seconds, int64_t started)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(board.mutex) {
  LoadProgress p;
  p.seconds = seconds;
  p.started = started;
  p.in_flight = static_cast<int64_t>(board.live.size());
  p.completed = board.completed;
  p.failed = static_cast<int64_t>(board.records.size()) - board.completed;
  p.output_tokens = board.output_tokens;
  return p;
}

}  // namespace

LoadResult RunLoad(const LoadRunOptions& options,
                   const std::vector<std::unique_ptr<v1::Completions::Stub>>& stubs,
                   const std::function<v1::CompleteRequest(int64_t)>& make_request,
                   const std::function<void(const LoadProgress&)>& on_progress,
                   Interrupt* interrupt) {
  Board board;
  LoadResult result;
  const int interrupt_id = interrupt->Add([&board] {
    std::set<std::shared_ptr<grpc::ClientContext>> live;
    {
      MutexLock lock(&board.mutex);
      board.interrupted = true;
      live = board.live;
      board.changed.SignalAll();
    }
    // Not under the lock: gRPC may run a stream's OnDone right here.
    for (const auto& context : live) context->TryCancel();
  });
  const auto start = SteadyClock::now();
  auto next_tick = start + kTick;
  int64_t started = 0;
  while (true) {
    const auto now = SteadyClock::now();
    const double elapsed = SecondsBetween(start, now);
    bool start_one = false;
    LoadProgress progress;
    {
      MutexLock lock(&board.mutex);
      const bool over = started == options.requests || board.interrupted ||
                        (options.max_seconds > 0 && elapsed >= options.max_seconds);
      if (over && board.live.empty()) break;
      const auto in_flight = static_cast<int64_t>(board.live.size());
      const bool room = options.max_in_flight == 0 || in_flight < options.max_in_flight;
      const bool due =
          options.arrivals.empty() || (started < static_cast<int64_t>(options.arrivals.size()) &&
                                       elapsed >= options.arrivals[started]);
      start_one = !over && room && due;
      if (!start_one && now < next_tick) {
        auto until = next_tick;
        if (!over && room && !options.arrivals.empty()) {
          until = std::min(until,
                           start + std::chrono::duration_cast<SteadyClock::duration>(
                                       std::chrono::duration<double>(options.arrivals[started])));
        }
        board.changed.WaitUntil(&board.mutex, until);
      }
      progress = ProgressOf(board, elapsed, started);
    }
    if (start_one) {
      auto* call = new StreamCall(options, make_request(started), started, start, &board);
      {
        MutexLock lock(&board.mutex);
        board.live.insert(call->context());
        result.max_in_flight =
            std::max(result.max_in_flight, static_cast<int64_t>(board.live.size()));
        if (board.interrupted) call->context()->TryCancel();  // has not begun: nothing runs here
      }
      call->Start(stubs[started % stubs.size()].get());
      ++started;
    }
    if (now >= next_tick) {
      on_progress(progress);
      next_tick = now + kTick;
    }
  }
  interrupt->Remove(interrupt_id);
  MutexLock lock(&board.mutex);
  result.records = std::move(board.records);
  result.duration = result.records.empty() ? 0 : SecondsBetween(start, board.last_end);
  return result;
}

}  // namespace carryover
