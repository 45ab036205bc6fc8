#include "engine/calibration.h"

#include <algorithm>
#include <optional>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "engine/calibration_device.h"
#include "engine/kv_fit.h"

namespace carryover {
namespace {

constexpr int kLeastPrefix = 64;
constexpr size_t kManyTexts = 10;
constexpr int kFold = 5;
constexpr int kHeldInFold = 2;
constexpr size_t kKeptBytes = size_t{1} << 30;
// Shares of the tokens after which a first map is tried: how much text is enough.
constexpr double kAmounts[] = {0.125, 0.25, 0.5};
// Of the dimension.
constexpr int kRankParts[] = {12, 4};

// std::shuffle's order is the library's own affair.
template <class T>
void Shuffle(std::vector<T>* items) {
  std::mt19937_64 random(7);
  for (size_t i = items->size(); i > 1; --i) std::swap((*items)[i - 1], (*items)[random() % i]);
}

class Calibrator {
 public:
  Calibrator(const CalibrationPair& pair, const CalibrationOptions& options,
             const CalibrationHooks& hooks)
      : pair_(pair),
        options_(options),
        hooks_(hooks),
        layout_(pair.target->kv_layout()),
        dim_(2 * layout_.geometry.kv_heads * layout_.geometry.head_dim) {}

  absl::StatusOr<Calibration> Run(const std::vector<std::vector<int32_t>>& texts);

 private:
  struct Held {
    std::vector<int32_t> tokens;
    std::vector<float> native;  // (positions, vocab)
  };

  absl::Status HoldOut();
  absl::Status Fit();
  absl::Status Choose();
  // Fits such a map on what was added so far and compares. The best of all tokens is kept.
  absl::StatusOr<KvMapQuality> Try(KvMapVariant variant, int rank, double lambda);
  absl::StatusOr<KvMapQuality> Compare(const DeviceKvMap* map);
  absl::Status RunSlice(Slice slice) {
    hooks_.start(std::move(slice));
    return hooks_.wait();
  }
  void Progress(const char* phase, int64_t done, int64_t total) {
    if (hooks_.progress) hooks_.progress(phase, done, total);
  }
  void Tell(const CalibrationCandidate& candidate) {
    if (hooks_.candidate) hooks_.candidate(candidate);
  }

  const CalibrationPair& pair_;
  const CalibrationOptions& options_;
  const CalibrationHooks& hooks_;
  const KvLayout& layout_;
  const int dim_;

  CalibrationPieces pieces_;
  std::unique_ptr<CalibrationDevice> device_;
  std::vector<Held> held_;
  std::vector<KvFitSums> sums_;  // (layers)
  int64_t fitted_ = 0;           // tokens in them
  int64_t fitted_texts_ = 0;
  KvMapQuality direct_;
  Calibration result_;
};

absl::StatusOr<Calibration> Calibrator::Run(const std::vector<std::vector<int32_t>>& texts) {
  const int block_tokens = layout_.geometry.block_tokens;
  pieces_ = CutPieces(texts, options_, block_tokens);
  if (pieces_.fit.empty() || pieces_.held.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("texts: too little text to fit a map and to compare it: at least ",
                     kHeldInFold + 1, " pieces of ", options_.piece_tokens + options_.positions,
                     " tokens are needed, or texts that are shorter"));
  }
  const int prefix = options_.piece_tokens / block_tokens * block_tokens;
  const size_t kept_bytes = layout_.geometry.BlockBytes() * (prefix / block_tokens);
  const size_t kept = std::max<size_t>(2, kKeptBytes / kept_bytes);
  if (pieces_.held.size() > kept) pieces_.held.resize(kept);
  ASSIGN_OR_RETURN(device_,
                   CalibrationDevice::Create(*pair_.ops, pair_.backend, pair_.source, pair_.target,
                                             {.kept = static_cast<int>(pieces_.held.size()),
                                              .prefix_tokens = prefix,
                                              .positions = options_.positions,
                                              .chunk_tokens = options_.chunk_tokens}));
  RETURN_IF_ERROR(HoldOut());
  RETURN_IF_ERROR(Fit());
  RETURN_IF_ERROR(Choose());
  return std::move(result_);
}

absl::Status Calibrator::HoldOut() {
  const int64_t total = pieces_.held.size();
  for (int64_t i = 0; i < total; ++i) {
    Progress("held out", i, total);
    Held& held = held_.emplace_back();
    held.tokens = std::move(pieces_.held[i]);
    const auto prefix =
        absl::MakeConstSpan(held.tokens).first(held.tokens.size() - options_.positions);
    RETURN_IF_ERROR(RunSlice(device_->KeepPrefix(prefix, static_cast<int>(i))));
    RETURN_IF_ERROR(RunSlice(device_->ComputeNative(held.tokens, &held.native)));
  }
  ASSIGN_OR_RETURN(direct_, Compare(nullptr));
  Tell({.quality = direct_});
  Progress("held out", total, total);
  return absl::OkStatus();
}

// While the device computes a chunk, this thread adds the one before.
absl::Status Calibrator::Fit() {
  for (int i = 0; i < layout_.geometry.layers; ++i) {
    sums_.emplace_back(layout_.geometry.kv_heads, layout_.geometry.head_dim);
  }
  PairedRows rows[2];
  PairedRows* ready = nullptr;
  const auto add = [&] {
    if (ready == nullptr) return;
    const size_t values = size_t{1} * ready->rows * dim_;
    for (size_t layer = 0; layer < sums_.size(); ++layer) {
      sums_[layer].Add(absl::MakeConstSpan(ready->source).subspan(layer * values, values),
                       absl::MakeConstSpan(ready->target).subspan(layer * values, values));
    }
    fitted_ += ready->rows;
    ready = nullptr;
    Progress("fit", fitted_, pieces_.fit_tokens);
  };
  size_t next_amount = 0;
  int turn = 0;
  for (const std::vector<int32_t>& piece : pieces_.fit) {
    const int tokens = static_cast<int>(piece.size());
    for (int begin = 0; begin < tokens; begin += options_.chunk_tokens) {
      PairedRows* out = &rows[turn];
      turn = 1 - turn;
      hooks_.start(
          device_->ComputePair(piece, begin, std::min(options_.chunk_tokens, tokens - begin), out));
      add();
      RETURN_IF_ERROR(hooks_.wait());
      ready = out;
    }
    ++fitted_texts_;
    if (next_amount == std::size(kAmounts)) continue;
    const int64_t with_ready = fitted_ + (ready == nullptr ? 0 : ready->rows);
    if (with_ready < kAmounts[next_amount] * pieces_.fit_tokens) continue;
    while (next_amount < std::size(kAmounts) &&
           with_ready >= kAmounts[next_amount] * pieces_.fit_tokens) {
      ++next_amount;
    }
    add();
    if (fitted_ == pieces_.fit_tokens) break;
    RETURN_IF_ERROR(
        Try(KvMapVariant::kPerLayer, 0, options_.lambdas[options_.lambdas.size() / 2]).status());
  }
  add();
  return absl::OkStatus();
}

absl::Status Calibrator::Choose() {
  std::vector<int> ranks;
  for (int part : kRankParts) {
    const int rank = dim_ / part;
    if (rank > 0) ranks.push_back(rank);
  }
  const int64_t total = 2 * options_.lambdas.size() + ranks.size();
  int64_t done = 0;
  double best_lambda = 0, best_tv = 2;
  for (KvMapVariant variant : {KvMapVariant::kPerLayer, KvMapVariant::kPerHead}) {
    for (double lambda : options_.lambdas) {
      Progress("choose", done++, total);
      ASSIGN_OR_RETURN(const KvMapQuality quality, Try(variant, 0, lambda));
      if (variant != KvMapVariant::kPerLayer || quality.tv >= best_tv) continue;
      best_tv = quality.tv;
      best_lambda = lambda;
    }
  }
  for (int rank : ranks) {
    Progress("choose", done++, total);
    RETURN_IF_ERROR(Try(KvMapVariant::kLowRank, rank, best_lambda).status());
  }
  Progress("choose", total, total);
  return absl::OkStatus();
}

absl::StatusOr<KvMapQuality> Calibrator::Try(KvMapVariant variant, int rank, double lambda) {
  KvMap map;
  map.info.source = pair_.source_fingerprint;
  map.info.target = pair_.target_fingerprint;
  map.info.kv_layout = layout_.sha256;
  map.info.layers = layout_.geometry.layers;
  map.info.kv_heads = layout_.geometry.kv_heads;
  map.info.head_dim = layout_.geometry.head_dim;
  map.info.variant = variant;
  map.info.rank = rank;
  map.info.lambda = lambda;
  map.info.texts = fitted_texts_;
  map.info.tokens = fitted_;
  map.info.held_texts = held_.size();
  map.info.held_positions = held_.size() * options_.positions;
  map.info.direct = direct_;
  for (const KvFitSums& sums : sums_) {
    ASSIGN_OR_RETURN(KvMapLayer layer, sums.Solve(variant, lambda, rank));
    map.layers.push_back(std::move(layer));
  }
  ASSIGN_OR_RETURN(const auto packed, device_->Pack(map));
  ASSIGN_OR_RETURN(map.info.mapped, Compare(packed.get()));
  const CalibrationCandidate candidate = {variant, rank, lambda, fitted_, map.info.mapped};
  Tell(candidate);
  result_.candidates.push_back(candidate);
  const bool all = fitted_ == pieces_.fit_tokens;
  if (all && (result_.map.layers.empty() || map.info.mapped.tv < result_.map.info.mapped.tv)) {
    result_.map = std::move(map);
  }
  return candidate.quality;
}

absl::StatusOr<KvMapQuality> Calibrator::Compare(const DeviceKvMap* map) {
  QualitySums sums;
  for (size_t i = 0; i < held_.size(); ++i) {
    RETURN_IF_ERROR(RunSlice(
        device_->Compare(held_[i].tokens, static_cast<int>(i), map, held_[i].native, &sums)));
  }
  return sums.Mean();
}

absl::Status CheckOptions(const CalibrationPair& pair, const CalibrationOptions& options) {
  const int64_t most = pair.target->config().max_positions;
  if (options.piece_tokens < kLeastPrefix || options.piece_tokens + options.positions > most ||
      options.piece_tokens + options.positions > pair.source->config().max_positions) {
    return absl::InvalidArgumentError(absl::StrCat("piece_tokens: not from ", kLeastPrefix, " to ",
                                                   most - options.positions, ", the context"));
  }
  if (options.max_tokens < options.piece_tokens) {
    return absl::InvalidArgumentError("max_tokens: less than a piece");
  }
  if (options.positions < 1 || options.held_pieces < 1 || options.lambdas.empty() ||
      options.chunk_tokens < 1 || options.lead.size() >= kLeastPrefix / 2) {
    return absl::InvalidArgumentError("calibration: an option is out of range");
  }
  return absl::OkStatus();
}

}  // namespace

CalibrationPieces CutPieces(const std::vector<std::vector<int32_t>>& texts,
                            const CalibrationOptions& options, int block_tokens) {
  CalibrationPieces pieces;
  const size_t whole = options.piece_tokens / block_tokens * block_tokens + options.positions;
  const size_t step = whole - options.lead.size();
  size_t counted = 0;
  for (size_t text = 0; text < texts.size(); ++text) {
    const std::vector<int32_t>& tokens = texts[text];
    for (size_t begin = 0; begin < tokens.size(); begin += step) {
      size_t size = options.lead.size() + std::min(step, tokens.size() - begin);
      if (size < static_cast<size_t>(kLeastPrefix + options.positions)) break;
      size = (size - options.positions) / block_tokens * block_tokens + options.positions;
      const size_t number = texts.size() >= kManyTexts ? text : counted;
      ++counted;
      const bool held = number % kFold == kHeldInFold;
      std::vector<int32_t> piece = options.lead;
      piece.insert(piece.end(), tokens.begin() + begin,
                   tokens.begin() + begin + size - options.lead.size());
      (held ? pieces.held : pieces.fit).push_back(std::move(piece));
    }
  }
  Shuffle(&pieces.fit);
  Shuffle(&pieces.held);
  if (pieces.held.size() > static_cast<size_t>(options.held_pieces)) {
    pieces.held.resize(options.held_pieces);
  }
  size_t kept = 0;
  while (kept < pieces.fit.size() &&
         (kept == 0 || pieces.fit_tokens + static_cast<int64_t>(pieces.fit[kept].size()) <=
                           options.max_tokens)) {
    pieces.fit_tokens += static_cast<int64_t>(pieces.fit[kept++].size());
  }
  pieces.fit.resize(kept);
  return pieces;
}

absl::StatusOr<Calibration> Calibrate(const CalibrationPair& pair,
                                      const std::vector<std::vector<int32_t>>& texts,
                                      const CalibrationOptions& options,
                                      const CalibrationHooks& hooks) {
  RETURN_IF_ERROR(CheckOptions(pair, options));
  return Calibrator(pair, options, hooks).Run(texts);
}

}  // namespace carryover
