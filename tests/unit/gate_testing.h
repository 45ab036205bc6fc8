// For tests of the gate: samples by the hundred, and what became of them.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "engine/gate.h"

namespace carryover {

inline GateConfig DirectAlone() {
  GateConfig config;
  config.ladder = {"direct"};
  return config;
}

class GateTest : public testing::Test {
 protected:
  CellKey Key(const std::string& task = "qa", int bucket = 1024,
              AnswerClass answer = AnswerClass::kLong) {
    CellKey key;
    key.source = "s";
    key.target = "t";
    key.plan = "direct";
    key.task = task;
    key.prefix_bucket = bucket;
    key.answer = answer;
    return key;
  }

  // `count` samples, each of a new prefix, whose every `flip_every`-th flips (0: none). Stops at
  // the first transition unless told otherwise.
  int Feed(Gate* gate, const CellKey& key, int count, int flip_every, bool stop_early = true) {
    for (int i = 1; i <= count; ++i) {
      GateSample sample;
      sample.cell = key;
      sample.prefix = next_prefix_++;
      if (flip_every > 0 && i % flip_every == 0) sample.values = {1, 0.5, 0};
      if (Send(gate, sample) && stop_early) return i;
    }
    return count;
  }

  bool Send(Gate* gate, const GateSample& sample) {
    const size_t before = transitions_.size();
    for (GateTransition& transition : gate->Observe(sample, now_)) {
      transitions_.push_back(std::move(transition));
    }
    return transitions_.size() > before;
  }

  void Control(Gate* gate, const CellKey& key, int count, int flip_every) {
    for (int i = 1; i <= count; ++i) {
      GateSample sample;
      sample.cell = key;
      sample.comparison = GateComparison::kControl;
      sample.prefix = next_prefix_++;
      if (flip_every > 0 && i % flip_every == 0) sample.values = {1, 0, 0};
      EXPECT_FALSE(Send(gate, sample));
    }
  }

  CellReport ReportOf(const Gate& gate, const CellKey& key) {
    for (const CellReport& report : gate.Report(now_)) {
      CellKey bare = report.cell, wanted = key;
      bare.plan = wanted.plan = "";
      if (bare == wanted) return report;
    }
    ADD_FAILURE() << "no such cell";
    return {};
  }

  double now_ = 1000;
  uint64_t next_prefix_ = 1;
  std::vector<GateTransition> transitions_;
};

}  // namespace carryover
