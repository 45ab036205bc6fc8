// What a load test measured, and its summary under the field names of vLLM's serving benchmark.
// Plain data and pure functions.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "nlohmann/json.hpp"

namespace carryover {

// One request, seen from the client. Times in seconds.
struct RequestRecord {
  int64_t index = 0;       // of the run's requests
  bool completed = false;  // OK, and the stream kept to the contract
  bool broken = false;     // the stream did not: lost, mixed up or miscounted
  std::string code;        // status code's name, or "BROKEN_STREAM"
  std::string error;
  std::string version;  // that served
  double start = 0;     // since the run began
  double ttft = 0;      // to the first generated token; 0 when there was none
  double e2el = 0;      // to the end of the stream
  // Between one message with generated tokens and the next.
  std::vector<double> itl;
  double server_ttft = 0;  // as the server timed it; 0 when it did not say
  double server_e2el = 0;
  int prompt_tokens = 0;
  int output_tokens = 0;
  int cached_tokens = 0;
  int carried_tokens = 0;
  int repaired_tokens = 0;
  int computed_tokens = 0;
  std::vector<int32_t> token_ids;  // kept when asked for
};

// Over a sample, in the sample's unit. All 0 for an empty one.
struct Distribution {
  double mean = 0;
  double median = 0;
  double std = 0;  // of the population
  double p90 = 0;
  double p99 = 0;
};

// The q-quantile (0 to 1) of values sorted upwards, with linear interpolation between neighbours:
// position q (n - 1). numpy's default, and so vLLM's. REQUIRES: not empty.
double Quantile(absl::Span<const double> sorted, double q);

Distribution Summarize(std::vector<double> values);

// A request is good when it keeps all limits that are set.
struct GoodputLimits {
  std::optional<double> ttft_ms;
  std::optional<double> tpot_ms;
  std::optional<double> e2el_ms;
  bool any() const { return ttft_ms || tpot_ms || e2el_ms; }
};

struct LoadSummary {
  double duration = 0;  // seconds, from the first request's start to the last one's end
  int64_t completed = 0;
  int64_t failed = 0;
  int64_t broken_streams = 0;  // among the failed
  int64_t total_input_tokens = 0;
  int64_t total_output_tokens = 0;
  int64_t cached_tokens = 0;
  int64_t carried_tokens = 0;
  int64_t repaired_tokens = 0;
  int64_t computed_tokens = 0;
  double request_throughput = 0;                // completed a second
  std::optional<double> request_goodput;        // good a second
  double output_throughput = 0;                 // tokens a second
  double total_token_throughput = 0;            // input and output tokens a second
  Distribution ttft, tpot, itl, e2el;           // milliseconds
  std::map<std::string, int64_t> errors;        // by code
  std::map<std::string, std::string> messages;  // the first of each code
  std::map<std::string, int64_t> versions;      // completed, by the version that served
};

// Only completed requests count, but for failed, broken_streams and errors. tpot is
// (e2el - ttft) / (output_tokens - 1), over requests with at least two output tokens.
LoadSummary SummarizeLoad(absl::Span<const RequestRecord> records, double duration,
                          const GoodputLimits& limits);

// With vLLM's names: mean_ttft_ms, p99_itl_ms, request_throughput and so on.
nlohmann::ordered_json LoadSummaryToJson(const LoadSummary& summary);

// One request, in milliseconds: index, code, start_ms, ttft_ms (null without a token), itl_ms[],
// e2el_ms, server_ttft_ms, server_e2el_ms, and its tokens by where they came from.
nlohmann::ordered_json RecordToJson(const RequestRecord& record);

}  // namespace carryover
