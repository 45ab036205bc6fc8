// y = x W^T + bias, with x packed into row tiles and W read in panels of 32 columns.
//
// bf16 weights are widened to f32 in registers and multiplied by f32 multiply-add, in which
// products of bf16 values are exact. Where the CPU multiplies pairs of bf16 at twice that rate
// (kernels/cpu/bf16_dot.h), both sides stay bf16. With weights of 8 bits x is rounded to 8 bits
// when it is packed; sums over a group of k are integers, and groups are added in f32.
//
// Each output is one chain of additions in the order of k, so its bits depend on its row and column
// alone: not on the tile that it fell into, nor on threads.
#define HWY_WANT_AVX3_DL
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/matmul.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "hwy/highway.h"
#include "kernels/cpu/backend.h"
#include "kernels/cpu/simd-inl.h"

#ifndef CARRYOVER_KERNELS_CPU_MATMUL_ONCE_
#define CARRYOVER_KERNELS_CPU_MATMUL_ONCE_
namespace carryover::cpu {

// x is cut along k, so that the rows of a tile stand a constant distance apart.
inline constexpr size_t kDepth = 256;

// One part of a product: panels of W times some tiles of x.
struct MatMulPart {
  const PackedMatrix* w;
  const char* x;  // (tiles, k / kDepth rounded up, tile rows, kRowStride<T>) of Left<T>
  int first_panel;
  int last_panel;
  int first_row;  // of the tiles below, all in one run
  int last_row;
  int tiles;              // of the rows first_row ... last_row, as SplitRows cuts them
  const float* x_scales;  // (rows, groups), for i8
  float* out;             // (rows, n)
  bool accumulate;
};

// Row tiles of nearly equal size: row_begin of tile t out of `tiles` over `rows` rows.
inline int TileBegin(int rows, int tiles, int t) {
  return static_cast<int>(static_cast<int64_t>(rows) * t / tiles);
}
inline size_t DepthBlocks(int k) { return (static_cast<size_t>(k) + kDepth - 1) / kDepth; }

}  // namespace carryover::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace carryover::cpu::HWY_NAMESPACE {

// In Left<T>. The padding of 8 spreads the rows over cache sets.
template <typename T>
inline constexpr size_t kRowStride = kDepth / kPerLeft<T> + 8;

// Adds what the groups of [k0, k0 + depth) give; x and w stand at k0.
template <int kRows, int kVectors>
HWY_INLINE void AddGroups(const MatMulPart& part, const uint32_t* x,
                          const int8_t* const (&w)[kVectors], size_t panel, size_t column, int row,
                          size_t k0, size_t depth, hn::Vec<DF> (&sums)[kRows][kVectors],
                          Ahead ahead) {
  constexpr size_t kPanel = PackedMatrix::kPanel, kGroup = PackedMatrix::kI8Group;
  static_assert(kDepth % kGroup == 0);
  const DF d;
  const hn::RebindToSigned<DF> di;
  const size_t groups = static_cast<size_t>(part.w->I8Groups());
  for (size_t i = 0; i < depth; i += kGroup) {
    const size_t group = (k0 + i) / kGroup;
    const int8_t* at[kVectors];
    size_t scales[kVectors];  // where those of a vector's columns stand
    hn::Vec<hn::RebindToSigned<DF>> integers[kRows][kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const size_t lane = column + v * kLanes;
      at[v] = w[v] + i * kPanel;
      scales[v] = ((panel + lane / kPanel) * groups + group) * kPanel + lane % kPanel;
      const auto start = hn::Neg(hn::LoadU(di, part.w->excess.get() + scales[v]));
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) integers[m][v] = start;
    }
    MultiplyTile<kRows, kVectors, kRowStride<int8_t>>(di, x + i / 4, at, kPanel * 4,
                                                      std::min(kGroup, depth - i), integers, ahead);
    ahead.at += kGroup / 4 * ahead.step;
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const auto scale = hn::LoadU(d, part.w->scale.get() + scales[v]);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const auto both = hn::Mul(hn::Set(d, part.x_scales[(row + m) * groups + group]), scale);
        sums[m][v] = hn::MulAdd(hn::ConvertTo(d, integers[m][v]), both, sums[m][v]);
      }
    }
  }
}

template <int kRows, int kVectors, typename T>
void Columns(const MatMulPart& part, const Left<T>* x, const T* panel_data, size_t panel,
             size_t column, int row, int tile) {
  constexpr size_t kPanel = PackedMatrix::kPanel;
  const DF d;
  const size_t k = static_cast<size_t>(part.w->k);
  const size_t stride = part.w->panel_bytes / sizeof(T);
  constexpr size_t kPack = sizeof(float) / sizeof(T);  // values of k side by side in a lane

  const T* w[kVectors];
  hn::Vec<DF> sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    const size_t lane = column + v * kLanes;  // counted from the panel
    w[v] = panel_data + lane / kPanel * stride + lane % kPanel * kPack;
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) sums[m][v] = hn::Zero(d);
  }
  // The row tiles share the work of fetching the panel that comes next. A lone tile, or the first
  // to see a part's first panel, has to stay ahead of itself.
  constexpr size_t kLead = 4096;
  const bool alone =
      part.tiles == 1 || (tile == 0 && panel == static_cast<size_t>(part.first_panel));
  const size_t share = alone ? 1 : static_cast<size_t>(part.tiles);
  Ahead ahead;
  ahead.step = kVectors * kLanes * sizeof(T) * kPack / share;
  ahead.at = alone ? reinterpret_cast<const char*>(w[0]) + kLead
                   : reinterpret_cast<const char*>(panel_data + stride) +
                         (tile * part.w->panel_bytes + column * k * sizeof(T)) / share;
  for (size_t k0 = 0; k0 < k; k0 += kDepth) {
    const size_t depth = std::min(kDepth, k - k0);
    if constexpr (sizeof(T) == 1) {
      AddGroups<kRows, kVectors>(part, x, w, panel, column, row, k0, depth, sums, ahead);
      ahead.at += kDepth / kPack * ahead.step;
    } else if constexpr (kVectors == 2) {
      MultiplyTile<kRows, kVectors, kRowStride<T>>(d, x, w, kPanel * kPack, depth, sums, ahead);
      ahead.at += kDepth / kPack * ahead.step;
    } else {  // few rows: so many streams side by side are left to the hardware
      MultiplyTile<kRows, kVectors, kRowStride<T>>(d, x, w, kPanel * kPack, depth, sums);
    }
    x += kRows * kRowStride<T>;
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) w[v] += kDepth * kPanel;
  }

  const size_t n = static_cast<size_t>(part.w->n);
  const size_t first = panel * kPanel + column;
  const float* const bias = part.w->bias.get();
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    float* const out = part.out + static_cast<size_t>(row + m) * n;
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const size_t at = first + v * kLanes;
      auto y = hn::Add(sums[m][v], hn::LoadU(d, bias + at));
      if (at + kLanes <= n) {
        if (part.accumulate) y = hn::Add(y, hn::LoadU(d, out + at));
        hn::StoreU(y, d, out + at);
      } else if (at < n) {
        HWY_ALIGN float lanes[kLanes];
        hn::Store(y, d, lanes);
        for (size_t i = 0; at + i < n; ++i) {
          out[at + i] = part.accumulate ? lanes[i] + out[at + i] : lanes[i];
        }
      }
    }
  }
}

// All columns of panels [first, last) for one row tile.
template <int kRows, typename T>
void RowTile(const MatMulPart& part, const char* x, int first, int last, int row, int tile) {
  constexpr size_t kPanel = PackedMatrix::kPanel;
  constexpr int kVectors = TileVectors(kRows);
  const size_t columns = static_cast<size_t>(last - first) * kPanel;
  const auto* const data = reinterpret_cast<const T*>(static_cast<const char*>(part.w->data.get()) +
                                                      first * part.w->panel_bytes);
  const auto* const left = reinterpret_cast<const Left<T>*>(x);
  size_t column = 0;
  for (; column + kVectors * kLanes <= columns; column += kVectors * kLanes) {
    Columns<kRows, kVectors, T>(part, left, data, first, column, row, tile);
  }
  for (; column < columns; column += 2 * kLanes) {
    Columns<kRows, 2, T>(part, left, data, first, column, row, tile);
  }
}

using RowTileFunction = void (*)(const MatMulPart&, const char*, int, int, int, int);

template <typename T, size_t... kIndex>
RowTileFunction FunctionFor(int rows, std::index_sequence<kIndex...>) {
  static constexpr RowTileFunction kFunctions[] = {RowTile<static_cast<int>(kIndex) + 1, T>...};
  return kFunctions[rows - 1];
}

template <typename T>
void RunPartAs(const MatMulPart& part) {
  const int rows = part.last_row - part.first_row;
  const size_t row_bytes = DepthBlocks(part.w->k) * kRowStride<T> * sizeof(Left<T>);
  // A group of panels stays in the nearest cache while all row tiles pass over it.
  const int group =
      part.tiles == 1
          ? part.last_panel - part.first_panel
          : std::max<int>(1, TileVectors(rows / part.tiles) * kLanes / PackedMatrix::kPanel);
  for (int panel = part.first_panel; panel < part.last_panel; panel += group) {
    const int last = std::min(panel + group, part.last_panel);
    for (int t = 0; t < part.tiles; ++t) {
      const int begin = TileBegin(rows, part.tiles, t);
      const int count = TileBegin(rows, part.tiles, t + 1) - begin;
      FunctionFor<T>(count, std::make_index_sequence<kMaxTileRows>())(
          part, part.x + static_cast<size_t>(begin) * row_bytes, panel, last,
          part.first_row + begin, t);
    }
  }
}

void RunPart(const MatMulPart& part) {
  if (part.w->type == DType::kI8) {
    RunPartAs<int8_t>(part);
  } else if (part.w->type == DType::kBF16) {
    RunPartAs<uint16_t>(part);
  } else {
    RunPartAs<float>(part);
  }
}

template <typename T>
void PackRowsAs(const T* x, int k, int rows, Left<T>* out) {
  const DF d;
  const size_t depth = static_cast<size_t>(k);
  for (size_t k0 = 0; k0 < depth; k0 += kDepth) {
    const size_t count = std::min(kDepth, depth - k0);
    for (int m = 0; m < rows; ++m, out += kRowStride<T>) {
      const T* const row = x + static_cast<size_t>(m) * depth + k0;
      if constexpr (kPerLeft<T> == 2) {
        out[count / 2] = 0;
        std::memcpy(out, row, count * sizeof(T));
      } else {
        size_t i = 0;
        for (; i + kLanes <= count; i += kLanes) hn::StoreU(LoadAs(d, row + i), d, out + i);
        for (; i < count; ++i) out[i] = LoadScalar(row + i);
      }
    }
  }
}

// Rounds rows of bf16 to 8 bits, plus 128, and gives each group's scale. What is not finite makes
// the scale so.
void PackRowsAsI8(const uint16_t* x, int k, int rows, uint32_t* out, float* scales) {
  const DF d;
  const hn::Rebind<uint8_t, DF> du8;
  const auto zero = hn::Set(hn::RebindToSigned<DF>(), 128);
  const size_t depth = static_cast<size_t>(k);
  constexpr size_t kGroup = PackedMatrix::kI8Group;
  for (int m = 0; m < rows; ++m) {
    for (size_t begin = 0; begin < depth; begin += kGroup) {
      const uint16_t* const from = x + static_cast<size_t>(m) * depth + begin;
      const size_t count = std::min(kGroup, depth - begin);
      uint16_t most = 0;  // bf16 without its sign is ordered as integers are
      for (size_t i = 0; i < count; ++i) most = std::max<uint16_t>(most, from[i] & 0x7fff);
      constexpr uint16_t kInfinity = 0x7f80;
      const float size = FloatFromBf16(most);
      *scales++ = size / 127;
      const size_t block = begin / kDepth * static_cast<size_t>(rows) + m;
      auto* const to =
          reinterpret_cast<uint8_t*>(out + block * kRowStride<int8_t>) + begin % kDepth;
      if (most == 0 || most >= kInfinity) {
        std::memset(to, 128, (count + 3) / 4 * 4);
        continue;
      }
      const float factor = 127 / size;
      size_t i = 0;
      for (; i + kLanes <= count; i += kLanes) {
        const auto value = hn::Mul(LoadAs(d, from + i), hn::Set(d, factor));
        hn::StoreU(hn::DemoteTo(du8, hn::Add(hn::NearestInt(value), zero)), du8, to + i);
      }
      for (; i < count; ++i) {
        to[i] = static_cast<uint8_t>(std::nearbyint(FloatFromBf16(from[i]) * factor) + 128);
      }
      for (; i % 4 != 0; ++i) to[i] = 0;  // meets weights of 0
    }
  }
}

// One row tile of x, (rows, k) of ActivationDType(type), into the layout of MatMulPart::x.
void PackRows(const void* x, DType type, int k, int rows, char* out, float* scales) {
  if (type == DType::kI8) {
    PackRowsAsI8(static_cast<const uint16_t*>(x), k, rows, reinterpret_cast<uint32_t*>(out),
                 scales);
  } else if (type == DType::kBF16) {
    PackRowsAs(static_cast<const uint16_t*>(x), k, rows, reinterpret_cast<Left<uint16_t>*>(out));
  } else {
    PackRowsAs(static_cast<const float*>(x), k, rows, reinterpret_cast<float*>(out));
  }
}

// Of a packed row.
size_t RowBytes(DType type, int k) {
  const size_t stride = type == DType::kI8     ? kRowStride<int8_t>
                        : type == DType::kBF16 ? kRowStride<uint16_t>
                                               : kRowStride<float>;
  return DepthBlocks(k) * stride * sizeof(float);
}

int MaxTileRows() { return kMaxTileRows; }

}  // namespace carryover::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carryover::cpu {

HWY_EXPORT(RunPart);
HWY_EXPORT(PackRows);
HWY_EXPORT(RowBytes);
HWY_EXPORT(MaxTileRows);

void MatMul(Backend* backend, const void* x, const PackedMatrix* w, int rows, float* out,
            bool accumulate) {
  if (rows <= 0) return;
  const int max_rows = HWY_DYNAMIC_DISPATCH(MaxTileRows)();
  const size_t row_bytes = HWY_DYNAMIC_DISPATCH(RowBytes)(w->type, w->k);
  char* const packed = backend->activations.Get<char>(rows * row_bytes, &backend->status);
  const size_t row_scales = w->type == DType::kI8 ? w->I8Groups() : 0;
  float* const scales =
      row_scales > 0 ? backend->scales.Get<float>(rows * row_scales, &backend->status) : nullptr;
  if (packed == nullptr || (row_scales > 0 && scales == nullptr)) return;

  // Rows in runs whose packed form stays in the second-level cache, tiles of nearly equal size.
  constexpr size_t kRunBytes = size_t{1} << 20;
  const int run_rows =
      std::max<int>(1, static_cast<int>(kRunBytes / row_bytes) / max_rows) * max_rows;
  const int runs = (rows + run_rows - 1) / run_rows;
  const auto run_begin = [&](int run) { return TileBegin(rows, runs, run); };
  const auto tiles_of = [&](int run) {
    return (run_begin(run + 1) - run_begin(run) + max_rows - 1) / max_rows;
  };

  ThreadPool& pool = backend->pool;
  const size_t x_row_bytes = static_cast<size_t>(w->k) * DTypeBytes(ActivationDType(w->type));
  const auto pack_run = [&](int run, int part, int parts) {
    const int begin = run_begin(run);
    const int run_size = run_begin(run + 1) - begin;
    const int tiles = tiles_of(run);
    for (int t = tiles * part / parts; t < tiles * (part + 1) / parts; ++t) {
      const int first = begin + TileBegin(run_size, tiles, t);
      const int count = begin + TileBegin(run_size, tiles, t + 1) - first;
      HWY_DYNAMIC_DISPATCH(PackRows)
      (static_cast<const char*>(x) + first * x_row_bytes, w->type, w->k, count,
       packed + first * row_bytes, scales == nullptr ? nullptr : scales + first * row_scales);
    }
  };
  // Packing a row costs as much as a few thousandths of multiplying it: alone when there are few.
  const int pack_parts = rows >= 64 ? 2 * pool.threads() : 1;
  pool.Run(runs * pack_parts,
           [&](int part, int) { pack_run(part / pack_parts, part % pack_parts, pack_parts); });

  // Parts small enough that threads end together, large enough that claiming them costs nothing,
  // and as many for each thread.
  constexpr int kFewestPanels = 4;
  const int threads = pool.threads();
  const int wanted =
      std::min((threads * 6 + runs - 1) / runs, (w->panels + kFewestPanels - 1) / kFewestPanels);
  const int chunks =
      threads == 1 ? 1 : std::min(w->panels, (wanted + threads - 1) / threads * threads);
  pool.Run(runs * chunks, [&](int index, int) {
    const int run = index / chunks;
    const int chunk = index % chunks;
    MatMulPart part;
    part.w = w;
    part.first_panel = TileBegin(w->panels, chunks, chunk);
    part.last_panel = TileBegin(w->panels, chunks, chunk + 1);
    part.first_row = run_begin(run);
    part.last_row = run_begin(run + 1);
    part.x = packed + part.first_row * row_bytes;
    part.tiles = tiles_of(run);
    part.x_scales = scales;
    part.out = out;
    part.accumulate = accumulate;
    HWY_DYNAMIC_DISPATCH(RunPart)(part);
  });
}

}  // namespace carryover::cpu
#endif  // HWY_ONCE
