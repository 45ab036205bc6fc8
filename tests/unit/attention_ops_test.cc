// rope_write and attention against fp64, on every backend. K and V are only seen through what
// attention makes of them: their order inside a block is the backend's own.
#include <algorithm>
#include <numeric>

#include "tests/unit/ops_testing.h"

namespace carryover {
namespace {

// A layer of attention, some sequences' inputs, and the KV memory that passes fill. Block ids are
// dealt in random order; every byte of KV starts as NaN.
struct World {
  KvGeometry geometry;
  int heads = 0;
  int layer = 0;
  int window = 0;
  float scale = 0;
  float eps = 1e-5f;
  std::vector<float> q_norm, k_norm;  // empty: none
  std::vector<float> cos_sin;         // (max_positions, 2, head_dim / 2)
  int max_positions = 0;
  std::vector<std::vector<float>> qkv;       // by sequence: (tokens, width)
  std::vector<std::vector<int32_t>> tables;  // by sequence: block ids
  int blocks = 0;
  int position_shift = 0;  // of the rotation against the place in KV
  void* kv = nullptr;

  int Group() const { return heads / geometry.kv_heads; }
  size_t Width() const {
    return static_cast<size_t>(heads + 2 * geometry.kv_heads) * geometry.head_dim;
  }
  size_t OutWidth() const { return static_cast<size_t>(heads) * geometry.head_dim; }
};

// Some next tokens of a sequence.
struct Chunk {
  int sequence;
  int begin;
  int count;
};

class AttentionTest : public OpsTestBase {
 protected:
  World MakeWorld(DType kv_type, int head_dim, const std::vector<int>& lengths) {
    World w;
    w.geometry.layers = Random(1, 3);
    w.geometry.kv_heads = Random(1, 3);
    w.geometry.head_dim = head_dim;
    w.geometry.block_tokens = 16 * Random(1, 3);
    w.geometry.dtype = kv_type;
    w.heads = w.geometry.kv_heads * Random(1, 5);
    w.layer = Random(0, w.geometry.layers - 1);
    w.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(head_dim)));
    if (Coin()) {
      w.q_norm = Values(head_dim);
      w.k_norm = Values(head_dim);
    }
    w.position_shift = Random(0, 5);
    w.max_positions = *std::max_element(lengths.begin(), lengths.end()) + w.position_shift;
    for (int p = 0; p < w.max_positions; ++p) {
      for (int part = 0; part < 2; ++part) {
        for (int i = 0; i < head_dim / 2; ++i) {
          const double angle = p * std::pow(10000.0, -2.0 * i / head_dim);
          w.cos_sin.push_back(static_cast<float>(part == 0 ? std::cos(angle) : std::sin(angle)));
        }
      }
    }
    for (int length : lengths) {
      w.qkv.push_back(Values(length * w.Width()));
      w.tables.emplace_back((length + w.geometry.block_tokens - 1) / w.geometry.block_tokens);
      w.blocks += static_cast<int>(w.tables.back().size());
    }
    ++w.blocks;  // one spare
    std::vector<int32_t> ids(w.blocks);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random_);
    for (std::vector<int32_t>& table : w.tables) {
      for (int32_t& id : table) {
        id = ids.back();
        ids.pop_back();
      }
    }
    w.kv = Poisoned(w.blocks * w.geometry.BlockBytes());
    return w;
  }

  // One pass over `chunks`. Gives (rows, heads * head_dim) in the chunks' order.
  std::vector<float> Pass(const World& w, const std::vector<Chunk>& chunks, DType out_type) {
    std::vector<SequenceRows> sequences;
    std::vector<int32_t> positions;
    std::vector<int32_t> table;
    std::vector<float> rows;
    for (const Chunk& c : chunks) {
      sequences.push_back({static_cast<int32_t>(positions.size()), c.count, c.begin,
                           static_cast<int32_t>(table.size())});
      const std::vector<int32_t>& blocks = w.tables[c.sequence];
      table.insert(table.end(), blocks.begin(), blocks.end());
      for (int i = 0; i < c.count; ++i) positions.push_back(c.begin + i + w.position_shift);
      const auto from = w.qkv[c.sequence].begin() + c.begin * w.Width();
      rows.insert(rows.end(), from, from + c.count * w.Width());
    }
    ops().begin_pass(backend_, {sequences, positions, table});
    RopeWriteArgs rope;
    rope.qkv = Upload(rows);
    rope.q_norm = w.q_norm.empty() ? nullptr : Upload(w.q_norm);
    rope.k_norm = w.k_norm.empty() ? nullptr : Upload(w.k_norm);
    rope.norm_eps = w.eps;
    rope.cos_sin = Upload(w.cos_sin);
    rope.heads = w.heads;
    rope.layer = w.layer;
    rope.kv_base = w.kv;
    rope.geometry = w.geometry;
    ops().rope_write(backend_, rope);

    AttentionArgs args;
    args.qkv = rope.qkv;
    args.heads = w.heads;
    args.layer = w.layer;
    args.scale = w.scale;
    args.window = w.window;
    args.kv_base = w.kv;
    args.geometry = w.geometry;
    const size_t count = positions.size() * w.OutWidth();
    args.out = Poisoned(count * DTypeBytes(out_type));
    args.out_type = out_type;
    ops().attention(backend_, args);
    return Download(args.out, count, out_type);
  }

  // Each sequence by itself in chunks of at most `most` tokens.
  std::vector<float> InChunks(const World& w, int sequence, int length, int most, DType out_type) {
    std::vector<float> out;
    for (int begin = 0; begin < length;) {
      const int count = std::min(Random(1, most), length - begin);
      const std::vector<float> part = Pass(w, {{sequence, begin, count}}, out_type);
      out.insert(out.end(), part.begin(), part.end());
      begin += count;
    }
    return out;
  }

  // Normalised, if the world says so, and rotated.
  static std::vector<double> Rotated(const World& w, const float* x, const std::vector<float>& norm,
                                     int position) {
    const int dim = w.geometry.head_dim;
    const int half = dim / 2;
    std::vector<double> v(x, x + dim);
    if (!norm.empty()) {
      double squares = 0;
      for (double e : v) squares += e * e;
      const double scale = 1 / std::sqrt(squares / dim + double{w.eps});
      for (int i = 0; i < dim; ++i) v[i] *= scale * norm[i];
    }
    const float* const cos = &w.cos_sin[static_cast<size_t>(position) * dim];
    const float* const sin = cos + half;
    std::vector<double> out(dim);
    for (int i = 0; i < half; ++i) {
      out[i] = v[i] * cos[i] - v[half + i] * sin[i];
      out[half + i] = v[half + i] * cos[i] + v[i] * sin[i];
    }
    return out;
  }

  // Rows [begin, end) of a sequence in fp64: (end - begin, heads * head_dim).
  static std::vector<double> Reference(const World& w, int sequence, int begin, int end) {
    const int dim = w.geometry.head_dim;
    const DType type = w.geometry.dtype;
    std::vector<double> out((end - begin) * w.OutWidth());
    for (int h = 0; h < w.heads; ++h) {
      const int kv_head = h / w.Group();
      std::vector<std::vector<double>> keys, values;
      for (int t = 0; t < end; ++t) {
        const float* const row = &w.qkv[sequence][t * w.Width()];
        const float* const k = row + (w.heads + kv_head) * dim;
        const float* const v = row + (w.heads + w.geometry.kv_heads + kv_head) * dim;
        keys.push_back(Rotated(w, k, w.k_norm, t + w.position_shift));
        for (double& e : keys.back()) e = RoundTo(type, static_cast<float>(e));
        values.emplace_back(v, v + dim);
        for (double& e : values.back()) e = RoundTo(type, static_cast<float>(e));

        if (t < begin) continue;
        const std::vector<double> q = Rotated(w, row + h * dim, w.q_norm, t + w.position_shift);
        const int first = w.window > 0 ? std::max(0, t - w.window + 1) : 0;
        std::vector<double> weights;
        for (int j = first; j <= t; ++j) {
          weights.push_back(w.scale * std::inner_product(q.begin(), q.end(), keys[j].begin(), 0.0));
        }
        const double max = *std::max_element(weights.begin(), weights.end());
        double sum = 0;
        for (double& weight : weights) sum += weight = std::exp(weight - max);
        for (int j = first; j <= t; ++j) {
          for (int i = 0; i < dim; ++i) {
            out[(t - begin) * w.OutWidth() + h * dim + i] +=
                weights[j - first] / sum * values[j][i];
          }
        }
      }
    }
    return out;
  }

  static void ExpectNear(const std::vector<float>& got, const std::vector<double>& want,
                         double tolerance) {
    ASSERT_EQ(got.size(), want.size());
    double worst = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      const double error = std::fabs(got[i] - want[i]);
      worst = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(worst, error);
    }
    EXPECT_LE(worst, tolerance);
  }
};

TEST_P(AttentionTest, AgreesWithReference) {
  for (int head_dim : {32, 64, 80, 96, 128, 256, 2 * Random(1, 60)}) {
    const DType type = AnyType();
    const DType out_type = AnyType();
    const int length = Random(1, 70);
    World w = MakeWorld(type, head_dim, {length, 5});
    w.window = Coin() ? 0 : Random(1, length + 3);
    SCOPED_TRACE(testing::Message()
                 << "head_dim " << head_dim << " heads " << w.heads << "/" << w.geometry.kv_heads
                 << " block " << w.geometry.block_tokens << " length " << length << " window "
                 << w.window << " kv " << DTypeName(type) << " out " << DTypeName(out_type));
    const double tolerance = std::max(ToleranceOf(type).attend, ToleranceOf(out_type).rounded * 4);
    ExpectNear(InChunks(w, 0, length, 70, out_type), Reference(w, 0, 0, length), tolerance);
  }
}

TEST_P(AttentionTest, LongContextAgreesWithReference) {  // around where splits of KV may end
  constexpr int kLength = 1100;
  for (int window : {0, 600}) {
    World w = MakeWorld(AnyType(), 16, {kLength});
    w.window = window;
    const std::vector<float> out = Pass(w, {{0, 0, kLength}}, DType::kF32);
    for (int end : {130, 514, 1026, kLength}) {
      ExpectNear({out.begin() + (end - 4) * w.OutWidth(), out.begin() + end * w.OutWidth()},
                 Reference(w, 0, end - 4, end), ToleranceOf(w.geometry.dtype).attend);
    }
  }
}

TEST_P(AttentionTest, BitsDoNotDependOnChunksOrNeighbours) {
  for (DType type : {DType::kF32, DType::kBF16}) {
    const int length = Random(530, 650);
    World w = MakeWorld(type, 16, {length, 100});
    w.window = Coin() ? 0 : Random(1, length);
    const std::vector<float> whole = Pass(w, {{0, 0, length}}, DType::kF32);

    World again = w;
    again.kv = Poisoned(w.blocks * w.geometry.BlockBytes());
    const std::vector<float> chunked = InChunks(again, 0, length, 400, DType::kF32);
    ASSERT_TRUE(SameBits(whole.data(), chunked.data(), whole.size())) << DTypeName(type);

    // Its last rows once more, one by one, in a batch with another sequence before it.
    Pass(again, {{1, 0, 90}}, DType::kF32);
    for (int t = 0; t < 10; ++t) {
      const int row = length - 10 + t;
      const std::vector<float> both = Pass(again, {{1, 90 + t, 1}, {0, row, 1}}, DType::kF32);
      ASSERT_TRUE(SameBits(&both[w.OutWidth()], &whole[row * w.OutWidth()], w.OutWidth()))
          << DTypeName(type) << " row " << row;
    }
  }
}

TEST_P(AttentionTest, WindowEndsWhereItShould) {
  // Equal scores and values that count tokens make a row the mean of what it sees.
  for (DType type : {DType::kF32, DType::kBF16}) {
    constexpr int kLength = 150;
    World w = MakeWorld(type, 16, {kLength});
    w.q_norm.clear();
    w.k_norm.clear();
    for (int t = 0; t < kLength; ++t) {
      float* const row = &w.qkv[0][t * w.Width()];
      std::fill(row, row + w.Width(), static_cast<float>(t));
      std::fill(row, row + w.OutWidth(), 0.0f);
    }
    for (int window : {0, 1, 2, 15, 16, 17, 31, 128, 129, 149, 150, 151, 1000}) {
      w.window = window;
      const std::vector<float> out = InChunks(w, 0, kLength, 90, DType::kF32);
      for (int t = 0; t < kLength; ++t) {
        const int first = window == 0 ? 0 : std::max(0, t - window + 1);
        ASSERT_NEAR(out[t * w.OutWidth()], (first + t) / 2.0, 1e-3)
            << "row " << t << " window " << window;
      }
    }
  }
}

TEST_P(AttentionTest, CopiedBlocksAnswerTheSame) {
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
TEST_P(AttentionTest, KvIsReadBackAndWrittenAgain) {
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
      read.out = PoisonedFloats(positions.size() * kv_width);
      ops().read_kv(backend_, read);
      const std::vector<float> got = Download(read.out, positions.size() * kv_width);

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

TEST_P(AttentionTest, LayersOfBlocksAreCopied) {
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
TEST_P(AttentionTest, KeysAndValuesAreCopiedApart) {
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
    // Another layer each time, and in the end two of them.
    args.layer_begin = planes == KvPlanes::kKeys ? 1 : planes == KvPlanes::kValues ? 2 : 0;
    args.layer_end = planes == KvPlanes::kBoth ? 2 : args.layer_begin + 1;
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

TEST_P(AttentionTest, ManySequencesInOnePass) {
  std::vector<int> lengths;
  for (int i = 0; i < 20; ++i) lengths.push_back(Random(1, 40));
  World w = MakeWorld(DType::kBF16, 32, lengths);
  std::vector<Chunk> chunks;
  for (int i = 0; i < 20; ++i) chunks.push_back({i, 0, lengths[i]});
  const std::vector<float> out = Pass(w, chunks, DType::kF32);
  size_t at = 0;
  for (int i = 0; i < 20; ++i) {
    const size_t count = lengths[i] * w.OutWidth();
    ExpectNear({out.begin() + at, out.begin() + at + count}, Reference(w, i, 0, lengths[i]),
               ToleranceOf(DType::kBF16).attend);
    at += count;
  }
}

TEST_P(AttentionTest, WrongGeometryIsTheFirstErrorOfSync) {
  float* const memory = PoisonedFloats(4096);
  AttentionArgs args;
  args.qkv = memory;
  args.out = memory;
  args.kv_base = memory;
  args.heads = 3;
  args.geometry = {.layers = 1, .kv_heads = 2, .head_dim = 8};
  ops().begin_pass(backend_, {});
  ops().attention(backend_, args);
  args.heads = 2;
  args.geometry.head_dim = 7;
  ops().attention(backend_, args);
  const absl::Status status = ops().sync(backend_);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("3 heads"), absl::string_view::npos) << status;
  EXPECT_TRUE(ops().sync(backend_).ok());
}

INSTANTIATE_TEST_SUITE_P(Backends, AttentionTest, testing::ValuesIn(BackendCases()), CaseName);

}  // namespace
}  // namespace carryover
