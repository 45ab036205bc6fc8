// Saving and restoring the gate. Integers and doubles little-endian; strings and lists with their
// length before them; a SHA-256 over everything at the end. What is read is checked value by value
// all the same: the checksum finds damage, not malice.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/hash.h"
#include "base/status_macros.h"
#include "engine/gate_impl.h"

namespace carryover {
namespace {

// Changes with the layout below and with the stakes, candidates and starts of the tests.
constexpr absl::string_view kMagic = "carryover-gate-3\n";
constexpr int64_t kMaxCount = int64_t{1} << 50;

void PutInt(uint64_t value, std::string* out) {
  char bytes[8];
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(value >> (8 * i));
  out->append(bytes, 8);
}
void PutDouble(double value, std::string* out) { PutInt(std::bit_cast<uint64_t>(value), out); }
void PutString(absl::string_view text, std::string* out) {
  PutInt(text.size(), out);
  out->append(text.data(), text.size());
}

void PutKey(const CellKey& key, std::string* out) {
  PutString(key.source, out);
  PutString(key.target, out);
  PutString(key.task, out);
  PutInt(key.prefix_bucket, out);
  PutInt(static_cast<uint64_t>(key.answer), out);
}

void PutTest(const MeanTest& test, std::string* out) {
  PutInt(test.n, out);
  for (const auto& row : test.capital) {
    for (int i = 0; i < test.size; ++i) PutDouble(row[i], out);
  }
}

void PutEvidence(const GateEvidence& evidence, std::string* out) {
  for (const MeanTest& test : evidence.open) PutTest(test, out);
  for (const MeanTest& test : evidence.close) PutTest(test, out);
  PutInt(evidence.cap.used, out);
  for (size_t i = 0; i < evidence.cap.slots.size(); ++i) {
    if (evidence.cap.slots[i] != 0) PutInt(i << 8 | evidence.cap.slots[i], out);
  }
  PutInt(evidence.recent.seen, out);
  PutInt(evidence.recent.entries.size(), out);
  for (const RecentPrefixes::Entry& entry : evidence.recent.entries) {
    PutInt(entry.prefix, out);
    PutInt(entry.at, out);
  }
  for (int64_t count : {evidence.samples, evidence.dropped, evidence.counted, evidence.prefixes}) {
    PutInt(count, out);
  }
  PutDouble(evidence.weight, out);
  for (double sum : evidence.sums) PutDouble(sum, out);
  PutDouble(evidence.recent_completed, out);
  PutDouble(evidence.recent_dropped, out);
}

// Reads what Put* wrote; the first thing that is wrong makes every later read fail.
class Reader {
 public:
  explicit Reader(absl::string_view bytes) : rest_(bytes) {}

  bool ok() const { return ok_; }
  bool done() const { return ok_ && rest_.empty(); }
  void Fail() { ok_ = false; }

  uint64_t Int(uint64_t most) {
    if (!Need(8)) return 0;
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) {
      value |= static_cast<uint64_t>(static_cast<uint8_t>(rest_[i])) << (8 * i);
    }
    rest_.remove_prefix(8);
    if (value > most) Fail();
    return ok_ ? value : 0;
  }

  // At least 0; NaN fails.
  double Double(double most) {
    const double value = std::bit_cast<double>(Int(~uint64_t{0}));
    if (!(value >= 0 && value <= most)) Fail();
    return ok_ ? value : 0;
  }

  std::string String() {
    const uint64_t size = Int(kMaxKeyBytes);
    if (!Need(size)) return "";
    std::string text(rest_.substr(0, size));
    rest_.remove_prefix(size);
    return text;
  }

  CellKey Key() {
    CellKey key;
    key.source = String();
    key.target = String();
    key.task = String();
    key.prefix_bucket = static_cast<int>(Int(kMaxPrefixBucket));
    key.answer = static_cast<AnswerClass>(Int(1));
    return key;
  }

  void Test(MeanTest* test) {
    test->n = Int(kMaxCount);
    for (auto& row : test->capital) {
      for (int i = 0; i < MeanTest::kCandidates; ++i) {
        row[i] = i < test->size ? Double(kMaxCapital) : row[test->size - 1];
      }
    }
  }

  void Evidence(GateEvidence* evidence) {
    for (MeanTest& test : evidence->open) Test(&test);
    for (MeanTest& test : evidence->close) Test(&test);
    PrefixCap& cap = evidence->cap;
    cap.used = static_cast<int>(Int(PrefixCap::kFull));
    if (ok_ && cap.used > 0) cap.slots.resize(PrefixCap::kSlots);
    for (int i = 0; ok_ && i < cap.used; ++i) {
      const uint64_t packed = Int((PrefixCap::kSlots << 8) - 1);
      uint8_t& slot = cap.slots[packed >> 8];
      if (slot != 0 || (packed & 255) == 0) Fail();
      slot = packed & 255;
    }
    RecentPrefixes& recent = evidence->recent;
    recent.seen = Int(kMaxCount);
    const uint64_t entries = Int(RecentPrefixes::kMaxOthers);
    for (uint64_t i = 0; ok_ && i < entries; ++i) {
      const uint64_t prefix = Int(~uint64_t{0});
      const int64_t at = Int(recent.seen);
      if (!recent.entries.empty() && at <= recent.entries.back().at) Fail();
      recent.entries.push_back({prefix, at});
    }
    for (int64_t* count :
         {&evidence->samples, &evidence->dropped, &evidence->counted, &evidence->prefixes}) {
      *count = Int(kMaxCount);
    }
    evidence->weight = Double(static_cast<double>(kMaxCount));
    for (double& sum : evidence->sums) sum = Double(evidence->weight * (1 + 1e-9));
    evidence->recent_completed = Double(1000);
    evidence->recent_dropped = Double(1000);
  }

 private:
  bool Need(uint64_t bytes) {
    if (rest_.size() < bytes) Fail();
    return ok_;
  }

  absl::string_view rest_;
  bool ok_ = true;
};

// Of everything that gives the evidence its meaning.
Digest ConfigDigest(const GateConfig& config) {
  std::string text;
  for (const GateValues* values : {&config.limit, &config.max_floor}) {
    for (double value : *values) PutDouble(value, &text);
  }
  PutDouble(config.alpha, &text);
  PutDouble(config.assume_dropped, &text);
  PutInt(config.prefix_weight, &text);
  for (const std::string& plan : config.ladder) PutString(plan, &text);
  return Sha256(text);
}

absl::string_view AsBytes(const Digest& digest) {
  return absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size());
}

}  // namespace

std::string Gate::Save(double now) const {
  std::string out(kMagic);
  const Digest config = ConfigDigest(impl_->config);
  absl::StrAppend(&out, AsBytes(config));
  PutInt(impl_->cells.size(), &out);
  for (const auto& [key, cell] : impl_->cells) {
    PutKey(key, &out);
    for (const GateRung& rung : cell->rungs) {
      PutInt(static_cast<uint64_t>(rung.state), &out);
      PutInt(rung.epoch, &out);
      PutDouble(rung.state == RungState::kFailed ? std::max(0.0, rung.retry_at - now) : 0, &out);
      PutInt(rung.borrowed ? 1 : 0, &out);
      PutInt(rung.by_task ? 1 : 0, &out);
      PutEvidence(rung.evidence, &out);
    }
  }
  PutInt(impl_->floors.size(), &out);
  for (const auto& [key, floor] : impl_->floors) {
    PutKey(key, &out);
    PutEvidence(*floor, &out);
  }
  PutInt(impl_->target_floors.size(), &out);
  for (const auto& [target, floor] : impl_->target_floors) {
    PutString(target, &out);
    PutEvidence(*floor, &out);
  }
  PutInt(impl_->rules.size(), &out);
  for (const GateRule& rule : impl_->rules) {
    PutString(rule.pattern.source, &out);
    PutString(rule.pattern.target, &out);
    PutString(rule.pattern.task, &out);
    PutInt(rule.pattern.prefix_bucket, &out);
    PutInt(rule.pattern.answer ? 1 + static_cast<uint64_t>(*rule.pattern.answer) : 0, &out);
    PutInt(static_cast<uint64_t>(rule.state), &out);
    PutString(rule.who, &out);
  }
  const Digest sum = Sha256(out);
  absl::StrAppend(&out, AsBytes(sum));
  return out;
}

size_t Gate::MaxSavedBytes(const GateConfig& config) {
  constexpr size_t kTest = 8 * (1 + MeanTest::kStakes * MeanTest::kCandidates);
  constexpr size_t kEvidence =
      2 * kGateMeasures * kTest + 8 * PrefixCap::kFull + 16 * RecentPrefixes::kMaxOthers + 8 * 16;
  constexpr size_t kKey = 3 * (8 + kMaxKeyBytes) + 8 * 8;
  // Cells with their rungs, strata of the floor, and targets.
  return kMagic.size() + 2 * sizeof(Digest) + 4 * 8 +
         static_cast<size_t>(config.max_cells) *
             (3 * kKey + (config.ladder.size() + 2) * (kEvidence + 5 * 8)) +
         kMaxForceRules * (kKey + 8 + kMaxKeyBytes);
}

absl::Status Gate::Restore(absl::string_view bytes, double now) {
  const absl::Status damaged = absl::DataLossError("gate state: not what was saved");
  constexpr size_t kDigest = sizeof(Digest);
  if (bytes.size() < kMagic.size() + 2 * kDigest || bytes.substr(0, kMagic.size()) != kMagic) {
    return damaged;
  }
  const absl::string_view body = bytes.substr(0, bytes.size() - kDigest);
  if (AsBytes(Sha256(body)) != bytes.substr(body.size())) return damaged;
  const GateConfig& config = impl_->config;
  if (AsBytes(ConfigDigest(config)) != body.substr(kMagic.size(), kDigest)) {
    return absl::FailedPreconditionError(
        "gate state: saved under other limits, max_floor, alpha, assume_dropped, prefix_weight or "
        "ladder; it starts anew");
  }
  auto restored = std::make_unique<Impl>(config);
  restored->unusable = impl_->unusable;
  Reader in(body.substr(kMagic.size() + kDigest));
  // A count is believed one entry at a time: each is read before there is room for the next. A
  // lower cap on cells than when it was saved leaves the rest out.
  const uint64_t cells = in.Int(kMaxCount);
  for (uint64_t i = 0; in.ok() && i < cells; ++i) {
    CellKey key = in.Key();
    if (key.prefix_bucket < 256) in.Fail();
    auto cell = std::make_unique<GateCell>(key, config.ladder.size(), restored->grids);
    for (GateRung& rung : cell->rungs) {
      rung.state = static_cast<RungState>(in.Int(static_cast<uint64_t>(RungState::kFailed)));
      rung.epoch = static_cast<int>(in.Int(1 << 30));
      // The cool-down may have been configured shorter since.
      rung.retry_at = now + std::min(in.Double(1e8), config.cooldown_seconds);
      rung.borrowed = in.Int(1) == 1;
      rung.by_task = in.Int(1) == 1;
      in.Evidence(&rung.evidence);
      if (rung.epoch < 1 || (rung.borrowed && rung.state != RungState::kProved)) in.Fail();
    }
    restored->SettleState(cell.get());
    if (static_cast<int>(restored->cells.size()) < config.max_cells &&
        !restored->cells.emplace(std::move(key), std::move(cell)).second) {
      in.Fail();
    }
  }
  for (bool own : {true, false}) {
    const uint64_t floors = in.Int(kMaxCount);
    for (uint64_t i = 0; in.ok() && i < floors; ++i) {
      CellKey key;
      if (own) {
        key = in.Key();
      } else {
        key.target = in.String();
      }
      auto floor = std::make_unique<GateEvidence>(GateComparison::kControl, restored->grids);
      in.Evidence(floor.get());
      const size_t held = own ? restored->floors.size() : restored->target_floors.size();
      if (static_cast<int>(held) >= config.max_cells) continue;
      const bool added = own ? restored->floors.emplace(std::move(key), std::move(floor)).second
                             : restored->target_floors.emplace(key.target, std::move(floor)).second;
      if (!added) in.Fail();
    }
  }
  const uint64_t rules = in.Int(kMaxForceRules);
  for (uint64_t i = 0; in.ok() && i < rules; ++i) {
    GateRule rule;
    rule.pattern.source = in.String();
    rule.pattern.target = in.String();
    rule.pattern.task = in.String();
    rule.pattern.prefix_bucket = static_cast<int>(in.Int(kMaxPrefixBucket));
    const uint64_t answer = in.Int(2);
    if (answer > 0) rule.pattern.answer = static_cast<AnswerClass>(answer - 1);
    rule.state = static_cast<GateState>(in.Int(static_cast<uint64_t>(GateState::kClosed)));
    if (rule.state == GateState::kRepaired && config.ladder.size() < 2) in.Fail();
    rule.who = in.String();
    if (!IsPrintable(rule.who)) in.Fail();
    restored->rules.push_back(std::move(rule));
  }
  if (!in.done()) return damaged;
  // Not the whole Impl: decisions given out point into its ladder.
  impl_->cells = std::move(restored->cells);
  impl_->floors = std::move(restored->floors);
  impl_->target_floors = std::move(restored->target_floors);
  impl_->rules = std::move(restored->rules);
  for (auto& [key, cell] : impl_->cells) {
    impl_->ApplyRules(cell.get());
    impl_->UpdateDecision(cell.get());
  }
  return absl::OkStatus();
}

}  // namespace carryover
