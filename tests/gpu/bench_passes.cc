#include <cstdint>
#include <memory>
#include <vector>

#include "base/status_macros.h"
#include "engine/model.h"
#include "tests/gpu/device_bench.h"

namespace carryover {
namespace {

// One pass of `rows` new tokens of each of `batch` sequences, behind `before` others whose blocks
// hold whatever was in memory: no time depends on it.
ForwardBatch Pass(int batch, int before, int rows, int block_tokens) {
  ForwardBatch pass;
  const int blocks = (before + rows + block_tokens - 1) / block_tokens;
  for (int s = 0; s < batch; ++s) {
    pass.sequences.push_back({s * rows, rows, before, s * blocks});
    for (int i = 0; i < rows; ++i) {
      pass.tokens.push_back(10 + (s + i) % 200);
      pass.positions.push_back(before + i);
    }
    for (int i = 0; i < blocks; ++i) pass.block_table.push_back((i * 7 + s) % (blocks * batch));
    pass.logit_rows.push_back((s + 1) * rows - 1);
  }
  return pass;
}

}  // namespace

absl::Status BenchPasses(const BenchOptions& options, const std::string& folder,
                         const ModelShape& shape, const AddRow& add) {
  const Ops& ops = *options.ops;
  ASSIGN_OR_RETURN(Backend * created, ops.create({}));
  const std::unique_ptr<Backend, void (*)(Backend*)> backend(created, ops.destroy);
  const ModelOptions model_options;
  ASSIGN_OR_RETURN(const std::unique_ptr<Model> model,
                   Model::Load(folder, ops, created, model_options));
  DeviceBuffer kv(&ops, created);
  std::vector<float> logits;
  absl::Status status;
  const auto run = [&](const char* name, int batch, int before, int rows) {
    const ForwardBatch pass = Pass(batch, before, rows, model_options.block_tokens);
    status.Update(kv.Reserve(pass.block_table.size() * model->kv_layout().geometry.BlockBytes()));
    if (!status.ok()) return;
    const double ms =
        MedianMs(options.repeats, [&] { status.Update(model->Forward(pass, kv.data(), &logits)); });
    const double weights = 1.0 * shape.LayerValues() * shape.layers;
    const double pairs = 1.0 * batch * rows * (before + (rows + 1) / 2.0);
    add({{"bench", name},
         {"model", shape.name},
         {"layers", shape.layers},
         {"batch", batch},
         {"rows", rows},
         {"context", before + rows},
         {"ms", ms},
         {"flops", 2 * weights * batch * rows + 2.0 * shape.HeadValues() * batch +
                       4 * pairs * shape.heads * shape.head_dim * shape.layers},
         {"bytes", 2 * (weights + shape.HeadValues()) +
                       1.0 * shape.KvBytesPerToken() * batch * (before + rows)}});
  };
  for (const int tokens : options.prompts) run("prefill", 1, 0, tokens);
  for (const int batch : options.batches) {
    for (const int context : options.contexts) run("decode", batch, context - 1, 1);
  }
  return status;
}

}  // namespace carryover
