// Where the divergence of directly carried caches comes from: what one prompt's probes found, and
// what those of many prompts say together. Plain values and pure functions; any thread.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "carryover/v1/fidelity.pb.h"
#include "client/eval/statistics.h"
#include "nlohmann/json.hpp"

namespace carryover::eval {

// How far the answer over a mixed cache is from the native one: means over positions.
struct MixedOutcome {
  bool valid = false;  // else the rest is unset
  double kl = 0;       // nats; may be +inf
  double tv = 0;
  double flips = 0;  // share of positions
  bool first_token_flip = false;
};

// A part of a prefix's cache: as CachePart of fidelity.proto.
struct PartOutcome {
  std::string kind;  // "ALL", "LAYERS", "KEYS", "VALUES", "POSITIONS"
  std::string name;
  int begin = 0, end = 0;              // layers, or tokens
  MixedOutcome carried;                // it alone is carried
  std::optional<MixedOutcome> native;  // it alone is native
};

struct SensitivityProfile {
  int layers = 0;
  int prefix_tokens = 0;
  std::vector<PartOutcome> parts;
};

SensitivityProfile TakeSensitivity(const v1::Sensitivity& from);
nlohmann::ordered_json ToJson(const SensitivityProfile& profile);
// INVALID_ARGUMENT names the field.
absl::StatusOr<SensitivityProfile> SensitivityFromJson(const nlohmann::json& json);

// One part over many prompts. Parts of one kind and name are one, whatever their tokens.
struct PartSummary {
  std::string kind, name;
  int begin = 0, end = 0;  // of the first prompt
  int n = 0;               // prompts whose probes were all valid
  Interval tv;             // it alone is carried
  double kl = 0;           // means over the prompts where it is finite
  double flips = 0;
  // It alone is native: by how much TV is less than where all is carried. Absent for ALL.
  std::optional<Interval> gain;
};

struct SensitivitySummary {
  std::string task;
  int bucket = 0;  // of prefix lengths; 0: all lengths
  int prompts = 0;
  int layers = 0;
  std::vector<PartSummary> parts;  // in the server's order

  // The part ALL: what carrying everything costs. Null where no prompt has one.
  const PartSummary* All() const;
};

// One prompt's profile, and the cluster (prefix) it belongs to.
struct ClusteredProfile {
  const SensitivityProfile* profile;
  int cluster;
};
SensitivitySummary Summarize(absl::Span<const ClusteredProfile> profiles);

nlohmann::ordered_json ToJson(const SensitivitySummary& summary);

// HTML, three figures: bars by layer, by position, keys against values.
std::string SensitivityCharts(const SensitivitySummary& summary);

}  // namespace carryover::eval
