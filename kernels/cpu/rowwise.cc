// The ops that work on rows one by one: embedding, RMS norm, rotary embedding with the KV write,
// SiLU, gather.
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rowwise.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/cpu/backend.h"
#include "kernels/cpu/for_rows.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carryover::cpu::HWY_NAMESPACE {

constexpr size_t kN = kLanes;

template <typename T>
void WidenRow(const T* in, size_t dim, float* out) {
  const DF d;
  size_t i = 0;
  for (; i + kN <= dim; i += kN) hn::StoreU(LoadAs(d, in + i), d, out + i);
  for (; i < dim; ++i) out[i] = LoadScalar(in + i);
}

void EmbedRow(const void* row, DType type, int dim, float* out) {
  if (type == DType::kBF16) {
    WidenRow(static_cast<const uint16_t*>(row), dim, out);
  } else if (type == DType::kF32) {
    std::memcpy(out, row, static_cast<size_t>(dim) * sizeof(float));
  } else {
    const auto* in = static_cast<const uint16_t*>(row);
    for (int i = 0; i < dim; ++i) out[i] = FloatFromF16(in[i]);
  }
}

// 1 / sqrt(mean(x^2) + eps).
float InverseRms(const float* x, size_t dim, float eps) {
  const DF d;
  auto sum0 = hn::Zero(d);
  auto sum1 = hn::Zero(d);
  size_t i = 0;
  for (; i + 2 * kN <= dim; i += 2 * kN) {
    const auto a = hn::LoadU(d, x + i);
    const auto b = hn::LoadU(d, x + i + kN);
    sum0 = hn::MulAdd(a, a, sum0);
    sum1 = hn::MulAdd(b, b, sum1);
  }
  float sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
  for (; i < dim; ++i) sum += x[i] * x[i];
  return 1.0f / std::sqrt(sum / static_cast<float>(dim) + eps);
}

template <typename T>
void RmsNormRowAs(const float* x, const float* weight, size_t dim, float eps, T* out) {
  const DF d;
  const float scale = InverseRms(x, dim, eps);
  const auto scales = hn::Set(d, scale);
  size_t i = 0;
  for (; i + kN <= dim; i += kN) {
    const auto y = hn::Mul(hn::Mul(hn::LoadU(d, x + i), scales), hn::LoadU(d, weight + i));
    StoreAs(d, y, out + i);
  }
  for (; i < dim; ++i) StoreScalar(x[i] * scale * weight[i], out + i);
}

void RmsNormRow(const float* x, const float* weight, int dim, float eps, void* out, DType type) {
  if (type == DType::kBF16) {
    RmsNormRowAs(x, weight, dim, eps, static_cast<uint16_t*>(out));
  } else {
    RmsNormRowAs(x, weight, dim, eps, static_cast<float*>(out));
  }
}

// QK norm, where there is a weight, and rotation of one head from x into out (they may be the
// same).
void RotateHead(const float* x, const float* weight, float eps, const float* cos_sin, size_t dim,
                float* out) {
  const size_t half = dim / 2;
  if (weight != nullptr) {
    RmsNormRowAs(x, weight, dim, eps, out);
    x = out;
  }
  const float* const cos = cos_sin;
  const float* const sin = cos_sin + half;
  const DF d;
  size_t i = 0;
  for (; i + kN <= half; i += kN) {
    const auto a = hn::LoadU(d, x + i);
    const auto b = hn::LoadU(d, x + half + i);
    const auto c = hn::LoadU(d, cos + i);
    const auto s = hn::LoadU(d, sin + i);
    hn::StoreU(hn::Sub(hn::Mul(a, c), hn::Mul(b, s)), d, out + i);
    hn::StoreU(hn::Add(hn::Mul(b, c), hn::Mul(a, s)), d, out + half + i);
  }
  for (; i < half; ++i) {
    const float a = x[i];
    const float b = x[half + i];
    out[i] = a * cos[i] - b * sin[i];
    out[half + i] = b * cos[i] + a * sin[i];
  }
}

// A row as bf16.
void RoundRow(const float* row, size_t dim, uint16_t* out) {
  const DF d;
  size_t i = 0;
  for (; i + kN <= dim; i += kN) StoreAs(d, hn::LoadU(d, row + i), out + i);
  for (; i < dim; ++i) StoreScalar(row[i], out + i);
}

// One head's K and V of one token into its slot; the layout is told in backend.h.
void WriteKv(const float* k, const float* v, size_t dim, size_t slot, float* k_head,
             float* v_head) {
  float* const k_tile = k_head + slot / 16 * 16 * dim + slot % 16;
  for (size_t i = 0; i < dim; ++i) k_tile[i * 16] = k[i];
  std::memcpy(v_head + slot * dim, v, dim * sizeof(float));
}
void WriteKv(const float* k, const float* v, size_t dim, size_t slot, uint16_t* k_head,
             uint16_t* v_head) {
  HWY_ALIGN uint16_t rounded[256];
  RoundRow(k, dim, rounded);
  uint16_t* const k_tile = k_head + slot / 16 * 16 * dim + slot % 16 * 2;
  for (size_t i = 0; i < dim; i += 2) std::memcpy(k_tile + i * 16, rounded + i, 4);
  RoundRow(v, dim, rounded);
  // Half a lane at a time: the other half is another token's, and maybe another thread's.
  uint16_t* const v_row = v_head + slot / 2 * dim * 2 + slot % 2;
  for (size_t i = 0; i < dim; ++i) v_row[i * 2] = rounded[i];
}

// The reverse of WriteKv.
void ReadKvHead(const float* k_head, const float* v_head, size_t dim, size_t slot, float* k,
                float* v) {
  const float* const k_tile = k_head + slot / 16 * 16 * dim + slot % 16;
  for (size_t i = 0; i < dim; ++i) k[i] = k_tile[i * 16];
  std::memcpy(v, v_head + slot * dim, dim * sizeof(float));
}
void ReadKvHead(const uint16_t* k_head, const uint16_t* v_head, size_t dim, size_t slot, float* k,
                float* v) {
  HWY_ALIGN uint16_t values[256] = {};
  const uint16_t* const k_tile = k_head + slot / 16 * 16 * dim + slot % 16 * 2;
  for (size_t i = 0; i < dim; i += 2) std::memcpy(values + i, k_tile + i * 16, 4);
  WidenRow(values, dim, k);
  const uint16_t* const v_row = v_head + slot / 2 * dim * 2 + slot % 2;
  for (size_t i = 0; i < dim; ++i) values[i] = v_row[i * 2];
  WidenRow(values, dim, v);
}

// One head of K, turned back in place by the angles of its position.
void UnrotateHead(const float* cos_sin, size_t dim, float* k) {
  const size_t half = dim / 2;
  const float* const cos = cos_sin;
  const float* const sin = cos_sin + half;
  const DF d;
  size_t i = 0;
  for (; i + kN <= half; i += kN) {
    const auto a = hn::LoadU(d, k + i);
    const auto b = hn::LoadU(d, k + half + i);
    const auto c = hn::LoadU(d, cos + i);
    const auto s = hn::LoadU(d, sin + i);
    hn::StoreU(hn::MulAdd(a, c, hn::Mul(b, s)), d, k + i);
    hn::StoreU(hn::Sub(hn::Mul(b, c), hn::Mul(a, s)), d, k + half + i);
  }
  for (; i < half; ++i) {
    const float a = k[i];
    const float b = k[half + i];
    k[i] = a * cos[i] + b * sin[i];
    k[half + i] = b * cos[i] - a * sin[i];
  }
}

void ReadKvRow(const ReadKvArgs& args, int32_t position, int32_t block, int slot, float* row) {
  const KvGeometry& g = args.geometry;
  const size_t dim = static_cast<size_t>(g.head_dim);
  const char* const base = static_cast<const char*>(args.kv_base);
  for (int h = 0; h < g.kv_heads; ++h) {
    const char* const k_head = base + KvOffset(g, block, args.layer, false, h);
    const char* const v_head = base + KvOffset(g, block, args.layer, true, h);
    float* const k = row + h * dim;
    float* const v = row + (g.kv_heads + h) * dim;
    if (g.dtype == DType::kBF16) {
      ReadKvHead(reinterpret_cast<const uint16_t*>(k_head),
                 reinterpret_cast<const uint16_t*>(v_head), dim, slot, k, v);
    } else {
      ReadKvHead(reinterpret_cast<const float*>(k_head), reinterpret_cast<const float*>(v_head),
                 dim, slot, k, v);
    }
    UnrotateHead(args.cos_sin + static_cast<size_t>(position) * dim, dim, k);
  }
}

// The row of one token: queries in place, K and V into block `block` at `slot`.
void RopeRow(const RopeWriteArgs& args, float* row, int32_t position, int32_t block, int slot) {
  const KvGeometry& g = args.geometry;
  const size_t dim = static_cast<size_t>(g.head_dim);
  const float* const cos_sin = args.cos_sin + static_cast<size_t>(position) * dim;
  for (int h = 0; h < args.heads; ++h) {
    float* const q = row + h * dim;
    RotateHead(q, args.q_norm, args.norm_eps, cos_sin, dim, q);
  }
  const float* const keys = row + args.heads * dim;
  const float* const values = keys + g.kv_heads * dim;
  char* const base = static_cast<char*>(args.kv_base);
  HWY_ALIGN float rotated[256] = {};
  for (int h = 0; h < g.kv_heads; ++h) {
    RotateHead(keys + h * dim, args.k_norm, args.norm_eps, cos_sin, dim, rotated);
    char* const k_head = base + KvOffset(g, block, args.layer, false, h);
    char* const v_head = base + KvOffset(g, block, args.layer, true, h);
    if (g.dtype == DType::kBF16) {
      WriteKv(rotated, values + h * dim, dim, slot, reinterpret_cast<uint16_t*>(k_head),
              reinterpret_cast<uint16_t*>(v_head));
    } else {
      WriteKv(rotated, values + h * dim, dim, slot, reinterpret_cast<float*>(k_head),
              reinterpret_cast<float*>(v_head));
    }
  }
}

}  // namespace carryover::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carryover::cpu {

HWY_EXPORT(EmbedRow);
HWY_EXPORT(RmsNormRow);
HWY_EXPORT(RopeRow);
HWY_EXPORT(ReadKvRow);
HWY_EXPORT(RoundRow);

namespace {

void* RowOf(void* out, DType type, int row, int dim) {
  return static_cast<char*>(out) + static_cast<size_t>(row) * dim * DTypeBytes(type);
}

}  // namespace

void Embed(Backend* backend, const void* table, DType type, absl::Span<const int32_t> tokens,
           int dim, float* x) {
  const size_t row_bytes = static_cast<size_t>(dim) * DTypeBytes(type);
  ForRows(backend->pool, static_cast<int>(tokens.size()), dim, [&](int r) {
    HWY_DYNAMIC_DISPATCH(EmbedRow)
    (static_cast<const char*>(table) + static_cast<size_t>(tokens[r]) * row_bytes, type, dim,
     x + static_cast<size_t>(r) * dim);
  });
}

void RmsNorm(Backend* backend, const float* x, const float* weight, int rows, int dim, float eps,
             void* out, DType out_type) {
  ForRows(backend->pool, rows, dim, [&](int r) {
    HWY_DYNAMIC_DISPATCH(RmsNormRow)
    (x + static_cast<size_t>(r) * dim, weight, dim, eps, RowOf(out, out_type, r, dim), out_type);
  });
}

void GatherRows(Backend* backend, const float* x, absl::Span<const int32_t> rows, int dim,
                float* out) {
  const size_t bytes = static_cast<size_t>(dim) * sizeof(float);
  ForRows(backend->pool, static_cast<int>(rows.size()), dim, [&](int r) {
    std::memcpy(out + static_cast<size_t>(r) * dim, x + static_cast<size_t>(rows[r]) * dim, bytes);
  });
}

void RopeWrite(Backend* backend, const RopeWriteArgs& args) {
  const KvGeometry& g = args.geometry;
  if (absl::Status status = CheckGeometry(g, args.heads, args.layer); !status.ok()) {
    backend->status.Update(status);
    return;
  }
  const size_t width = static_cast<size_t>(args.heads + 2 * g.kv_heads) * g.head_dim;
  const PassLayout& layout = backend->layout;
  for (const SequenceRows& sequence : layout.sequences) {
    const int table = args.table_begin + sequence.table_begin;
    ForRows(backend->pool, sequence.row_count, 4 * width, [&](int i) {
      const int row = sequence.row_begin + i;
      const int token = sequence.kv_begin + i;
      const int32_t block = layout.block_table[table + token / g.block_tokens];
      HWY_DYNAMIC_DISPATCH(RopeRow)
      (args, args.qkv + static_cast<size_t>(row) * width, layout.positions[row], block,
       token % g.block_tokens);
    });
  }
}

void ReadKv(Backend* backend, const ReadKvArgs& args) {
  const KvGeometry& g = args.geometry;
  if (absl::Status status = CheckGeometry(g, 0, args.layer); !status.ok()) {
    backend->status.Update(status);
    return;
  }
  const size_t width = size_t{2} * g.kv_heads * g.head_dim;
  const PassLayout& layout = backend->layout;
  for (const SequenceRows& sequence : layout.sequences) {
    const int table = args.table_begin + sequence.table_begin;
    ForRows(backend->pool, sequence.row_count, 4 * width, [&](int i) {
      const int row = sequence.row_begin + i;
      const int token = sequence.kv_begin + i;
      const int32_t block = layout.block_table[table + token / g.block_tokens];
      HWY_DYNAMIC_DISPATCH(ReadKvRow)
      (args, layout.positions[row], block, token % g.block_tokens,
       args.out + static_cast<size_t>(row) * width);
      if (args.copy == nullptr) return;
      const float* const from = args.out + static_cast<size_t>(row) * width;
      void* const to = RowOf(args.copy, args.copy_type, row, static_cast<int>(width));
      if (args.copy_type == DType::kF32) {
        std::memcpy(to, from, width * sizeof(float));
      } else {
        HWY_DYNAMIC_DISPATCH(RoundRow)(from, width, static_cast<uint16_t*>(to));
      }
    });
  }
}

void CopyKv(Backend* backend, const CopyKvArgs& args) {
  const KvGeometry& g = args.geometry;
  if (absl::Status status = CheckGeometry(g, 0, 0); !status.ok()) {
    backend->status.Update(status);
    return;
  }
  if (args.layer_begin < 0 || args.layer_end < args.layer_begin || args.layer_end > g.layers ||
      args.from.size() != args.to.size()) {
    backend->status.Update(absl::InvalidArgumentError("copy_kv: no such layers or blocks"));
    return;
  }
  // A layer's K plane, then its V plane: both planes of all layers are one run, one of them is a
  // run a layer.
  const bool both = args.planes == KvPlanes::kBoth;
  const int layers = args.layer_end - args.layer_begin, runs = both ? 1 : layers;
  const size_t bytes = both ? layers * g.LayerBytes() : g.PlaneBytes();
  char* const base = static_cast<char*>(args.kv_base) + args.layer_begin * g.LayerBytes() +
                     (args.planes == KvPlanes::kValues ? g.PlaneBytes() : 0);
  ForRows(backend->pool, static_cast<int>(args.from.size()), runs * bytes / 8, [&](int i) {
    for (int run = 0; run < runs; ++run) {
      char* const first = base + run * g.LayerBytes();
      std::memcpy(first + args.to[i] * g.BlockBytes(), first + args.from[i] * g.BlockBytes(),
                  bytes);
    }
  });
}

}  // namespace carryover::cpu
#endif  // HWY_ONCE
