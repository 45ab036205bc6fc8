// Small fixed pieces of work whose instructions scripts/check --perf counts under valgrind.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace carryover::bench {

struct PerfWork {
  // Does the same work again each time.
  using Body = std::function<absl::Status()>;

  std::string name;
  std::string unit;  // what a count is given for: "block"
  int units = 1;     // that the body does each time
  // Times that the body runs while it is counted. Under valgrind a run takes seconds.
  int repeats = 1;
  // Sets up, which is not counted. What the body holds is never given back: the program ends
  // without.
  std::function<absl::StatusOr<Body>()> prepare;
};

// model: a folder of a small model, whose weights nothing reads.
void AddEngineWork(const std::string& model, std::vector<PerfWork>* works);
void AddStoreWork(std::vector<PerfWork>* works);
void AddTokenWork(const std::string& model, std::vector<PerfWork>* works);
void AddServerWork(std::vector<PerfWork>* works);

}  // namespace carryover::bench
