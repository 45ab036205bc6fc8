// y = x W^T + bias, in tiles of some rows of x by panels of 32 columns of W. x is read where it
// lies, unless it has to be converted first.
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
#include "kernels/cpu/for_rows.h"
#include "kernels/cpu/simd-inl.h"
#include "kernels/host_matrix.h"

#ifndef CARRYOVER_KERNELS_CPU_MATMUL_ONCE_
#define CARRYOVER_KERNELS_CPU_MATMUL_ONCE_
namespace carryover::cpu {

// One part of a product: panels of W times some tiles of x.
struct MatMulPart {
  const PackedMatrix* w;
  const char* x;    // first_row, of Left<T>
  size_t x_stride;  // from row to row, in Left<T>
  int first_panel;
  int last_panel;
  int first_row;  // of the tiles below, all in one run
  int last_row;
  int tiles;              // of the rows first_row ... last_row, as SplitRows cuts them
  const float* x_scales;  // (rows, groups), for i8
  void* out;              // (rows, n) f32, or of a gated matrix (rows, n / 2) of x's type
  bool accumulate;
};

// Where the sums of a tile go: (rows, columns) of which `columns` are not padding.
struct TileOutput {
  float* out;
  size_t stride;
  size_t columns;
  bool accumulate;
};

// Row tiles of nearly equal size: row_begin of tile t out of `tiles` over `rows` rows.
inline int TileBegin(int rows, int tiles, int t) {
  return static_cast<int>(static_cast<int64_t>(rows) * t / tiles);
}

}  // namespace carryover::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace carryover::cpu::HWY_NAMESPACE {

// Whether rows of x are what multiplies: then they are read in place.
template <typename T>
constexpr bool InPlace(size_t k) {
  if constexpr (std::is_same_v<T, float>) return true;
  return sizeof(T) == 2 && kPerLeft<T> == 2 && k % 2 == 0;
}

// In Left<T>. Converted rows stand an odd number of cache lines apart, so that they spread over the
// cache's sets.
template <typename T>
constexpr size_t RowStride(size_t k) {
  constexpr size_t kLine = 64 / sizeof(Left<T>);
  if (InPlace<T>(k)) return k / kPerLeft<T>;
  const size_t lines = ((k + kPerLeft<T> - 1) / kPerLeft<T> + kLine - 1) / kLine;
  return (lines | 1) * kLine;
}

// Adds what all groups of k give.
template <int kRows, int kVectors>
HWY_INLINE void AddGroups(const MatMulPart& part, const uint32_t* x,
                          const int8_t* const (&w)[kVectors], size_t panel, size_t column, int row,
                          hn::Vec<DF> (&sums)[kRows][kVectors], Ahead ahead) {
  constexpr size_t kPanel = PackedMatrix::kPanel, kGroup = PackedMatrix::kI8Group;
  const DF d;
  const hn::RebindToSigned<DF> di;
  const size_t k = static_cast<size_t>(part.w->k);
  const size_t groups = static_cast<size_t>(part.w->I8Groups());
  for (size_t group = 0; group < groups; ++group) {
    const size_t begin = group * kGroup;
    const int8_t* at[kVectors];
    size_t scales[kVectors];  // where those of a vector's columns stand
    hn::Vec<hn::RebindToSigned<DF>> integers[kRows][kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const size_t lane = column + v * kLanes;
      at[v] = w[v] + begin * kPanel;
      scales[v] = ((panel + lane / kPanel) * groups + group) * kPanel + lane % kPanel;
      const auto start = hn::Neg(hn::LoadU(di, part.w->excess.get() + scales[v]));
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) integers[m][v] = start;
    }
    MultiplyTile<kRows, kVectors>(di, x + begin / 4, part.x_stride, at, kPanel * 4,
                                  std::min(kGroup, k - begin), integers, ahead);
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
             size_t column, int row, int tile, const TileOutput& to) {
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
  if (to.accumulate) {  // needed at the end, and by then no longer far away
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        __builtin_prefetch(to.out + m * to.stride + column + v * kLanes);
      }
    }
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
  if constexpr (sizeof(T) == 1) {
    AddGroups<kRows, kVectors>(part, x, w, panel, column, row, sums, ahead);
  } else if constexpr (kVectors == 2) {
    MultiplyTile<kRows, kVectors>(d, x, part.x_stride, w, kPanel * kPack, k, sums, ahead);
  } else {  // few rows: so many streams side by side are left to the hardware
    MultiplyTile<kRows, kVectors>(d, x, part.x_stride, w, kPanel * kPack, k, sums);
  }

  const float* const bias = part.w->bias.get() + panel * kPanel;
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    float* const out = to.out + m * to.stride;
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const size_t at = column + v * kLanes;
      auto y = hn::Add(sums[m][v], hn::LoadU(d, bias + at));
      if (at + kLanes <= to.columns) {
        if (to.accumulate) y = hn::Add(y, hn::LoadU(d, out + at));
        hn::StoreU(y, d, out + at);
      } else if (at < to.columns) {
        HWY_ALIGN float lanes[kLanes];
        hn::Store(y, d, lanes);
        for (size_t i = 0; at + i < to.columns; ++i) {
          out[at + i] = to.accumulate ? lanes[i] + out[at + i] : lanes[i];
        }
      }
    }
  }
}

// The sums of gate and up that a tile of a gated matrix holds at once, of one row.
inline constexpr size_t kGatedWidth =
    std::max<size_t>(PackedMatrix::kPanel, TileVectors(1) * kLanes);

// silu(gate) * up of panels [first, last), from the sums of kRows rows.
template <int kRows, typename Out>
void WriteGated(const MatMulPart& part, const float* sums, int first, int last, int row) {
  constexpr size_t kHalf = PackedMatrix::kPanel / 2;
  static_assert(kHalf % kLanes == 0);
  const DF d;
  const auto columns = static_cast<size_t>(part.w->n / 2);
  for (size_t m = 0; m < kRows; ++m) {
    const float* gate = sums + m * kGatedWidth;
    Out* const out = static_cast<Out*>(part.out) + (row + m) * columns;
    for (size_t panel = first; panel < static_cast<size_t>(last); ++panel, gate += 2 * kHalf) {
      for (size_t i = 0; i < kHalf; i += kLanes) {
        const size_t at = panel * kHalf + i;
        const auto g = hn::LoadU(d, gate + i), up = hn::LoadU(d, gate + kHalf + i);
        hn::Vec<DF> y;
        if constexpr (sizeof(Out) == 4) {
          y = SiluMul(d, g, up);
        } else {
          y = SiluMulRough(d, g, up);
        }
        if (at + kLanes <= columns) {
          if constexpr (sizeof(Out) == 4) {
            hn::StoreU(y, d, out + at);
          } else {
            StoreRounded(d, y, out + at);
          }
        } else if (at < columns) {
          HWY_ALIGN float lanes[kLanes];
          hn::Store(y, d, lanes);
          for (size_t j = 0; at + j < columns; ++j) StoreScalar(lanes[j], out + at + j);
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
  const auto n = static_cast<size_t>(part.w->n);
  HWY_ALIGN float both[kRows * kGatedWidth];
  const TileOutput to = part.w->gated
                            ? TileOutput{both, kGatedWidth, kGatedWidth, false}
                            : TileOutput{static_cast<float*>(part.out) + row * n + first * kPanel,
                                         n, n - first * kPanel, part.accumulate};
  const size_t columns = static_cast<size_t>(last - first) * kPanel;
  const auto* const data = reinterpret_cast<const T*>(static_cast<const char*>(part.w->data.get()) +
                                                      first * part.w->panel_bytes);
  const auto* const left = reinterpret_cast<const Left<T>*>(x);
  size_t column = 0;
  for (; column + kVectors * kLanes <= columns; column += kVectors * kLanes) {
    Columns<kRows, kVectors, T>(part, left, data, first, column, row, tile, to);
  }
  for (; column < columns; column += 2 * kLanes) {
    Columns<kRows, 2, T>(part, left, data, first, column, row, tile, to);
  }
  using Out = std::conditional_t<sizeof(T) == 4, float, uint16_t>;
  if (part.w->gated) WriteGated<kRows, Out>(part, both, first, last, row);
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
  const size_t row_bytes = part.x_stride * sizeof(Left<T>);
  // A group of panels stays in the nearest cache while all row tiles pass over it.
  const int group =
      part.tiles == 1 && !part.w->gated
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
void ConvertRowAs(const T* x, size_t k, Left<T>* out) {
  if constexpr (kPerLeft<T> == 2) {
    out[k / 2] = 0;  // k is odd
    std::memcpy(out, x, k * sizeof(T));
  } else {
    const DF d;
    size_t i = 0;
    for (; i + kLanes <= k; i += kLanes) hn::StoreU(LoadAs(d, x + i), d, out + i);
    for (; i < k; ++i) out[i] = LoadScalar(x + i);
  }
}

// Rounds a row of bf16 to 8 bits, plus 128, and gives each group's scale. What is not finite makes
// the scale so.
void ConvertRowToI8(const uint16_t* x, size_t k, uint8_t* out, float* scales) {
  const DF d;
  const hn::Rebind<uint8_t, DF> du8;
  const auto zero = hn::Set(hn::RebindToSigned<DF>(), 128);
  constexpr size_t kGroup = PackedMatrix::kI8Group;
  for (size_t begin = 0; begin < k; begin += kGroup) {
    const uint16_t* const from = x + begin;
    uint8_t* const to = out + begin;
    const size_t count = std::min(kGroup, k - begin);
    uint16_t most = 0;  // bf16 without its sign is ordered as integers are
    for (size_t i = 0; i < count; ++i) most = std::max<uint16_t>(most, from[i] & 0x7fff);
    constexpr uint16_t kInfinity = 0x7f80;
    const float size = FloatFromBf16(most);
    *scales++ = size / 127;
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

// A row of x, (k) of ActivationDType(type), as it is multiplied.
void ConvertRow(const void* x, DType type, size_t k, char* out, float* scales) {
  if (type == DType::kI8) {
    ConvertRowToI8(static_cast<const uint16_t*>(x), k, reinterpret_cast<uint8_t*>(out), scales);
  } else {
    ConvertRowAs(static_cast<const uint16_t*>(x), k, reinterpret_cast<Left<uint16_t>*>(out));
  }
}

bool InPlaceFor(DType type, size_t k) {
  return type == DType::kI8     ? InPlace<int8_t>(k)
         : type == DType::kBF16 ? InPlace<uint16_t>(k)
                                : InPlace<float>(k);
}

size_t RowStrideFor(DType type, size_t k) {
  return type == DType::kI8     ? RowStride<int8_t>(k)
         : type == DType::kBF16 ? RowStride<uint16_t>(k)
                                : RowStride<float>(k);
}

int MaxTileRows() { return kMaxTileRows; }

}  // namespace carryover::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carryover::cpu {

HWY_EXPORT(RunPart);
HWY_EXPORT(ConvertRow);
HWY_EXPORT(InPlaceFor);
HWY_EXPORT(RowStrideFor);
HWY_EXPORT(MaxTileRows);

namespace {

void Multiply(Backend* backend, const void* x, const PackedMatrix* w, int rows, void* out,
              bool accumulate) {
  if (rows <= 0) return;
  ThreadPool& pool = backend->pool;
  const auto k = static_cast<size_t>(w->k);
  const size_t row_stride = HWY_DYNAMIC_DISPATCH(RowStrideFor)(w->type, k);
  const size_t row_bytes = row_stride * sizeof(float);  // or of as many bits
  const size_t row_scales = w->type == DType::kI8 ? w->I8Groups() : 0;
  float* scales = nullptr;
  if (row_scales > 0) scales = backend->scales.Get<float>(rows * row_scales, &backend->status);
  if (!HWY_DYNAMIC_DISPATCH(InPlaceFor)(w->type, k)) {
    char* const converted = backend->activations.Get<char>(rows * row_bytes, &backend->status);
    if (converted == nullptr || (row_scales > 0 && scales == nullptr)) return;
    ForRows(pool, rows, k, [&](int row) {
      HWY_DYNAMIC_DISPATCH(ConvertRow)
      (static_cast<const char*>(x) + row * k * DTypeBytes(ActivationDType(w->type)), w->type, k,
       converted + row * row_bytes, scales == nullptr ? nullptr : scales + row * row_scales);
    });
    x = converted;
  }

  // Rows in runs that stay in the second-level cache, tiles of nearly equal size.
  constexpr size_t kRunBytes = size_t{1} << 20;
  const int max_rows = HWY_DYNAMIC_DISPATCH(MaxTileRows)();
  const int run_rows =
      std::max<int>(1, static_cast<int>(kRunBytes / row_bytes) / max_rows) * max_rows;
  const int runs = (rows + run_rows - 1) / run_rows;
  const auto run_begin = [&](int run) { return TileBegin(rows, runs, run); };

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
    part.x = static_cast<const char*>(x) + part.first_row * row_bytes;
    part.x_stride = row_stride;
    part.tiles = (part.last_row - part.first_row + max_rows - 1) / max_rows;
    part.x_scales = scales;
    part.out = out;
    part.accumulate = accumulate;
    HWY_DYNAMIC_DISPATCH(RunPart)(part);
  });
}

}  // namespace

void MatMul(Backend* backend, const void* x, const PackedMatrix* w, int rows, float* out,
            bool accumulate) {
  backend->status.Update(CheckGated(w->gated, false));
  if (!w->gated) Multiply(backend, x, w, rows, out, accumulate);
}

void MatMulGated(Backend* backend, const void* x, const PackedMatrix* w, int rows, void* out) {
  backend->status.Update(CheckGated(w->gated, true));
  if (w->gated) Multiply(backend, x, w, rows, out, false);
}

}  // namespace carryover::cpu
#endif  // HWY_ONCE
