#include "client/eval/sensitivity.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace carryover::eval {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxParts = 1000;  // far more than a server gives

MixedOutcome Take(const v1::MixedOutcome& from) {
  return {from.valid(), from.kl(), from.tv(), from.flips(), from.first_token_flip()};
}

// JSON has no infinity: null stands for +inf.
Json ToJson(const MixedOutcome& outcome) {
  return {{"valid", outcome.valid},
          {"kl", std::isfinite(outcome.kl) ? Json(outcome.kl) : Json(nullptr)},
          {"tv", outcome.tv},
          {"flips", outcome.flips},
          {"first_token_flip", outcome.first_token_flip}};
}

template <typename T>
absl::Status Read(const nlohmann::json& json, const char* field, T* out) {
  const auto found = json.is_object() ? json.find(field) : json.end();
  if (!json.is_object() || found == json.end()) {
    return absl::InvalidArgumentError(absl::StrCat("sensitivity: ", field, " is missing"));
  }
  if constexpr (std::is_same_v<T, double>) {
    if (found->is_null()) {
      *out = std::numeric_limits<double>::infinity();
      return absl::OkStatus();
    }
  }
  try {
    found->get_to(*out);
  } catch (const nlohmann::json::exception&) {
    return absl::InvalidArgumentError(absl::StrCat("sensitivity: ", field, " has another type"));
  }
  return absl::OkStatus();
}

absl::StatusOr<MixedOutcome> OutcomeFromJson(const nlohmann::json& json) {
  MixedOutcome outcome;
  RETURN_IF_ERROR(Read(json, "valid", &outcome.valid));
  RETURN_IF_ERROR(Read(json, "kl", &outcome.kl));
  RETURN_IF_ERROR(Read(json, "tv", &outcome.tv));
  RETURN_IF_ERROR(Read(json, "flips", &outcome.flips));
  RETURN_IF_ERROR(Read(json, "first_token_flip", &outcome.first_token_flip));
  return outcome;
}

// Of one part, over prompts.
struct Values {
  PartSummary summary;
  std::vector<double> tv, gain;
  std::vector<int> tv_clusters, gain_clusters;
  double kl = 0;
  int finite_kl = 0;
};

Json ToJson(const Interval& interval) {
  return {{"mean", interval.mean}, {"lower", interval.lower}, {"upper", interval.upper}};
}

}  // namespace

SensitivityProfile TakeSensitivity(const v1::Sensitivity& from) {
  SensitivityProfile profile;
  profile.layers = from.layers();
  profile.prefix_tokens = from.prefix_tokens();
  for (const v1::CachePart& part : from.parts()) {
    PartOutcome& out = profile.parts.emplace_back();
    out.kind = v1::CachePart::Kind_Name(part.kind());
    out.name = part.name();
    out.begin = part.begin();
    out.end = part.end();
    out.carried = Take(part.carried());
    if (part.has_native()) out.native = Take(part.native());
  }
  return profile;
}

Json ToJson(const SensitivityProfile& profile) {
  Json json = {{"layers", profile.layers}, {"prefix_tokens", profile.prefix_tokens}};
  json["parts"] = Json::array();
  for (const PartOutcome& part : profile.parts) {
    json["parts"].push_back({{"kind", part.kind},
                             {"name", part.name},
                             {"begin", part.begin},
                             {"end", part.end},
                             {"carried", ToJson(part.carried)},
                             {"native", part.native ? ToJson(*part.native) : Json(nullptr)}});
  }
  return json;
}

absl::StatusOr<SensitivityProfile> SensitivityFromJson(const nlohmann::json& json) {
  SensitivityProfile profile;
  nlohmann::json parts;
  RETURN_IF_ERROR(Read(json, "layers", &profile.layers));
  RETURN_IF_ERROR(Read(json, "prefix_tokens", &profile.prefix_tokens));
  RETURN_IF_ERROR(Read(json, "parts", &parts));
  if (!parts.is_array() || parts.size() > kMaxParts) {
    return absl::InvalidArgumentError("sensitivity: parts is no list, or too long");
  }
  for (const nlohmann::json& from : parts) {
    PartOutcome& part = profile.parts.emplace_back();
    nlohmann::json carried, native;
    RETURN_IF_ERROR(Read(from, "kind", &part.kind));
    RETURN_IF_ERROR(Read(from, "name", &part.name));
    RETURN_IF_ERROR(Read(from, "begin", &part.begin));
    RETURN_IF_ERROR(Read(from, "end", &part.end));
    RETURN_IF_ERROR(Read(from, "carried", &carried));
    RETURN_IF_ERROR(Read(from, "native", &native));
    ASSIGN_OR_RETURN(part.carried, OutcomeFromJson(carried));
    if (!native.is_null()) {
      ASSIGN_OR_RETURN(part.native, OutcomeFromJson(native));
    }
  }
  return profile;
}

const PartSummary* SensitivitySummary::All() const {
  for (const PartSummary& part : parts) {
    if (part.kind == "ALL" && part.n > 0) return &part;
  }
  return nullptr;
}

SensitivitySummary Summarize(absl::Span<const ClusteredProfile> profiles) {
  SensitivitySummary out;
  std::vector<Values> all;
  for (const auto& [profile, cluster] : profiles) {
    ++out.prompts;
    out.layers = std::max(out.layers, profile->layers);
    const auto whole = std::find_if(profile->parts.begin(), profile->parts.end(),
                                    [](const PartOutcome& part) { return part.kind == "ALL"; });
    for (const PartOutcome& part : profile->parts) {
      auto found = std::find_if(all.begin(), all.end(), [&](const Values& values) {
        return values.summary.kind == part.kind && values.summary.name == part.name;
      });
      if (found == all.end()) {
        Values& fresh = all.emplace_back();
        fresh.summary.kind = part.kind;
        fresh.summary.name = part.name;
        fresh.summary.begin = part.begin;
        fresh.summary.end = part.end;
        found = all.end() - 1;
      }
      if (!part.carried.valid || (part.native && !part.native->valid)) continue;
      ++found->summary.n;
      found->tv.push_back(part.carried.tv);
      found->tv_clusters.push_back(cluster);
      found->summary.flips += part.carried.flips;
      if (std::isfinite(part.carried.kl)) {
        found->kl += part.carried.kl;
        ++found->finite_kl;
      }
      if (!part.native || whole == profile->parts.end() || !whole->carried.valid) continue;
      found->gain.push_back(whole->carried.tv - part.native->tv);
      found->gain_clusters.push_back(cluster);
    }
  }
  for (Values& values : all) {
    PartSummary& summary = values.summary;
    if (summary.n > 0) {
      summary.tv = ClusterBootstrap(values.tv, values.tv_clusters);
      summary.flips /= summary.n;
    }
    if (values.finite_kl > 0) summary.kl = values.kl / values.finite_kl;
    if (!values.gain.empty()) summary.gain = ClusterBootstrap(values.gain, values.gain_clusters);
    out.parts.push_back(std::move(summary));
  }
  return out;
}

Json ToJson(const SensitivitySummary& summary) {
  Json json = {{"task", summary.task},
               {"prefix_bucket", summary.bucket},
               {"prompts", summary.prompts},
               {"layers", summary.layers}};
  json["parts"] = Json::array();
  for (const PartSummary& part : summary.parts) {
    Json one = {{"kind", part.kind},     {"name", part.name},
                {"begin", part.begin},   {"end", part.end},
                {"n", part.n},           {"tv_carried", ToJson(part.tv)},
                {"kl_carried", part.kl}, {"flips_carried", part.flips}};
    one["tv_gain_native"] = part.gain ? ToJson(*part.gain) : Json(nullptr);
    json["parts"].push_back(std::move(one));
  }
  return json;
}

}  // namespace carryover::eval
