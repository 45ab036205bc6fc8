// What carryover-bench runs: named cases that each give one JSON object. One thread.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/shapes.h"

namespace carryover::bench {

struct Settings {
  std::string source;  // model folders; target is an update of source
  std::string target;
  int threads = 0;  // of the backend; 0: one a core
  int repeats = 7;  // of what counts, after one that does not
  DType weights = DType::kBF16;
  DType kv_dtype = DType::kBF16;
};

struct Case {
  std::string name;  // "decode/batch=16/context=1024"
  std::string what;  // for --list
  // Tokens of KV that it needs at once; an engine is made large enough for all chosen cases.
  int64_t kv_tokens = 0;
  std::function<absl::StatusOr<nlohmann::json>()> run;
};

// Quartiles of samples. REQUIRES: some.
struct Quartiles {
  double low = 0;
  double median = 0;
  double high = 0;
};
Quartiles QuartilesOf(std::vector<double> samples);

double Now();  // seconds, steady

// Runs body once unmeasured, then repeats times; milliseconds of each.
std::vector<double> Repeat(int repeats, const std::function<void()>& body);

// {prefix_low, prefix_median, prefix_high} with units in the name: "ttft_ms".
void AddQuartiles(const std::string& name, const std::vector<double>& samples, nlohmann::json* out);

// Deterministic text of about so many bytes: words, numbers, punctuation, code and some other
// scripts, so that figures of different days compare.
std::string SampleText(size_t bytes);
// Deterministic tokens below vocab, different from the first one on for each seed.
std::vector<int32_t> SampleTokens(int count, int vocab, uint32_t seed);

// Deterministic logits from 0 to 20, and the same a little higher.
struct LogitPairs {
  std::vector<float> native;
  std::vector<float> carried;
};
LogitPairs SampleLogitPairs(size_t count);

class EngineBench;

// The cases of each subject.
void AddEngineCases(EngineBench* engine, std::vector<Case>* cases);
void AddStoreCases(std::vector<Case>* cases);
void AddTextCases(const Settings& settings, std::vector<Case>* cases);

}  // namespace carryover::bench
