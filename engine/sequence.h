// What the scheduler and the engine keep of a request while it is alive. Engine thread only.
//
// Three lengths explain a sequence: `reused` tokens were found in the store, `computed` tokens
// (reused ones included) have their K and V in blocks, and tokens.size() is all there is. A step
// runs tokens [computed, n); when n reaches tokens.size(), the last row's logits give the next
// token.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/kv_cache.h"
#include "engine/prefix_store.h"
#include "engine/provenance.h"
#include "engine/repair.h"
#include "engine/request.h"
#include "engine/reuse_policy.h"
#include "engine/sampler.h"
#include "engine/shadow.h"
#include "engine/stop_matcher.h"
#include "engine/tokenizer.h"
#include "engine/version.h"

namespace carryover {

struct ActiveRequest;

enum class SequenceState : uint8_t {
  kWaiting,  // in the queue, holds no blocks
  kLoading,  // waits for blocks of slower tiers
  kRunning,
  kFinished,
};

struct Sequence {
  ActiveRequest* request = nullptr;
  int choice = 0;
  SequenceState state = SequenceState::kWaiting;
  std::vector<int32_t> tokens;  // prompt, then output
  int reused = 0;
  int computed = 0;
  std::vector<TableBlock> table;   // over `computed` tokens, and room for the next step
  int offered = 0;                 // leading blocks that came from the store or were offered to it
  std::vector<PlannedBlock> plan;  // what of the table came from the store
  CarryPlan carry;                 // by which it was chosen
  int repaired = 0;                // tokens behind the reused ones that it would repair
  std::vector<BlockRepair> repairs;  // of the table, before anything else is computed
  size_t repairs_done = 0;
  bool forked = false;           // the table came from choice 0
  PrefixStore::LoadId load = 0;  // while kLoading
  std::optional<Lineage> lineage;
  std::optional<Sampler> sampler;
  std::optional<StopMatcher> matcher;
  std::unique_ptr<StreamDecoder> decoder;
  ChoiceFinish finish;
  SteadyTime last_token{};

  int length() const { return static_cast<int>(tokens.size()); }
  int output() const;  // generated tokens
  bool repairing() const { return repairs_done < repairs.size(); }
};

struct ActiveRequest {
  uint64_t ticket = 0;
  uint64_t arrival = 0;  // order among equal priorities
  CompletionRequest ask;
  int prompt_tokens = 0;
  std::shared_ptr<CompletionSink> sink;
  std::shared_ptr<const Version> version;
  std::shared_ptr<Model> weights;  // keeps them while the request runs
  std::shared_ptr<KvCache> cache;
  CacheRoot root;
  std::vector<std::unique_ptr<Sequence>> sequences;  // (n)
  std::vector<int32_t> stop_tokens;                  // its own and, unless ignored, the model's
  std::vector<CarrySource> sources;  // declared, most wanted first; fixed when the request came
  bool carried = false;  // its output depends on carried blocks; never goes back to false
  bool started = false;  // OnStart was sent
  bool cancelled = false;
  Usage usage;
  CacheInfo info;
  Timing timing;
  SteadyTime accepted{}, admitted{}, loaded{};  // loaded: its blocks were all there
  // Set once the request could have carried blocks, whether it does or not.
  std::optional<ShadowChoice> choice;
  std::vector<float> served_logits;  // (first tokens of choice 0, vocab), where choice->sampled
  std::vector<PositionLogprobs> prompt_logprobs;
  int64_t reserved_tokens = 0;  // of the queue's limit

  bool prefill_only() const { return ask.sampling.max_tokens == 0; }
};

inline int Sequence::output() const { return length() - request->prompt_tokens; }

}  // namespace carryover
