// What a pass over a model's layers must cost at least on this machine, from the pieces it is made
// of, each measured alone: the products with all weights, the LM head of one row, and reading the
// KV that the rows attend to. Prints one JSON line; times are medians in milliseconds.
//
//   build/bin/floor --rows=32 --context=7680        (other flags: see FloorShape; SmolLM2-135M by
//   default)
//
// attention_products_ms is apart and not in floor_ms: the two products of attention, Q K^T and P V,
// run as ordinary matrix products of the same shapes, without softmax, mask and paging.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "bench/floor_model.h"

namespace carryover::bench {
namespace {

int Main(int argc, char** argv) {
  FloorShape shape;
  int rows = 32, context = 7680, f32 = 0, repeats = 15;
  const std::map<std::string, int*> flags = {
      {"layers", &shape.layers},     {"hidden", &shape.hidden},
      {"heads", &shape.heads},       {"kv-heads", &shape.kv_heads},
      {"head-dim", &shape.head_dim}, {"intermediate", &shape.intermediate},
      {"vocab", &shape.vocab},       {"rows", &rows},
      {"context", &context},         {"f32", &f32},
      {"threads", &shape.threads},   {"repeats", &repeats}};
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    const size_t equals = arg.find('=');
    const auto flag = equals == std::string::npos || arg.rfind("--", 0) != 0
                          ? flags.end()
                          : flags.find(arg.substr(2, equals - 2));
    if (flag == flags.end()) {
      std::fprintf(stderr, "floor: unknown argument '%s'; flags are --NAME=NUMBER of:", argv[i]);
      for (const auto& [name, value] : flags) std::fprintf(stderr, " %s", name.c_str());
      std::fprintf(stderr, "\n");
      return 2;
    }
    *flag->second = std::atoi(arg.c_str() + equals + 1);
  }
  for (const auto& [name, value] : flags) {
    const bool may_be_zero = name == "context" || name == "f32" || name == "threads";
    if (*value < (may_be_zero ? 0 : 1) || *value > (1 << 24)) {
      std::fprintf(stderr, "floor: --%s=%d is out of range\n", name.c_str(), *value);
      return 2;
    }
  }
  shape.type = f32 != 0 ? DType::kF32 : DType::kBF16;
  const FloorTimes times = FloorModel(shape).Measure(rows, context, repeats, true);
  const nlohmann::json line = {
      {"rows", rows},
      {"context", context},
      {"weights", DTypeName(shape.type)},
      {"matmul_ms", times.matmul_ms},
      {"head_ms", times.head_ms},
      {"kv_bytes", times.kv_bytes},
      {"kv_read_ms", times.kv_read_ms},
      {"kv_read_gbytes", static_cast<double>(times.kv_bytes) / times.kv_read_ms * 1e-6},
      {"floor_ms", times.FloorMs()},
      {"attention_products_ms", times.attention_products_ms}};
  std::printf("%s\n", line.dump().c_str());
  return 0;
}

}  // namespace
}  // namespace carryover::bench

int main(int argc, char** argv) { return carryover::bench::Main(argc, argv); }
