// What a pass over a model's layers must cost at least on this machine, from the pieces it is made
// of, each measured alone: the products with all weights, the LM head of one row, and reading the
// KV that the rows attend to. Prints one JSON line; times are medians in milliseconds.
//
//   build/bin/floor --rows=32 --context=7680        (other flags: see Shape; SmolLM2-135M by
//   default)
//
// attention_products_ms is apart and not in floor_ms: the two products of attention, Q K^T and P V,
// run as ordinary matrix products of the same shapes, without softmax, mask and paging.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "bench/cpu_peak.h"
#include "kernels/ops.h"

namespace carryover {
namespace {

struct Shape {
  int layers = 30;
  int hidden = 576;
  int heads = 9;
  int kv_heads = 3;
  int head_dim = 64;
  int intermediate = 1536;
  int vocab = 49152;
  int rows = 32;
  int context = 7680;  // tokens before the rows
  int f32 = 0;         // weights and KV as f32 instead of bf16
  int threads = 0;
  int repeats = 15;
};

double Milliseconds() {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

double Median(int repeats, const std::function<void()>& body) {
  body();  // pages and caches
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) {
    const double start = Milliseconds();
    body();
    times.push_back(Milliseconds() - start);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

class Floor {
 public:
  explicit Floor(const Shape& shape)
      : shape_(shape),
        type_(shape.f32 != 0 ? DType::kF32 : DType::kBF16),
        backend_(*CpuOps().create({.threads = shape.threads})) {}

  nlohmann::json Measure() {
    const Shape& s = shape_;
    const int qkv = (s.heads + 2 * s.kv_heads) * s.head_dim;
    std::vector<PackedMatrix*> weights;
    for (int i = 0; i < s.layers; ++i) {
      weights.push_back(Matrix(qkv, s.hidden));
      weights.push_back(Matrix(s.hidden, s.heads * s.head_dim));
      weights.push_back(Matrix(2 * s.intermediate, s.hidden));
      weights.push_back(Matrix(s.hidden, s.intermediate));
    }
    const int widest =
        std::max({s.hidden, s.heads * s.head_dim, s.intermediate, s.context + s.rows});
    const int group_rows = s.rows * s.heads / s.kv_heads;
    void* const x = Zeros(static_cast<size_t>(group_rows) * widest * 4);
    const size_t outputs = static_cast<size_t>(s.rows) * std::max(2 * s.intermediate, qkv);
    auto* const out = static_cast<float*>(
        Zeros(4 * std::max({outputs, static_cast<size_t>(s.vocab),
                            static_cast<size_t>(group_rows) * (s.context + s.rows)})));
    const double matmul = Median(s.repeats, [&] {
      for (PackedMatrix* w : weights) CpuOps().matmul(backend_, x, w, s.rows, out, false);
    });
    PackedMatrix* const head = Matrix(s.vocab, s.hidden);
    const double head_ms =
        Median(s.repeats, [&] { CpuOps().matmul(backend_, x, head, 1, out, false); });

    const size_t kv_bytes = 2 * static_cast<size_t>(s.context + s.rows) * s.kv_heads * s.head_dim *
                            DTypeBytes(type_) * s.layers;
    const double kv_ms = ReadMilliseconds(kv_bytes);

    PackedMatrix* const keys = Matrix(s.context + s.rows, s.head_dim);
    PackedMatrix* const values = Matrix(s.head_dim, s.context + s.rows);
    const double attention = Median(s.repeats, [&] {
      for (int i = 0; i < s.layers * s.kv_heads; ++i) {
        CpuOps().matmul(backend_, x, keys, group_rows, out, false);
        CpuOps().matmul(backend_, x, values, group_rows, out, false);
      }
    });
    return {{"rows", s.rows},
            {"context", s.context},
            {"weights", DTypeName(type_)},
            {"matmul_ms", matmul},
            {"head_ms", head_ms},
            {"kv_bytes", kv_bytes},
            {"kv_read_ms", kv_ms},
            {"kv_read_gbytes", static_cast<double>(kv_bytes) / kv_ms * 1e-6},
            {"floor_ms", matmul + head_ms + kv_ms},
            {"attention_products_ms", attention}};
  }

 private:
  void* Zeros(size_t bytes) {
    void* const p = *CpuOps().alloc(backend_, bytes);
    std::memset(p, 0, bytes);
    return p;
  }
  PackedMatrix* Matrix(int n, int k) {
    const std::vector<uint8_t> zeros(static_cast<size_t>(n) * k * DTypeBytes(type_));
    return *CpuOps().pack(backend_, {{zeros.data(), type_, n, k}}, {}, type_);
  }
  // All threads reading `bytes` once, each its own part.
  double ReadMilliseconds(size_t bytes) {
    const size_t threads =
        shape_.threads > 0 ? shape_.threads : std::thread::hardware_concurrency();
    char* const data = static_cast<char*>(Zeros(bytes));
    const size_t part = bytes / threads;
    return Median(shape_.repeats, [&] {
      std::vector<std::thread> others;
      for (size_t t = 1; t < threads; ++t) {
        others.emplace_back([=] { ReadGbytes(data + t * part, part); });
      }
      ReadGbytes(data, part);
      for (std::thread& other : others) other.join();
    });
  }

  const Shape shape_;
  const DType type_;
  Backend* const backend_;  // lives as long as the process, with all it allocated
};

int Main(int argc, char** argv) {
  Shape shape;
  const std::map<std::string, int*> flags = {
      {"layers", &shape.layers},     {"hidden", &shape.hidden},
      {"heads", &shape.heads},       {"kv-heads", &shape.kv_heads},
      {"head-dim", &shape.head_dim}, {"intermediate", &shape.intermediate},
      {"vocab", &shape.vocab},       {"rows", &shape.rows},
      {"context", &shape.context},   {"f32", &shape.f32},
      {"threads", &shape.threads},   {"repeats", &shape.repeats}};
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
  std::printf("%s\n", Floor(shape).Measure().dump().c_str());
  return 0;
}

}  // namespace
}  // namespace carryover

int main(int argc, char** argv) { return carryover::Main(argc, argv); }
