// The ops that are kernels of ours: what the host has to check, send and launch.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/backend.h"

namespace carryover::CARRYOVER_DEVICE {
namespace {

// Notes INVALID_ARGUMENT where a geometry is not one that the kernels know. heads may be 0.
bool KnowsGeometry(DeviceBackend* backend, const KvGeometry& g, int heads, int layer) {
  const bool good = g.layers > 0 && layer >= 0 && layer < g.layers && g.kv_heads > 0 &&
                    heads >= 0 && heads % g.kv_heads == 0 && g.head_dim > 0 &&
                    g.head_dim % 2 == 0 && g.head_dim <= 256 && g.block_tokens > 0 &&
                    g.block_tokens % 16 == 0 && (g.dtype == DType::kBF16 || g.dtype == DType::kF32);
  if (good) return true;
  backend->Note(absl::InvalidArgumentError(
      absl::StrCat("unsupported attention: layer ", layer, " of ", g.layers, ", ", heads,
                   " heads over ", g.kv_heads, " of size ", g.head_dim, ", blocks of ",
                   g.block_tokens, " tokens of ", DTypeName(g.dtype))));
  return false;
}

}  // namespace

void BeginPass(Backend* backend, const PassLayout& layout) {
  DeviceBackend& device = *Of(backend);
  device.Flush();
  device.sequences.assign(layout.sequences.begin(), layout.sequences.end());
  device.rows = static_cast<int>(layout.positions.size());
  std::vector<RowPlace> places(layout.positions.size());
  for (const SequenceRows& sequence : layout.sequences) {
    for (int i = 0; i < sequence.row_count; ++i) {
      const int row = sequence.row_begin + i;
      places[row] = {layout.positions[row], sequence.kv_begin + i, sequence.table_begin};
    }
  }
  if (device.pass_mailbox.drained) device.pass_mailbox.Empty();
  device.places = device.SendForPass<RowPlace>(places);
  device.block_table = device.SendForPass(layout.block_table);
  for (const auto& plan : device.plans) plan->items = nullptr;
  device.decoding =
      std::all_of(layout.sequences.begin(), layout.sequences.end(),
                  [](const SequenceRows& sequence) { return sequence.row_count == 1; });
  if (device.graphs_wanted && device.decoding) device.Hold();
}

void Embed(Backend* backend, const void* table, DType type, absl::Span<const int32_t> tokens,
           int dim, float* x) {
  if (tokens.empty()) return;
  DeviceBackend& device = *Of(backend);
  const int32_t* const ids = device.Send(tokens);
  if (ids == nullptr) return;
  device.Do(LaunchEmbed, table, type, ids, static_cast<int>(tokens.size()), dim, x);
}

void RmsNorm(Backend* backend, const float* x, const float* weight, int rows, int dim, float eps,
             void* out, DType out_type) {
  Of(backend)->Do(LaunchRmsNorm, x, weight, rows, dim, eps, out, out_type);
}

void GatherRows(Backend* backend, const float* x, absl::Span<const int32_t> rows, int dim,
                float* out) {
  if (rows.empty()) return;
  DeviceBackend& device = *Of(backend);
  const int32_t* const ids = device.Send(rows);
  if (ids == nullptr) return;
  device.Do(LaunchGatherRows, x, ids, static_cast<int>(rows.size()), dim, out);
}

void RopeWrite(Backend* backend, const RopeWriteArgs& args) {
  DeviceBackend& device = *Of(backend);
  if (!KnowsGeometry(&device, args.geometry, args.heads, args.layer) || device.rows == 0 ||
      device.places == nullptr) {
    return;
  }
  device.Do(LaunchRopeWrite,
            RopeLaunch{args.qkv, args.q_norm, args.k_norm, args.norm_eps, args.cos_sin, args.heads,
                       device.rows, device.places, device.block_table + args.table_begin,
                       args.kv_base, MakeDeviceKv(args.geometry, args.layer)},
            args.geometry.dtype);
}

void ReadKv(Backend* backend, const ReadKvArgs& args) {
  DeviceBackend& device = *Of(backend);
  if (!KnowsGeometry(&device, args.geometry, 0, args.layer) || device.rows == 0 ||
      device.places == nullptr) {
    return;
  }
  device.Do(
      LaunchReadKv,
      ReadKvLaunch{args.cos_sin, device.rows, device.places, device.block_table + args.table_begin,
                   args.kv_base, MakeDeviceKv(args.geometry, args.layer), args.out, args.copy,
                   args.copy_type},
      args.geometry.dtype);
}

void CopyKv(Backend* backend, const CopyKvArgs& args) {
  DeviceBackend& device = *Of(backend);
  const KvGeometry& g = args.geometry;
  if (!KnowsGeometry(&device, g, 0, 0)) return;
  if (args.layer_begin < 0 || args.layer_end < args.layer_begin || args.layer_end > g.layers ||
      args.from.size() != args.to.size()) {
    device.Note(absl::InvalidArgumentError("copy_kv: no such layers or blocks"));
    return;
  }
  if (args.from.empty()) return;
  const int32_t* const from = device.Send(args.from);
  const int32_t* const to = device.Send(args.to);
  if (from == nullptr || to == nullptr) return;
  const bool both = args.planes == KvPlanes::kBoth;
  const int layers = args.layer_end - args.layer_begin;
  const auto layer_bytes = static_cast<int64_t>(g.LayerBytes());
  const auto plane_bytes = static_cast<int64_t>(g.PlaneBytes());
  device.Do(LaunchCopyKv,
            CopyKvLaunch{.kv_base = static_cast<char*>(args.kv_base),
                         .from = from,
                         .to = to,
                         .blocks = static_cast<int>(args.from.size()),
                         .block_bytes = static_cast<int64_t>(g.BlockBytes()),
                         .first = args.layer_begin * layer_bytes +
                                  (args.planes == KvPlanes::kValues ? plane_bytes : 0),
                         .stride = layer_bytes,
                         .run_bytes = both ? layers * layer_bytes : plane_bytes,
                         .runs = both ? 1 : layers});
}

void Attention(Backend* backend, const AttentionArgs& args) {
  DeviceBackend& device = *Of(backend);
  if (!KnowsGeometry(&device, args.geometry, args.heads, args.layer) || device.rows == 0 ||
      device.places == nullptr) {
    return;
  }
  // One plan serves all layers with the same window.
  DeviceBackend::Plan* plan = nullptr;
  for (const auto& known : device.plans) {
    if (known->heads == args.heads && known->window == args.window &&
        known->geometry == args.geometry) {
      plan = known.get();
    }
  }
  if (plan == nullptr) {
    device.plans.push_back(std::make_unique<DeviceBackend::Plan>());
    plan = device.plans.back().get();
    plan->heads = args.heads;
    plan->window = args.window;
    plan->geometry = args.geometry;
  }
  if (plan->items == nullptr) {
    PlanAttention(args.geometry, args.heads, args.window, device.limits, device.sequences.data(),
                  static_cast<int>(device.sequences.size()), &plan->plan);
    if (device.decoding) PadAttentionPlan(args.geometry, &plan->plan);
    plan->items = device.SendForPass<AttentionItem>(plan->plan.items);
    if (plan->items == nullptr) return;
  }
  void* const scratch = device.Reserve(&device.attention, plan->plan.scratch_bytes);
  if (scratch == nullptr) return;
  device.Do(LaunchAttention,
            AttentionLaunch{.qkv = args.qkv,
                            .out = args.out,
                            .out_type = args.out_type,
                            .kv_base = args.kv_base,
                            .geometry = args.geometry,
                            .heads = args.heads,
                            .layer = args.layer,
                            .window = args.window,
                            .scale = args.scale,
                            .block_table = device.block_table,
                            .items = plan->items,
                            .scratch = scratch},
            static_cast<const AttentionCounts&>(plan->plan));
}

void Divergence(Backend* backend, const DivergenceArgs& args) {
  if (args.rows <= 0) return;
  DeviceBackend& device = *Of(backend);
  if (args.vocab <= 0 ||
      (!args.answers.empty() && static_cast<int>(args.answers.size()) != args.rows)) {
    device.Note(absl::InvalidArgumentError(absl::StrCat("divergence of ", args.rows, " rows of ",
                                                        args.vocab, " logits with ",
                                                        args.answers.size(), " answers")));
    return;
  }
  std::vector<int32_t> stops;
  for (const int32_t id : args.stop_tokens) {
    if (id >= 0 && id < args.vocab) stops.push_back(id);
  }
  std::sort(stops.begin(), stops.end());
  stops.erase(std::unique(stops.begin(), stops.end()), stops.end());
  const int32_t* const stop_ids = device.Send<int32_t>(stops);
  const int32_t* const answers = args.answers.empty() ? nullptr : device.Send(args.answers);
  void* const scratch =
      device.Reserve(&device.divergence, DivergenceScratchBytes(args.rows, args.vocab));
  if (stop_ids == nullptr || scratch == nullptr) return;
  device.Do(LaunchDivergence,
            DivergenceLaunch{args.native, args.carried, args.rows, args.vocab, stop_ids,
                             static_cast<int>(stops.size()), answers, args.out, scratch});
}

void Sample(Backend* backend, const SampleArgs& args) {
  if (args.rows.empty()) return;
  DeviceBackend& device = *Of(backend);
  if (args.vocab <= 0) {
    device.Note(
        absl::InvalidArgumentError(absl::StrCat("sample of rows of ", args.vocab, " logits")));
    return;
  }
  const SampleSpec* const rows = device.Send(args.rows);
  const LogitEdit* const edits = device.Send(args.edits);
  void* const saved = device.Reserve(&device.edits, args.edits.size() * sizeof(float));
  if (rows == nullptr || edits == nullptr || saved == nullptr) return;
  device.Do(LaunchSample,
            SampleLaunch{args.logits, args.vocab, rows, static_cast<int>(args.rows.size()), edits,
                         static_cast<float*>(saved), args.out});
}

}  // namespace carryover::CARRYOVER_DEVICE
