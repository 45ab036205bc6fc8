#include "bench/bench_case.h"

#include <algorithm>
#include <chrono>

namespace carryover::bench {

Quartiles QuartilesOf(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const auto at = [&](double share) {
    const double place = share * static_cast<double>(samples.size() - 1);
    const size_t low = static_cast<size_t>(place);
    const size_t high = std::min(low + 1, samples.size() - 1);
    const double part = place - static_cast<double>(low);
    return samples[low] * (1 - part) + samples[high] * part;
  };
  return {at(0.25), at(0.5), at(0.75)};
}

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::vector<double> Repeat(int repeats, const std::function<void()>& body) {
  body();
  std::vector<double> samples;
  for (int i = 0; i < repeats; ++i) {
    const double start = Now();
    body();
    samples.push_back(1e3 * (Now() - start));
  }
  return samples;
}

void AddQuartiles(const std::string& name, const std::vector<double>& samples,
                  nlohmann::json* out) {
  const Quartiles q = QuartilesOf(samples);
  (*out)[name] = q.median;
  (*out)[name + "_quartiles"] = {q.low, q.high};
}

std::string SampleText(size_t bytes) {
  static const char* const kPieces[] = {"The ",
                                        "cache ",
                                        "holds ",
                                        "keys ",
                                        "and ",
                                        "values, ",
                                        "which ",
                                        "an ",
                                        "update ",
                                        "would ",
                                        "throw ",
                                        "away; ",
                                        "it\xE2\x80\x99s ",
                                        "measured ",
                                        "2,048 ",
                                        "times. ",
                                        "\n\n",
                                        "for (int i = 0; i < n; ++i) {\n",
                                        "    sum += x[i] * y[i];\n",
                                        "}\n",
                                        "Stra\xC3\x9F"
                                        "e ",
                                        "\xD0\xBC\xD0\xBE\xD0\xB4\xD0\xB5\xD0\xBB\xD1\x8C ",
                                        "\xE6\xA8\xA1\xE5\x9E\x8B\xE6\x9B\xB4\xE6\x96\xB0 ",
                                        "don't ",
                                        "unbelievably ",
                                        "HTTP/2 ",
                                        "0.5 ",
                                        "\"quoted\" ",
                                        "(see ",
                                        "below) ",
                                        "request ",
                                        "of "};
  std::string text;
  text.reserve(bytes + 64);
  uint32_t state = 1;
  while (text.size() < bytes) {
    state = state * 1664525 + 1013904223;
    text += kPieces[(state >> 16) % (sizeof(kPieces) / sizeof(kPieces[0]))];
  }
  return text;
}

std::vector<int32_t> SampleTokens(int count, int vocab, uint32_t seed) {
  std::vector<int32_t> tokens(count);
  uint32_t state = 12345 + 7919 * seed;
  for (int32_t& token : tokens) {
    state = state * 1664525 + 1013904223;
    token = static_cast<int32_t>((state >> 8) % static_cast<uint32_t>(vocab));
  }
  return tokens;
}

LogitPairs SampleLogitPairs(size_t count) {
  LogitPairs pairs{std::vector<float>(count), std::vector<float>(count)};
  uint32_t state = 1;
  for (size_t i = 0; i < count; ++i) {
    state = state * 1664525 + 1013904223;
    pairs.native[i] = static_cast<float>(state >> 16) * (20.0f / 65536);
    pairs.carried[i] = pairs.native[i] + static_cast<float>(state & 0xffff) * (0.5f / 65536);
  }
  return pairs;
}

}  // namespace carryover::bench
