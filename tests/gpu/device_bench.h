// Benchmarks of a device: kernels alone, whole passes, time to the first token. They run on every
// backend, so that they are tested where there is no GPU; only a GPU's times mean something.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/ops.h"
#include "tests/gpu/random_model.h"

namespace carryover {

struct BenchOptions {
  const Ops* ops = nullptr;
  std::vector<ModelShape> models;
  std::vector<int> prompts;   // tokens of a prefill
  std::vector<int> contexts;  // of a decode
  std::vector<int> batches;   // of a decode
  std::vector<int> prefixes;  // that are reused
  int max_positions = 131072;
  int repeats = 5;
  std::string source_dir;  // root of the source tree
  std::string scratch;     // a folder for model folders
};

// A result: what, of which size, how long, and what it moves and computes at least. Every row has
// "bench" and "ms".
using AddRow = std::function<void(nlohmann::json row)>;

// Divergence, copies between host and device, matrix products and attention of each model's sizes.
absl::Status BenchKernels(const BenchOptions& options, const AddRow& add);
// Prefill and decode passes of each model.
absl::Status BenchPasses(const BenchOptions& options, const std::string& folder,
                         const ModelShape& shape, const AddRow& add);
// Time to the first token: nothing cached, the version's own cache, another version's cache.
absl::Status BenchReuse(const BenchOptions& options, const std::string& folder,
                        const ModelShape& shape, const AddRow& add);

// The median time of `body`, which waits for the device at its end, in milliseconds; once more
// before, for what is made at a first call.
double MedianMs(int repeats, const std::function<void()>& body);

}  // namespace carryover
