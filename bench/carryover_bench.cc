// Engine benchmarks without a server; one JSON object a line. --help shows how to use it.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "bench/bench_case.h"
#include "bench/engine_bench.h"

namespace carryover::bench {
namespace {

constexpr char kHelp[] =
    R"(Measures the engine without a server. Each case prints one JSON object on a line of its own.

usage: carryover-bench [--NAME=VALUE ...] [CASE ...]
  CASE            a case or the beginning of one, such as decode/batch=16; default: all but the
                  store of ten million blocks, which takes 8 GB and a minute
  --list          names the cases and ends
  --model=FOLDER  of a model, or with 2026-10 and its update 2026-11 in it
                  (default: models/smollm2, which models/fetch_smollm2 fetches)
  --target=FOLDER the update; default: as above, or the model itself
  --threads=N     of the engine's maths; default: one a core
  --repeats=N     of what counts, after one that does not; default 7
  --weights=bf16|fp32|int8, --kv=bf16|fp32

examples
  carryover-bench prefill/512 prefill/4096
  carryover-bench --model=models/demo --repeats=1 decode/batch=4/context=128
  carryover-bench store > store.jsonl

Times are medians, *_quartiles beside them the first and third. On a machine with other work they
mean little: store cases count their own CPU time, all others the clock.
)";

bool IsFolder(const std::string& folder) {
  std::FILE* const file = std::fopen((folder + "/config.json").c_str(), "rb");
  if (file != nullptr) std::fclose(file);
  return file != nullptr;
}

int Fail(const std::string& what) {
  std::fprintf(stderr, "carryover-bench: %s\n", what.c_str());
  return 2;
}

bool ParseDType(const std::string& text, DType* type) {
  *type = text == "fp32" ? DType::kF32 : text == "int8" ? DType::kI8 : DType::kBF16;
  return text == "fp32" || text == "bf16" || text == "int8";
}

int Main(int argc, char** argv) {
  Settings settings;
  settings.source = "models/smollm2";
  bool list = false;
  std::vector<std::string> wanted;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg.rfind("--", 0) != 0) {
      wanted.push_back(arg);
      continue;
    }
    const std::pair<std::string, std::string> flag =
        absl::StrSplit(arg.substr(2), absl::MaxSplits('=', 1));
    const std::string& value = flag.second;
    bool good = true;
    if (flag.first == "help") {
      std::fputs(kHelp, stdout);
      return 0;
    } else if (flag.first == "list") {
      list = true;
    } else if (flag.first == "model") {
      settings.source = value;
    } else if (flag.first == "target") {
      settings.target = value;
    } else if (flag.first == "threads") {
      good = absl::SimpleAtoi(value, &settings.threads) && settings.threads >= 0 &&
             settings.threads <= 1024;
    } else if (flag.first == "repeats") {
      good = absl::SimpleAtoi(value, &settings.repeats) && settings.repeats >= 1 &&
             settings.repeats <= 1000;
    } else if (flag.first == "weights") {
      good = ParseDType(value, &settings.weights);
    } else if (flag.first == "kv") {
      good = ParseDType(value, &settings.kv_dtype) && settings.kv_dtype != DType::kI8;
    } else {
      return Fail(absl::StrCat("unknown flag '", arg, "'; --help lists them"));
    }
    if (!good) return Fail(absl::StrCat("'", arg, "' is not possible; --help says what is"));
  }
  if (!IsFolder(settings.source)) {
    if (settings.target.empty()) settings.target = settings.source + "/2026-11";
    settings.source += "/2026-10";
  }
  if (settings.target.empty()) settings.target = settings.source;

  int64_t kv_tokens = 0;
  EngineBench engine(settings, &kv_tokens);
  std::vector<Case> cases;
  AddEngineCases(&engine, &cases);
  AddStoreCases(&cases);
  AddTextCases(settings, &cases);
  std::vector<const Case*> chosen;
  for (const Case& one : cases) {
    const bool named = std::any_of(wanted.begin(), wanted.end(), [&](const std::string& w) {
      return one.name == w ||
             (one.name.rfind(w, 0) == 0 && (w.back() == '/' || one.name[w.size()] == '/'));
    });
    if (wanted.empty() ? one.name != "store/blocks=10000000" : named) chosen.push_back(&one);
  }
  for (const std::string& w : wanted) {
    if (std::none_of(chosen.begin(), chosen.end(),
                     [&](const Case* one) { return one->name.rfind(w, 0) == 0; })) {
      return Fail(absl::StrCat("there is no case '", w, "'; --list names them"));
    }
  }
  if (list) {
    for (const Case* one : chosen) std::printf("%-36s %s\n", one->name.c_str(), one->what.c_str());
    return 0;
  }
  for (const Case* one : chosen) kv_tokens = std::max(kv_tokens, one->kv_tokens);
  for (const Case* one : chosen) {
    absl::StatusOr<nlohmann::json> result = one->run();
    if (!result.ok()) {
      return Fail(absl::StrCat(one->name, ": ", result.status().ToString())) - 1;
    }
    nlohmann::json line = {{"case", one->name},
                           {"model", settings.source},
                           {"weights", DTypeName(settings.weights)},
                           {"kv", DTypeName(settings.kv_dtype)},
                           {"threads", settings.threads}};
    line.update(*result);
    std::printf("%s\n", line.dump().c_str());
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace carryover::bench

int main(int argc, char** argv) { return carryover::bench::Main(argc, argv); }
