// Saving and restoring the gate, from bytes that were saved, damaged or made up.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/hash.h"
#include "engine/gate.h"
#include "tests/unit/gate_testing.h"

namespace carryover {
namespace {

constexpr size_t kDigestBytes = sizeof(Digest);

CellKey Key(const std::string& task) {
  CellKey key;
  key.source = "source";
  key.target = "target";
  key.plan = "direct";
  key.task = task;
  key.prefix_bucket = 1024;
  return key;
}

// A gate with an open, a closed and a learning cell, controls, and an override.
void Live(Gate* gate, int learning_samples = 100) {
  uint64_t prefix = 0;
  const auto feed = [&](const std::string& task, int count, int flip_every) {
    for (int i = 1; i <= count; ++i) {
      GateSample sample;
      sample.cell = Key(task);
      sample.prefix = ++prefix * 0x9e3779b97f4a7c15u;
      sample.dropped = i % 499 == 0;
      if (flip_every > 0 && i % flip_every == 0) sample.values = {1, 0.3, 0.1};
      gate->Observe(sample, 50);
      sample.comparison = GateComparison::kControl;
      sample.values = {};
      if (i % 4 == 0) gate->Observe(sample, 50);
    }
  };
  feed("open", 2500, 0);
  feed("closed", 300, 2);
  feed("learning", learning_samples, 150);
  std::vector<GateTransition> changes;
  CellPattern pattern;
  pattern.task = "forced";
  pattern.answer = AnswerClass::kLong;
  ASSERT_TRUE(gate->Force(pattern, GateState::kOpen, "test", &changes).ok());
}

// What a caller can see; two gates that agree here go on alike.
std::string Seen(Gate* gate, double now) {
  std::string text;
  for (const CellReport& report : gate->Report(now)) {
    text += report.explanation + " " + std::to_string(report.cooldown_left);
    for (const MeasureReport& measure : report.measures) {
      text += " " + std::to_string(measure.open_evidence) + " " +
              std::to_string(measure.close_evidence) + " " + std::to_string(measure.floor_upper);
    }
    text += "\n";
  }
  return text;
}

std::string Signed(std::string body) {
  const Digest sum = Sha256(body);
  return body.append(reinterpret_cast<const char*>(sum.data()), sum.size());
}

TEST(GateStateTest, ARestoredGateGoesOnAsIfNothingHadHappened) {
  Gate gate(DirectAlone());
  Live(&gate);
  ASSERT_EQ(gate.Decide(Key("open")).state, GateState::kOpen);
  ASSERT_EQ(gate.Decide(Key("closed")).state, GateState::kClosed);
  const std::string bytes = gate.Save(100);
  EXPECT_LT(bytes.size(), 200000u);

  Gate other(DirectAlone());
  other.Decide(Key("gone after the restore"));
  ASSERT_TRUE(other.Restore(bytes, 7100).ok());  // another clock
  EXPECT_EQ(other.cells(), 3);
  EXPECT_EQ(Seen(&other, 7100), Seen(&gate, 100));
  EXPECT_EQ(other.Decide(Key("open")).plan, "direct");
  EXPECT_TRUE(other.Decide(Key("forced")).carry);
  EXPECT_TRUE(gate.Decide(Key("forced")).carry);
  ASSERT_EQ(other.Rules().size(), 1u);
  EXPECT_EQ(other.Rules()[0].pattern, gate.Rules()[0].pattern);
  EXPECT_EQ(other.Rules()[0].state, GateState::kOpen);
  EXPECT_EQ(other.Rules()[0].who, "test");
  // The cool-down goes on, and so does what prefixes counted.
  EXPECT_TRUE(other.Tick(7100 + 549).empty());
  for (int i = 0; i < 900; ++i) {
    GateSample sample;
    sample.cell = Key("learning");
    sample.prefix = (2800 + i) * 0x9e3779b97f4a7c15u;
    sample.values = {i % 400 == 3 ? 1.0 : 0.0, 0.01, 0};
    const auto here = gate.Observe(sample, 100), there = other.Observe(sample, 7100);
    ASSERT_EQ(here.size(), there.size());
    if (!here.empty()) {
      EXPECT_EQ(here[0].reason, there[0].reason);
    }
  }
  EXPECT_EQ(gate.Decide(Key("learning")).state, GateState::kOpen);
  EXPECT_EQ(Seen(&other, 7100), Seen(&gate, 100));
  EXPECT_EQ(other.Tick(7100 + 551).size(), 1u);
}

TEST(GateStateTest, NothingSavedIsOverTheLimit) {
  GateConfig config = DirectAlone();
  config.max_cells = 2;
  Gate gate(config);
  const std::string name(256, 'x');
  for (int cell = 0; cell < 2; ++cell) {
    for (int i = 0; i < 20000; ++i) {  // fills the table of prefixes
      GateSample sample;
      sample.cell = {.source = name, .target = name, .plan = "direct", .task = name};
      sample.cell.prefix_bucket = 256 << cell;
      sample.prefix = (20000 * cell + i) * 0x9e3779b97f4a7c15u;
      gate.Observe(sample, 0);
      sample.comparison = GateComparison::kControl;
      gate.Observe(sample, 0);
    }
  }
  std::vector<GateTransition> changes;
  for (int i = 0; i < 64; ++i) {
    const CellPattern pattern = {.task = absl::StrCat(i), .prefix_bucket = 256};
    ASSERT_TRUE(gate.Force(pattern, GateState::kOpen, name, &changes).ok());
  }
  const size_t size = gate.Save(0).size();
  EXPECT_LE(size, Gate::MaxSavedBytes(config));
  EXPECT_GT(size, 20000u * 2);
}

TEST(GateStateTest, WhoSaidItIsPrintable) {
  Gate gate(DirectAlone());
  std::vector<GateTransition> changes;
  for (const std::string& who : {std::string("a\nb"), std::string(257, 'a')}) {
    EXPECT_EQ(gate.Force({}, GateState::kOpen, who, &changes).code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(gate.Rules().empty());
}

TEST(GateStateTest, EvidenceUnderOtherLimitsIsRefused) {
  Gate gate(DirectAlone());
  Live(&gate);
  const std::string bytes = gate.Save(0);
  const auto restore = [&bytes](auto change) {
    GateConfig config = DirectAlone();
    change(&config);
    Gate other(config);
    return other.Restore(bytes, 0).code();
  };
  const auto refused = absl::StatusCode::kFailedPrecondition;
  EXPECT_EQ(restore([](GateConfig* c) { c->limit[2] = 0.03; }), refused);
  EXPECT_EQ(restore([](GateConfig* c) { c->max_floor[0] = 0; }), refused);
  EXPECT_EQ(restore([](GateConfig* c) { c->alpha = 0.1; }), refused);
  EXPECT_EQ(restore([](GateConfig* c) { c->assume_dropped = 0; }), refused);
  EXPECT_EQ(restore([](GateConfig* c) { c->prefix_weight = 2; }), refused);
  EXPECT_EQ(restore([](GateConfig* c) { c->ladder = {"direct", "tail(32)"}; }), refused);
  // What does not change the meaning of evidence is free to change.
  EXPECT_EQ(restore([](GateConfig* c) { c->cooldown_seconds = 5; }), absl::StatusCode::kOk);
  EXPECT_EQ(restore([](GateConfig* c) { c->min_completion = 0.9; }), absl::StatusCode::kOk);
  EXPECT_EQ(restore([](GateConfig* c) { c->max_cells = 1; }), absl::StatusCode::kOk);
}

TEST(GateStateTest, DamageIsFoundAndChangesNothing) {
  Gate gate(DirectAlone());
  Live(&gate, 10);
  const std::string bytes = gate.Save(0);
  Gate other(DirectAlone());
  ASSERT_TRUE(other.Restore(bytes, 0).ok());
  const std::string before = Seen(&other, 0);
  std::mt19937_64 random(3);
  for (int i = 0; i < 200; ++i) {
    std::string bad = bytes;
    if (i % 2 == 0) {
      bad.resize(random() % bytes.size());
    } else {
      bad[random() % bad.size()] ^= static_cast<char>(1 << random() % 8);
    }
    ASSERT_EQ(other.Restore(bad, 0).code(), absl::StatusCode::kDataLoss) << i;
  }
  EXPECT_EQ(other.Restore("", 0).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Seen(&other, 0), before);
}

// With a checksum that fits, so that the values themselves are what is checked.
TEST(GateStateTest, WhatIsMadeUpIsRefusedOrHarmless) {
  Gate gate(DirectAlone());
  Live(&gate, 10);
  const std::string bytes = gate.Save(0);
  const std::string body = bytes.substr(0, bytes.size() - kDigestBytes);
  // Cells come after the magic line and the digest of the config.
  const size_t header = std::string("carryover-gate-2\n").size() + kDigestBytes;
  std::mt19937_64 random(4);
  int refused = 0, taken = 0;
  for (int i = 0; i < 400; ++i) {
    std::string bad = body;
    const size_t span = i % 2 == 0 ? 200 : bad.size() - header;  // often among the first fields
    const size_t at = header + random() % (span - 8);
    switch (i % 4) {
      case 0:
      case 1:
        bad[at] ^= static_cast<char>(1 << random() % 8);
        break;
      case 2:
        for (int j = 0; j < 8; ++j) bad[at + j] = '\xff';  // NaN, the greatest count
        break;
      case 3:
        bad.erase(at, 1 + random() % 16);
        break;
    }
    Gate other(DirectAlone());
    if (!other.Restore(Signed(bad), 0).ok()) {
      ++refused;
      continue;
    }
    ++taken;
    for (const CellReport& report : other.Report(0)) {
      for (const MeasureReport& measure : report.measures) {
        ASSERT_TRUE(measure.open_evidence >= 0 && measure.close_evidence >= 0);
      }
    }
    GateSample sample;
    sample.cell = Key("open");
    for (int j = 0; j < 30; ++j) {
      sample.prefix = random();
      other.Observe(sample, 0);
    }
    other.Save(0);
  }
  EXPECT_GT(refused, 150);
  EXPECT_GT(taken, 20);
}

TEST(GateStateTest, AHugeCountDoesNotAllocate) {
  Gate gate(DirectAlone());
  std::string body = gate.Save(0);
  body.resize(body.size() - kDigestBytes);
  const size_t header = std::string("carryover-gate-2\n").size() + kDigestBytes;
  ASSERT_EQ(body.size(), header + 4 * 8);  // four empty lists
  for (int list = 0; list < 4; ++list) {
    std::string bad = body;
    bad[header + 8 * list + 5] = 1;  // 2^40
    EXPECT_EQ(gate.Restore(Signed(bad), 0).code(), absl::StatusCode::kDataLoss);
  }
}

}  // namespace
}  // namespace carryover
