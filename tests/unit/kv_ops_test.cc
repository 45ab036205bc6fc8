// What lies in KV blocks, read back, written and copied, on every backend.
#include <utility>

#include "tests/unit/attention_fixture.h"

namespace carryover {
namespace {

class KvOpsTest : public AttentionTestBase {};

TEST_P(KvOpsTest, CopiedBlocksAnswerTheSame) {
  World w = MakeWorld(AnyType(), 64, {60});
  std::vector<float> rows = Pass(w, {{0, 0, 59}}, DType::kF32);
  const std::vector<float> want = Pass(w, {{0, 59, 1}}, DType::kF32);
  // The first block moves to the spare id and its old place is poisoned.
  std::vector<bool> used(w.blocks);
  for (int32_t id : w.tables[0]) used[id] = true;
  const int32_t spare =
      static_cast<int32_t>(std::find(used.begin(), used.end(), false) - used.begin());
  const size_t bytes = w.geometry.BlockBytes();
  std::vector<uint8_t> block(bytes);
  char* const kv = static_cast<char*>(w.kv);
  ops().download(backend_, block.data(), kv + w.tables[0][0] * bytes, bytes);
  ASSERT_TRUE(ops().sync(backend_).ok());
  ops().upload(backend_, kv + spare * bytes, block.data(), bytes);
  const std::vector<uint8_t> poison(bytes, 0xff);
  ops().upload(backend_, kv + w.tables[0][0] * bytes, poison.data(), bytes);
  w.tables[0][0] = spare;
  const std::vector<float> got = Pass(w, {{0, 59, 1}}, DType::kF32);
  EXPECT_TRUE(SameBits(got.data(), want.data(), want.size()));
}

// What lies in the blocks comes back at position 0, and goes into others as it was.
TEST_P(KvOpsTest, KvIsReadBackAndWrittenAgain) {
  for (const DType type : {DType::kF32, DType::kBF16}) {
    for (const int dim : {2, 6, 32, 64, 80}) {
      World w = MakeWorld(type, dim, {Random(1, 70), Random(1, 70)});
      const int lengths[] = {static_cast<int>(w.qkv[0].size() / w.Width()),
                             static_cast<int>(w.qkv[1].size() / w.Width())};
      Pass(w, {{0, 0, lengths[0]}, {1, 0, lengths[1]}}, DType::kF32);

      // Some rows of each, so that neither row nor token begins at 0.
      const int begin[] = {Random(0, lengths[0] - 1), Random(0, lengths[1] - 1)};
      std::vector<SequenceRows> sequences;
      std::vector<int32_t> positions, table;
      for (int s = 0; s < 2; ++s) {
        sequences.push_back({static_cast<int32_t>(positions.size()), lengths[s] - begin[s],
                             begin[s], static_cast<int32_t>(table.size())});
        table.insert(table.end(), w.tables[s].begin(), w.tables[s].end());
        for (int t = begin[s]; t < lengths[s]; ++t) positions.push_back(t + w.position_shift);
      }
      ops().begin_pass(backend_, {sequences, positions, table});
      const size_t kv_width = size_t{2} * w.geometry.kv_heads * dim;
      ReadKvArgs read;
      read.cos_sin = Upload(w.cos_sin);
      read.layer = w.layer;
      read.kv_base = w.kv;
      read.geometry = w.geometry;
      const size_t count = positions.size() * kv_width;
      read.out = PoisonedFloats(count);
      ops().read_kv(backend_, read);
      const std::vector<float> got = Download(read.out, count);

      // Once more, with a copy of each type: the same values, rounded, and not one more.
      for (const DType copy_type : {DType::kF32, DType::kBF16}) {
        read.out = PoisonedFloats(count + 1);
        read.copy = Poisoned((count + 1) * DTypeBytes(copy_type));
        read.copy_type = copy_type;
        ops().read_kv(backend_, read);
        const std::vector<float> out = Download(read.out, count + 1);
        const std::vector<float> copied = Download(read.copy, count + 1, copy_type);
        EXPECT_TRUE(SameBits(out.data(), got.data(), count)) << dim;
        for (size_t i = 0; i < count; ++i) {
          ASSERT_EQ(copied[i], RoundTo(copy_type, got[i])) << dim << " " << DTypeName(copy_type);
        }
        EXPECT_TRUE(std::isnan(out[count]) && std::isnan(copied[count])) << dim;
      }
      read.copy = nullptr;

      size_t row = 0;
      double worst = 0;
      for (int s = 0; s < 2; ++s) {
        for (int t = begin[s]; t < lengths[s]; ++t, ++row) {
          for (int h = 0; h < w.geometry.kv_heads; ++h) {
            const float* const k = &w.qkv[s][t * w.Width() + (w.heads + h) * dim];
            const float* const v = k + w.geometry.kv_heads * dim;
            const std::vector<double> key =
                Rotated(w, k, w.k_norm, 0);  // position 0: only the norm
            const float* const k_got = &got[row * kv_width + h * dim];
            const float* const v_got = k_got + w.geometry.kv_heads * dim;
            for (int i = 0; i < dim; ++i) {
              const double size = std::hypot(key[i % (dim / 2)], key[i % (dim / 2) + dim / 2]);
              worst = std::max(worst, std::fabs(k_got[i] - key[i]) / std::max(size, 0.1));
              EXPECT_EQ(v_got[i], RoundTo(type, v[i]));
            }
          }
        }
      }
      EXPECT_LE(worst, 2 * ToleranceOf(type).rounded) << dim;

      // Written to other blocks, they answer alike: there, only these rows are no NaN.
      World copy = w;
      copy.kv = Poisoned(w.blocks * w.geometry.BlockBytes());
      RopeWriteArgs write;
      write.qkv = read.out;
      write.cos_sin = read.cos_sin;
      write.heads = 0;
      write.layer = w.layer;
      write.kv_base = copy.kv;
      write.geometry = w.geometry;
      ops().rope_write(backend_, write);
      read.kv_base = copy.kv;
      read.out = PoisonedFloats(positions.size() * kv_width);
      ops().read_kv(backend_, read);
      const std::vector<float> again = Download(read.out, positions.size() * kv_width);
      worst = 0;
      for (size_t i = 0; i < got.size(); ++i) {
        const double error = std::fabs(again[i] - got[i]) / std::max(1.0f, std::fabs(got[i]));
        worst = std::isnan(error) ? 1 : std::max(worst, error);
      }
      EXPECT_LE(worst, 2 * ToleranceOf(type).rounded) << dim;
    }
  }
}

TEST_P(KvOpsTest, LayersOfBlocksAreCopied) {
  KvGeometry g = {.layers = 4, .kv_heads = 2, .head_dim = 8, .block_tokens = 32};
  g.dtype = AnyType();
  constexpr int kBlocks = 6;
  std::vector<uint8_t> before(kBlocks * g.BlockBytes());
  for (uint8_t& byte : before) byte = static_cast<uint8_t>(Random(0, 255));
  CopyKvArgs args;
  const std::vector<int32_t> from = {0, 5, 0}, to = {1, 4, 3};
  args.from = from;
  args.to = to;
  args.kv_base = Upload(before.data(), before.size());
  args.geometry = g;
  for (const auto& [begin, end] : {std::pair(0, 0), std::pair(2, 3), std::pair(1, 4)}) {
    args.layer_begin = begin;
    args.layer_end = end;
    ops().copy_kv(backend_, args);
    std::vector<uint8_t> after(before.size());
    ops().download(backend_, after.data(), args.kv_base, after.size());
    ASSERT_TRUE(ops().sync(backend_).ok());
    for (size_t i = 0; i < from.size(); ++i) {
      const size_t layers = begin * g.LayerBytes(), bytes = (end - begin) * g.LayerBytes();
      std::copy_n(&before[from[i] * g.BlockBytes() + layers], bytes,
                  &before[to[i] * g.BlockBytes() + layers]);
    }
    EXPECT_EQ(after, before) << begin;
  }
  args.planes = KvPlanes::kValues;
  args.layer_end = 5;
  ops().copy_kv(backend_, args);
  EXPECT_EQ(ops().sync(backend_).code(), absl::StatusCode::kInvalidArgument);
  args.layer_end = 4;
  args.to = {};
  ops().copy_kv(backend_, args);
  EXPECT_EQ(ops().sync(backend_).code(), absl::StatusCode::kInvalidArgument);
}

// What attention sees of keys and values that were copied apart, wherever a backend keeps them.
TEST_P(KvOpsTest, KeysAndValuesAreCopiedApart) {
  KvGeometry g = {.layers = 3, .kv_heads = 2, .head_dim = 8, .block_tokens = 16};
  g.dtype = AnyType();
  constexpr int kBlocks = 4;
  const size_t width = size_t{2} * g.kv_heads * g.head_dim, half = width / 2;
  const size_t rows = kBlocks * g.block_tokens;
  std::vector<float> unit(rows * g.head_dim);  // a rotation by nothing
  for (size_t i = 0; i < unit.size(); ++i) unit[i] = i % g.head_dim < g.head_dim / 2u ? 1 : 0;
  const float* const cos_sin = Upload(unit);
  std::vector<int32_t> positions(rows), table = {0, 1, 2, 3};
  std::iota(positions.begin(), positions.end(), 0);
  const std::vector<SequenceRows> sequences = {{0, static_cast<int32_t>(rows), 0, 0}};
  void* const kv = Poisoned(kBlocks * g.BlockBytes());
  // By layer: (rows, K of all heads and V of all heads).
  std::vector<std::vector<float>> expected(g.layers);
  ops().begin_pass(backend_, {sequences, positions, table});
  for (int layer = 0; layer < g.layers; ++layer) {
    expected[layer].resize(rows * width);
    for (float& value : expected[layer]) value = static_cast<float>(Random(-64, 64)) / 16;
    RopeWriteArgs write;
    write.qkv = Upload(expected[layer]);
    write.cos_sin = cos_sin;
    write.layer = layer;
    write.kv_base = kv;
    write.geometry = g;
    ops().rope_write(backend_, write);
  }
  const std::vector<int32_t> from = {2, 0}, to = {1, 3};
  for (const KvPlanes planes : {KvPlanes::kKeys, KvPlanes::kValues, KvPlanes::kBoth}) {
    CopyKvArgs args;
    args.from = from;
    args.to = to;
    // Two layers each, whose planes do not lie side by side, and not always the same ones.
    args.layer_begin = planes == KvPlanes::kValues ? 1 : 0;
    args.layer_end = args.layer_begin + 2;
    args.kv_base = kv;
    args.geometry = g;
    args.planes = planes;
    ops().copy_kv(backend_, args);
    for (int layer = args.layer_begin; layer < args.layer_end; ++layer) {
      for (size_t i = 0; i < from.size(); ++i) {
        for (int t = 0; t < g.block_tokens; ++t) {
          const float* const read = &expected[layer][(from[i] * g.block_tokens + t) * width];
          float* const into = &expected[layer][(to[i] * g.block_tokens + t) * width];
          if (planes != KvPlanes::kValues) std::copy_n(read, half, into);
          if (planes != KvPlanes::kKeys) std::copy_n(read + half, half, into + half);
        }
      }
    }
    for (int layer = 0; layer < g.layers; ++layer) {
      ReadKvArgs read;
      read.cos_sin = cos_sin;
      read.layer = layer;
      read.kv_base = kv;
      read.geometry = g;
      read.out = PoisonedFloats(rows * width);
      ops().read_kv(backend_, read);
      EXPECT_EQ(Download(read.out, rows * width), expected[layer])
          << static_cast<int>(planes) << " " << layer;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, KvOpsTest, testing::ValuesIn(BackendCases()), CaseName);

}  // namespace
}  // namespace carryover
