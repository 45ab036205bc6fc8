// oneDNN's matmul at the shapes of kernels_bench, to compare with: weights in the layout that it
// prefers, reordered outside the timed part.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstring>
#include <dnnl.hpp>
#include <vector>

namespace carryover {
namespace {

void OneDnn(benchmark::State& state, dnnl::memory::data_type type) {
  using dnnl::memory;
  const memory::dim k = state.range(0);
  const memory::dim n = state.range(1);
  const memory::dim rows = state.range(2);
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  const memory::desc x({rows, k}, type, memory::format_tag::ab);
  const memory::desc w({k, n}, type, memory::format_tag::any);
  const memory::desc y({rows, n}, memory::data_type::f32, memory::format_tag::ab);
  const dnnl::matmul::primitive_desc chosen(dnnl::matmul::desc(x, w, y), engine);
  const dnnl::matmul product(chosen);
  const auto zeros = [&](const memory::desc& desc) {
    memory m(desc, engine);
    std::memset(m.get_data_handle(), 0, desc.get_size());
    return m;
  };
  const size_t bytes = chosen.weights_desc().get_size();
  const size_t copies = std::clamp<size_t>((size_t{64} << 20) / bytes, 1, 30);
  std::vector<memory> weights;
  for (size_t i = 0; i < copies; ++i) weights.push_back(zeros(chosen.weights_desc()));
  const memory input = zeros(x);
  const memory output = zeros(y);
  size_t i = 0;
  for (auto _ : state) {
    product.execute(
        stream,
        {{DNNL_ARG_SRC, input}, {DNNL_ARG_WEIGHTS, weights[i++ % copies]}, {DNNL_ARG_DST, output}});
    stream.wait();
  }
  const double calls = static_cast<double>(state.iterations());
  state.counters["GFLOP/s"] = benchmark::Counter(2e-9 * static_cast<double>(rows * k * n) * calls,
                                                 benchmark::Counter::kIsRate);
}

void Shapes(benchmark::internal::Benchmark* b) {
  for (const auto& [k, n] : {std::pair{576, 960}, {576, 3072}, {1536, 576}, {576, 49152}}) {
    for (int rows : {1, 16, 32, 128, 512}) b->Args({k, n, rows});
  }
  b->ArgNames({"k", "n", "rows"})->UseRealTime();
}

BENCHMARK_CAPTURE(OneDnn, bf16, dnnl::memory::data_type::bf16)->Apply(Shapes);
BENCHMARK_CAPTURE(OneDnn, f32, dnnl::memory::data_type::f32)->Apply(Shapes);

}  // namespace
}  // namespace carryover
