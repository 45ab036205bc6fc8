// Runs one piece of work, for scripts/check --perf; bench/perf_check.py starts it.
//   perf_work --list MODEL             one JSON object a line: name, unit, units, repeats
//   perf_work MODEL NAME REPEATS       once to warm up, then REPEATS times; says on which CPU
//   perf_work MODEL                    everything once, to see that it runs
#include "bench/perf_work.h"

#include <hwy/targets.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "absl/strings/numbers.h"

namespace carryover::bench {
namespace {

int Fail(const std::string& what) {
  std::fprintf(stderr, "perf_work: %s\n", what.c_str());
  return 2;
}

absl::Status Run(const PerfWork& work, int repeats) {
  absl::StatusOr<PerfWork::Body> body = work.prepare();
  if (!body.ok()) return body.status();
  for (int i = 0; i <= repeats; ++i) {
    if (const absl::Status status = (*body)(); !status.ok()) return status;
  }
  // Giving back what the repeats left would be counted with them.
  static std::vector<PerfWork::Body> kept;
  kept.push_back(*std::move(body));
  return absl::OkStatus();
}

// Of the instruction sets that Highway knows here, the one that it prefers.
std::string Target() {
  const auto targets = hwy::SupportedTargets();
  return hwy::TargetName(targets & -targets);
}

int Main(int argc, char** argv) {
  const bool list = argc == 3 && std::strcmp(argv[1], "--list") == 0;
  int repeats = 0;
  if (!list && argc != 2 && !(argc == 4 && absl::SimpleAtoi(argv[3], &repeats) && repeats >= 0)) {
    return Fail("usage: perf_work [--list] MODEL [NAME REPEATS]");
  }
  const std::string model = argv[list ? 2 : 1];
  std::vector<PerfWork> works;
  AddEngineWork(model, &works);
  AddStoreWork(&works);
  AddTokenWork(model, &works);
  AddServerWork(&works);

  bool found = false;
  for (const PerfWork& work : works) {
    if (list) {
      std::printf("%s\n", nlohmann::json{{"name", work.name},
                                         {"unit", work.unit},
                                         {"units", work.units},
                                         {"repeats", work.repeats}}
                              .dump()
                              .c_str());
      continue;
    }
    if (argc == 4 && work.name != argv[2]) continue;
    found = true;
    if (const absl::Status status = Run(work, repeats); !status.ok()) {
      return Fail(work.name + ": " + status.ToString());
    }
  }
  if (!list && !found) return Fail(std::string("there is no work '") + argv[2] + "'");
  if (!list) {
    std::printf("%s\n",
                nlohmann::json{{"target", Target()}, {"compiler", __VERSION__}}.dump().c_str());
  }
  std::fflush(stdout);
  _exit(0);
}

}  // namespace
}  // namespace carryover::bench

int main(int argc, char** argv) { return carryover::bench::Main(argc, argv); }
