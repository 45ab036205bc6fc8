#include "bench/floor_model.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>

#include "bench/bench_case.h"
#include "bench/cpu_peak.h"

namespace carryover::bench {
namespace {

double Median(int repeats, const std::function<void()>& body) {
  return QuartilesOf(Repeat(repeats, body)).median;
}

struct Zeros {
  Zeros(Backend* backend, size_t bytes) : backend(backend), data(*CpuOps().alloc(backend, bytes)) {
    std::memset(data, 0, bytes);
  }
  ~Zeros() { CpuOps().release(backend, data); }
  float* floats() const { return static_cast<float*>(data); }
  Backend* const backend;
  void* const data;
};

}  // namespace

FloorModel::FloorModel(const FloorShape& shape)
    : shape_(shape), backend_(*CpuOps().create({.threads = shape.threads})) {
  const FloorShape& s = shape_;
  for (int i = 0; i < s.layers; ++i) {
    layers_.push_back(Matrix((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden));
    layers_.push_back(Matrix(s.hidden, s.heads * s.head_dim));
    layers_.push_back(Matrix(2 * s.intermediate, s.hidden));
    layers_.push_back(Matrix(s.hidden, s.intermediate));
  }
  head_ = Matrix(s.vocab, s.hidden);
}

FloorModel::~FloorModel() {
  for (PackedMatrix* matrix : layers_) CpuOps().release_matrix(backend_, matrix);
  CpuOps().release_matrix(backend_, head_);
  CpuOps().destroy(backend_);
}

PackedMatrix* FloorModel::Matrix(int n, int k) {
  const DType from = ActivationDType(shape_.type);
  const std::vector<uint8_t> zeros(static_cast<size_t>(n) * k * DTypeBytes(from));
  return *CpuOps().pack(backend_, {{zeros.data(), from, n, k}}, {}, shape_.type, /*gated=*/false);
}

size_t FloorModel::layer_weight_bytes() const {
  size_t bytes = 0;
  for (const PackedMatrix* matrix : layers_) bytes += CpuOps().matrix_bytes(matrix);
  return bytes;
}

FloorTimes FloorModel::Measure(int rows, int context, int repeats, bool attention) {
  const FloorShape& s = shape_;
  const int qkv = (s.heads + 2 * s.kv_heads) * s.head_dim;
  const int group_rows = rows * s.heads / s.kv_heads;
  const size_t tokens = static_cast<size_t>(context) + rows;
  const size_t widest =
      std::max<size_t>({static_cast<size_t>(s.hidden), static_cast<size_t>(s.heads * s.head_dim),
                        static_cast<size_t>(s.intermediate), tokens});
  const size_t outputs = static_cast<size_t>(rows) * std::max(2 * s.intermediate, qkv);
  const Zeros x(backend_, group_rows * widest * 4);
  const Zeros out(backend_, 4 * std::max({outputs, static_cast<size_t>(s.vocab),
                                          static_cast<size_t>(group_rows) * tokens}));
  FloorTimes times;
  times.matmul_ms = Median(repeats, [&] {
    for (const PackedMatrix* w : layers_) {
      CpuOps().matmul(backend_, x.data, w, rows, out.floats(), false);
    }
  });
  times.head_ms =
      Median(repeats, [&] { CpuOps().matmul(backend_, x.data, head_, 1, out.floats(), false); });
  times.kv_bytes =
      2 * tokens * s.kv_heads * s.head_dim * DTypeBytes(ActivationDType(s.type)) * s.layers;
  times.kv_read_ms = ReadMs(times.kv_bytes, repeats);
  if (!attention) return times;

  PackedMatrix* const keys = Matrix(static_cast<int>(tokens), s.head_dim);
  PackedMatrix* const values = Matrix(s.head_dim, static_cast<int>(tokens));
  times.attention_products_ms = Median(repeats, [&] {
    for (int i = 0; i < s.layers * s.kv_heads; ++i) {
      CpuOps().matmul(backend_, x.data, keys, group_rows, out.floats(), false);
      CpuOps().matmul(backend_, x.data, values, group_rows, out.floats(), false);
    }
  });
  CpuOps().release_matrix(backend_, keys);
  CpuOps().release_matrix(backend_, values);
  return times;
}

double FloorModel::ReadMs(size_t bytes, int repeats) {
  const size_t threads =
      shape_.threads > 0 ? shape_.threads : std::max(1u, std::thread::hardware_concurrency());
  const Zeros memory(backend_, bytes);
  const char* const data = static_cast<const char*>(memory.data);
  const size_t part = bytes / threads;
  return Median(repeats, [&] {
    std::vector<std::thread> others;
    for (size_t t = 1; t < threads; ++t) {
      others.emplace_back([=] { ReadGbytes(data + t * part, part); });
    }
    ReadGbytes(data, part);
    for (std::thread& other : others) other.join();
  });
}

}  // namespace carryover::bench
