#include "client/load_mix.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

namespace carryover {
namespace {

// Streams of random numbers that must not meet.
constexpr uint64_t kPrefixStream = 0x70726566;
constexpr uint64_t kSuffixStream = 0x73756666;
constexpr uint64_t kArrivalStream = 0x61727276;

}  // namespace

// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014) over a counter.
uint64_t MixBits(uint64_t seed, uint64_t position) {
  uint64_t z = seed + (position + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

PromptMix PromptMix::Random(const MixOptions& options, int32_t low, int32_t high) {
  PromptMix mix(options);
  mix.low_ = low;
  mix.high_ = high;
  return mix;
}

absl::StatusOr<PromptMix> PromptMix::FromText(const MixOptions& options,
                                              std::vector<int32_t> text) {
  const int64_t needed = std::max(int64_t{options.prefixes} * options.prefix_tokens,
                                  int64_t{options.suffix_tokens} + 1);
  if (static_cast<int64_t>(text.size()) < needed) {
    return absl::InvalidArgumentError(
        absl::StrCat("the text has ", text.size(), " tokens, and the mix needs ", needed));
  }
  PromptMix mix(options);
  mix.text_ = std::move(text);
  return mix;
}

int32_t PromptMix::Token(uint64_t random) const {
  return low_ + static_cast<int32_t>(random % static_cast<uint64_t>(high_ - low_));
}

std::vector<int32_t> PromptMix::Prompt(int64_t index) const {
  // Warm-up requests count from -1 downwards and meet the prefixes in turn, too.
  const auto turn = static_cast<uint64_t>(index >= 0 ? index : -(index + 1));
  const uint64_t prefix = turn % static_cast<uint64_t>(options_.prefixes);
  const uint64_t own_seed = MixBits(options_.seed ^ kSuffixStream, static_cast<uint64_t>(index));
  std::vector<int32_t> prompt;
  prompt.reserve(options_.prefix_tokens + options_.suffix_tokens);
  if (!text_.empty()) {
    const auto start = text_.begin() + static_cast<int64_t>(prefix) * options_.prefix_tokens;
    prompt.assign(start, start + options_.prefix_tokens);
    const auto own =
        text_.begin() + static_cast<int64_t>(own_seed % (text_.size() - options_.suffix_tokens));
    prompt.insert(prompt.end(), own, own + options_.suffix_tokens);
    return prompt;
  }
  const uint64_t prefix_seed = MixBits(options_.seed ^ kPrefixStream, prefix);
  for (int i = 0; i < options_.prefix_tokens; ++i) prompt.push_back(Token(MixBits(prefix_seed, i)));
  for (int i = 0; i < options_.suffix_tokens; ++i) prompt.push_back(Token(MixBits(own_seed, i)));
  return prompt;
}

std::vector<double> PoissonArrivals(double rate, int64_t count, uint64_t seed) {
  std::vector<double> arrivals;
  arrivals.reserve(count);
  double now = 0;
  for (int64_t i = 0; i < count; ++i) {
    arrivals.push_back(now);
    // In (0, 1], so that the logarithm is finite.
    const double uniform =
        static_cast<double>((MixBits(seed ^ kArrivalStream, i) >> 11) + 1) * 0x1p-53;
    now -= std::log(uniform) / rate;
  }
  return arrivals;
}

}  // namespace carryover
