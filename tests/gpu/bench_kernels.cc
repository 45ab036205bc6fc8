#include <cstdint>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "engine/model.h"
#include "tests/gpu/device_bench.h"

namespace carryover {
namespace {

constexpr int kBlockTokens = 16;
constexpr int kInner = 10;  // launches a measurement, so that waiting for the device counts little

class Kernels {
 public:
  Kernels(const BenchOptions& options, Backend* backend, const AddRow& add)
      : options_(options), ops_(*options.ops), backend_(backend), add_(add) {}

  absl::Status Divergence(int vocab) {
    constexpr int kRows = 64;
    DeviceBuffer native(&ops_, backend_), carried(&ops_, backend_), out(&ops_, backend_);
    const size_t values = size_t{kRows} * vocab;
    for (DeviceBuffer* logits : {&native, &carried}) {
      RETURN_IF_ERROR(logits->Reserve(values * sizeof(float)));
      std::vector<float> host(values);
      std::minstd_rand random(logits == &native ? 1 : 2);
      for (float& v : host) v = static_cast<float>(random() % 20000) * 1e-3f - 10;
      ops_.upload(backend_, logits->data(), host.data(), values * sizeof(float));
      RETURN_IF_ERROR(ops_.sync(backend_));
    }
    RETURN_IF_ERROR(out.Reserve(kRows * sizeof(DivergenceRow)));
    const double ms = Time([&] {
      ops_.divergence(backend_, {.native = native.floats(),
                                 .carried = carried.floats(),
                                 .rows = kRows,
                                 .vocab = vocab,
                                 .out = static_cast<DivergenceRow*>(out.data())});
    });
    // Both arms twice, kernels/ops.h says why.
    add_({{"bench", "divergence"},
          {"rows", kRows},
          {"vocab", vocab},
          {"ms", ms},
          {"bytes", 4 * values * sizeof(float)}});
    return status_;
  }

  // One block of a model between plain host memory and the device, as a tier moves it.
  absl::Status BlockCopies(const ModelShape& shape) {
    const auto bytes = static_cast<size_t>(shape.KvBytesPerToken()) * kBlockTokens;
    DeviceBuffer device(&ops_, backend_);
    RETURN_IF_ERROR(device.Reserve(bytes));
    std::vector<char> host(bytes, 1);
    const double up = Time([&] { ops_.upload(backend_, device.data(), host.data(), bytes); });
    const double down = Time([&] { ops_.download(backend_, host.data(), device.data(), bytes); });
    for (const auto& [name, ms] : {std::pair("upload", up), std::pair("download", down)}) {
      add_({{"bench", name}, {"model", shape.name}, {"ms", ms}, {"bytes", bytes}});
    }
    return status_;
  }

  absl::Status Products(const ModelShape& shape) {
    const std::pair<const char*, std::pair<int, int>> all[] = {
        {"qkv", {shape.QkvRows(), shape.hidden}},
        {"out", {shape.hidden, shape.heads * shape.head_dim}},
        {"gate_up", {2 * shape.intermediate, shape.hidden}},
        {"down", {shape.hidden, shape.intermediate}}};
    std::vector<int> row_counts = options_.batches;
    row_counts.insert(row_counts.end(), options_.prompts.begin(), options_.prompts.end());
    for (const auto& [name, sides] : all) {
      const auto [n, k] = sides;
      const std::vector<uint16_t> noise(static_cast<size_t>(n) * k, 0x3c8f);
      const HostMatrix part = {noise.data(), DType::kBF16, n, k};
      ASSIGN_OR_RETURN(PackedMatrix * packed,
                       ops_.pack(backend_, {&part, 1}, {}, DType::kBF16, /*gated=*/false));
      for (const int rows : row_counts) {
        DeviceBuffer x(&ops_, backend_), y(&ops_, backend_);
        RETURN_IF_ERROR(x.Reserve(size_t{2} * rows * k));
        RETURN_IF_ERROR(y.Reserve(sizeof(float) * rows * n));
        ops_.upload(backend_, x.data(), noise.data(),
                    std::min(noise.size(), static_cast<size_t>(rows) * k) * 2);
        const double ms =
            Time([&] { ops_.matmul(backend_, x.data(), packed, rows, y.floats(), false); });
        add_({{"bench", "matmul"},
              {"model", shape.name},
              {"matrix", name},
              {"rows", rows},
              {"ms", ms},
              {"flops", 2.0 * rows * n * k},
              {"bytes", 2.0 * n * k + 2.0 * rows * k + 4.0 * rows * n}});
      }
      ops_.release_matrix(backend_, packed);
    }
    return status_;
  }

  // `rows` new tokens of each of `batch` sequences, behind `before` others.
  absl::Status Attention(const ModelShape& shape, int batch, int before, int rows) {
    const KvGeometry geometry = {.layers = 1,
                                 .kv_heads = shape.kv_heads,
                                 .head_dim = shape.head_dim,
                                 .block_tokens = kBlockTokens};
    const int blocks = (before + rows + kBlockTokens - 1) / kBlockTokens;
    std::vector<SequenceRows> sequences;
    std::vector<int32_t> positions, table;
    for (int s = 0; s < batch; ++s) {
      sequences.push_back({s * rows, rows, before, s * blocks});
      for (int i = 0; i < rows; ++i) positions.push_back(before + i);
      // Scattered, as a pool in use hands them out.
      for (int i = 0; i < blocks; ++i) table.push_back((i * 7 + s) % (blocks * batch));
    }
    DeviceBuffer kv(&ops_, backend_), qkv(&ops_, backend_), out(&ops_, backend_);
    const size_t all_rows = positions.size();
    RETURN_IF_ERROR(kv.Reserve(geometry.BlockBytes() * blocks * batch));
    RETURN_IF_ERROR(qkv.Reserve(all_rows * shape.QkvRows() * sizeof(float)));
    RETURN_IF_ERROR(out.Reserve(all_rows * shape.heads * shape.head_dim * 2));
    ops_.begin_pass(backend_, {sequences, positions, table});
    const AttentionArgs args = {.qkv = qkv.floats(),
                                .heads = shape.heads,
                                .scale = 0.1f,
                                .kv_base = kv.data(),
                                .geometry = geometry,
                                .out = out.data(),
                                .out_type = DType::kBF16};
    const double ms = Time([&] { ops_.attention(backend_, args); });
    const double pairs = 1.0 * batch * rows * (before + (rows + 1) / 2.0);  // query and key
    add_({{"bench", "attention"},
          {"model", shape.name},
          {"batch", batch},
          {"rows", rows},
          {"context", before + rows},
          {"ms", ms},
          {"flops", 4 * pairs * shape.heads * shape.head_dim},
          {"bytes", 4.0 * batch * (before + rows) * shape.kv_heads * shape.head_dim +
                        6.0 * all_rows * shape.heads * shape.head_dim}});
    return status_;
  }

 private:
  double Time(const std::function<void()>& launch) {
    const auto body = [&] {
      for (int i = 0; i < kInner; ++i) launch();
      status_.Update(ops_.sync(backend_));
    };
    return MedianMs(options_.repeats, body) / kInner;
  }

  const BenchOptions& options_;
  const Ops& ops_;
  Backend* const backend_;
  const AddRow& add_;
  absl::Status status_;
};

}  // namespace

absl::Status BenchKernels(const BenchOptions& options, const AddRow& add) {
  ASSIGN_OR_RETURN(Backend * created, options.ops->create({}));
  const std::unique_ptr<Backend, void (*)(Backend*)> backend(created, options.ops->destroy);
  Kernels kernels(options, created, add);
  for (const ModelShape& shape : options.models) {
    RETURN_IF_ERROR(kernels.Divergence(shape.vocab));
    RETURN_IF_ERROR(kernels.BlockCopies(shape));
    RETURN_IF_ERROR(kernels.Products(shape));
    for (const int tokens : options.prompts) {
      RETURN_IF_ERROR(kernels.Attention(shape, 1, 0, tokens));
    }
    for (const int batch : options.batches) {
      for (const int context : options.contexts) {
        RETURN_IF_ERROR(kernels.Attention(shape, batch, context - 1, 1));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace carryover
