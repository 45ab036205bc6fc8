// What one item gave: a row of items.jsonl and of eval.json's `items`. Plain values; any thread.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "carryover/v1/fidelity.pb.h"
#include "client/eval/item.h"
#include "client/eval/sensitivity.h"
#include "nlohmann/json.hpp"

namespace carryover::eval {

// One way of answering. Times in seconds.
struct Arm {
  std::string version;
  std::string plan;  // "native", "direct", ...
  std::string text;
  std::vector<int32_t> tokens;  // with the stop token
  std::string finish;           // "STOP_TOKEN", "STOP_STRING", "LENGTH"
  double ttft = 0, total = 0;
  int cached = 0, carried = 0, repaired = 0, computed = 0;  // tokens of the prompt
  std::optional<double> score;
  std::optional<bool> right;
};

// One position of a comparison, as PositionFidelity of fidelity.proto.
struct Position {
  bool valid = false, flip = false, fragile = false;
  double kl = 0, js = 0, tv = 0, overlap = 0;
  double native_margin = 0, carried_margin = 0, delta_range = 0;
  double native_stop = 0, carried_stop = 0;
};

struct Comparison {
  std::string comparison;  // "carried", "control", "old"
  std::string plan;
  bool valid = false;
  bool first_token_flip = false;
  std::string continuation;
  int divergence = -1;
  std::optional<bool> stop_disagreement;
  double gate_flip = 0, gate_tv = 0, gate_stop = 0;  // what the gate judges, in [0, 1]
  std::vector<Position> positions;

  double MeanKl() const;  // over the positions; +inf where one is
};

struct ItemResult {
  int index = 0;  // in the order of the tasks files
  std::string id, task, key, prefix_key;
  Metric metric = Metric::kNone;
  int prompt_tokens = 0, prefix_tokens = 0;
  int bucket = 256;           // of prefix_tokens: a power of two, rounded down, from 256
  int32_t answer_token = -1;  // whose margins were compared at the first position; -1: T's choice
  bool answer_is_single = false;  // the labelled answer is that token alone
  std::vector<std::string> answers;
  double seconds = 0;  // for the client
  // Failed: code and message, and nothing below.
  std::string error_code, error;

  Arm source, native;
  std::optional<Arm> hit;
  std::vector<Arm> carried;
  std::vector<Comparison> comparisons;
  std::optional<SensitivityProfile> sensitivity;  // where it was asked for

  bool ok() const { return error_code.empty(); }
  // Null where there is none. plan matters for "carried" alone.
  const Comparison* Find(absl::string_view comparison, absl::string_view plan = "") const;
};

int PrefixBucketOf(int prefix_tokens);

// Fills what the response says, and scores it.
void TakeResponse(const Item& item, const v1::EvaluateResponse& response, ItemResult* result);

nlohmann::ordered_json ResultToJson(const ItemResult& result);
// INVALID_ARGUMENT names the field.
absl::StatusOr<ItemResult> ResultFromJson(const nlohmann::json& json);

}  // namespace carryover::eval
