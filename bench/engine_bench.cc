#include "bench/engine_bench.h"

#include <algorithm>
#include <future>
#include <utility>

#include "base/status_macros.h"
#include "bench/switched_ops.h"

namespace carryover::bench {
namespace {

// Notes when each token came. Events come from the engine thread alone, the answer is read after
// the end.
class TimedSink final : public CompletionSink {
 public:
  explicit TimedSink(double start) : start_(start) {}
  void OnStart(const std::string&, const Usage&, const CacheInfo&) override {}
  void OnPromptLogprobs(std::vector<PositionLogprobs>) override {}
  void OnDelta(ChoiceDelta delta) override {
    answer_.token_at.insert(answer_.token_at.end(), delta.token_ids.size(), Now());
  }
  void OnFinish(const ChoiceFinish&) override {}
  void OnDone(const CompletionDone& done) override {
    if (!answer_.token_at.empty()) answer_.first_ms = 1e3 * (answer_.token_at[0] - start_);
    answer_.usage = done.usage;
    status_ = done.status;
    ended_.set_value();
  }
  absl::StatusOr<TimedAnswer> Wait() {
    ended_.get_future().wait();
    RETURN_IF_ERROR(status_);
    return answer_;
  }

 private:
  const double start_;
  TimedAnswer answer_;
  absl::Status status_;
  std::promise<void> ended_;
};

}  // namespace

absl::Status EngineBench::Load(const std::string& version, const std::string& folder,
                               std::vector<std::string> carry_from) {
  LoadOptions options;
  options.model = "m";
  options.version = version;
  options.path = folder;
  options.carry_from = std::move(carry_from);
  options.auto_dtype = false;
  options.weights = settings_.weights;
  options.kv_dtype = settings_.kv_dtype;
  // One folder can play both parts.
  if (settings_.source == settings_.target) options.distinct = version;
  ASSIGN_OR_RETURN(const VersionInfo info, engine_->Load(options, nullptr));
  weight_bytes_ = info.weight_bytes;
  weights_dtype_ = info.weights_dtype;
  return absl::OkStatus();
}

absl::StatusOr<Engine*> EngineBench::Get(bool with_target) {
  if (engine_ == nullptr) {
    ASSIGN_OR_RETURN(config_, LoadModelConfig(settings_.source));
    kv_bytes_per_token_ = size_t{2} * config_.layers * config_.kv_heads * config_.head_dim *
                          DTypeBytes(settings_.kv_dtype);
    EngineOptions options;
    options.threads = settings_.threads;
    options.kv_cache_bytes =
        static_cast<int64_t>(kv_bytes_per_token_) * (*kv_tokens_ + 32 * options.block_tokens);
    options.max_waiting_tokens = int64_t{1} << 30;
    options.fidelity.sample_rate = options.fidelity.learning_sample_rate = 0;
    options.fidelity.hold_out_rate = 0;
    ASSIGN_OR_RETURN(engine_, Engine::Create(options, SwitchedOps(), nullptr));
    RETURN_IF_ERROR(Load("S", settings_.source, {}));
  }
  if (with_target && !has_target_) {
    RETURN_IF_ERROR(Load("T", settings_.target, {"S"}));
    has_target_ = true;
  }
  return engine_.get();
}

CompletionRequest EngineBench::Ask(const std::string& version, std::vector<int32_t> tokens,
                                   int max_tokens, ReuseMode reuse) {
  CompletionRequest request;
  request.version = version;
  request.tokens = std::move(tokens);
  request.reuse = reuse;
  request.store = false;
  request.judged = false;
  request.sampling.max_tokens = max_tokens;
  request.sampling.temperature = 0;
  request.sampling.ignore_eos = true;
  return request;
}

absl::StatusOr<std::vector<TimedAnswer>> EngineBench::Run(std::vector<CompletionRequest> requests) {
  std::vector<std::shared_ptr<TimedSink>> sinks;
  absl::Status submitted;
  HoldPasses(requests.size() > 1);
  for (CompletionRequest& request : requests) {
    auto sink = std::make_shared<TimedSink>(Now());
    const auto ticket = engine_->Submit(std::move(request), sink);
    submitted.Update(ticket.status());
    if (ticket.ok()) sinks.push_back(std::move(sink));
  }
  HoldPasses(false);
  std::vector<TimedAnswer> answers;
  for (const auto& sink : sinks) {
    auto answer = sink->Wait();
    submitted.Update(answer.status());
    if (answer.ok()) answers.push_back(*std::move(answer));
  }
  RETURN_IF_ERROR(submitted);
  return answers;
}

absl::Status EngineBench::Warm(const std::string& version, std::vector<int32_t> tokens) {
  const int wanted = static_cast<int>(tokens.size()) / EngineOptions().block_tokens;
  PrefixSpec prefix;
  prefix.version = version;
  prefix.tokens = std::move(tokens);
  ASSIGN_OR_RETURN(const WarmResult result, engine_->Warm(prefix, nullptr, nullptr));
  if (result.stored_tokens / EngineOptions().block_tokens < wanted) {
    return absl::ResourceExhaustedError("the KV cache is too small for the prefix");
  }
  return absl::OkStatus();
}

absl::Status EngineBench::Forget() { return engine_->Evict("", "").status(); }

}  // namespace carryover::bench
