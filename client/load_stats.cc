#include "client/load_stats.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace carryover {

double Quantile(absl::Span<const double> sorted, double q) {
  CHECK(!sorted.empty());
  const double position = q * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(std::floor(position));
  const size_t above = std::min(below + 1, sorted.size() - 1);
  const double part = position - static_cast<double>(below);
  return sorted[below] + (sorted[above] - sorted[below]) * part;
}

Distribution Summarize(std::vector<double> values) {
  Distribution result;
  if (values.empty()) return result;
  std::sort(values.begin(), values.end());
  const auto n = static_cast<double>(values.size());
  result.mean = std::accumulate(values.begin(), values.end(), 0.0) / n;
  double squares = 0;
  for (double value : values) squares += (value - result.mean) * (value - result.mean);
  result.std = std::sqrt(squares / n);
  result.median = Quantile(values, 0.5);
  result.p90 = Quantile(values, 0.9);
  result.p99 = Quantile(values, 0.99);
  return result;
}

LoadSummary SummarizeLoad(absl::Span<const RequestRecord> records, double duration,
                          const GoodputLimits& limits) {
  LoadSummary s;
  s.duration = duration;
  std::vector<double> ttft, tpot, itl, e2el;
  int64_t good = 0;
  for (const RequestRecord& r : records) {
    if (!r.completed) {
      ++s.failed;
      if (r.broken) ++s.broken_streams;
      ++s.errors[r.code];
      s.messages.emplace(r.code, r.error);
      continue;
    }
    ++s.completed;
    ++s.versions[r.version];
    s.total_input_tokens += r.prompt_tokens;
    s.total_output_tokens += r.output_tokens;
    s.cached_tokens += r.cached_tokens;
    s.carried_tokens += r.carried_tokens;
    s.repaired_tokens += r.repaired_tokens;
    s.computed_tokens += r.computed_tokens;
    const double ttft_ms = 1e3 * r.ttft, e2el_ms = 1e3 * r.e2el;
    double tpot_ms = 0;
    e2el.push_back(e2el_ms);
    if (r.output_tokens > 0) ttft.push_back(ttft_ms);
    if (r.output_tokens > 1) {
      tpot_ms = (e2el_ms - ttft_ms) / (r.output_tokens - 1);
      tpot.push_back(tpot_ms);
    }
    for (double gap : r.itl) itl.push_back(1e3 * gap);
    if (ttft_ms <= limits.ttft_ms.value_or(ttft_ms) &&
        tpot_ms <= limits.tpot_ms.value_or(tpot_ms) &&
        e2el_ms <= limits.e2el_ms.value_or(e2el_ms)) {
      ++good;
    }
  }
  if (duration > 0) {
    s.request_throughput = static_cast<double>(s.completed) / duration;
    s.output_throughput = static_cast<double>(s.total_output_tokens) / duration;
    s.total_token_throughput =
        static_cast<double>(s.total_input_tokens + s.total_output_tokens) / duration;
  }
  if (limits.any()) s.request_goodput = duration > 0 ? static_cast<double>(good) / duration : 0;
  s.ttft = Summarize(std::move(ttft));
  s.tpot = Summarize(std::move(tpot));
  s.itl = Summarize(std::move(itl));
  s.e2el = Summarize(std::move(e2el));
  return s;
}

nlohmann::ordered_json LoadSummaryToJson(const LoadSummary& s) {
  nlohmann::ordered_json json = {
      {"duration", s.duration},
      {"completed", s.completed},
      {"failed", s.failed},
      {"total_input_tokens", s.total_input_tokens},
      {"total_output_tokens", s.total_output_tokens},
      {"request_throughput", s.request_throughput},
      {"request_goodput", nullptr},
      {"output_throughput", s.output_throughput},
      {"total_token_throughput", s.total_token_throughput},
  };
  if (s.request_goodput) json["request_goodput"] = *s.request_goodput;
  const auto add = [&json](const char* name, const Distribution& d) {
    json[absl::StrCat("mean_", name, "_ms")] = d.mean;
    json[absl::StrCat("median_", name, "_ms")] = d.median;
    json[absl::StrCat("std_", name, "_ms")] = d.std;
    json[absl::StrCat("p90_", name, "_ms")] = d.p90;
    json[absl::StrCat("p99_", name, "_ms")] = d.p99;
  };
  add("ttft", s.ttft);
  add("tpot", s.tpot);
  add("itl", s.itl);
  add("e2el", s.e2el);
  json["cached_tokens"] = s.cached_tokens;
  json["carried_tokens"] = s.carried_tokens;
  json["repaired_tokens"] = s.repaired_tokens;
  json["computed_tokens"] = s.computed_tokens;
  json["broken_streams"] = s.broken_streams;
  json["errors"] = s.errors;
  json["first_error_messages"] = s.messages;
  json["versions"] = s.versions;
  return json;
}

nlohmann::ordered_json RecordToJson(const RequestRecord& r) {
  std::vector<double> gaps;
  for (double gap : r.itl) gaps.push_back(1e3 * gap);
  nlohmann::ordered_json json = {
      {"index", r.index},
      {"code", r.code},
      {"completed", r.completed},
      {"version", r.version},
      {"start_ms", 1e3 * r.start},
      {"ttft_ms", nullptr},
      {"e2el_ms", 1e3 * r.e2el},
      {"itl_ms", gaps},
      {"server_ttft_ms", 1e3 * r.server_ttft},
      {"server_e2el_ms", 1e3 * r.server_e2el},
      {"prompt_tokens", r.prompt_tokens},
      {"output_tokens", r.output_tokens},
      {"cached_tokens", r.cached_tokens},
      {"carried_tokens", r.carried_tokens},
      {"repaired_tokens", r.repaired_tokens},
      {"computed_tokens", r.computed_tokens},
  };
  if (r.ttft > 0) json["ttft_ms"] = 1e3 * r.ttft;
  return json;
}

}  // namespace carryover
