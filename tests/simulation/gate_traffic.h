// What scenarios of the gate are made of: a generator, and traffic of one cell, a sample at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "engine/gate.h"

namespace carryover {

// splitmix64: small, and the same everywhere.
struct Random {
  uint64_t state;
  uint64_t Bits() {
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  double Uniform() { return static_cast<double>(Bits() >> 11) * 0x1p-53; }
  bool Coin(double rate) { return Uniform() < rate; }
};

constexpr int kNever = -1;

// One run: after how many samples the event came, or kNever.
using Run = std::function<int(Random*)>;

inline CellKey Cell(const std::string& task = "task") {
  CellKey key;
  key.source = "source";
  key.target = "target";
  key.plan = "direct";
  key.task = task;
  key.prefix_bucket = 1024;
  return key;
}

inline GateConfig DirectAlone() {
  GateConfig config;
  config.ladder = {"direct"};
  return config;
}

inline GateConfig WithoutFloor() {
  GateConfig config = DirectAlone();
  config.max_floor = {0, 0, 0};
  return config;
}

// Feeds a gate one sample at a time, each of a prefix of its own unless told otherwise.
struct Traffic {
  explicit Traffic(const GateConfig& config, Random* random) : gate(config), random(random) {}

  GateState state() { return gate.Decide(sample.cell).state; }
  void Send() {
    if (own_prefix) sample.prefix = random->Bits();
    gate.Observe(sample, 0);
    sample.dropped = false;
    sample.values = {};
  }
  void SendFlip(double rate) {
    sample.values[kGateFlip] = random->Coin(rate) ? 1 : 0;
    Send();
  }
  void SendControl(double rate) {
    sample.comparison = GateComparison::kControl;
    SendFlip(rate);
    sample.comparison = GateComparison::kCarried;
  }

  Gate gate;
  Random* random;
  GateSample sample = {.cell = Cell()};
  bool own_prefix = true;
};

}  // namespace carryover
