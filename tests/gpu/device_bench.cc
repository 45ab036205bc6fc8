// device_bench: see device_bench.h. tests/gpu/run runs it beside PyTorch and makes a table of both.
#include "tests/gpu/device_bench.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/log.h"
#include "base/status_macros.h"

namespace carryover {
namespace {

constexpr char kHelp[] = R"(Usage: device_bench [--NAME=VALUE...]
  --device=cuda|emulated|cpu    default cuda
  --models=llama-3.1-8b,smollm2-135m,tiny
  --layers=N      cuts the models to so many; 0, the default: all
  --benches=kernels,passes,reuse
  --prompts=N,...   tokens of a prefill     --contexts=N,...  tokens behind which decode runs
  --batches=N,...   sequences of a decode   --prefixes=N,...  tokens that are reused
  --repeats=N       default 5; the median counts
  --source=DIR      root of the source tree, default .
  --scratch=DIR     where model folders are made, default the system's temporary folder
  --json=FILE       everything, once more
)";

const Ops* FindOps(const std::string& device) {
  if (device == "cpu") return &CpuOps();
  if (device == "emulated") return &EmulatedCudaOps();
#if defined(CARRYOVER_CUDA)
  if (device == "cuda") return &CudaOps();
#endif
  return nullptr;
}

absl::StatusOr<std::vector<int>> Numbers(const std::string& text) {
  std::vector<int> numbers;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    int number = 0;
    if (!absl::SimpleAtoi(part, &number) || number < 1 || number > 1 << 20) {
      return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" is no list of numbers"));
    }
    numbers.push_back(number);
  }
  return numbers;
}

absl::Status Run(std::map<std::string, std::string> flags) {
  const auto started = std::chrono::steady_clock::now();
  BenchOptions options;
  options.ops = FindOps(flags["device"]);
  if (options.ops == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("there is no device \"", flags["device"], "\" in this build"));
  }
  ASSIGN_OR_RETURN(options.prompts, Numbers(flags["prompts"]));
  ASSIGN_OR_RETURN(options.contexts, Numbers(flags["contexts"]));
  ASSIGN_OR_RETURN(options.batches, Numbers(flags["batches"]));
  ASSIGN_OR_RETURN(options.prefixes, Numbers(flags["prefixes"]));
  ASSIGN_OR_RETURN(const std::vector<int> repeats, Numbers(flags["repeats"]));
  options.repeats = repeats[0];
  options.source_dir = flags["source"];
  int layers = 0;
  if (!absl::SimpleAtoi(flags["layers"], &layers) || layers < 0) {
    return absl::InvalidArgumentError("--layers is no number");
  }
  for (absl::string_view name : absl::StrSplit(flags["models"], ',')) {
    bool known = false;
    for (ModelShape shape : {kLlama8B, kSmolLm2, kTiny}) {
      if (name != shape.name) continue;
      known = true;
      if (layers > 0) shape.layers = std::min(layers, shape.layers);
      options.models.push_back(shape);
    }
    if (!known) return absl::InvalidArgumentError(absl::StrCat("there is no model \"", name, "\""));
  }
  std::string folder = flags["scratch"] + "/carryover-bench-XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("cannot make a folder in ", flags["scratch"]));
  }
  options.scratch = folder;

  nlohmann::json result = {{"device", options.ops->name}, {"rows", nlohmann::json::array()}};
  const AddRow add = [&](nlohmann::json row) {
    std::printf("%s\n", row.dump().c_str());
    std::fflush(stdout);
    result["rows"].push_back(std::move(row));
  };
  const auto wants = [&](absl::string_view bench) {
    const std::vector<std::string> all = absl::StrSplit(flags["benches"], ',');
    return std::find(all.begin(), all.end(), bench) != all.end();
  };
  absl::Status status;
  if (wants("kernels")) status.Update(BenchKernels(options, add));
  for (const ModelShape& shape : options.models) {
    if (!status.ok() || !(wants("passes") || wants("reuse"))) break;
    status.Update(WriteRandomModel(shape, options.max_positions, options.source_dir, folder));
    if (status.ok() && wants("passes")) status.Update(BenchPasses(options, folder, shape, add));
    if (status.ok() && wants("reuse")) status.Update(BenchReuse(options, folder, shape, add));
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  result["seconds"] =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  result["error"] = status.ok() ? "" : status.ToString();
  if (!flags["json"].empty()) {
    std::ofstream file(flags["json"]);
    file << result.dump(1) << "\n";
    if (!file.flush()) status.Update(absl::InternalError("cannot write " + flags["json"]));
  }
  return status;
}

int Main(int argc, char** argv) {
  std::map<std::string, std::string> flags = {
      {"device", "cuda"},
      {"models", "llama-3.1-8b,smollm2-135m"},
      {"layers", "0"},
      {"benches", "kernels,passes,reuse"},
      {"prompts", "1024,8192"},
      {"contexts", "1024,8192"},
      {"batches", "1,32"},
      {"prefixes", "1024,4096,16384,65536"},
      {"repeats", "5"},
      {"source", "."},
      {"scratch", std::filesystem::temp_directory_path().string()},
      {"json", ""}};
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    const size_t equals = arg.find('=');
    const auto flag = equals == std::string::npos || arg.rfind("--", 0) != 0
                          ? flags.end()
                          : flags.find(arg.substr(2, equals - 2));
    if (flag == flags.end()) {
      std::fprintf(stderr, "device_bench: unknown argument \"%s\"\n%s", argv[i], kHelp);
      return 2;
    }
    flag->second = arg.substr(equals + 1);
  }
  SetLogLevel("warning");
  if (const absl::Status status = Run(std::move(flags)); !status.ok()) {
    std::fprintf(stderr, "device_bench: %s\n", status.ToString().c_str());
    return 1;
  }
  return 0;
}

}  // namespace

double MedianMs(int repeats, const std::function<void()>& body) {
  body();
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    body();
    times.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
            .count());
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace carryover

int main(int argc, char** argv) { return carryover::Main(argc, argv); }
