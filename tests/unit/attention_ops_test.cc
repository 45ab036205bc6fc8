// rope_write and attention against fp64, on every backend.
#include "tests/unit/attention_fixture.h"

namespace carryover {
namespace {

class AttentionTest : public AttentionTestBase {};

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
    ExpectNear(InChunks(w, 0, 0, length, 70, out_type), Reference(w, 0, 0, length), tolerance);
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
      const std::vector<float> out = InChunks(w, 0, 0, kLength, 90, DType::kF32);
      for (int t = 0; t < kLength; ++t) {
        const int first = window == 0 ? 0 : std::max(0, t - window + 1);
        ASSERT_NEAR(out[t * w.OutWidth()], (first + t) / 2.0, 1e-3)
            << "row " << t << " window " << window;
      }
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
