// An engine over SwitchedOps with one model, or with it and an update of it, and requests whose
// times are taken. Main thread only.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/bench_case.h"
#include "engine/engine.h"
#include "engine/model_config.h"

namespace carryover::bench {

struct TimedAnswer {
  double first_ms = 0;           // from Submit to the first token
  std::vector<double> token_at;  // (tokens) seconds
  Usage usage;
};

class EngineBench {
 public:
  // kv_tokens: that all chosen cases need at once, read when the engine is first used.
  EngineBench(const Settings& settings, const int64_t* kv_tokens)
      : settings_(settings), kv_tokens_(kv_tokens) {}

  const Settings& settings() const { return settings_; }
  // Loads on first use: "S", and with_target "T", which carries from S.
  absl::StatusOr<Engine*> Get(bool with_target);
  const ModelConfig& config() const { return config_; }  // after Get
  int64_t weight_bytes() const { return weight_bytes_; }
  std::string weights_dtype() const { return weights_dtype_; }
  size_t kv_bytes_per_token() const { return kv_bytes_per_token_; }

  static CompletionRequest Ask(const std::string& version, std::vector<int32_t> tokens,
                               int max_tokens, ReuseMode reuse);
  // Runs the requests side by side; the first alone has a step more.
  absl::StatusOr<std::vector<TimedAnswer>> Run(std::vector<CompletionRequest> requests);
  // Puts blocks of a prefix into the store, computed or, where only decoding is, of zeros.
  absl::Status Warm(const std::string& version, std::vector<int32_t> tokens);
  absl::Status Forget();  // everything that is stored

 private:
  absl::Status Load(const std::string& version, const std::string& folder,
                    std::vector<std::string> carry_from);

  const Settings settings_;
  const int64_t* const kv_tokens_;
  ModelConfig config_;
  int64_t weight_bytes_ = 0;
  std::string weights_dtype_;
  size_t kv_bytes_per_token_ = 0;
  bool has_target_ = false;
  std::unique_ptr<Engine> engine_;
};

}  // namespace carryover::bench
