// Fitting maps between loaded versions.

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "engine/engine_impl.h"

namespace carryover {
namespace {

// Puts a flag down again.
struct Lowered {
  std::atomic<bool>* flag;
  ~Lowered() { *flag = false; }
};

absl::Status NotLoaded(const char* field, const Version& version) {
  return absl::FailedPreconditionError(
      absl::StrCat(field, ": version ", version.name, " has no weights; load it"));
}

}  // namespace

absl::StatusOr<Calibration> EngineImpl::Calibrate(const CalibrateSpec& spec,
                                                  const CalibrateHooks& hooks) {
  if (calibrating_.exchange(true)) {
    return absl::ResourceExhaustedError("another calibration runs");
  }
  const Lowered lowered{&calibrating_};
  std::shared_ptr<const Version> source, target;
  {
    const std::shared_ptr<const VersionTable> versions = table();
    ASSIGN_OR_RETURN(const ModelEntry* model, versions->FindModel(spec.model));
    ASSIGN_OR_RETURN(source, FindVersion(*model, spec.source));
    ASSIGN_OR_RETURN(target, FindVersion(*model, spec.target));
  }
  // Weights go with their last holder, and that must not be this thread.
  const auto release = [&] {
    Call([&] {
      source.reset();
      target.reset();
      return true;
    });
  };
  const auto run = [&]() -> absl::StatusOr<Calibration> {
    if (source->weights == nullptr) return NotLoaded("source", *source);
    if (target->weights == nullptr) return NotLoaded("target", *target);
    if (source->fingerprint == target->fingerprint) {
      return absl::FailedPreconditionError("target: is the source");
    }
    RETURN_IF_ERROR(CheckCompatible(*source, *target));
    CalibrationOptions options = spec.options;
    EncodeOptions encode;
    encode.add_special_tokens = true;
    ASSIGN_OR_RETURN(options.lead, target->tokenizer->Encode("", encode));
    encode.add_special_tokens = false;
    std::vector<std::vector<int32_t>> texts;
    for (size_t i = 0; i < spec.texts.size(); ++i) {
      if (hooks.cancelled && hooks.cancelled()) return absl::CancelledError("cancelled");
      absl::StatusOr<std::vector<int32_t>> tokens =
          target->tokenizer->Encode(spec.texts[i], encode);
      if (!tokens.ok()) {
        return absl::InvalidArgumentError(
            absl::StrCat("texts[", i, "]: ", tokens.status().message()));
      }
      for (int32_t token : *tokens) {
        if (token < 0 || token >= std::min(source->config.vocab, target->config.vocab)) {
          return absl::InvalidArgumentError(
              absl::StrCat("texts[", i, "]: a token is outside the vocabulary"));
        }
      }
      texts.push_back(*std::move(tokens));
    }

    std::shared_ptr<SliceJob> job;
    CalibrationHooks device;
    device.start = [&](Slice slice) {
      job = std::make_shared<SliceJob>(std::move(slice));
      Post([this, job = job] { slices_.Add(job); });
    };
    device.wait = [&]() -> absl::Status {
      bool stopped = false;
      while (true) {
        if (std::optional<absl::Status> status = job->Wait()) return *std::move(status);
        if (stopped || !hooks.cancelled || !hooks.cancelled()) continue;
        stopped = true;
        Post([this, job = job] { slices_.Cancel(job); });
      }
    };
    device.progress = hooks.progress;
    device.candidate = hooks.candidate;
    CalibrationPair pair;
    pair.ops = &ops_;
    pair.backend = backend_;
    pair.source = source->weights.get();
    pair.target = target->weights.get();
    pair.source_fingerprint = source->fingerprint;
    pair.target_fingerprint = target->fingerprint;
    return carryover::Calibrate(pair, texts, options, device);
  };
  absl::StatusOr<Calibration> calibration = run();
  if (calibration.ok()) {
    const KvMapInfo& info = calibration->map.info;
    LogInfo("calibrated", {{"model", target->model},
                           {"source", source->name},
                           {"target", target->name},
                           {"variant", KvMapVariantName(info.variant)},
                           {"tokens", absl::StrCat(info.tokens)},
                           {"direct_tv", absl::StrCat(info.direct.tv)},
                           {"mapped_tv", absl::StrCat(info.mapped.tv)}});
  }
  release();
  return calibration;
}

}  // namespace carryover
