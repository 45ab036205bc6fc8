#include "client/eval/result.h"

#include <cmath>
#include <limits>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/eval/scoring.h"

namespace carryover::eval {
namespace {

using Json = nlohmann::ordered_json;

// JSON has no infinity: null stands for +inf (a token that the other arm holds impossible).
Json Finite(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

template <typename T>
Json Column(const std::vector<Position>& positions, T Position::*field) {
  Json out = Json::array();
  for (const Position& position : positions) {
    if constexpr (std::is_same_v<T, bool>) {
      out.push_back(position.*field ? 1 : 0);
    } else {
      out.push_back(Finite(position.*field));
    }
  }
  return out;
}

// Every field of a position with its name, for both directions.
template <typename Visit>
void EachField(const Visit& visit) {
  visit("valid", &Position::valid);
  visit("flip", &Position::flip);
  visit("fragile", &Position::fragile);
  visit("kl", &Position::kl);
  visit("js", &Position::js);
  visit("tv", &Position::tv);
  visit("overlap", &Position::overlap);
  visit("native_margin", &Position::native_margin);
  visit("carried_margin", &Position::carried_margin);
  visit("delta_range", &Position::delta_range);
  visit("native_stop", &Position::native_stop);
  visit("carried_stop", &Position::carried_stop);
}

Arm ToArm(const Item& item, int32_t labelled, const v1::EvaluatedAnswer& answer) {
  Arm arm;
  arm.version = answer.version();
  arm.plan = answer.plan();
  arm.text = answer.choice().text();
  arm.tokens.assign(answer.choice().token_ids().begin(), answer.choice().token_ids().end());
  arm.finish = v1::Finish::Reason_Name(answer.choice().finish().reason());
  arm.ttft = answer.timing().first_token();
  arm.total = answer.timing().total();
  arm.cached = answer.usage().cached_tokens();
  arm.carried = answer.usage().carried_tokens();
  arm.repaired = answer.usage().repaired_tokens();
  arm.computed = answer.usage().computed_tokens();
  const Score score = item.metric == Metric::kToken ? ScoreToken(labelled, arm.tokens)
                                                    : ScoreAnswer(item, arm.text);
  arm.score = score.value;
  arm.right = score.right;
  return arm;
}

Comparison ToComparison(const v1::FidelitySample& sample) {
  Comparison out;
  out.comparison = sample.comparison();
  out.plan = sample.plan();
  out.valid = sample.valid();
  out.first_token_flip = sample.first_token_flip();
  out.continuation = sample.continuation();
  out.divergence = sample.divergence();
  if (sample.has_stop_disagreement()) out.stop_disagreement = sample.stop_disagreement();
  if (sample.gate_values_size() == 3) {
    out.gate_flip = sample.gate_values(0);
    out.gate_tv = sample.gate_values(1);
    out.gate_stop = sample.gate_values(2);
  }
  for (const v1::PositionFidelity& from : sample.positions()) {
    out.positions.push_back({from.valid(), from.flip(), from.fragile(), from.kl(), from.js(),
                             from.tv(), from.overlap(), from.native_margin(), from.carried_margin(),
                             from.delta_range(), from.native_stop(), from.carried_stop()});
  }
  return out;
}

Json ArmToJson(const Arm& arm) {
  Json json = {{"version", arm.version}, {"plan", arm.plan},     {"text", arm.text},
               {"tokens", arm.tokens},   {"finish", arm.finish}, {"ttft_s", arm.ttft},
               {"total_s", arm.total}};
  json["prompt"] = {{"cached", arm.cached},
                    {"carried", arm.carried},
                    {"repaired", arm.repaired},
                    {"computed", arm.computed}};
  json["score"] = arm.score ? Json(*arm.score) : Json(nullptr);
  json["right"] = arm.right ? Json(*arm.right) : Json(nullptr);
  return json;
}

Json ComparisonToJson(const Comparison& from) {
  Json json = {{"comparison", from.comparison},
               {"plan", from.plan},
               {"valid", from.valid},
               {"first_token_flip", from.first_token_flip},
               {"continuation", from.continuation},
               {"divergence", from.divergence}};
  json["stop_disagreement"] =
      from.stop_disagreement ? Json(*from.stop_disagreement) : Json(nullptr);
  json["gate_values"] = {from.gate_flip, from.gate_tv, from.gate_stop};
  Json& positions = json["positions"] = Json::object();
  EachField([&](const char* name, auto field) { positions[name] = Column(from.positions, field); });
  return json;
}

// Reads fields; the first that is wrong stays in `status`.
struct Reader {
  const nlohmann::json& json;
  absl::Status status;

  template <typename T>
  void operator()(const char* field, T* out) {
    const auto found = json.find(field);
    if (found == json.end()) {
      status.Update(absl::InvalidArgumentError(absl::StrCat(field, " is missing")));
      return;
    }
    try {
      found->get_to(*out);
    } catch (const nlohmann::json::exception&) {
      status.Update(absl::InvalidArgumentError(absl::StrCat(field, " has another type")));
    }
  }
  template <typename T>
  void operator()(const char* field, std::optional<T>* out) {
    const auto found = json.find(field);
    if (found == json.end() || found->is_null()) return;
    (*this)(field, &out->emplace());
  }
};

absl::StatusOr<Arm> ArmFromJson(const nlohmann::json& json) {
  if (!json.is_object()) return absl::InvalidArgumentError("an arm is not an object");
  Arm arm;
  Reader read{json, {}};
  read("version", &arm.version);
  read("plan", &arm.plan);
  read("text", &arm.text);
  read("tokens", &arm.tokens);
  read("finish", &arm.finish);
  read("ttft_s", &arm.ttft);
  read("total_s", &arm.total);
  read("score", &arm.score);
  read("right", &arm.right);
  nlohmann::json prompt;
  read("prompt", &prompt);
  RETURN_IF_ERROR(read.status);
  if (!prompt.is_object()) return absl::InvalidArgumentError("prompt has another type");
  Reader counts{prompt, {}};
  counts("cached", &arm.cached);
  counts("carried", &arm.carried);
  counts("repaired", &arm.repaired);
  counts("computed", &arm.computed);
  RETURN_IF_ERROR(counts.status);
  return arm;
}

absl::StatusOr<Comparison> ComparisonFromJson(const nlohmann::json& json) {
  if (!json.is_object()) return absl::InvalidArgumentError("a comparison is not an object");
  Comparison out;
  Reader read{json, {}};
  std::vector<double> gate;
  nlohmann::json positions;
  read("comparison", &out.comparison);
  read("plan", &out.plan);
  read("valid", &out.valid);
  read("first_token_flip", &out.first_token_flip);
  read("continuation", &out.continuation);
  read("divergence", &out.divergence);
  read("stop_disagreement", &out.stop_disagreement);
  read("gate_values", &gate);
  read("positions", &positions);
  RETURN_IF_ERROR(read.status);
  if (gate.size() != 3) return absl::InvalidArgumentError("gate_values are not three");
  out.gate_flip = gate[0];
  out.gate_tv = gate[1];
  out.gate_stop = gate[2];
  absl::Status status;
  EachField([&](const char* name, auto field) {
    const auto column = positions.is_object() ? positions.find(name) : positions.end();
    if (column == positions.end() || !column->is_array()) {
      status.Update(absl::InvalidArgumentError(absl::StrCat("positions.", name, " is missing")));
      return;
    }
    if (out.positions.empty()) out.positions.resize(column->size());
    if (column->size() != out.positions.size()) {
      status.Update(
          absl::InvalidArgumentError(absl::StrCat("positions.", name, " has another length")));
      return;
    }
    for (size_t i = 0; i < column->size(); ++i) {
      const nlohmann::json& value = (*column)[i];
      if (!value.is_number() && !value.is_null()) {
        status.Update(
            absl::InvalidArgumentError(absl::StrCat("positions.", name, " is no number")));
        return;
      }
      const double number =
          value.is_null() ? std::numeric_limits<double>::infinity() : value.get<double>();
      using Field = std::remove_reference_t<decltype(out.positions[i].*field)>;
      out.positions[i].*field = static_cast<Field>(number);
    }
  });
  RETURN_IF_ERROR(status);
  return out;
}

}  // namespace

double Comparison::MeanKl() const {
  double sum = 0;
  for (const Position& position : positions) {
    sum += position.valid ? position.kl : std::numeric_limits<double>::infinity();
  }
  return positions.empty() ? 0 : sum / static_cast<double>(positions.size());
}

const Comparison* ItemResult::Find(absl::string_view comparison, absl::string_view plan) const {
  for (const Comparison& one : comparisons) {
    if (one.comparison == comparison && (plan.empty() || one.plan == plan)) return &one;
  }
  return nullptr;
}

int PrefixBucketOf(int prefix_tokens) {
  int bucket = 256;
  while (bucket <= prefix_tokens / 2) bucket *= 2;
  return bucket;
}

void TakeResponse(const Item& item, const v1::EvaluateResponse& response, ItemResult* result) {
  result->source = ToArm(item, result->answer_token, response.source());
  result->native = ToArm(item, result->answer_token, response.native());
  if (response.has_hit()) result->hit = ToArm(item, result->answer_token, response.hit());
  for (const auto& answer : response.carried())
    result->carried.push_back(ToArm(item, result->answer_token, answer));
  for (const auto& sample : response.samples()) {
    result->comparisons.push_back(ToComparison(sample));
  }
  if (response.has_sensitivity()) result->sensitivity = TakeSensitivity(response.sensitivity());
}

Json ResultToJson(const ItemResult& result) {
  Json json = {{"index", result.index},
               {"id", result.id},
               {"task", result.task},
               {"metric", MetricName(result.metric)},
               {"key", result.key},
               {"prefix_key", result.prefix_key},
               {"prompt_tokens", result.prompt_tokens},
               {"prefix_tokens", result.prefix_tokens},
               {"bucket", result.bucket},
               {"answer_token", result.answer_token},
               {"answer_is_single", result.answer_is_single},
               {"answers", result.answers},
               {"seconds", result.seconds}};
  if (!result.ok()) {
    json["error"] = {{"code", result.error_code}, {"message", result.error}};
    return json;
  }
  json["source"] = ArmToJson(result.source);
  json["native"] = ArmToJson(result.native);
  json["hit"] = result.hit ? ArmToJson(*result.hit) : Json(nullptr);
  json["carried"] = Json::array();
  for (const Arm& arm : result.carried) json["carried"].push_back(ArmToJson(arm));
  json["comparisons"] = Json::array();
  for (const Comparison& one : result.comparisons) {
    json["comparisons"].push_back(ComparisonToJson(one));
  }
  if (result.sensitivity) json["sensitivity"] = ToJson(*result.sensitivity);
  return json;
}

absl::StatusOr<ItemResult> ResultFromJson(const nlohmann::json& json) {
  if (!json.is_object()) return absl::InvalidArgumentError("not a JSON object");
  ItemResult result;
  Reader read{json, {}};
  std::string metric;
  read("index", &result.index);
  read("id", &result.id);
  read("task", &result.task);
  read("metric", &metric);
  read("key", &result.key);
  read("prefix_key", &result.prefix_key);
  read("prompt_tokens", &result.prompt_tokens);
  read("prefix_tokens", &result.prefix_tokens);
  read("bucket", &result.bucket);
  read("answer_token", &result.answer_token);
  read("answer_is_single", &result.answer_is_single);
  read("answers", &result.answers);
  read("seconds", &result.seconds);
  for (Metric one : {Metric::kStarts, Metric::kToken, Metric::kShare, Metric::kQa, Metric::kClass,
                     Metric::kSummary}) {
    if (metric == MetricName(one)) result.metric = one;
  }
  if (const auto error = json.find("error"); error != json.end()) {
    if (!error->is_object()) return absl::InvalidArgumentError("error is not an object");
    Reader of_error{*error, {}};
    of_error("code", &result.error_code);
    of_error("message", &result.error);
    read.status.Update(of_error.status);
    RETURN_IF_ERROR(read.status);
    return result;
  }
  nlohmann::json source, native, hit, carried, comparisons;
  read("source", &source);
  read("native", &native);
  read("hit", &hit);
  read("carried", &carried);
  read("comparisons", &comparisons);
  RETURN_IF_ERROR(read.status);
  if (!carried.is_array() || !comparisons.is_array()) {
    return absl::InvalidArgumentError("carried or comparisons is not a list");
  }
  ASSIGN_OR_RETURN(result.source, ArmFromJson(source));
  ASSIGN_OR_RETURN(result.native, ArmFromJson(native));
  if (!hit.is_null()) {
    ASSIGN_OR_RETURN(result.hit, ArmFromJson(hit));
  }
  for (const auto& arm : carried) {
    ASSIGN_OR_RETURN(Arm one, ArmFromJson(arm));
    result.carried.push_back(std::move(one));
  }
  for (const auto& comparison : comparisons) {
    ASSIGN_OR_RETURN(Comparison one, ComparisonFromJson(comparison));
    result.comparisons.push_back(std::move(one));
  }
  if (const auto profile = json.find("sensitivity"); profile != json.end()) {
    ASSIGN_OR_RETURN(result.sensitivity, SensitivityFromJson(*profile));
  }
  return result;
}

}  // namespace carryover::eval
