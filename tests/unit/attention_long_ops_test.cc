// Attention over more tokens than one split of a device's has (512), on every backend: what splits
// leave is merged, and where a split ends nothing may show.
#include "tests/unit/attention_fixture.h"

namespace carryover {
namespace {

struct Shape {
  DType type;
  int head_dim;
  int kv_heads;
};

class LongAttentionTest : public AttentionTestBase {
 protected:
  // 16 is a size without tensor cores, 64 and more have them in bf16. With one KV head the emulated
  // device spreads the splits of a chunk over blocks, with three a block walks them one by one.
  std::vector<Shape> Shapes() {
    return {{DType::kF32, 16, 1},   {DType::kBF16, 16, 3},
            {DType::kBF16, 64, 1},  {DType::kBF16, Coin() ? 80 : 96, 3},
            {DType::kBF16, 128, 3}, {DType::kBF16, 256, 1}};
  }
  // Without norms, whose random weights may make a few scores so large that little else counts.
  World MakeLong(const Shape& shape, const std::vector<int>& lengths) {
    World w =
        MakeWorld(shape.type, shape.head_dim, lengths, shape.kv_heads, shape.kv_heads == 1 ? 2 : 1);
    w.q_norm.clear();
    w.k_norm.clear();
    return w;
  }
};

testing::Message Name(const Shape& shape, const World& w) {
  return testing::Message() << DTypeName(shape.type) << " head_dim " << shape.head_dim << " heads "
                            << w.heads << "/" << shape.kv_heads << " window " << w.window;
}

TEST_P(LongAttentionTest, AgreesWithReference) {
  constexpr int kLength = 1100, kMany = 20, kFew = 3;
  for (const Shape& shape : Shapes()) {
    World w = MakeLong(shape, {kLength});
    Write(w, {{0, 0, kLength}});
    for (const int window : {0, Random(500, 700)}) {
      w.window = window;
      SCOPED_TRACE(Name(shape, w));
      // Means of so many values are small.
      const double tolerance = ToleranceOf(shape.type).attend / 4;
      const std::vector<double> want = Reference(w, 0, kLength - kMany, kLength);
      ExpectNear(Pass(w, {{0, kLength - kMany, kMany}}, DType::kF32), want, tolerance);
      ExpectNear(Pass(w, {{0, kLength - kFew, kFew}}, DType::kF32),
                 {want.end() - kFew * w.OutWidth(), want.end()}, tolerance);
    }
  }
}

TEST_P(LongAttentionTest, EverySeenTokenCountsOnce) {
  constexpr int kLength = 1100;
  for (const Shape& shape : Shapes()) {
    World w = MakeLong(shape, {kLength});
    const int dim = shape.head_dim;
    const size_t values = static_cast<size_t>(w.heads + shape.kv_heads) * dim;
    const auto value = [](int token, size_t column) {
      return static_cast<int>((token * 7 + column * 3) % 251) - 125;
    };
    // By row: the sums of all values before it.
    std::vector<std::vector<int64_t>> sums(kLength + 1, std::vector<int64_t>(w.Width() - values));
    for (int t = 0; t < kLength; ++t) {
      float* const row = &w.qkv[0][t * w.Width()];
      std::fill(row, row + values, 0.0f);
      for (size_t c = 0; c < w.Width() - values; ++c) {
        row[values + c] = static_cast<float>(value(t, c));
        sums[t + 1][c] = sums[t][c] + value(t, c);
      }
    }
    Write(w, {{0, 0, kLength}});
    for (const int window : {0, Coin() ? Random(510, 514) : Random(1020, 1030)}) {
      w.window = window;
      for (const int end : {Random(512, 514), Random(1024, 1026), kLength}) {
        const int begin = end - (end == kLength ? 20 : Random(1, 3));
        const std::vector<float> out = Pass(w, {{0, begin, end - begin}}, DType::kF32);
        for (int t = begin; t < end; ++t) {
          const int first = window == 0 ? 0 : std::max(0, t - window + 1);
          double worst = 0;
          for (size_t i = 0; i < w.OutWidth(); ++i) {
            const size_t column = i / dim / w.Group() * dim + i % dim;
            const double mean =
                static_cast<double>(sums[t + 1][column] - sums[first][column]) / (t + 1 - first);
            const double error = std::fabs(out[(t - begin) * w.OutWidth() + i] - mean);
            worst = std::isnan(error) ? 1 : std::max(worst, error);
          }
          ASSERT_LE(worst, 1e-4) << Name(shape, w) << " row " << t << " of " << begin << " to "
                                 << end;
        }
      }
    }
  }
}

TEST_P(LongAttentionTest, BitsDoNotDependOnChunksOrNeighbours) {
  const std::vector<Shape> shapes = Shapes();
  for (const Shape& shape : {shapes[Random(0, 1)], shapes[Random(2, 5)]}) {
    const int length = Random(1030, 1150), begin = length - Random(40, 60);
    World w = MakeLong(shape, {length, 100});
    w.window = Coin() ? 0 : Random(1, length);
    SCOPED_TRACE(Name(shape, w) << " length " << length << " from " << begin);
    Write(w, {{0, 0, begin}});
    const std::vector<float> whole = Pass(w, {{0, begin, length - begin}}, DType::kF32);

    World again = w;
    again.kv = Poisoned(w.blocks * w.geometry.BlockBytes());
    Write(again, {{0, 0, begin}});
    const std::vector<float> chunked = InChunks(again, 0, begin, length, 40, DType::kF32);
    ASSERT_TRUE(SameBits(whole.data(), chunked.data(), whole.size()));

    // Its last rows once more, one by one, in a batch with another sequence before it, of one token
    // and of many.
    Write(again, {{1, 0, 90}});
    for (int t = 0; t < 4; ++t) {
      const int row = length - 4 + t;
      const Chunk other = t < 2 ? Chunk{1, 90 + t, 1} : Chunk{1, 30, 20 + t};
      const std::vector<float> both = Pass(again, {other, {0, row, 1}}, DType::kF32);
      ASSERT_TRUE(SameBits(&both[other.count * w.OutWidth()], &whole[(row - begin) * w.OutWidth()],
                           w.OutWidth()))
          << "row " << row;
    }
  }
}

// More splits than a merge loads at once.
TEST_P(LongAttentionTest, MergesManySplits) {
  constexpr int kLength = 4700;
  World w = MakeLong({DType::kBF16, 64, 1}, {kLength});
  Write(w, {{0, 0, kLength}});
  for (const int count : {1, 20}) {
    ExpectNear(Pass(w, {{0, kLength - count, count}}, DType::kF32),
               Reference(w, 0, kLength - count, kLength), ToleranceOf(DType::kBF16).attend / 4);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, LongAttentionTest, testing::ValuesIn(BackendCases()), CaseName);

}  // namespace
}  // namespace carryover
