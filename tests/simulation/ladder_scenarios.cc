#include "tests/simulation/ladder_scenarios.h"

#include <string>
#include <utility>

#include "absl/strings/string_view.h"

namespace carryover {
namespace {

// A ladder of three, whose plans flip at these rates. What the gate judges first is compared by
// every request, the others by one in ten, as requests are drawn.
struct Ladder {
  Ladder(std::vector<double> rates, Random* random)
      : traffic(
            [] {
              GateConfig config = WithoutFloor();
              config.ladder = {"direct", "tail(5%)", "tail(50%)"};
              config.cooldown_seconds = 0;
              return config;
            }(),
            random),
        rates(std::move(rates)) {}

  void Send() {
    const GateDecision decision = traffic.gate.Decide(traffic.sample.cell);
    std::vector<std::string> plans;
    if (!decision.shadow_plan.empty()) plans.emplace_back(decision.shadow_plan);
    if (traffic.random->Coin(0.1)) {
      for (const absl::string_view plan : decision.other_plans) plans.emplace_back(plan);
    }
    for (const std::string& plan : plans) {
      traffic.sample.cell.plan = plan;
      traffic.SendFlip(rates[plan == "direct" ? 0 : plan == "tail(5%)" ? 1 : 2]);
    }
  }
  // Which plan serves: 0, 1, 2, or -1.
  int Serves() {
    const GateDecision decision = traffic.gate.Decide(traffic.sample.cell);
    if (!decision.carry) return -1;
    return decision.plan == "direct" ? 0 : decision.plan == "tail(5%)" ? 1 : 2;
  }

  Traffic traffic;
  std::vector<double> rates;
};

}  // namespace

Run LadderServesBad(std::vector<double> rates, int most) {
  return [=](Random* random) {
    Ladder ladder(rates, random);
    for (int n = 1; n <= most; ++n) {
      ladder.Send();
      const int plan = ladder.Serves();
      if (plan >= 0 && rates[plan] > 0.02) return n;
    }
    return kNever;
  };
}

Run LadderCloses(std::vector<double> rates, int most) {
  return [=](Random* random) {
    Ladder ladder(rates, random);
    for (int n = 1; n <= most; ++n) {
      ladder.Send();
      if (ladder.traffic.state() == GateState::kClosed) return n;
    }
    return kNever;
  };
}

Run LadderFinds(std::vector<double> rates, int plan, int most) {
  return [=](Random* random) {
    Ladder ladder(rates, random);
    for (int n = 1; n <= most; ++n) {
      ladder.Send();
      if (ladder.Serves() == plan) return n;
    }
    return kNever;
  };
}

int LadderClimbs(Random* random) {
  Ladder ladder({0.002, 0, 0}, random);
  for (int n = 0; n < 5000; ++n) ladder.Send();
  if (ladder.Serves() != 0) return kNever;
  ladder.rates[0] = 0.2;
  for (int n = 1; n <= 2000; ++n) {
    ladder.Send();
    if (ladder.Serves() == -1) return kNever;
    if (ladder.Serves() == 1) return n;
  }
  return kNever;
}

int LadderComesDown(Random* random) {
  Ladder ladder({0.2, 0.001, 0.001}, random);
  for (int n = 0; n < 2000; ++n) ladder.Send();
  if (ladder.Serves() != 1) return kNever;
  ladder.rates[0] = 0;
  for (int n = 1; n <= 100000; ++n) {
    ladder.Send();
    ladder.traffic.gate.Tick(0);
    if (ladder.Serves() == 0) return n;
  }
  return kNever;
}

}  // namespace carryover
