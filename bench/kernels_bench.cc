// Micro benchmarks of the CPU backend at SmolLM2-135M's shapes. Rates are in the counters.
//   build/bin/kernels_bench --benchmark_filter=MatMul
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "bench/cpu_peak.h"
#include "kernels/ops.h"

namespace carryover {
namespace {

constexpr int kHeads = 9;
constexpr int kKvHeads = 3;
constexpr int kHeadDim = 64;
constexpr int kLayers = 30;
constexpr int kHidden = 576;
constexpr int kIntermediate = 1536;
constexpr int kVocab = 49152;

// All threads of one backend for the process; BENCH_THREADS overrides how many.
Backend* SharedBackend() {
  static Backend* const backend = [] {
    const char* const threads = std::getenv("BENCH_THREADS");
    return *CpuOps().create({.threads = threads == nullptr ? 0 : std::atoi(threads)});
  }();
  return backend;
}

// Zeroed memory of the backend, so that pages are there and values are harmless.
struct Buffer {
  explicit Buffer(size_t bytes) : data(*CpuOps().alloc(SharedBackend(), bytes)) {
    std::memset(data, 0, bytes);
  }
  ~Buffer() { CpuOps().release(SharedBackend(), data); }
  float* floats() { return static_cast<float*>(data); }
  void* data;
};

void MatMul(benchmark::State& state, DType type) {
  const int k = static_cast<int>(state.range(0));
  const int n = static_cast<int>(state.range(1));
  const int rows = static_cast<int>(state.range(2));
  const Ops& ops = CpuOps();
  Backend* const backend = SharedBackend();
  // Several matrices in turn, as in a model's layers: one alone would stay in the caches.
  const size_t bytes = static_cast<size_t>(k) * n * DTypeBytes(type);
  const size_t copies = std::clamp<size_t>((size_t{64} << 20) / bytes, 1, kLayers);
  const DType from = ActivationDType(type);
  const std::vector<uint8_t> values(static_cast<size_t>(k) * n * DTypeBytes(from), 0x3c);
  std::vector<PackedMatrix*> weights;
  for (size_t i = 0; i < copies; ++i) {
    weights.push_back(*ops.pack(backend, {{values.data(), from, n, k}}, {}, type, /*gated=*/false));
  }
  Buffer x(static_cast<size_t>(rows) * k * DTypeBytes(from));
  std::memset(x.data, 0x3c, static_cast<size_t>(rows) * k * DTypeBytes(from));
  Buffer out(static_cast<size_t>(rows) * n * sizeof(float));
  size_t i = 0;
  for (auto _ : state) {
    ops.matmul(backend, x.data, weights[i++ % copies], rows, out.floats(), false);
  }
  for (PackedMatrix* w : weights) ops.release_matrix(backend, w);
  const double calls = static_cast<double>(state.iterations());
  state.counters["GFLOP/s"] =
      benchmark::Counter(2e-9 * rows * k * n * calls, benchmark::Counter::kIsRate);
  state.counters["GB/s"] =
      benchmark::Counter(1e-9 * static_cast<double>(bytes) * calls, benchmark::Counter::kIsRate);
}

// `rows` new tokens of `sequences` sequences over `context` earlier ones, one layer of all.
void Attention(benchmark::State& state, DType type) {
  const int rows = static_cast<int>(state.range(0));
  const int context = static_cast<int>(state.range(1));
  const int count = static_cast<int>(state.range(2));
  const Ops& ops = CpuOps();
  Backend* const backend = SharedBackend();
  KvGeometry geometry{.layers = kLayers, .kv_heads = kKvHeads, .head_dim = kHeadDim};
  geometry.dtype = type;
  const int blocks_each = (context + rows + geometry.block_tokens - 1) / geometry.block_tokens;
  Buffer kv(geometry.BlockBytes() * blocks_each * count);
  Buffer qkv(static_cast<size_t>(rows) * count * (kHeads + 2 * kKvHeads) * kHeadDim * 4);
  Buffer out(static_cast<size_t>(rows) * count * kHeads * kHeadDim * 4);
  std::vector<SequenceRows> sequences;
  std::vector<int32_t> positions;
  std::vector<int32_t> table;
  for (int s = 0; s < count; ++s) {
    sequences.push_back({s * rows, rows, context, s * blocks_each});
    for (int i = 0; i < rows; ++i) positions.push_back(context + i);
    for (int b = 0; b < blocks_each; ++b) table.push_back(s * blocks_each + b);
  }
  ops.begin_pass(backend, {sequences, positions, table});
  AttentionArgs args;
  args.qkv = qkv.floats();
  args.heads = kHeads;
  args.scale = 0.125f;
  args.kv_base = kv.data;
  args.geometry = geometry;
  args.out = out.data;
  for (auto _ : state) {
    args.layer = (args.layer + 1) % kLayers;
    ops.attention(backend, args);
  }
  const double calls = static_cast<double>(state.iterations());
  const double seen = static_cast<double>(rows) * count * (context + (rows + 1) / 2.0);
  state.counters["GFLOP/s"] =
      benchmark::Counter(4e-9 * seen * kHeads * kHeadDim * calls, benchmark::Counter::kIsRate);
  state.counters["GB/s"] = benchmark::Counter(
      2e-9 * count * (context + rows) * kKvHeads * kHeadDim * DTypeBytes(type) * calls,
      benchmark::Counter::kIsRate);
  state.counters["ms/30layers"] = benchmark::Counter(
      calls / (1e3 * kLayers), benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

void RopeWrite(benchmark::State& state) {
  const int rows = static_cast<int>(state.range(0));
  KvGeometry geometry{.layers = kLayers, .kv_heads = kKvHeads, .head_dim = kHeadDim};
  Buffer kv(geometry.BlockBytes() * (rows / geometry.block_tokens + 1));
  Buffer qkv(static_cast<size_t>(rows) * (kHeads + 2 * kKvHeads) * kHeadDim * 4);
  Buffer cos_sin(static_cast<size_t>(rows) * kHeadDim * 4);
  std::vector<int32_t> positions;
  std::vector<int32_t> table;
  for (int i = 0; i < rows; ++i) positions.push_back(i);
  for (int b = 0; b <= rows / geometry.block_tokens; ++b) table.push_back(b);
  const SequenceRows sequence{0, rows, 0, 0};
  CpuOps().begin_pass(SharedBackend(), {{&sequence, 1}, positions, table});
  RopeWriteArgs args;
  args.qkv = qkv.floats();
  args.cos_sin = cos_sin.floats();
  args.heads = kHeads;
  args.kv_base = kv.data;
  args.geometry = geometry;
  for (auto _ : state) CpuOps().rope_write(SharedBackend(), args);
}

void RmsNorm(benchmark::State& state) {
  const int rows = static_cast<int>(state.range(0));
  Buffer x(static_cast<size_t>(rows) * kHidden * 4);
  Buffer weight(kHidden * 4);
  for (auto _ : state) {
    CpuOps().rms_norm(SharedBackend(), x.floats(), weight.floats(), rows, kHidden, 1e-5f, x.data,
                      DType::kBF16);
  }
}

// Rows of logits as unlike as neighbouring checkpoints': every exponential is a real one.
void Divergence(benchmark::State& state) {
  const int rows = static_cast<int>(state.range(0));
  const int vocab = static_cast<int>(state.range(1));
  const size_t values = static_cast<size_t>(rows) * vocab;
  Buffer native(values * 4), carried(values * 4), out(rows * sizeof(DivergenceRow));
  uint32_t draw = 1;
  for (size_t i = 0; i < values; ++i) {
    draw = 1664525 * draw + 1013904223;
    native.floats()[i] = static_cast<float>(draw >> 8) / 1e6f;
    carried.floats()[i] = native.floats()[i] + static_cast<float>(draw & 0xff) / 1e3f;
  }
  DivergenceArgs args;
  args.native = native.floats();
  args.carried = carried.floats();
  args.rows = rows;
  args.vocab = vocab;
  args.out = static_cast<DivergenceRow*>(out.data);
  for (auto _ : state) CpuOps().divergence(SharedBackend(), args);
  state.counters["GB/s"] = benchmark::Counter(
      8e-9 * static_cast<double>(values) * static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate);
}

// One core; the best of all runs counts.
void Peak(benchmark::State& state, double (*measure)()) {
  double best = 0;
  for (auto _ : state) best = std::max(best, measure());
  state.counters["GFLOP/s"] = best;
}

void ReadMemory(benchmark::State& state) {
  const size_t bytes = static_cast<size_t>(state.range(0));
  Buffer memory(bytes);
  double best = 0;
  for (auto _ : state) best = std::max(best, ReadGbytes(memory.data, bytes));
  state.counters["GB/s"] = best;
}

void MatMulShapes(benchmark::internal::Benchmark* b) {
  const std::vector<std::pair<int, int>> shapes = {{kHidden, (kHeads + 2 * kKvHeads) * kHeadDim},
                                                   {kHidden, kHidden},
                                                   {kHidden, 2 * kIntermediate},
                                                   {kIntermediate, kHidden},
                                                   {kHidden, kVocab}};
  for (const auto& [k, n] : shapes) {
    for (int rows : {1, 2, 4, 8, 16, 32, 128, 512}) b->Args({k, n, rows});
  }
  b->ArgNames({"k", "n", "rows"})->UseRealTime();
}

void AttentionShapes(benchmark::internal::Benchmark* b) {
  for (int rows : {1, 32}) {
    for (int context : {1024, 4096, 8192}) b->Args({rows, context, 1});
  }
  b->Args({1, 1024, 32})->Args({512, 0, 1})->Args({512, 1536, 1});
  b->ArgNames({"rows", "context", "sequences"})->UseRealTime();
}

BENCHMARK_CAPTURE(Peak, fma_f32, PeakFmaGflops);
BENCHMARK_CAPTURE(Peak, dot_bf16, PeakBf16Gflops);
BENCHMARK(ReadMemory)->Arg(1 << 20)->Arg(32 << 20)->Arg(1 << 29);
BENCHMARK_CAPTURE(MatMul, bf16, DType::kBF16)->Apply(MatMulShapes);
BENCHMARK_CAPTURE(MatMul, int8, DType::kI8)->Apply(MatMulShapes);
BENCHMARK_CAPTURE(MatMul, f32, DType::kF32)->Apply(MatMulShapes);
BENCHMARK_CAPTURE(Attention, bf16, DType::kBF16)->Apply(AttentionShapes);
BENCHMARK_CAPTURE(Attention, f32, DType::kF32)->Apply(AttentionShapes);
BENCHMARK(RopeWrite)->Arg(1)->Arg(32)->Arg(512)->UseRealTime();
BENCHMARK(RmsNorm)->Arg(1)->Arg(32)->Arg(512)->UseRealTime();
BENCHMARK(Divergence)
    ->Args({1, kVocab})
    ->Args({16, kVocab})
    ->Args({16, 151936})
    ->ArgNames({"rows", "vocab"})
    ->UseRealTime();

}  // namespace
}  // namespace carryover

BENCHMARK_MAIN();
