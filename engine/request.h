// A completion as the engine sees it: what is asked, and the events that answer it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "engine/carry_plan.h"
#include "engine/comparison_waiter.h"

namespace carryover {

using SteadyTime = std::chrono::steady_clock::time_point;

enum class ReuseMode : uint8_t {
  kAuto,        // as the gate (until there is one: EngineOptions::when_learning) says
  kNativeOnly,  // never a block that another version computed
  kCarry,       // carried blocks of declared sources are welcome
};

struct SamplingParams {
  int max_tokens = 16;    // 0: prefill only
  int min_tokens = 0;     // no stop token before so many
  float temperature = 1;  // 0: greedy
  float top_p = 1;        // (0, 1]
  int top_k = 0;          // 0: all
  float min_p = 0;        // [0, 1]
  float presence_penalty = 0;
  float frequency_penalty = 0;
  float repetition_penalty = 1;
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::optional<uint64_t> seed;  // drawn by the engine when absent
  int n = 1;
  std::vector<std::string> stop;
  std::vector<int32_t> stop_token_ids;
  bool include_stop = false;
  bool ignore_eos = false;
  std::optional<int> logprobs;         // how many alternatives; 0: only the chosen token's
  std::optional<int> prompt_logprobs;  // the same for prompt positions; nothing is reused then
  bool echo = false;
  bool skip_special_tokens = true;
};

struct CompletionRequest {
  std::string id;       // for people; need not be unique. Made by the server when absent
  std::string model;    // may be empty when there is just one
  std::string version;  // empty: the promoted one, by session
  std::string tenant;   // from the authenticated identity, never from the request's body
  std::string session;
  std::string salt;
  std::string task;
  std::optional<std::string> prompt;  // this, or
  std::vector<int32_t> tokens;        // this
  bool add_special_tokens = true;
  int truncate_prompt_tokens = 0;  // keep the last so many; 0: all
  SamplingParams sampling;
  ReuseMode reuse = ReuseMode::kAuto;
  bool store = true;
  int priority = 0;  // lower runs earlier
  std::optional<SteadyTime> deadline;
  // False: none of the gate's business, and never compared by chance.
  bool judged = true;
  CarryPlan carry_plan;  // where it is not judged and kCarry
  // Serves natively and compares all arms afterwards for somebody who waits; told once.
  std::shared_ptr<ComparisonWaiter> compared;
  std::vector<NamedPlan> compare_plans;  // then: ways of carrying, one arm each
  bool compare_control = false;          // that, with the native arm computed once more
  bool compare_probes = false;           // that, and over mixed caches
  // Right answers by generated position, whose margins are compared; -1 or missing: as the native
  // arm has it.
  std::vector<int32_t> compare_answers;
  int max_reused_tokens = 0;  // only so many in front may come from the store; 0: all
};

// prompt_tokens = cached + carried + repaired + computed, each token counted once.
struct Usage {
  int prompt_tokens = 0;
  int completion_tokens = 0;  // over all choices
  int cached_tokens = 0;      // native blocks of the target
  int carried_tokens = 0;     // blocks that another version had a hand in
  int repaired_tokens = 0;  // that could have been carried, and the target computed over the others
  int computed_tokens = 0;
};

// A run of the prompt that came from one place.
struct CacheSegment {
  std::string source;  // version name; for tainted blocks "T over S"; the target for fresh tokens
  std::string plan;    // "native", "direct", "tail(32)", "fresh"
  std::string tier;    // where the blocks lay: "device", "host"; "" for what is computed
  int tokens = 0;
};

struct CacheInfo {
  std::string target;  // version that serves
  std::vector<CacheSegment> segments;
  std::string gate;  // state of the cell; "none" while no gate judges
  bool shadowed = false;
};

// Seconds since the request was accepted, but for the first three, which are lengths.
struct Timing {
  double queue = 0;
  double load = 0;  // waiting for blocks of slower tiers
  double prefill = 0;
  double first_token = 0;
  double total = 0;
};

struct TokenLogprob {
  int32_t token = 0;
  std::string text;
  float logprob = 0;  // natural logarithm, of the raw logits
  int rank = 0;       // 1 is the most likely
};

struct PositionLogprobs {
  TokenLogprob chosen;
  std::vector<TokenLogprob> top;  // most likely first
};

struct ChoiceDelta {
  int index = 0;
  std::string text;                // valid UTF-8
  std::vector<int32_t> token_ids;  // includes a stop token
  std::vector<PositionLogprobs> logprobs;
};

enum class FinishReason : uint8_t { kNone, kStopToken, kStopString, kLength, kCancelled };

struct ChoiceFinish {
  int index = 0;
  FinishReason reason = FinishReason::kNone;
  std::string matched;         // the stop string
  int32_t matched_token = -1;  // the stop token
};

struct CompletionDone {
  absl::Status status;  // OK, CANCELLED, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, INTERNAL
  Usage usage;
  CacheInfo cache;
  Timing timing;
};

// Where a request's events go, all from the engine thread: OnStart, OnPromptLogprobs when asked
// for, deltas and finishes, then OnDone once and last. OnDone may come without any of the others.
// An implementation never blocks and never calls back into the engine but for Engine::Cancel.
class CompletionSink {
 public:
  virtual ~CompletionSink() = default;
  virtual void OnStart(const std::string& model, const Usage& usage, const CacheInfo& cache) = 0;
  // After each pass over the prompt: how many of its tokens have their KV now.
  virtual void OnPrefillProgress(int /*done_tokens*/, int /*prompt_tokens*/) {}
  // One a prompt token; the first has no logprob and is left out.
  virtual void OnPromptLogprobs(std::vector<PositionLogprobs> logprobs) = 0;
  virtual void OnDelta(ChoiceDelta delta) = 0;
  virtual void OnFinish(const ChoiceFinish& finish) = 0;
  virtual void OnDone(const CompletionDone& done) = 0;
};

}  // namespace carryover
