// The engine beside a model's arithmetic: ops that do nothing, so that steps, plans and the store
// are left.
#include "base/status_macros.h"
#include "bench/engine_bench.h"
#include "bench/perf_work.h"
#include "bench/switched_ops.h"

namespace carryover::bench {
namespace {

constexpr int kBatch = 16;
constexpr int kAnswer = 32;
constexpr int kPrefix = 1024;

struct Fixture {
  explicit Fixture(const std::string& model)
      : engine(Settings{.source = model, .target = model, .threads = 1}, &kv_tokens) {}
  const int64_t kv_tokens = 4 * (kPrefix + kBatch * (64 + kAnswer));
  EngineBench engine;
};

// Sixteen requests side by side, from submission to the last event.
absl::StatusOr<PerfWork::Body> Steps(const std::string& model) {
  const auto fixture = std::make_shared<Fixture>(model);
  RETURN_IF_ERROR(fixture->engine.Get(false).status());
  SetLaunches(Launches::kNone);
  return PerfWork::Body([fixture]() -> absl::Status {
    std::vector<CompletionRequest> requests;
    for (int i = 0; i < kBatch; ++i) {
      requests.push_back(EngineBench::Ask("S", SampleTokens(32, fixture->engine.config().vocab, i),
                                          kAnswer, ReuseMode::kNativeOnly));
    }
    return fixture->engine.Run(std::move(requests)).status();
  });
}

// Requests of one token behind a prefix that the source's blocks hold, one after another.
absl::StatusOr<PerfWork::Body> Carried(const std::string& model) {
  const auto fixture = std::make_shared<Fixture>(model);
  RETURN_IF_ERROR(fixture->engine.Get(true).status());
  SetLaunches(Launches::kNone);
  std::vector<int32_t> tokens = SampleTokens(kPrefix, fixture->engine.config().vocab, 1);
  RETURN_IF_ERROR(fixture->engine.Warm("S", tokens));
  tokens.resize(kPrefix + 32, 5);
  return PerfWork::Body([fixture, tokens]() -> absl::Status {
    ASSIGN_OR_RETURN(const auto answers,
                     fixture->engine.Run({EngineBench::Ask("T", tokens, 1, ReuseMode::kCarry)}));
    if (answers[0].usage.carried_tokens != kPrefix) return absl::InternalError("nothing carried");
    return absl::OkStatus();
  });
}

}  // namespace

void AddEngineWork(const std::string& model, std::vector<PerfWork>* works) {
  works->push_back({"engine/step/batch=16", "step", kAnswer, 320, [=] { return Steps(model); }});
  works->push_back(
      {"engine/carried/prefix=1024", "request", 1, 160, [=] { return Carried(model); }});
}

}  // namespace carryover::bench
