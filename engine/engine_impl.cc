#include "engine/engine_impl.h"

#include <algorithm>
#include <random>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/utf8.h"

namespace carryover {
namespace {

constexpr auto kDeadlineInterval = std::chrono::milliseconds(20);
constexpr auto kGateInterval = std::chrono::milliseconds(500);  // its cool-downs end

uint64_t RandomSeed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options, const Ops& ops,
                                                       EngineObserver* observer) {
  if (options.block_tokens <= 0 || options.block_tokens % 16 != 0) {
    return absl::InvalidArgumentError("block_tokens: must be a positive multiple of 16");
  }
  if (options.kv_cache_bytes <= 0) {
    return absl::InvalidArgumentError("kv_cache_bytes: must be positive");
  }
  if (options.max_running <= 0) return absl::InvalidArgumentError("max_running: must be positive");
  if (options.step_tokens <= 0) return absl::InvalidArgumentError("step_tokens: must be positive");
  RETURN_IF_ERROR(ValidateGateConfig(options.gate));
  BackendOptions backend_options;
  backend_options.threads = options.threads;
  backend_options.graphs = options.graphs;
  ASSIGN_OR_RETURN(Backend * backend, ops.create(backend_options));
  return std::unique_ptr<Engine>(new EngineImpl(options, ops, backend, observer));
}

EngineImpl::EngineImpl(const EngineOptions& options, const Ops& ops, Backend* backend,
                       EngineObserver* observer)
    : options_(options),
      ops_(ops),
      backend_(backend),
      observer_(observer),
      table_(std::make_shared<VersionTable>()) {
  SchedulerOptions scheduling;
  scheduling.max_running = options.max_running;
  scheduling.step_tokens = options.step_tokens;
  scheduling.min_carried_tokens = options.min_carried_tokens;
  gate_ = std::make_unique<Gate>(options.gate);
  carry_policy_ =
      std::make_unique<CarryPolicy>(options.fidelity, options.gate.ladder, &registry_, gate_.get());
  mapper_ = std::make_unique<KvMapper>(&ops, backend);
  shadows_ = std::make_unique<ShadowRunner>(options.fidelity, ops, backend, &registry_,
                                            mapper_.get(), ShadowHooks());
  scheduler_ = std::make_unique<Scheduler>(
      scheduling, &registry_, observer_, [this](Sequence* sequence) { OnStart(sequence); },
      [this](Sequence* sequence, absl::Status status) {
        EndRequest(sequence->request, std::move(status));
      },
      [this](Sequence* sequence, const ReusePlan& all, const ReuseByPlan& by_plan) {
        return carry_policy_->Choose(sequence->request, all, by_plan);
      },
      [this](const KvCache& cache) { return shadows_->Reclaim(cache); });
  thread_ = std::thread([this] { ThreadMain(); });
}

EngineImpl::~EngineImpl() {
  StartDrain();
  FinishDrain(0);
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    wake_.Signal();
  }
  thread_.join();
  ended_requests_.clear();
  shadows_.reset();
  mapper_.reset();
  caches_.clear();
  table_.reset();  // the weights go before the backend
  ops_.destroy(backend_);
}

std::shared_ptr<const VersionTable> EngineImpl::table() {
  MutexLock lock(&mutex_);
  return table_;
}

void EngineImpl::Post(std::function<void()> work) {
  MutexLock lock(&mutex_);
  PostLocked(std::move(work));
}

void EngineImpl::PostLocked(std::function<void()> work) {
  if (mailbox_.empty()) mailbox_since_ = std::chrono::steady_clock::now();
  mailbox_.push_back(std::move(work));
  wake_.Signal();
}

void EngineImpl::ThreadMain() {
  bool busy = false;
  std::vector<std::function<void()>> work;
  while (true) {
    bool poll = false;
    {
      MutexLock lock(&mutex_);
      while (!busy && mailbox_.empty() && !poll_tiers_ && !stopping_) {
        if (requests_.empty() && gate_->cells() == 0) {
          wake_.Wait(&mutex_);
        } else if (requests_.empty()) {
          wake_.WaitUntil(&mutex_, std::chrono::steady_clock::now() + kGateInterval);
          break;
        } else {
          // Something waits, for a tier or for blocks: look at the deadlines now and then.
          wake_.WaitUntil(&mutex_, std::chrono::steady_clock::now() + kDeadlineInterval);
          break;
        }
      }
      if (stopping_ && mailbox_.empty()) return;
      work.swap(mailbox_);
      poll = std::exchange(poll_tiers_, false);
    }
    for (const auto& item : work) item();
    work.clear();
    if (poll) {
      for (const auto& [layout, cache] : caches_) cache->store->Poll();
      shadows_->OnPoll();
    }
    busy = Step();
  }
}

absl::StatusOr<std::vector<int32_t>> EngineImpl::PromptTokens(
    const Version& version, const std::optional<std::string>& prompt, std::vector<int32_t> tokens,
    bool add_special_tokens) const {
  if (prompt.has_value()) {
    if (!tokens.empty()) return absl::InvalidArgumentError("tokens: give prompt or tokens");
    EncodeOptions options;
    options.add_special_tokens = add_special_tokens;
    auto encoded = version.tokenizer->Encode(*prompt, options);
    if (!encoded.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("prompt: ", encoded.status().message()));
    }
    tokens = *std::move(encoded);
  }
  for (int32_t token : tokens) {
    if (token < 0 || token >= version.config.vocab) {
      return absl::InvalidArgumentError(
          absl::StrCat("tokens: ", token, " is outside the vocabulary of ", version.config.vocab));
    }
  }
  if (tokens.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(prompt.has_value() ? "prompt" : "tokens", ": no token to start from"));
  }
  return tokens;
}

absl::Status EngineImpl::CheckRequest(const CompletionRequest& request, const Version& version,
                                      int prompt_tokens) const {
  const SamplingParams& sampling = request.sampling;
  const int vocab = version.config.vocab;
  if (sampling.max_tokens < 0) return absl::InvalidArgumentError("max_tokens: is negative");
  if (prompt_tokens + int64_t{sampling.max_tokens} > version.config.max_positions) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_tokens: prompt of ", prompt_tokens, " tokens and max_tokens of ", sampling.max_tokens,
        " are over the context of ", version.config.max_positions));
  }
  if (sampling.min_tokens < 0 || sampling.min_tokens > sampling.max_tokens) {
    return absl::InvalidArgumentError("min_tokens: must be between 0 and max_tokens");
  }
  if (sampling.n < 1) return absl::InvalidArgumentError("n: must be at least 1");
  for (const auto& [token, bias] : sampling.logit_bias) {
    if (token < 0 || token >= vocab) {
      return absl::InvalidArgumentError(
          absl::StrCat("logit_bias: token ", token, " is outside the vocabulary of ", vocab));
    }
  }
  for (int32_t token : sampling.stop_token_ids) {
    if (token < 0 || token >= vocab) {
      return absl::InvalidArgumentError(
          absl::StrCat("stop_token_ids: ", token, " is outside the vocabulary of ", vocab));
    }
  }
  for (const std::string& stop : sampling.stop) {
    if (stop.empty()) return absl::InvalidArgumentError("stop: a stop string is empty");
    if (FirstInvalidUtf8(stop) != stop.size()) {
      return absl::InvalidArgumentError("stop: a stop string is not valid UTF-8");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const Version>> EngineImpl::ChooseVersion(
    const VersionTable& table, const CompletionRequest& request,
    absl::string_view session_key) const {
  ASSIGN_OR_RETURN(const ModelEntry* model, table.FindModel(request.model));
  std::shared_ptr<const Version> version;
  if (request.version.empty()) {
    ASSIGN_OR_RETURN(version, RouteVersion(*model, session_key));
  } else {
    ASSIGN_OR_RETURN(version, FindVersion(*model, request.version));
  }
  if (version->weights == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("version: ", version->name, " is unloaded; only its caches are left"));
  }
  return version;
}

absl::StatusOr<uint64_t> EngineImpl::Submit(CompletionRequest request,
                                            std::shared_ptr<CompletionSink> sink) {
  auto active = std::make_unique<ActiveRequest>();
  active->accepted = std::chrono::steady_clock::now();
  const std::shared_ptr<const VersionTable> versions = table();

  // A request without a session is its own session; RandomSeed keeps one client's choice of ids
  // from steering the split.
  const uint64_t seed = request.sampling.seed.value_or(RandomSeed());
  const std::string session_key =
      request.session.empty() ? absl::StrCat("request:", RandomSeed())
                              : absl::StrCat("session:", request.tenant, ":", request.session);
  ASSIGN_OR_RETURN(active->version, ChooseVersion(*versions, request, session_key));
  const Version& version = *active->version;
  ASSIGN_OR_RETURN(
      std::vector<int32_t> tokens,
      PromptTokens(version, request.prompt, std::move(request.tokens), request.add_special_tokens));
  if (request.truncate_prompt_tokens > 0 &&
      tokens.size() > static_cast<size_t>(request.truncate_prompt_tokens)) {
    tokens.erase(tokens.begin(), tokens.end() - request.truncate_prompt_tokens);
    request.prompt.reset();  // echo shows what is left
  }
  if (tokens.size() > static_cast<size_t>(version.config.max_positions)) {
    return absl::InvalidArgumentError(absl::StrCat("prompt: ", tokens.size(),
                                                   " tokens are over the context of ",
                                                   version.config.max_positions));
  }
  const int prompt_tokens = static_cast<int>(tokens.size());
  RETURN_IF_ERROR(CheckRequest(request, version, prompt_tokens));
  const int64_t pool_tokens =
      options_.kv_cache_bytes / version.kv_layout.geometry.BlockBytes() * options_.block_tokens;
  if (prompt_tokens + request.sampling.max_tokens > pool_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("prompt: ", prompt_tokens, " tokens and max_tokens of ",
                     request.sampling.max_tokens, " are over the KV cache's ", pool_tokens));
  }

  const ModelEntry* model = *versions->FindModel(version.model);
  for (const std::string& name : version.carry_from) {
    auto source = FindVersion(*model, name);
    if (source.ok()) active->sources.push_back(version.Source((*source)->fingerprint));
  }
  active->weights = version.weights;
  active->prompt_tokens = prompt_tokens;
  active->root =
      RootKey(request.tenant, request.salt, version.tokenizer->sha256(), version.kv_layout.sha256);
  active->sink = std::move(sink);
  active->reserved_tokens = prompt_tokens;
  active->ask = std::move(request);
  active->info.target = version.name;
  active->info.gate = "none";

  const SamplingParams& sampling = active->ask.sampling;
  active->stop_tokens = sampling.stop_token_ids;
  if (!sampling.ignore_eos) {
    active->stop_tokens.insert(active->stop_tokens.end(), version.config.eos_ids.begin(),
                               version.config.eos_ids.end());
  }
  for (int choice = 0; choice < sampling.n; ++choice) {
    auto sequence = std::make_unique<Sequence>();
    sequence->request = active.get();
    sequence->choice = choice;
    sequence->tokens = tokens;
    sequence->sampler.emplace(sampling, seed, choice, tokens, active->stop_tokens);
    sequence->matcher.emplace(sampling.stop, sampling.include_stop);
    sequence->decoder = version.tokenizer->NewStreamDecoder(sampling.skip_special_tokens);
    // The decoder treats the start of a text apart (a leading space), and the output is no start.
    sequence->decoder->Add(tokens.back());
    sequence->finish.index = choice;
    active->sequences.push_back(std::move(sequence));
  }

  absl::string_view refused;
  {
    MutexLock lock(&mutex_);
    if (draining_) {
      refused = "draining";
    } else if (queued_requests_ >= options_.max_waiting_requests) {
      refused = "queue_requests";
    } else if (queued_tokens_ + prompt_tokens > options_.max_waiting_tokens &&
               queued_requests_ > 0) {
      refused = "queue_tokens";
    } else {
      const uint64_t ticket = next_ticket_++;
      active->ticket = active->arrival = ticket;
      ++queued_requests_;
      queued_tokens_ += prompt_tokens;
      ++alive_;
      ++alive_by_version_[{version.model, version.name}];
      // A function object has to be copyable, so the pointer travels bare.
      PostLocked([this, raw = active.release()] { Accept(std::unique_ptr<ActiveRequest>(raw)); });
      return ticket;
    }
  }
  if (observer_ != nullptr) observer_->OnRejected(refused);
  if (refused == "draining") return absl::UnavailableError("the server is draining");
  return absl::ResourceExhaustedError(
      refused == "queue_requests"
          ? absl::StrCat("the queue is full: ", options_.max_waiting_requests, " requests wait")
          : absl::StrCat("the queue is full: ", options_.max_waiting_tokens,
                         " prompt tokens wait"));
}

void EngineImpl::Cancel(uint64_t ticket) {
  Post([this, ticket] {
    const auto at = requests_.find(ticket);
    if (at != requests_.end()) at->second->cancelled = true;
  });
}

absl::StatusOr<std::shared_ptr<const Tokenizer>> EngineImpl::FindTokenizer(
    absl::string_view model_name, absl::string_view version_name) {
  const std::shared_ptr<const VersionTable> versions = table();
  ASSIGN_OR_RETURN(const ModelEntry* model, versions->FindModel(model_name));
  ASSIGN_OR_RETURN(
      const std::shared_ptr<const Version> version,
      version_name.empty() ? RouteVersion(*model, "") : FindVersion(*model, version_name));
  return version->tokenizer;
}

EngineSnapshot EngineImpl::snapshot() {
  MutexLock lock(&mutex_);
  EngineSnapshot snapshot = snapshot_;
  snapshot.waiting = queued_requests_;
  snapshot.waiting_tokens = queued_tokens_;
  snapshot.draining = draining_;
  return snapshot;
}

void EngineImpl::StartDrain() {
  MutexLock lock(&mutex_);
  draining_ = true;
  PostLocked([this] {
    shadows_->Close();
    slices_.Close();
  });
}

bool EngineImpl::FinishDrain(double timeout_seconds) {
  const auto deadline = std::chrono::steady_clock::now() +
                        std::chrono::duration_cast<SteadyTime::duration>(
                            std::chrono::duration<double>(std::max(0.0, timeout_seconds)));
  MutexLock lock(&mutex_);
  while (alive_ > 0 && ended_.WaitUntil(&mutex_, deadline)) {
  }
  const bool drained = alive_ == 0;
  if (!drained) {
    PostLocked([this] {
      while (!requests_.empty()) {
        EndRequest(requests_.begin()->second.get(),
                   absl::UnavailableError("the server is shutting down"));
      }
    });
    while (alive_ > 0) ended_.Wait(&mutex_);
  }
  return drained;
}

}  // namespace carryover
