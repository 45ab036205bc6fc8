// Prefill, decode, time to first token, and what a step costs beside its ops: through the engine,
// without a server.
#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "bench/engine_bench.h"
#include "bench/floor_model.h"
#include "bench/switched_ops.h"

namespace carryover::bench {
namespace {

using Json = nlohmann::json;

// Sets the launches for its scope.
struct Switched {
  explicit Switched(Launches launches) { SetLaunches(launches); }
  ~Switched() { SetLaunches(Launches::kAll); }
};

// Multiply-adds of the layers' products for one token, times two.
double LayerFlops(const ModelConfig& c) {
  const double qkv = (c.heads + 2.0 * c.kv_heads) * c.head_dim;
  return 2.0 * c.layers * c.hidden *
         (qkv + static_cast<double>(c.heads) * c.head_dim + 3.0 * c.intermediate);
}

absl::StatusOr<Json> Prefill(EngineBench* bench, int wanted) {
  RETURN_IF_ERROR(bench->Get(false).status());
  const int tokens = std::min(wanted, bench->config().max_positions - 1);
  std::vector<double> times;
  for (int i = -1; i < bench->settings().repeats; ++i) {
    ASSIGN_OR_RETURN(
        const std::vector<TimedAnswer> answers,
        bench->Run({EngineBench::Ask("S", SampleTokens(tokens, bench->config().vocab, i + 1), 1,
                                     ReuseMode::kNativeOnly)}));
    if (answers[0].usage.computed_tokens != tokens) return absl::InternalError("not all computed");
    if (i >= 0) times.push_back(answers[0].first_ms);
  }
  Json out = {{"tokens", tokens}};
  AddQuartiles("first_token_ms", times, &out);
  const double seconds = QuartilesOf(times).median * 1e-3;
  out["tokens_per_s"] = tokens / seconds;
  out["products_gflops"] = LayerFlops(bench->config()) * tokens / seconds * 1e-9;
  return out;
}

// Where the time of a cold prompt goes: means, so that they add up.
absl::StatusOr<Json> PrefillProfile(EngineBench* bench, int wanted) {
  RETURN_IF_ERROR(bench->Get(false).status());
  const int tokens = std::min(wanted, bench->config().max_positions - 1);
  const int repeats = bench->settings().repeats;
  double whole = 0;
  std::map<std::string, double> ops;
  for (int i = -1; i < repeats; ++i) {
    StartTiming();
    ASSIGN_OR_RETURN(
        const std::vector<TimedAnswer> answers,
        bench->Run({EngineBench::Ask("S", SampleTokens(tokens, bench->config().vocab, i + 1), 1,
                                     ReuseMode::kNativeOnly)}));
    const OpTimes times = StopTiming();
    if (i < 0) continue;
    whole += answers[0].first_ms / repeats;
    for (const auto& [name, ms] : times) ops[name] += ms / repeats;
  }
  double rest = whole;
  for (const auto& [name, ms] : ops) rest -= ms;
  ops["outside of ops"] = rest;
  return Json{{"tokens", tokens}, {"first_token_ms", whole}, {"ops_ms", ops}};
}

// The times between steps in which all requests run, milliseconds. Each request stands behind
// `context` tokens of its own, which nobody computed.
absl::StatusOr<std::vector<double>> DecodeSteps(EngineBench* bench, int batch, int context,
                                                int steps, Launches launches) {
  const int block = EngineOptions().block_tokens;
  const int prefix = std::max(block, context / block * block);
  std::vector<CompletionRequest> requests;
  {
    const Switched switched(Launches::kOnlyDecoding);
    for (int i = 0; i < batch; ++i) {
      std::vector<int32_t> tokens = SampleTokens(prefix + 1, bench->config().vocab, 100 + i);
      RETURN_IF_ERROR(
          bench->Warm("S", std::vector<int32_t>(tokens.begin(), tokens.begin() + prefix)));
      requests.push_back(
          EngineBench::Ask("S", std::move(tokens), steps + 4, ReuseMode::kNativeOnly));
    }
  }
  const Switched switched(launches);
  ASSIGN_OR_RETURN(const std::vector<TimedAnswer> answers, bench->Run(std::move(requests)));
  double all_run = 0, first_ends = 1e300;
  for (const TimedAnswer& answer : answers) {
    if (answer.usage.cached_tokens != prefix) return absl::InternalError("a prefix was not cached");
    all_run = std::max(all_run, answer.token_at[0]);
    first_ends = std::min(first_ends, answer.token_at.back());
  }
  // The last one's tokens mark the steps.
  const std::vector<double>& at = answers.back().token_at;
  std::vector<double> times;
  for (size_t i = 1; i < at.size(); ++i) {
    if (at[i - 1] >= all_run && at[i] <= first_ends) times.push_back(1e3 * (at[i] - at[i - 1]));
  }
  RETURN_IF_ERROR(bench->Forget());
  if (times.empty()) return absl::InternalError("the requests did not run side by side");
  return times;
}

absl::StatusOr<Json> Decode(EngineBench* bench, int batch, int wanted) {
  RETURN_IF_ERROR(bench->Get(false).status());
  const int steps = std::max(4, 6 * bench->settings().repeats);
  const int context = std::min(wanted, bench->config().max_positions - steps - 8);
  ASSIGN_OR_RETURN(const std::vector<double> times,
                   DecodeSteps(bench, batch, context, steps, Launches::kOnlyDecoding));
  Json out = {{"batch", batch}, {"context", context}, {"steps", times.size()}};
  AddQuartiles("step_ms", times, &out);
  const double seconds = QuartilesOf(times).median * 1e-3;
  out["tokens_per_s"] = batch / seconds;
  const double bytes = static_cast<double>(bench->weight_bytes()) +
                       static_cast<double>(bench->kv_bytes_per_token()) * context * batch;
  out["read_gbytes_per_s"] = bytes / seconds * 1e-9;  // weights and KV, each once
  return out;
}

absl::StatusOr<Json> Overhead(EngineBench* bench, int batch, int context) {
  RETURN_IF_ERROR(bench->Get(false).status());
  const int steps = std::max(4, 6 * bench->settings().repeats);
  context = std::min(context, bench->config().max_positions - 8 * steps - 8);
  ASSIGN_OR_RETURN(const std::vector<double> whole,
                   DecodeSteps(bench, batch, context, steps, Launches::kOnlyDecoding));
  ASSIGN_OR_RETURN(const std::vector<double> rest,
                   DecodeSteps(bench, batch, context, 8 * steps, Launches::kNone));
  Json out = {{"batch", batch}, {"context", context}};
  AddQuartiles("step_ms", whole, &out);
  AddQuartiles("without_ops_ms", rest, &out);
  out["share"] = QuartilesOf(rest).median / QuartilesOf(whole).median;
  return out;
}

// The pieces' floors; several prefixes share the rows' products.
FloorTimes FloorOf(const EngineBench& bench, int rows, int context) {
  const ModelConfig& c = bench.config();
  FloorModel model({.layers = c.layers,
                    .hidden = c.hidden,
                    .heads = c.heads,
                    .kv_heads = c.kv_heads,
                    .head_dim = c.head_dim,
                    .intermediate = c.intermediate,
                    .vocab = c.vocab,
                    .type = bench.settings().weights,
                    .threads = bench.settings().threads});
  return model.Measure(rows, context, std::max(3, bench.settings().repeats), true);
}

absl::StatusOr<Json> FirstToken(EngineBench* bench, int wanted, int suffix) {
  RETURN_IF_ERROR(bench->Get(true).status());
  const int block = EngineOptions().block_tokens;
  const int prefix = std::min(wanted, bench->config().max_positions - suffix - 1) / block * block;
  const std::vector<int32_t> shared = SampleTokens(prefix, bench->config().vocab, 7);
  const auto prompt = [&](uint32_t seed) {
    std::vector<int32_t> tokens = shared;
    const std::vector<int32_t> end = SampleTokens(suffix, bench->config().vocab, 1000 + seed);
    tokens.insert(tokens.end(), end.begin(), end.end());
    return tokens;
  };
  const auto once = [&](ReuseMode reuse, uint32_t seed) {
    return bench->Run({EngineBench::Ask("T", prompt(seed), 1, reuse)});
  };
  Json out = {{"prefix", prefix}, {"suffix", suffix}};
  const int repeats = bench->settings().repeats;

  // Native in full: as long as a prefill takes, so fewer of them.
  std::vector<double> native, hit, carried;
  for (int i = 0; i < std::max(1, repeats / 4); ++i) {
    ASSIGN_OR_RETURN(const auto answers, once(ReuseMode::kNativeOnly, i));
    if (answers[0].usage.computed_tokens != prefix + suffix) {
      return absl::InternalError("native was not computed in full");
    }
    native.push_back(answers[0].first_ms);
  }
  {
    const Switched switched(Launches::kOnlyDecoding);
    RETURN_IF_ERROR(bench->Warm("S", shared));
  }
  for (int i = -1; i < repeats; ++i) {
    ASSIGN_OR_RETURN(const auto answers, once(ReuseMode::kCarry, i + 1));
    if (answers[0].usage.carried_tokens != prefix) return absl::InternalError("nothing carried");
    if (i >= 0) carried.push_back(answers[0].first_ms);
  }
  {
    const Switched switched(Launches::kOnlyDecoding);
    RETURN_IF_ERROR(bench->Warm("T", shared));
  }
  for (int i = -1; i < repeats; ++i) {
    ASSIGN_OR_RETURN(const auto answers, once(ReuseMode::kNativeOnly, i + 1));
    if (answers[0].usage.cached_tokens != prefix) return absl::InternalError("no hit");
    if (i >= 0) hit.push_back(answers[0].first_ms);
  }
  RETURN_IF_ERROR(bench->Forget());
  AddQuartiles("native_ms", native, &out);
  AddQuartiles("hit_ms", hit, &out);
  AddQuartiles("carried_ms", carried, &out);

  const FloorTimes floor = FloorOf(*bench, suffix, prefix);
  out["floor_matmul_ms"] = floor.matmul_ms;
  out["floor_head_ms"] = floor.head_ms;
  out["floor_kv_read_ms"] = floor.kv_read_ms;
  out["floor_ms"] = floor.FloorMs();
  out["attention_products_ms"] = floor.attention_products_ms;
  out["carried_over_floor"] = QuartilesOf(carried).median / floor.FloorMs();
  out["carried_over_floor_with_attention_products"] =
      QuartilesOf(carried).median / (floor.FloorMs() + floor.attention_products_ms);
  return out;
}

}  // namespace

void AddEngineCases(EngineBench* engine, std::vector<Case>* cases) {
  for (const int tokens : {128, 256, 512, 1024, 2048, 4096, 8192}) {
    cases->push_back({absl::StrCat("prefill/", tokens), "a cold prompt, until its first token",
                      tokens + 1, [=] { return Prefill(engine, tokens); }});
  }
  for (const int tokens : {512, 4096}) {
    cases->push_back({absl::StrCat("profile/prefill=", tokens), "where a cold prompt's time goes",
                      tokens + 1, [=] { return PrefillProfile(engine, tokens); }});
  }
  for (const int batch : {1, 4, 16}) {
    for (const int context : {128, 512, 1024, 4096, 8192}) {
      cases->push_back({absl::StrCat("decode/batch=", batch, "/context=", context),
                        "steps of so many sequences, each behind its own context",
                        int64_t{batch} * (context + 1024),
                        [=] { return Decode(engine, batch, context); }});
    }
  }
  for (const int prefix : {512, 1024, 2048, 4096, 8192}) {
    for (const int suffix : {32, 128}) {
      cases->push_back({absl::StrCat("ttft/prefix=", prefix, "/suffix=", suffix),
                        "native, from own blocks, from carried blocks, and the floor",
                        3 * (prefix + suffix + 16),
                        [=] { return FirstToken(engine, prefix, suffix); }});
    }
  }
  for (const int batch : {1, 16}) {
    cases->push_back({absl::StrCat("overhead/batch=", batch),
                      "a decode step whose ops do nothing, as a share of one whose ops do",
                      int64_t{batch} * 2048, [=] { return Overhead(engine, batch, 512); }});
  }
}

}  // namespace carryover::bench
