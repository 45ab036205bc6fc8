#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "engine/engine.h"
#include "engine/waiting_sink.h"
#include "tests/gpu/device_bench.h"

namespace carryover {
namespace {

constexpr int kSuffix = 32;

// Ids of the smallest tokenizer, without its special ones.
void AppendTokens(int count, uint32_t seed, std::vector<int32_t>* tokens) {
  for (int i = 0; i < count; ++i) {
    seed = seed * 1664525 + 1013904223;
    tokens->push_back(10 + static_cast<int32_t>((seed >> 16) % 200));
  }
}

absl::StatusOr<CompletionDone> FirstToken(Engine* engine, const std::string& version,
                                          std::vector<int32_t> tokens, ReuseMode reuse) {
  CompletionRequest request;
  request.version = version;
  request.tokens = std::move(tokens);
  request.sampling.max_tokens = 1;
  request.sampling.temperature = 0;
  request.reuse = reuse;
  request.store = false;
  const auto sink = std::make_shared<WaitingSink>();
  RETURN_IF_ERROR(engine->Submit(std::move(request), sink).status());
  int done = 0;
  while (!sink->Wait(&done)) {
  }
  CompletionDone end = sink->answer().done;
  RETURN_IF_ERROR(end.status);
  return end;
}

}  // namespace

absl::Status BenchReuse(const BenchOptions& options, const std::string& folder,
                        const ModelShape& shape, const AddRow& add) {
  const int longest = *std::max_element(options.prefixes.begin(), options.prefixes.end());
  EngineOptions engine_options;
  // The prefix in the store, and a native run of it.
  engine_options.kv_cache_bytes = shape.KvBytesPerToken() * (int64_t{3} * longest + 4096);
  engine_options.step_tokens = 8192;
  engine_options.gate.when_learning_carry = true;
  engine_options.fidelity.sample_rate = engine_options.fidelity.learning_sample_rate = 0;
  engine_options.fidelity.hold_out_rate = 0;
  ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                   Engine::Create(engine_options, *options.ops, nullptr));
  LoadOptions load;
  load.model = shape.name;
  load.path = folder;
  load.auto_dtype = false;
  load.version = "S";
  RETURN_IF_ERROR(engine->Load(load, nullptr).status());
  load.version = "T";
  load.carry_from = {"S"};
  load.distinct = "control";
  RETURN_IF_ERROR(engine->Load(load, nullptr).status());

  for (const int prefix : options.prefixes) {
    std::vector<int32_t> cached;
    AppendTokens(prefix, prefix, &cached);
    PrefixSpec spec;
    spec.version = "S";
    spec.tokens = cached;
    RETURN_IF_ERROR(engine->Warm(spec, nullptr, nullptr).status());
    const struct {
      const char* bench;
      const char* version;
      ReuseMode reuse;
    } kinds[] = {{"ttft_native", "T", ReuseMode::kNativeOnly},
                 {"ttft_hit", "S", ReuseMode::kCarry},
                 {"ttft_carried", "T", ReuseMode::kCarry}};
    std::vector<double> times[3];
    // In turns, so that a clock that changes meets all three alike; the first turn does not count.
    for (int turn = 0; turn <= options.repeats; ++turn) {
      std::vector<int32_t> tokens = cached;
      AppendTokens(kSuffix, prefix + turn, &tokens);
      for (int i = 0; i < 3; ++i) {
        ASSIGN_OR_RETURN(const CompletionDone done,
                         FirstToken(engine.get(), kinds[i].version, tokens, kinds[i].reuse));
        const int reused = i == 0   ? done.usage.computed_tokens - kSuffix
                           : i == 1 ? done.usage.cached_tokens
                                    : done.usage.carried_tokens;
        if (reused != prefix) {
          return absl::InternalError(absl::StrCat(kinds[i].bench, ": ", reused, " tokens of ",
                                                  prefix, " came from where they should"));
        }
        if (turn > 0) times[i].push_back(1e3 * done.timing.first_token);
      }
    }
    for (int i = 0; i < 3; ++i) {
      std::sort(times[i].begin(), times[i].end());
      add({{"bench", kinds[i].bench},
           {"model", shape.name},
           {"layers", shape.layers},
           {"prefix", prefix},
           {"suffix", kSuffix},
           {"ms", times[i][times[i].size() / 2]}});
    }
    RETURN_IF_ERROR(engine->Evict(shape.name, "").status());
  }
  return absl::OkStatus();
}

}  // namespace carryover
