#include "engine/version.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace carryover {

CarrySource Version::Source(const Digest& fingerprint) const {
  CarrySource source;
  source.fingerprint = fingerprint;
  for (const VersionMap& map : maps) {
    if (map.info.source == fingerprint) source.map = map.device;
  }
  return source;
}

absl::StatusOr<const ModelEntry*> VersionTable::FindModel(absl::string_view name) const {
  if (name.empty() && models.size() == 1) return &models[0];
  std::vector<std::string> known;
  for (const ModelEntry& model : models) {
    if (model.name == name) return &model;
    known.push_back(model.name);
  }
  if (name.empty()) {
    return absl::InvalidArgumentError(
        models.empty() ? "model: none is loaded"
                       : absl::StrCat("model: required, one of ", absl::StrJoin(known, ", ")));
  }
  return absl::NotFoundError(absl::StrCat("model: no such model; loaded: ",
                                          known.empty() ? "none" : absl::StrJoin(known, ", ")));
}

ModelEntry* VersionTable::MutableModel(absl::string_view name) {
  for (ModelEntry& model : models) {
    if (model.name == name) return &model;
  }
  return nullptr;
}

absl::StatusOr<std::shared_ptr<const Version>> FindVersion(const ModelEntry& model,
                                                           absl::string_view name) {
  std::vector<std::string> known;
  for (const auto& version : model.versions) {
    if (version->name == name) return version;
    known.push_back(version->name);
  }
  return absl::NotFoundError(absl::StrCat("version: model ", model.name,
                                          " has no such version; it has ",
                                          known.empty() ? "none" : absl::StrJoin(known, ", ")));
}

absl::StatusOr<std::shared_ptr<const Version>> RouteVersion(const ModelEntry& model,
                                                            absl::string_view session_key) {
  if (!model.candidate.empty()) {
    const Digest digest = Hasher().Add(model.name).Add(session_key).Finish();
    uint32_t point;
    std::memcpy(&point, digest.data(), sizeof(point));
    if (point < model.candidate_share / 100 * 4294967296.0) {
      return FindVersion(model, model.candidate);
    }
  }
  if (model.stable.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("model ", model.name, ": no version is promoted"));
  }
  return FindVersion(model, model.stable);
}

absl::Status CheckCompatible(const Version& source, const Version& target) {
  std::vector<std::string> differences;
  const auto compare = [&](absl::string_view field, const auto& a, const auto& b) {
    if (a != b) differences.push_back(absl::StrCat(field, " (", a, " and ", b, ")"));
  };
  const auto flag = [](const auto& value) { return static_cast<int>(value); };
  const ModelConfig &s = source.config, &t = target.config;
  compare("architecture", s.model_type, t.model_type);
  compare("layers", s.layers, t.layers);
  compare("kv_heads", s.kv_heads, t.kv_heads);
  compare("head_dim", s.head_dim, t.head_dim);
  compare("qk_norm", flag(s.qk_norm), flag(t.qk_norm));
  compare("rope.theta", s.rope.theta, t.rope.theta);
  compare("rope.scaling", flag(s.rope.scaling), flag(t.rope.scaling));
  compare("rope.factor", s.rope.factor, t.rope.factor);
  compare("rope.low_freq_factor", s.rope.low_freq_factor, t.rope.low_freq_factor);
  compare("rope.high_freq_factor", s.rope.high_freq_factor, t.rope.high_freq_factor);
  compare("rope.original_max_positions", s.rope.original_max_positions,
          t.rope.original_max_positions);
  compare("sliding_windows", absl::StrJoin(s.windows, ","), absl::StrJoin(t.windows, ","));
  compare("kv_dtype", std::string(DTypeName(source.kv_layout.geometry.dtype)),
          std::string(DTypeName(target.kv_layout.geometry.dtype)));
  compare("block_tokens", source.kv_layout.geometry.block_tokens,
          target.kv_layout.geometry.block_tokens);
  compare("kv_format", source.kv_layout.format, target.kv_layout.format);
  compare("tokenizer_sha256", ShortHex(source.tokenizer->sha256()),
          ShortHex(target.tokenizer->sha256()));
  if (differences.empty() && source.kv_layout.sha256 != target.kv_layout.sha256) {
    differences.push_back("kv_layout_sha256");
  }
  if (differences.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("version ", target.name, " cannot read the caches of ", source.name,
                   "; these differ: ", absl::StrJoin(differences, ", ")));
}

}  // namespace carryover
