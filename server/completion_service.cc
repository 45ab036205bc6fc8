#include "server/completion_service.h"

#include <openssl/rand.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/utf8.h"
#include "server/rpc_status.h"

namespace carryover {
namespace {

constexpr size_t kLargeText = 64 << 10;  // bytes; more is tokenized by a worker
constexpr int kTextWorkers = 2;
constexpr size_t kTextJobs = 1024;

std::string NewId() {
  char bytes[12];
  CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(bytes), sizeof(bytes)) == 1);
  return absl::StrCat("cmpl-", absl::BytesToHexString(absl::string_view(bytes, sizeof(bytes))));
}

std::optional<SteadyTime> Deadline(const grpc::CallbackServerContext& context) {
  const auto deadline = context.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return std::nullopt;
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(
             deadline - std::chrono::system_clock::now());
}

// What the two sinks share: the names that go into a response.
struct Names {
  std::string id;
  std::string request_id;
};

// By the id that the server made: the client has it too, and its own may say anything.
void LogEnd(const Names& names, const CompletionDone& done) {
  LogInfo("completion", {{"id", names.id},
                         {"version", done.cache.target},
                         {"code", absl::StatusCodeToString(done.status.code())},
                         {"prompt_tokens", done.usage.prompt_tokens},
                         {"cached_tokens", done.usage.cached_tokens},
                         {"carried_tokens", done.usage.carried_tokens},
                         {"completion_tokens", done.usage.completion_tokens},
                         {"first_token_ms", done.timing.first_token * 1e3},
                         {"total_ms", done.timing.total * 1e3}});
}

// Gathers a unary response. The response belongs to gRPC and lives until Close.
class UnarySink final : public CompletionSink {
 public:
  UnarySink(std::shared_ptr<UnaryCall> call, v1::CompleteResponse* response, Names names)
      : call_(std::move(call)), response_(response), names_(std::move(names)) {}

  void OnStart(const std::string& model, const Usage& usage, const CacheInfo& cache) override {
    response_->set_model(model);
  }
  void OnPromptLogprobs(std::vector<PositionLogprobs> logprobs) override {
    for (const PositionLogprobs& position : logprobs) {
      ToProto(position, response_->add_prompt_logprobs());
    }
  }
  void OnDelta(ChoiceDelta delta) override {
    v1::Choice* choice = At(delta.index);
    choice->mutable_text()->append(delta.text);
    choice->mutable_token_ids()->Add(delta.token_ids.begin(), delta.token_ids.end());
    for (const PositionLogprobs& position : delta.logprobs) {
      ToProto(position, choice->add_logprobs());
    }
  }
  void OnFinish(const ChoiceFinish& finish) override {
    ToProto(finish, At(finish.index)->mutable_finish());
  }
  void OnDone(const CompletionDone& done) override {
    LogEnd(names_, done);
    if (done.status.ok()) {
      response_->set_id(names_.id);
      response_->set_request_id(names_.request_id);
      response_->set_version(done.cache.target);
      ToProto(done.usage, response_->mutable_usage());
      ToProto(done.cache, response_->mutable_cache());
      ToProto(done.timing, response_->mutable_timing());
    }
    call_->Close(ToGrpc(WithDetails(done.status)));
  }

 private:
  v1::Choice* At(int index) {
    while (response_->choices_size() <= index) {
      response_->add_choices()->set_index(response_->choices_size() - 1);
    }
    return response_->mutable_choices(index);
  }

  const std::shared_ptr<UnaryCall> call_;
  v1::CompleteResponse* const response_;
  const Names names_;
};

class StreamSink final : public CompletionSink {
 public:
  StreamSink(std::shared_ptr<StreamCall<v1::CompleteEvent>> call, Names names)
      : call_(std::move(call)), names_(std::move(names)) {}

  void OnStart(const std::string& model, const Usage& usage, const CacheInfo& cache) override {
    v1::CompleteEvent event;
    v1::CompleteEvent::Started* started = event.mutable_started();
    started->set_id(names_.id);
    started->set_request_id(names_.request_id);
    started->set_model(model);
    started->set_version(cache.target);
    ToProto(usage, started->mutable_usage());
    ToProto(cache, started->mutable_cache());
    call_->Push(std::move(event));
  }
  void OnPromptLogprobs(std::vector<PositionLogprobs> logprobs) override {
    v1::CompleteEvent event;
    for (const PositionLogprobs& position : logprobs) {
      ToProto(position, event.mutable_prompt_logprobs()->add_positions());
    }
    call_->Push(std::move(event));
  }
  void OnDelta(ChoiceDelta delta) override {
    v1::CompleteEvent event;
    v1::CompleteEvent::Delta* out = event.mutable_delta();
    out->set_index(delta.index);
    out->set_text(std::move(delta.text));
    out->mutable_token_ids()->Add(delta.token_ids.begin(), delta.token_ids.end());
    for (const PositionLogprobs& position : delta.logprobs) ToProto(position, out->add_logprobs());
    call_->Push(std::move(event));
  }
  void OnFinish(const ChoiceFinish& finish) override {
    v1::CompleteEvent event;
    event.mutable_finished()->set_index(finish.index);
    ToProto(finish, event.mutable_finished()->mutable_finish());
    call_->Push(std::move(event));
  }
  void OnDone(const CompletionDone& done) override {
    LogEnd(names_, done);
    if (done.status.ok()) {
      v1::CompleteEvent event;
      ToProto(done.usage, event.mutable_done()->mutable_usage());
      ToProto(done.cache, event.mutable_done()->mutable_cache());
      ToProto(done.timing, event.mutable_done()->mutable_timing());
      call_->Push(std::move(event));
    }
    call_->Close(ToGrpc(WithDetails(done.status)));
  }

 private:
  const std::shared_ptr<StreamCall<v1::CompleteEvent>> call_;
  const Names names_;
};

// Runs a job here, or on a worker when its text is large.
void RunByTextSize(size_t bytes, WorkerPool* workers, const std::function<void()>& job,
                   const std::function<void(absl::Status)>& refuse) {
  if (bytes <= kLargeText) return job();
  if (!workers->Run(job))
    refuse(absl::ResourceExhaustedError("too many large prompts are waiting"));
}

}  // namespace

CompletionService::CompletionService(Engine* engine, PrometheusObserver* observer,
                                     const RequestLimits& limits, size_t stream_queue_events)
    : engine_(engine),
      observer_(observer),
      limits_(limits),
      stream_queue_events_(stream_queue_events),
      text_workers_(kTextWorkers, kTextJobs) {}

CallEnd CompletionService::CountAs(const char* method) {
  return [this, method](grpc::StatusCode code) {
    observer_->OnCall(method, static_cast<absl::StatusCode>(code));
  };
}

CallDone CompletionService::CountRunning() {
  {
    MutexLock lock(&mutex_);
    ++calls_;
  }
  return [this] {
    MutexLock lock(&mutex_);
    if (--calls_ == 0) ended_.SignalAll();
  };
}

void CompletionService::WaitForCalls(double seconds) {
  const auto deadline = std::chrono::steady_clock::now() +
                        std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                            std::chrono::duration<double>(seconds));
  MutexLock lock(&mutex_);
  while (calls_ > 0 && ended_.WaitUntil(&mutex_, deadline)) {
  }
}

absl::StatusOr<CompletionRequest> CompletionService::Read(const v1::CompleteRequest& in) const {
  if (!open_) return absl::UnavailableError("the server is still loading");
  ASSIGN_OR_RETURN(CompletionRequest out, FromProto(in, limits_));
  // A text can only be too long where it has more bytes than the limit has tokens.
  const size_t limit = static_cast<size_t>(limits_.max_prompt_tokens);
  if (limit > 0 && out.prompt.has_value() && out.truncate_prompt_tokens == 0 &&
      out.prompt->size() > limit) {
    ASSIGN_OR_RETURN(auto tokenizer, engine_->FindTokenizer(in.model(), in.version()));
    ASSIGN_OR_RETURN(auto tokens, tokenizer->Encode(
                                      *out.prompt, {.add_special_tokens = out.add_special_tokens}));
    if (tokens.size() > limit) {
      return FieldError("prompt", absl::StrCat("has ", tokens.size(), " tokens; at most ", limit,
                                               " are allowed"));
    }
  }
  return out;
}

void CompletionService::Begin(grpc::CallbackServerContext* context,
                              const v1::CompleteRequest& request, std::string id,
                              std::shared_ptr<CompletionSink> sink,
                              const std::shared_ptr<CancelHandle>& cancel) {
  absl::StatusOr<CompletionRequest> read = Read(request);
  if (!read.ok()) return sink->OnDone({.status = read.status()});
  read->id = std::move(id);
  read->deadline = Deadline(*context);
  const absl::StatusOr<uint64_t> ticket = engine_->Submit(*std::move(read), sink);
  if (!ticket.ok()) return sink->OnDone({.status = ticket.status()});
  cancel->Set(engine_, *ticket);
}

grpc::ServerUnaryReactor* CompletionService::Complete(grpc::CallbackServerContext* context,
                                                      const v1::CompleteRequest* request,
                                                      v1::CompleteResponse* response) {
  auto cancel = std::make_shared<CancelHandle>();
  auto call = UnaryCall::Make([cancel] { cancel->Cancel(); }, CountAs("Complete"), CountRunning());
  Names names{NewId(), request->request_id()};
  const std::string id = names.id;
  auto sink = std::make_shared<UnarySink>(call, response, std::move(names));
  RunByTextSize(
      request->prompt().size(), &text_workers_,
      [=, this] { Begin(context, *request, id, sink, cancel); },
      [sink](absl::Status status) { sink->OnDone({.status = std::move(status)}); });
  return call.get();
}

grpc::ServerWriteReactor<v1::CompleteEvent>* CompletionService::CompleteStream(
    grpc::CallbackServerContext* context, const v1::CompleteRequest* request) {
  auto cancel = std::make_shared<CancelHandle>();
  auto call = StreamCall<v1::CompleteEvent>::Make(
      context, stream_queue_events_, [cancel] { cancel->Cancel(); }, CountAs("CompleteStream"),
      CountRunning());
  Names names{NewId(), request->request_id()};
  const std::string id = names.id;
  auto sink = std::make_shared<StreamSink>(call, std::move(names));
  RunByTextSize(
      request->prompt().size(), &text_workers_,
      [=, this] { Begin(context, *request, id, sink, cancel); },
      [sink](absl::Status status) { sink->OnDone({.status = std::move(status)}); });
  return call.get();
}

grpc::ServerUnaryReactor* CompletionService::Tokenize(grpc::CallbackServerContext* context,
                                                      const v1::TokenizeRequest* request,
                                                      v1::TokenizeResponse* response) {
  auto call = UnaryCall::Make(nullptr, CountAs("Tokenize"), CountRunning());
  const auto run = [this, request, response]() -> absl::Status {
    ASSIGN_OR_RETURN(auto tokenizer, engine_->FindTokenizer(request->model(), request->version()));
    EncodeOptions options;
    if (request->has_add_special_tokens()) {
      options.add_special_tokens = request->add_special_tokens();
    }
    ASSIGN_OR_RETURN(auto tokens, tokenizer->Encode(request->text(), options));
    response->mutable_tokens()->Add(tokens.begin(), tokens.end());
    if (request->with_texts()) {
      for (const int32_t token : tokens) {
        response->add_texts(ReplaceInvalidUtf8(tokenizer->TokenText(token)));
      }
    }
    return absl::OkStatus();
  };
  RunByTextSize(
      request->text().size(), &text_workers_,
      [call, run] { call->Close(ToGrpc(WithDetails(run()))); },
      [call](const absl::Status& status) { call->Close(ToGrpc(WithDetails(status))); });
  return call.get();
}

grpc::ServerUnaryReactor* CompletionService::Detokenize(grpc::CallbackServerContext* context,
                                                        const v1::DetokenizeRequest* request,
                                                        v1::DetokenizeResponse* response) {
  auto call = UnaryCall::Make(nullptr, CountAs("Detokenize"), CountRunning());
  const auto run = [this, request, response]() -> absl::Status {
    ASSIGN_OR_RETURN(auto tokenizer, engine_->FindTokenizer(request->model(), request->version()));
    for (int i = 0; i < request->tokens_size(); ++i) {
      if (request->tokens(i) < 0 || request->tokens(i) >= tokenizer->vocab_size()) {
        return FieldError(absl::StrCat("tokens[", i, "]"),
                          absl::StrCat("is not in the vocabulary: ", request->tokens(i)));
      }
    }
    const bool skip = !request->has_skip_special_tokens() || request->skip_special_tokens();
    response->set_text(tokenizer->Decode(request->tokens(), skip));
    return absl::OkStatus();
  };
  RunByTextSize(
      static_cast<size_t>(request->tokens_size()), &text_workers_,
      [call, run] { call->Close(ToGrpc(WithDetails(run()))); },
      [call](const absl::Status& status) { call->Close(ToGrpc(WithDetails(status))); });
  return call.get();
}

}  // namespace carryover
