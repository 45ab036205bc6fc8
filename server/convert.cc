#include "server/convert.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/utf8.h"
#include "server/rpc_status.h"

namespace carryover {
namespace {

// Far more than any context, and small enough that sums of two fit an int.
constexpr int kMaxTokens = 1 << 30;
constexpr size_t kMaxVersionName = 128;
constexpr size_t kMaxPathBytes = 4096;
constexpr int kMaxCalibrateTexts = 100'000;
constexpr int64_t kMaxCalibrateBytes = 48 << 20;
constexpr int64_t kMaxCalibrateTokens = 4 << 20;

class RequestReader {
 public:
  RequestReader(const RequestLimits& limits, FieldErrors* errors)
      : limits_(limits), errors_(errors) {}

  int Int(const char* field, int value, int low, int high) {
    if (value < low || value > high) {
      errors_->Add(field, absl::StrCat("must be from ", low, " to ", high, "; it is ", value));
    }
    return value;
  }

  // NaN is out of every range.
  float Float(absl::string_view field, float value, float low, float high,
              bool low_allowed = true) {
    if (!(low_allowed ? value >= low : value > low) || !(value <= high)) {
      errors_->Add(field, absl::StrCat("must be ", low_allowed ? "from " : "above ", low, " to ",
                                       high, "; it is ", value));
    }
    return value;
  }

  std::string Text(absl::string_view field, const std::string& value) {
    if (value.size() > static_cast<size_t>(limits_.max_name_bytes)) {
      errors_->Add(field, absl::StrCat("is longer than ", limits_.max_name_bytes, " bytes"));
      return "";
    }
    return value;
  }

  void Count(const char* field, size_t count, int high) {
    if (count > static_cast<size_t>(high)) {
      errors_->Add(field, absl::StrCat("has ", count, " entries; at most ", high, " are allowed"));
    }
  }

  std::vector<int32_t> Tokens(const char* field, const v1::TokenIds& tokens) {
    if (limits_.max_prompt_tokens > 0) {
      Count(field, static_cast<size_t>(tokens.ids_size()), limits_.max_prompt_tokens);
    }
    return TokenList(field, tokens.ids());
  }

  std::vector<int32_t> TokenList(const char* field,
                                 const google::protobuf::RepeatedField<int32_t>& ids) {
    for (int i = 0; i < ids.size(); ++i) {
      if (ids[i] < 0) {
        errors_->Add(absl::StrCat(field, "[", i, "]"), absl::StrCat("is negative: ", ids[i]));
        break;
      }
    }
    return {ids.begin(), ids.end()};
  }

  void Stops(const v1::CompleteRequest& request, SamplingParams* sampling) {
    Count("stop", static_cast<size_t>(request.stop_size()), limits_.max_stop);
    for (int i = 0; i < request.stop_size() && i < limits_.max_stop; ++i) {
      const std::string& stop = request.stop(i);
      const std::string field = absl::StrCat("stop[", i, "]");
      if (stop.empty()) errors_->Add(field, "is empty");
      if (stop.size() > static_cast<size_t>(limits_.max_stop_bytes)) {
        errors_->Add(field, absl::StrCat("is longer than ", limits_.max_stop_bytes, " bytes"));
      }
      sampling->stop.push_back(stop);
    }
    Count("stop_token_ids", static_cast<size_t>(request.stop_token_ids_size()),
          limits_.max_stop_token_ids);
    sampling->stop_token_ids = TokenList("stop_token_ids", request.stop_token_ids());
  }

  void Bias(const v1::CompleteRequest& request, SamplingParams* sampling) {
    Count("logit_bias", request.logit_bias().size(), limits_.max_logit_bias);
    for (const auto& [token, bias] : request.logit_bias()) {
      const std::string field = absl::StrCat("logit_bias[", token, "]");
      if (token < 0) errors_->Add(field, "is no token");
      sampling->logit_bias.emplace_back(token, Float(field, bias, -100, 100));
    }
    // The map's order is not one to rely on.
    std::sort(sampling->logit_bias.begin(), sampling->logit_bias.end());
  }

 private:
  const RequestLimits& limits_;
  FieldErrors* errors_;
};

SamplingParams ReadSampling(const v1::CompleteRequest& in, const RequestLimits& limits,
                            RequestReader* read) {
  SamplingParams out;
  if (in.has_max_tokens()) out.max_tokens = read->Int("max_tokens", in.max_tokens(), 0, kMaxTokens);
  if (in.has_min_tokens()) {
    out.min_tokens = read->Int("min_tokens", in.min_tokens(), 0, std::max(out.max_tokens, 0));
  }
  if (in.has_temperature()) out.temperature = read->Float("temperature", in.temperature(), 0, 100);
  if (in.has_top_p()) out.top_p = read->Float("top_p", in.top_p(), 0, 1, /*low_allowed=*/false);
  if (in.has_top_k()) {
    out.top_k = read->Int("top_k", in.top_k(), 0, std::numeric_limits<int32_t>::max());
  }
  if (in.has_min_p()) out.min_p = read->Float("min_p", in.min_p(), 0, 1);
  if (in.has_presence_penalty()) {
    out.presence_penalty = read->Float("presence_penalty", in.presence_penalty(), -2, 2);
  }
  if (in.has_frequency_penalty()) {
    out.frequency_penalty = read->Float("frequency_penalty", in.frequency_penalty(), -2, 2);
  }
  if (in.has_repetition_penalty()) {
    out.repetition_penalty =
        read->Float("repetition_penalty", in.repetition_penalty(), 0, 10, /*low_allowed=*/false);
  }
  read->Bias(in, &out);
  if (in.has_seed()) out.seed = in.seed();
  if (in.has_n()) out.n = read->Int("n", in.n(), 1, limits.max_n);
  read->Stops(in, &out);
  out.include_stop = in.include_stop();
  out.ignore_eos = in.ignore_eos();
  if (in.has_logprobs())
    out.logprobs = read->Int("logprobs", in.logprobs(), 0, limits.max_logprobs);
  if (in.has_prompt_logprobs()) {
    out.prompt_logprobs =
        read->Int("prompt_logprobs", in.prompt_logprobs(), 0, limits.max_logprobs);
  }
  out.echo = in.echo();
  if (in.has_skip_special_tokens()) out.skip_special_tokens = in.skip_special_tokens();
  return out;
}

}  // namespace

std::string NameProblem(absl::string_view name) {
  if (name.empty()) return "is missing";
  if (name.size() > kMaxVersionName) {
    return absl::StrCat("is longer than ", kMaxVersionName, " bytes");
  }
  for (const char c : name) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) &&
        absl::string_view("-_./:").find(c) == absl::string_view::npos) {
      return "may only hold letters, digits and - _ . / :";
    }
  }
  return "";
}

absl::StatusOr<CompletionRequest> FromProto(const v1::CompleteRequest& in,
                                            const RequestLimits& limits) {
  FieldErrors errors;
  RequestReader read(limits, &errors);
  CompletionRequest out;
  out.model = read.Text("model", in.model());
  out.version = read.Text("version", in.version());
  read.Text("request_id", in.request_id());
  out.session = read.Text("session", in.session());
  out.salt = read.Text("cache.salt", in.cache().salt());
  out.task = read.Text("cache.task", in.cache().task());
  switch (in.input_case()) {
    case v1::CompleteRequest::kPrompt:
      out.prompt = in.prompt();
      break;
    case v1::CompleteRequest::kTokens:
      out.tokens = read.Tokens("tokens", in.tokens());
      break;
    case v1::CompleteRequest::INPUT_NOT_SET:
      errors.Add("prompt", "either prompt or tokens must be set");
  }
  out.sampling = ReadSampling(in, limits, &read);
  if (in.has_add_special_tokens()) out.add_special_tokens = in.add_special_tokens();
  if (in.has_truncate_prompt_tokens()) {
    out.truncate_prompt_tokens =
        read.Int("truncate_prompt_tokens", in.truncate_prompt_tokens(), 1, kMaxTokens);
  }
  if (in.has_priority()) out.priority = read.Int("priority", in.priority(), -1000, 1000);
  switch (in.cache().reuse()) {
    case v1::CacheOptions::AUTO:
      out.reuse = ReuseMode::kAuto;
      break;
    case v1::CacheOptions::NATIVE_ONLY:
      out.reuse = ReuseMode::kNativeOnly;
      break;
    case v1::CacheOptions::CARRY:
      out.reuse = ReuseMode::kCarry;
      break;
    default:
      errors.Add("cache.reuse", absl::StrCat("is unknown: ", in.cache().reuse()));
  }
  if (in.cache().has_store()) out.store = in.cache().store();
  if (absl::Status status = errors.ToStatus(); !status.ok()) return status;
  return out;
}

absl::StatusOr<PrefixSpec> FromProto(const v1::Prefix& in, const RequestLimits& limits) {
  FieldErrors errors;
  RequestReader read(limits, &errors);
  PrefixSpec out;
  out.model = read.Text("prefix.model", in.model());
  out.version = read.Text("prefix.version", in.version());
  out.salt = read.Text("prefix.salt", in.salt());
  switch (in.input_case()) {
    case v1::Prefix::kPrompt:
      out.prompt = in.prompt();
      break;
    case v1::Prefix::kTokens:
      out.tokens = read.Tokens("prefix.tokens", in.tokens());
      break;
    case v1::Prefix::INPUT_NOT_SET:
      errors.Add("prefix.prompt", "either prompt or tokens must be set");
  }
  if (in.has_add_special_tokens()) out.add_special_tokens = in.add_special_tokens();
  if (absl::Status status = errors.ToStatus(); !status.ok()) return status;
  return out;
}

absl::Status Check(const v1::LoadRequest& in) {
  FieldErrors errors;
  const auto name = [&](const std::string& field, const std::string& value) {
    if (std::string problem = NameProblem(value); !problem.empty()) errors.Add(field, problem);
  };
  name("model", in.model());
  name("version", in.version());
  if (in.carry_from_size() > kMaxCarryFrom) {
    errors.Add("carry_from", absl::StrCat("has more than ", kMaxCarryFrom, " entries"));
  } else {
    for (int i = 0; i < in.carry_from_size(); ++i) {
      name(absl::StrCat("carry_from[", i, "]"), in.carry_from(i));
    }
  }
  if (in.path().empty()) {
    errors.Add("path", "is missing");
  } else if (in.path().size() > kMaxPathBytes || in.path().find('\0') != std::string::npos) {
    errors.Add("path", "is no path");
  }
  if (in.map_size() > kMaxCarryFrom) {
    errors.Add("map", absl::StrCat("has more than ", kMaxCarryFrom, " entries"));
  }
  for (int i = 0; i < in.map_size(); ++i) {
    if (in.map(i).empty() || in.map(i).size() > kMaxPathBytes ||
        in.map(i).find('\0') != std::string::npos) {
      errors.Add(absl::StrCat("map[", i, "]"), "is no path");
    }
  }
  if (in.distinct().size() > kMaxVersionName) errors.Add("distinct", "is too long");
  if (!v1::DType_IsValid(in.weights())) errors.Add("weights", "is unknown");
  if (!v1::DType_IsValid(in.kv_dtype())) errors.Add("kv_dtype", "is unknown");
  if (in.kv_dtype() == v1::DTYPE_INT8) errors.Add("kv_dtype", "INT8 is for weights alone");
  if (in.has_promote() && !(in.promote() >= 0 && in.promote() <= 100)) {
    errors.Add("promote", "must be from 0 to 100");
  }
  return errors.ToStatus();
}

absl::StatusOr<CalibrateSpec> FromProto(const v1::CalibrateRequest& in) {
  FieldErrors errors;
  const auto name = [&](const std::string& field, const std::string& value) {
    if (std::string problem = NameProblem(value); !problem.empty()) errors.Add(field, problem);
  };
  name("model", in.model());
  name("source", in.source());
  name("target", in.target());
  CalibrateSpec out;
  out.model = in.model();
  out.source = in.source();
  out.target = in.target();
  int64_t bytes = 0;
  for (const std::string& text : in.texts()) bytes += static_cast<int64_t>(text.size());
  if (in.texts_size() == 0) errors.Add("texts", "are missing");
  if (in.texts_size() > kMaxCalibrateTexts) {
    errors.Add("texts", absl::StrCat("are over ", kMaxCalibrateTexts));
  }
  if (bytes > kMaxCalibrateBytes) {
    errors.Add("texts", absl::StrCat("have ", bytes, " bytes, over ", kMaxCalibrateBytes));
  }
  if (in.has_piece_tokens()) {
    out.options.piece_tokens = in.piece_tokens();
    if (in.piece_tokens() < 64) errors.Add("piece_tokens", "must be at least 64");
  }
  if (in.has_max_tokens()) {
    out.options.max_tokens = in.max_tokens();
    if (in.max_tokens() < 1 || in.max_tokens() > kMaxCalibrateTokens) {
      errors.Add("max_tokens", absl::StrCat("must be from 1 to ", kMaxCalibrateTokens));
    }
  }
  if (absl::Status status = errors.ToStatus(); !status.ok()) return status;
  out.texts.assign(in.texts().begin(), in.texts().end());
  return out;
}

LoadOptions ToLoadOptions(const v1::LoadRequest& in) {
  LoadOptions out;
  out.model = in.model();
  out.version = in.version();
  out.path = in.path();
  out.carry_from = {in.carry_from().begin(), in.carry_from().end()};
  out.maps = {in.map().begin(), in.map().end()};
  out.distinct = in.distinct();
  out.auto_dtype = in.weights() == v1::DTYPE_AUTO;
  out.weights = in.weights() == v1::DTYPE_FP32   ? DType::kF32
                : in.weights() == v1::DTYPE_INT8 ? DType::kI8
                                                 : DType::kBF16;
  out.kv_dtype = in.kv_dtype() == v1::DTYPE_FP32 ? DType::kF32 : DType::kBF16;
  return out;
}

void ToProto(const Usage& usage, v1::Usage* out) {
  out->set_prompt_tokens(usage.prompt_tokens);
  out->set_completion_tokens(usage.completion_tokens);
  out->set_total_tokens(usage.prompt_tokens + usage.completion_tokens);
  out->set_cached_tokens(usage.cached_tokens);
  out->set_carried_tokens(usage.carried_tokens);
  out->set_repaired_tokens(usage.repaired_tokens);
  out->set_computed_tokens(usage.computed_tokens);
}

void ToProto(const CacheInfo& cache, v1::CacheInfo* out) {
  out->set_target(cache.target);
  for (const CacheSegment& segment : cache.segments) {
    v1::CacheSegment* added = out->add_segments();
    added->set_source(segment.source);
    added->set_plan(segment.plan);
    added->set_tier(segment.tier);
    added->set_tokens(segment.tokens);
  }
  out->set_gate(cache.gate);
  out->set_shadowed(cache.shadowed);
}

void ToProto(const Timing& timing, v1::Timing* out) {
  out->set_queue(timing.queue);
  out->set_load(timing.load);
  out->set_prefill(timing.prefill);
  out->set_first_token(timing.first_token);
  out->set_total(timing.total);
}

void ToProto(const PositionLogprobs& position, v1::PositionLogprobs* out) {
  const auto one = [](const TokenLogprob& from, v1::TokenLogprob* to) {
    to->set_token(from.token);
    // A vocabulary may spell a token as bytes that are no text; a proto string must be.
    to->set_text(ReplaceInvalidUtf8(from.text));
    to->set_logprob(from.logprob);
    to->set_rank(from.rank);
  };
  one(position.chosen, out->mutable_chosen());
  for (const TokenLogprob& top : position.top) one(top, out->add_top());
}

void ToProto(const ChoiceFinish& finish, v1::Finish* out) {
  switch (finish.reason) {
    case FinishReason::kNone:
      break;
    case FinishReason::kStopToken:
      out->set_reason(v1::Finish::STOP_TOKEN);
      out->set_token(finish.matched_token);
      break;
    case FinishReason::kStopString:
      out->set_reason(v1::Finish::STOP_STRING);
      out->set_stop(finish.matched);
      break;
    case FinishReason::kLength:
      out->set_reason(v1::Finish::LENGTH);
      break;
    case FinishReason::kCancelled:
      out->set_reason(v1::Finish::CANCELLED);
      break;
  }
}

void ToProto(const VersionInfo& info, v1::Version* out) {
  out->set_model(info.model);
  out->set_version(info.version);
  out->set_path(info.path);
  out->set_state(info.state);
  out->set_fingerprint(info.fingerprint);
  out->set_weights_sha256(info.weights_sha256);
  out->set_tokenizer_sha256(info.tokenizer_sha256);
  out->set_kv_layout_sha256(info.kv_layout_sha256);
  out->set_weights_dtype(info.weights_dtype);
  out->set_kv_dtype(info.kv_dtype);
  for (const std::string& source : info.carry_from) out->add_carry_from(source);
  out->set_share(info.share);
  out->set_max_positions(info.max_positions);
  out->set_weight_bytes(info.weight_bytes);
  out->set_running_requests(info.running_requests);
  out->set_cached_tokens(info.cached_tokens);
  for (const auto& [name, map] : info.maps) ToProto(map, name, out->add_maps());
}

void ToProto(const KvMapQuality& quality, v1::MapQuality* out) {
  out->set_tv(quality.tv);
  out->set_kl(quality.kl);
  out->set_flips(quality.flips);
}

void ToProto(const KvMapInfo& info, const std::string& name, v1::KvMap* out) {
  out->set_sha256(name);
  out->set_source(ToHex(info.source));
  out->set_target(ToHex(info.target));
  out->set_kv_layout_sha256(ToHex(info.kv_layout));
  out->set_variant(KvMapVariantName(info.variant));
  out->set_rank(info.rank);
  out->set_lambda(info.lambda);
  out->set_texts(info.texts);
  out->set_tokens(info.tokens);
  out->set_held_texts(info.held_texts);
  out->set_held_positions(info.held_positions);
  ToProto(info.direct, out->mutable_direct());
  ToProto(info.mapped, out->mutable_mapped());
}

void ToProto(const CalibrationCandidate& candidate, v1::CalibrateCandidate* out) {
  out->set_variant(candidate.tokens == 0 ? "direct" : KvMapVariantName(candidate.variant));
  out->set_rank(candidate.rank);
  out->set_lambda(candidate.lambda);
  out->set_tokens(candidate.tokens);
  ToProto(candidate.quality, out->mutable_quality());
}

void ToProto(const EngineSnapshot& snapshot, v1::StatsResponse* out) {
  out->set_running(snapshot.running);
  out->set_waiting(snapshot.waiting);
  out->set_waiting_tokens(snapshot.waiting_tokens);
  out->set_device_blocks(snapshot.device_blocks);
  out->set_device_blocks_used(snapshot.device_blocks_used);
  out->set_device_blocks_active(snapshot.device_blocks_active);
  for (const StoreRow& row : snapshot.store) {
    v1::StoreStats* added = out->add_store();
    added->set_model(row.model);
    added->set_tier(row.tier);
    added->set_provenance(row.provenance);
    added->set_blocks(row.blocks);
    added->set_bytes(row.bytes);
    added->set_hit_tokens(row.hit_tokens);
  }
  out->set_provenance_violations(snapshot.provenance_violations);
  out->set_preemptions(snapshot.preemptions);
  out->set_steps(snapshot.steps);
  out->set_draining(snapshot.draining);
}

void ToProto(const CachedPrefix& prefix, v1::CachedPrefix* out) {
  out->set_key(prefix.key);
  out->set_provenance(prefix.provenance);
  out->set_tier(prefix.tier);
  out->set_tokens(prefix.tokens);
  out->set_hits(prefix.hits);
  out->set_idle_seconds(prefix.idle_seconds);
  out->set_pinned(prefix.pinned);
}

void ToProto(const EvictResult& result, v1::EvictResponse* out) {
  out->set_blocks_evicted(result.blocks_evicted);
  out->set_blocks_in_use(result.blocks_in_use);
  out->set_blocks_pinned(result.blocks_pinned);
}

void ToProto(const WarmResult& result, v1::WarmResult* out) {
  out->set_version(result.version);
  out->set_tokens(result.tokens);
  out->set_cached_tokens(result.cached_tokens);
  out->set_computed_tokens(result.computed_tokens);
  out->set_stored_tokens(result.stored_tokens);
}

}  // namespace carryover
