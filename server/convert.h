// Between the protos and the engine's structs. FromProto is where requests of the outside world are
// checked: nothing out of bounds goes further. Thread-safe, no state.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "carryover/v1/cache.pb.h"
#include "carryover/v1/completions.pb.h"
#include "carryover/v1/versions.pb.h"
#include "engine/engine.h"
#include "engine/request.h"

namespace carryover {

constexpr int kMaxCarryFrom = 16;

// Bounds of one request: ServerConfig.limits, where each is documented.
struct RequestLimits {
  int max_prompt_tokens = 0;  // 0: the model's context
  int max_n = 16;
  int max_stop = 16;
  int max_stop_bytes = 256;
  int max_stop_token_ids = 64;
  int max_logit_bias = 300;
  int max_logprobs = 20;
  int max_name_bytes = 256;
};

// What is wrong with a model's or version's name, or "": 1 to 128 of letters, digits and - _ . / :
// Names become metric labels and log fields.
std::string NameProblem(absl::string_view name);

// INVALID_ARGUMENT with a google.rpc.BadRequest that names every field out of bounds. id, tenant
// and deadline are left to the caller.
absl::StatusOr<CompletionRequest> FromProto(const v1::CompleteRequest& request,
                                            const RequestLimits& limits);
absl::StatusOr<PrefixSpec> FromProto(const v1::Prefix& prefix, const RequestLimits& limits);
absl::Status Check(const v1::LoadRequest& request);
LoadOptions ToLoadOptions(const v1::LoadRequest& request);  // REQUIRES: Check is OK
absl::StatusOr<CalibrateSpec> FromProto(const v1::CalibrateRequest& request);

void ToProto(const Usage& usage, v1::Usage* out);
void ToProto(const CacheInfo& cache, v1::CacheInfo* out);
void ToProto(const Timing& timing, v1::Timing* out);
void ToProto(const PositionLogprobs& position, v1::PositionLogprobs* out);
void ToProto(const ChoiceFinish& finish, v1::Finish* out);
void ToProto(const VersionInfo& info, v1::Version* out);
void ToProto(const KvMapQuality& quality, v1::MapQuality* out);
void ToProto(const KvMapInfo& info, const std::string& name, v1::KvMap* out);
void ToProto(const CalibrationCandidate& candidate, v1::CalibrateCandidate* out);
void ToProto(const EngineSnapshot& snapshot, v1::StatsResponse* out);
void ToProto(const CachedPrefix& prefix, v1::CachedPrefix* out);
void ToProto(const EvictResult& result, v1::EvictResponse* out);
void ToProto(const WarmResult& result, v1::WarmResult* out);

}  // namespace carryover
