// Holds the gate against traffic whose truth is known. Every scenario lets a gate look after every
// sample and counts how often something happens that must be rare (or must happen), and how many
// samples it took. Prints one line a scenario; exits with 1 when a promise is broken.
//
//   gate_simulation [--runs N] [--only PART_OF_A_NAME]
//
// Seeds are fixed and the generator is ours, so the same build prints the same table. A share is
// called too large when so many would come by chance with less than 1e-4, were the true one alpha.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "engine/gate.h"
#include "tests/simulation/gate_traffic.h"
#include "tests/simulation/ladder_scenarios.h"

namespace carryover {
namespace {

enum class Promise {
  kAtMostAlpha,  // the event is an error of the gate's
  kNever,        // not in a single run
  kAlways,       // in every run
  kOverAlpha,    // of a control that is broken on purpose: must be found out
  kNone,         // for the table only
};

struct Scenario {
  std::string name;
  std::string event;
  Promise promise;
  Run run;
  double runs_part = 1;
};

// Sends until the cell is in `wanted`, at most `most` samples.
template <typename Next>
int Until(Traffic* traffic, GateState wanted, int most, Next next) {
  for (int n = 1; n <= most; ++n) {
    next();
    const GateState state = traffic->state();
    if (state == wanted) return n;
    if (state == GateState::kClosed) return kNever;  // samples do not count any more
  }
  return kNever;
}

Run Flips(const GateConfig& config, double rate, GateState wanted, int most) {
  return [=](Random* random) {
    Traffic traffic(config, random);
    return Until(&traffic, wanted, most, [&] { traffic.SendFlip(rate); });
  };
}

// One control for every `every` samples.
Run FlipsWithFloor(double floor, double rate, int every, GateState wanted, int most) {
  return [=](Random* random) {
    Traffic traffic(DirectAlone(), random);
    int n = 0;
    return Until(&traffic, wanted, most, [&] {
      if (n++ % every == 0) traffic.SendControl(floor);
      traffic.SendFlip(rate);
    });
  };
}

// Prefixes come in clusters of `repeats` whose requests all flip or none does, `active` clusters
// mixed at a time.
Run Clusters(const GateConfig& config, double bad_prefixes, int repeats, int active,
             GateState wanted, int most) {
  return [=](Random* random) {
    struct Cluster {
      uint64_t prefix;
      bool bad;
      int left;
    };
    std::vector<Cluster> clusters(active, Cluster{0, false, 0});
    Traffic traffic(config, random);
    traffic.own_prefix = false;
    return Until(&traffic, wanted, most, [&] {
      Cluster& cluster = clusters[random->Bits() % clusters.size()];
      if (cluster.left == 0) cluster = {random->Bits(), random->Coin(bad_prefixes), repeats};
      --cluster.left;
      traffic.sample.prefix = cluster.prefix;
      traffic.sample.values[kGateFlip] = cluster.bad ? 1 : 0;
      traffic.Send();
    });
  };
}

// 90 % of requests flip at 1 %, 10 % at 40 %: 4.9 % in all. They come mixed, or in stretches.
Run Mixture(int stretch, GateState wanted, int most) {
  return [=](Random* random) {
    Traffic traffic(WithoutFloor(), random);
    int left = 0;
    bool bad = false;
    return Until(&traffic, wanted, most, [&] {
      if (left-- == 0) {
        bad = random->Coin(0.1);
        left = stretch - 1;
      }
      traffic.SendFlip(bad ? 0.4 : 0.01);
    });
  };
}

// Flips are dropped with one probability, the others with another.
Run Drops(const GateConfig& config, double rate, double drop_flips, double drop_others,
          GateState wanted, int most) {
  return [=](Random* random) {
    Traffic traffic(config, random);
    return Until(&traffic, wanted, most, [&] {
      const bool flip = random->Coin(rate);
      traffic.sample.dropped = random->Coin(flip ? drop_flips : drop_others);
      traffic.sample.values[kGateFlip] = flip ? 1 : 0;
      traffic.Send();
    });
  };
}

// 50,000 samples at 1 %, then 20 %. Pasts are long: a hundred of them are shared by all runs,
// saved. Counts from the turn; kNever when the past itself had closed.
Run Turn(int control_every, int most) {
  struct Past {
    std::string bytes;
    bool closed;
  };
  auto pasts = std::make_shared<std::vector<Past>>();
  auto next = std::make_shared<size_t>(0);
  return [=](Random* random) {
    if (pasts->size() < 100) {
      Traffic traffic(DirectAlone(), random);
      for (int n = 0; n < 50000; ++n) {
        traffic.SendFlip(0.01);
        if (control_every > 0 && n % control_every == 0) traffic.SendControl(0);
      }
      pasts->push_back({traffic.gate.Save(0), traffic.state() != GateState::kOpen});
    }
    const Past& past = (*pasts)[(*next)++ % pasts->size()];
    if (past.closed) return kNever;
    Traffic traffic(DirectAlone(), random);
    CHECK(traffic.gate.Restore(past.bytes, 0).ok());
    return Until(&traffic, GateState::kClosed, most, [&] { traffic.SendFlip(0.2); });
  };
}

// Five alike cells of which one, nobody knows which, flips at 2.1 %. The others have proved
// themselves when the last is judged: how often is the last one bad and opens?
int LastOfAPool(Random* random) {
  Traffic traffic(WithoutFloor(), random);
  const int bad = static_cast<int>(random->Bits() % 5);
  if (bad != 4) return kNever;
  for (int cell = 0; cell < 4; ++cell) {
    traffic.sample.cell = Cell();
    traffic.sample.cell.prefix_bucket = 256 << cell;
    for (int n = 0; n < 300; ++n) traffic.SendFlip(0);
  }
  traffic.sample.cell.prefix_bucket = 256 << 4;
  return Until(&traffic, GateState::kOpen, 2000, [&] { traffic.SendFlip(0.021); });
}

// An open gate whose traffic is a few prefixes that come again and again, of which each request
// flips at a rate.
Run HotPrefixes(int prefixes, double rate) {
  return [=](Random* random) {
    Traffic traffic(WithoutFloor(), random);
    for (int n = 0; n < 300; ++n) traffic.SendFlip(0);
    if (traffic.state() != GateState::kOpen) return kNever;
    traffic.own_prefix = false;
    return Until(&traffic, GateState::kClosed, 100000, [&] {
      traffic.sample.prefix = random->Bits() % prefixes;
      traffic.SendFlip(rate);
    });
  };
}

// What one would do without anytime-valid bounds: the exact binomial test of a fixed n
// (Clopper-Pearson), looked at after every sample.
Run FixedSampleTest(double rate, double limit, double alpha, int most) {
  // For every n, the most flips with which P(Bin(n, limit) <= flips) <= alpha.
  auto most_flips = std::make_shared<std::vector<int>>(most + 1, -1);
  for (int n = 1; n <= most; ++n) {
    double term = std::exp(n * std::log1p(-limit)), sum = 0;
    int k = 0;
    for (; k <= n && sum + term <= alpha; ++k) {
      sum += term;
      term *= (n - k) / (k + 1.0) * limit / (1 - limit);
    }
    (*most_flips)[n] = k - 1;
  }
  return [=](Random* random) {
    int flips = 0;
    for (int n = 1; n <= most; ++n) {
      flips += random->Coin(rate) ? 1 : 0;
      if (flips <= (*most_flips)[n]) return n;
    }
    return kNever;
  };
}

// Against clusters: the gate itself, with the cap on repeats taken away.
GateConfig WithoutCap() {
  GateConfig config = WithoutFloor();
  config.prefix_weight = 255;
  return config;
}

std::vector<Scenario> Scenarios() {
  const GateState open = GateState::kOpen, closed = GateState::kClosed;
  const GateConfig floorless = WithoutFloor();
  GateConfig trusting = floorless;
  trusting.assume_dropped = 0;
  std::vector<Scenario> all = {
      // Errors. The limit on flips is 2 %.
      {"2.01 % flips", "opens", Promise::kAtMostAlpha, Flips(floorless, 0.0201, open, 2000)},
      {"3 % flips", "opens", Promise::kAtMostAlpha, Flips(floorless, 0.03, open, 1000)},
      {"1.99 % flips", "closes", Promise::kAtMostAlpha, Flips(floorless, 0.0199, closed, 2000)},
      {"1 % flips", "closes", Promise::kAtMostAlpha, Flips(floorless, 0.01, closed, 1000)},
      {"3.1 % over a floor of 1 %", "opens", Promise::kAtMostAlpha,
       FlipsWithFloor(0.01, 0.031, 1, open, 1000)},
      {"2.9 % over a floor of 1 %", "closes", Promise::kAtMostAlpha,
       FlipsWithFloor(0.01, 0.029, 1, closed, 1000)},
      {"floor of 2 %, no other flips", "closes", Promise::kAtMostAlpha,
       FlipsWithFloor(0.02, 0.02, 10, closed, 2000)},
      {"TV of 0 to 0.104", "opens", Promise::kAtMostAlpha,
       [floorless](Random* random) {
         Traffic traffic(floorless, random);
         return Until(&traffic, GateState::kOpen, 2000, [&] {
           traffic.sample.values[kGateTv] = 0.104 * traffic.random->Uniform();
           traffic.Send();
         });
       }},
      {"TV of 0 to 0.096", "closes", Promise::kAtMostAlpha,
       [floorless](Random* random) {
         Traffic traffic(floorless, random);
         return Until(&traffic, GateState::kClosed, 2000, [&] {
           traffic.sample.values[kGateTv] = 0.096 * traffic.random->Uniform();
           traffic.Send();
         });
       }},
      // Clusters: 3 % and 1 % of prefixes are bad.
      {"clusters of 50, 3 % bad", "opens", Promise::kAtMostAlpha,
       Clusters(floorless, 0.03, 50, 1, open, 20000)},
      {"clusters of 50, 10 at a time, 3 % bad", "opens", Promise::kAtMostAlpha,
       Clusters(floorless, 0.03, 50, 10, open, 20000)},
      {"clusters of 50, 1 % bad", "closes", Promise::kAtMostAlpha,
       Clusters(floorless, 0.01, 50, 1, closed, 20000)},
      {"clusters of 50, 10 at a time, 1 % bad", "closes", Promise::kAtMostAlpha,
       Clusters(floorless, 0.01, 50, 10, closed, 20000)},
      {"clusters of 200, 10 at a time, 1 % bad", "closes", Promise::kNone,
       Clusters(floorless, 0.01, 200, 10, closed, 40000), 0.1},
      {"control: no cap, clusters of 50, 3 % bad", "opens", Promise::kOverAlpha,
       Clusters(WithoutCap(), 0.03, 50, 10, open, 20000), 0.1},
      // Mixtures.
      {"90 % at 1 %, 10 % at 40 %, mixed", "opens", Promise::kNever, Mixture(1, open, 3000)},
      {"the same in stretches of 20", "opens", Promise::kNone, Mixture(20, open, 3000)},
      {"90 % at 1 %, 10 % at 40 %, mixed", "closes", Promise::kAlways, Mixture(1, closed, 20000)},
      // Drops.
      {"20 % flips, all dropped", "opens", Promise::kNever,
       Drops(floorless, 0.2, 1, 0, open, 1000)},
      {"3 % flips, all dropped", "opens", Promise::kAtMostAlpha,
       Drops(floorless, 0.03, 1, 0, open, 1000)},
      {"1.9 % flips, 10 % of others dropped", "closes", Promise::kAtMostAlpha,
       Drops(floorless, 0.019, 0, 0.1, closed, 2000)},
      {"no flips, 30 % complete, drops trusted", "opens", Promise::kNever,
       Drops(trusting, 0, 0.7, 0.7, open, 1000)},
      {"control: 3 % flips, all dropped, trusted", "opens", Promise::kOverAlpha,
       Drops(trusting, 0.03, 1, 0, open, 2000), 0.1},
      // Pools.
      {"last of 5 siblings is the bad one", "opens", Promise::kAtMostAlpha, LastOfAPool},
      // The test one would use otherwise.
      {"control: fixed-n test, 2.01 % flips", "opens", Promise::kOverAlpha,
       FixedSampleTest(0.0201, 0.02, 0.05, 2000)},
      // Ladders.
      {"ladder, all plans at 2.1 %", "serves", Promise::kAtMostAlpha,
       LadderServesBad({0.021, 0.021, 0.021}, 3000), 0.2},
      {"ladder at 2.1, 2.1 and 0.5 %", "bad one", Promise::kAtMostAlpha,
       LadderServesBad({0.021, 0.021, 0.005}, 3000), 0.2},
      {"ladder at 3, 3 and 1.9 %", "closes", Promise::kAtMostAlpha,
       LadderCloses({0.03, 0.03, 0.019}, 10000), 0.2},
      {"ladder at 3 % each", "closes", Promise::kNone, LadderCloses({0.03, 0.03, 0.03}, 20000),
       0.05},
      {"ladder at 20, 10 and 0 %", "finds", Promise::kAlways, LadderFinds({0.2, 0.1, 0}, 2, 5000),
       0.1},
      {"ladder at 20, 0.2 and 0 %", "finds", Promise::kAlways,
       LadderFinds({0.2, 0.002, 0}, 1, 5000), 0.1},
      {"ladder, the first turns to 20 %", "climbs", Promise::kAlways, LadderClimbs, 0.02},
      {"ladder, the first turns to 0 %", "descends", Promise::kAlways, LadderComesDown, 0.02},
      // A turn.
      {"1 % for 50,000, then 20 %", "closes", Promise::kAlways, Turn(0, 1000)},
      {"the same, 1 control in 20", "closes", Promise::kAlways, Turn(20, 300)},
  };
  // How many samples it takes.
  for (double rate : {0.0, 0.0025, 0.005, 0.01, 0.0125}) {
    char name[64];
    std::snprintf(name, sizeof(name), "to open at %.2f %% flips", 100 * rate);
    const bool sure = rate <= 0.01;
    all.push_back({name, "opens", sure ? Promise::kAlways : Promise::kNone,
                   Flips(DirectAlone(), rate, open, 20000), 0.1});
  }
  all.push_back({"to open at 0 %, the first of the default ladder's plans", "opens",
                 Promise::kAlways, Flips(GateConfig(), 0, open, 20000), 0.1});
  for (double rate : {0.03, 0.05, 0.1, 0.2, 0.4}) {
    char name[64];
    std::snprintf(name, sizeof(name), "to close at %.0f %% flips, no floor", 100 * rate);
    all.push_back({name, "closes", rate >= 0.05 ? Promise::kAlways : Promise::kNone,
                   Flips(floorless, rate, closed, 20000), 0.1});
  }
  for (double rate : {0.1, 0.2, 0.4}) {
    char name[64];
    std::snprintf(name, sizeof(name), "to close at %.0f %%, floor never measured", 100 * rate);
    all.push_back(
        {name, "closes", Promise::kAlways, Flips(DirectAlone(), rate, closed, 20000), 0.1});
  }
  for (double rate : {0.05, 0.1, 0.2}) {
    char name[64];
    std::snprintf(name, sizeof(name), "to close at %.0f %%, 1 control in 10", 100 * rate);
    all.push_back(
        {name, "closes", Promise::kAlways, FlipsWithFloor(0, rate, 10, closed, 20000), 0.1});
  }
  all.push_back({"to close at 20 %, no floor, 30 hot prefixes", "closes", Promise::kAlways,
                 HotPrefixes(30, 0.2), 0.1});
  all.push_back({"to close at 20 %, no floor, 8 hot prefixes", "closes", Promise::kAlways,
                 HotPrefixes(8, 0.2), 0.1});
  for (double rate : {0.01, 0.02}) {
    char name[64];
    std::snprintf(name, sizeof(name), "to open at %.0f %% flips, all of them floor", 100 * rate);
    all.push_back(
        {name, "opens", Promise::kNone, FlipsWithFloor(rate, rate, 1, open, 30000), 0.05});
  }
  return all;
}

// P(Bin(runs, rate) >= count), by its sum.
double Tail(int runs, double rate, int count) {
  double sum = 0;
  for (int k = count; k <= runs; ++k) {
    sum += std::exp(std::lgamma(runs + 1.0) - std::lgamma(k + 1.0) - std::lgamma(runs - k + 1.0) +
                    k * std::log(rate) + (runs - k) * std::log1p(-rate));
  }
  return sum;
}

bool Kept(Promise promise, int runs, int count, double alpha) {
  switch (promise) {
    case Promise::kAtMostAlpha:
      return Tail(runs, alpha, count) >= 1e-4;
    case Promise::kNever:
      return count == 0;
    case Promise::kAlways:
      return count == runs;
    case Promise::kOverAlpha:
      return Tail(runs, alpha, count) < 1e-4;
    case Promise::kNone:
      return true;
  }
  return false;
}

constexpr const char* kPromises[] = {"<= 5 %", "never", "always", "> 5 %", ""};

int Main(int runs, absl::string_view only) {
  const double alpha = GateConfig().alpha;
  int broken = 0;
  uint64_t seed = 20261202;
  std::printf("%-44s %6s %-7s %8s %-7s %7s %7s %7s\n", "traffic", "runs", "event", "share",
              "promise", "median", "p90", "p99");
  for (const Scenario& scenario : Scenarios()) {
    seed += 1000003;
    if (scenario.name.find(std::string(only)) == std::string::npos) continue;
    const int count = std::max(50, static_cast<int>(runs * scenario.runs_part));
    std::vector<int> when;
    for (int i = 0; i < count; ++i) {
      Random random{seed + static_cast<uint64_t>(i) * 0x2545f4914f6cdd1du};
      const int n = scenario.run(&random);
      if (n != kNever) when.push_back(n);
    }
    std::sort(when.begin(), when.end());
    const int events = static_cast<int>(when.size());
    // Of all runs: a quantile that was not reached is shown as none.
    const auto quantile = [&](double part) {
      const int index = static_cast<int>(std::ceil(part * count)) - 1;
      return index < events ? std::to_string(when[index]) : std::string("-");
    };
    const bool kept = Kept(scenario.promise, count, events, alpha);
    broken += kept ? 0 : 1;
    std::printf("%-44s %6d %-7s %6.2f %% %-7s %7s %7s %7s%s\n", scenario.name.c_str(), count,
                scenario.event.c_str(), 100.0 * events / count,
                kPromises[static_cast<int>(scenario.promise)], quantile(0.5).c_str(),
                quantile(0.9).c_str(), quantile(0.99).c_str(), kept ? "" : "  BROKEN");
    std::fflush(stdout);
  }
  if (broken > 0) std::printf("%d broken\n", broken);
  return broken > 0 ? 1 : 0;
}

}  // namespace
}  // namespace carryover

int main(int argc, char** argv) {
  int runs = 300;
  std::string only;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    if (i + 1 < argc && flag == "--runs") {
      runs = std::atoi(argv[i + 1]);
    } else if (i + 1 < argc && flag == "--only") {
      only = argv[i + 1];
    } else {
      runs = 0;
    }
  }
  if (runs < 1 || runs > 10000000) {
    std::fprintf(stderr, "usage: gate_simulation [--runs N] [--only PART_OF_A_NAME]\n");
    return 2;
  }
  return carryover::Main(runs, only);
}
