#include "engine/kv_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/atomic_file.h"
#include "engine/safetensors.h"

namespace carryover {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Values that are all different, so that a mixed up order shows.
std::vector<float> Counted(int64_t count, float first) {
  std::vector<float> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = first + 0.5f * static_cast<float>(i);
  return values;
}

// 2 layers, 2 heads of 2: rows of 8.
KvMap SomeMap(KvMapVariant variant) {
  KvMap map;
  map.info.source.fill(1);
  map.info.target.fill(0xab);
  map.info.kv_layout.fill(3);
  map.info.layers = 2;
  map.info.kv_heads = 2;
  map.info.head_dim = 2;
  map.info.variant = variant;
  map.info.rank = variant == KvMapVariant::kLowRank ? 3 : 0;
  map.info.lambda = 0.001;
  map.info.texts = 10;
  map.info.tokens = 1234567890123;
  map.info.held_texts = 2;
  map.info.held_positions = 32;
  map.info.direct = {0.25, 0.5, 0.125};
  map.info.mapped = {0.0625, 0.03125, 0.015625};
  for (int i = 0; i < 2; ++i) {
    KvMapLayer layer;
    layer.bias = Counted(8, 1000.f * i);
    if (variant == KvMapVariant::kPerLayer) layer.weight = Counted(64, 1000.f * i + 10);
    if (variant == KvMapVariant::kPerHead) layer.weight = Counted(32, 1000.f * i + 10);
    if (variant == KvMapVariant::kLowRank) {
      layer.down = Counted(24, 1000.f * i + 100);
      layer.up = Counted(24, 1000.f * i + 200);
    }
    map.layers.push_back(layer);
  }
  return map;
}

std::string FileOf(const KvMap& map) {
  const absl::StatusOr<std::string> file = WriteKvMap(map);
  EXPECT_TRUE(file.ok()) << file.status();
  return file.value_or("");
}

std::string ErrorOf(absl::string_view file) {
  const absl::StatusOr<KvMap> map = ParseKvMap(file, "m.safetensors");
  EXPECT_EQ(map.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(map.status().message()), HasSubstr("m.safetensors"));
  return std::string(map.status().message());
}

// The error after one piece of text in the header became another one of the same length.
std::string ErrorAfter(absl::string_view from, absl::string_view to) {
  EXPECT_EQ(from.size(), to.size());
  const std::string file = FileOf(SomeMap(KvMapVariant::kPerLayer));
  const std::string changed = absl::StrReplaceAll(file, {{from, to}});
  EXPECT_NE(file, changed) << from;
  return ErrorOf(changed);
}

class KvMapFile : public testing::TestWithParam<KvMapVariant> {};

TEST_P(KvMapFile, ComesBackAsItWas) {
  const KvMap map = SomeMap(GetParam());
  const std::string file = FileOf(map);
  const absl::StatusOr<KvMap> read = ParseKvMap(file, "m.safetensors");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(FileOf(*read), file);
  EXPECT_EQ(read->info.source, map.info.source);
  EXPECT_EQ(read->info.target, map.info.target);
  EXPECT_EQ(read->info.kv_layout, map.info.kv_layout);
  EXPECT_EQ(read->info.variant, GetParam());
  EXPECT_EQ(read->info.rank, map.info.rank);
  EXPECT_EQ(read->info.tokens, map.info.tokens);
  EXPECT_EQ(read->info.direct.kl, 0.5);
  EXPECT_EQ(read->info.mapped.flips, 0.015625);
  ASSERT_EQ(read->layers.size(), 2u);
  EXPECT_EQ(read->layers[1].bias, map.layers[1].bias);
  EXPECT_EQ(read->layers[1].weight, map.layers[1].weight);
  EXPECT_EQ(read->layers[1].down, map.layers[1].down);
  EXPECT_EQ(read->layers[1].up, map.layers[1].up);
  EXPECT_EQ(read->Name(), map.Name());
}

TEST_P(KvMapFile, IsRefusedWithoutAnyOneOfItsBytesAtTheEnd) {
  const std::string file = FileOf(SomeMap(GetParam()));
  for (size_t size = 0; size < file.size(); size += 7) {
    EXPECT_FALSE(ParseKvMap(absl::string_view(file).substr(0, size), "m").ok()) << size;
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, KvMapFile,
                         testing::Values(KvMapVariant::kPerLayer, KvMapVariant::kPerHead,
                                         KvMapVariant::kLowRank),
                         [](const auto& info) {
                           return std::string(KvMapVariantName(info.param));
                         });

TEST(KvMap, NamesTheFieldThatIsWrong) {
  EXPECT_THAT(ErrorAfter("\"format\":\"carryover-kv-map-1\"", "\"format\":\"carryover-kv-map-2\""),
              HasSubstr("'format'"));
  EXPECT_THAT(ErrorAfter("\"lambda\"", "\"lambdo\""), HasSubstr("'lambda' is missing"));
  EXPECT_THAT(ErrorAfter("\"source\":\"01", "\"source\":\"0X"), HasSubstr("'source'"));
  EXPECT_THAT(ErrorAfter("\"source\":\"01", "\"source\":\"0A"), HasSubstr("'source'"));
  EXPECT_THAT(ErrorAfter("\"layers\":\"2\"", "\"layers\":\"0\""), HasSubstr("'layers'"));
  EXPECT_THAT(ErrorAfter("\"layers\":\"2\"", "\"layers\":\"3\""), HasSubstr("4 tensors"));
  EXPECT_THAT(ErrorAfter("\"head_dim\":\"2\"", "\"head_dim\":\"3\""), HasSubstr("'head_dim'"));
  EXPECT_THAT(ErrorAfter("\"head_dim\":\"2\"", "\"head_dim\":\"4\""),
              AllOf(HasSubstr("'layers.0.bias' is (8), not (16)")));
  EXPECT_THAT(ErrorAfter("\"kv_heads\":\"2\"", "\"kv_heads\":\"-\""), HasSubstr("'kv_heads'"));
  EXPECT_THAT(ErrorAfter("\"variant\":\"per_layer\"", "\"variant\":\"per_lager\""),
              HasSubstr("'variant'"));
  EXPECT_THAT(ErrorAfter("\"rank\":\"0\"", "\"rank\":\"3\""), HasSubstr("'rank' is 3"));
  EXPECT_THAT(ErrorAfter("\"lambda\":\"0.001\"", "\"lambda\":\"  nan\""), HasSubstr("'lambda'"));
  EXPECT_THAT(ErrorAfter("\"direct_tv\":\"0.25\"", "\"direct_tv\":\"-.25\""),
              HasSubstr("'direct_tv'"));
  EXPECT_THAT(ErrorAfter("\"texts\":\"10\"", "\"texts\":\"-1\""), HasSubstr("'texts'"));
  EXPECT_THAT(ErrorAfter("layers.1.bias", "layers.9.bias"),
              HasSubstr("'layers.1.bias' is missing"));
}

TEST(KvMap, RefusesWhatIsNoMap) {
  const std::vector<float> values(2, 0);
  EXPECT_THAT(ErrorOf(WriteSafetensors({}, {{{"x", {2}, values}}})), HasSubstr("not a KV map"));
  std::map<std::string, std::string> metadata;
  KvMap map = SomeMap(KvMapVariant::kPerLayer);
  const std::string file = FileOf(map);
  ASSERT_TRUE(ParseSafetensors(file, "m", &metadata).ok());
  metadata["note"] = "hello";
  std::vector<NamedTensor> tensors;
  for (int i = 0; i < 2; ++i) {
    tensors.push_back({absl::StrCat("layers.", i, ".bias"), {8}, map.layers[i].bias});
    tensors.push_back({absl::StrCat("layers.", i, ".weight"), {8, 8}, map.layers[i].weight});
  }
  EXPECT_THAT(ErrorOf(WriteSafetensors(metadata, tensors)), HasSubstr("unknown field 'note'"));
  metadata.erase("note");
  EXPECT_TRUE(ParseKvMap(WriteSafetensors(metadata, tensors), "m").ok());
  map.layers[1].weight[5] = std::numeric_limits<float>::infinity();
  EXPECT_THAT(ErrorOf(WriteSafetensors(metadata, tensors)),
              HasSubstr("'layers.1.weight' has a value that is not finite"));
}

TEST(KvMap, WritesOnlyWhatCanBeRead) {
  KvMap map = SomeMap(KvMapVariant::kPerLayer);
  map.layers[1].bias[2] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(std::string(WriteKvMap(map).status().message()), HasSubstr("layers.1.bias"));
  map = SomeMap(KvMapVariant::kPerLayer);
  map.layers[0].weight.pop_back();
  EXPECT_THAT(std::string(WriteKvMap(map).status().message()), HasSubstr("layers.0.weight"));
  map = SomeMap(KvMapVariant::kPerLayer);
  map.layers.pop_back();
  EXPECT_EQ(WriteKvMap(map).status().code(), absl::StatusCode::kInvalidArgument);
  map = SomeMap(KvMapVariant::kPerLayer);
  map.info.mapped.kl = std::numeric_limits<double>::infinity();
  EXPECT_THAT(std::string(WriteKvMap(map).status().message()), HasSubstr("'mapped_kl'"));
}

TEST(KvMap, ItsNameIsOfWhatChangesBlocks) {
  const KvMap map = SomeMap(KvMapVariant::kPerLayer);
  EXPECT_EQ(map.Name().size(), 64u);
  KvMap other = map;
  other.info.mapped.tv = 0;
  other.info.lambda = 2;
  EXPECT_EQ(other.Name(), map.Name());
  other = map;
  other.layers[1].weight[63] += 1;
  EXPECT_NE(other.Name(), map.Name());
  other = map;
  other.info.target[0] ^= 1;
  EXPECT_NE(other.Name(), map.Name());
  other = map;
  other.info.source[0] ^= 1;
  EXPECT_NE(other.Name(), map.Name());
}

// Every output of a head reads that head's K and V and no other's.
TEST(KvMap, APerHeadMapIsBlockDiagonal) {
  const KvMap map = SomeMap(KvMapVariant::kPerHead);
  const std::vector<float> dense = map.Weight(1);
  ASSERT_EQ(dense.size(), 64u);
  // Rows and columns: K of head 0, K of head 1, V of head 0, V of head 1, two values each.
  const auto head_of = [](int i) { return i / 2 % 2; };
  const auto within = [](int i) { return i % 2 + (i < 4 ? 0 : 2); };
  for (int row = 0; row < 8; ++row) {
    for (int col = 0; col < 8; ++col) {
      const float want =
          head_of(row) != head_of(col)
              ? 0
              : map.layers[1].weight[head_of(row) * 16 + within(row) * 4 + within(col)];
      EXPECT_EQ(dense[row * 8 + col], want) << row << " " << col;
    }
  }
}

TEST(KvMap, WritesItsWeightsOut) {
  const KvMap layer_map = SomeMap(KvMapVariant::kPerLayer);
  EXPECT_EQ(layer_map.Weight(1), layer_map.layers[1].weight);
  const KvMap low = SomeMap(KvMapVariant::kLowRank);
  const KvMapLayer& layer = low.layers[0];
  const std::vector<float> dense = low.Weight(0);
  ASSERT_EQ(dense.size(), 64u);
  for (int row = 0; row < 8; ++row) {
    for (int col = 0; col < 8; ++col) {
      double want = 0;
      for (int r = 0; r < 3; ++r) want += double{layer.up[row * 3 + r]} * layer.down[r * 8 + col];
      EXPECT_NEAR(dense[row * 8 + col], want, 1e-5) << row << " " << col;
    }
  }
}

TEST(KvMap, IsRefusedByOtherVersions) {
  const KvMap map = SomeMap(KvMapVariant::kPerLayer);
  const KvMapIdentity fits = {map.info.source, map.info.target, map.info.kv_layout, 2, 2, 2};
  EXPECT_TRUE(CheckKvMapFits(map, fits).ok());
  const auto problem = [&](auto change) {
    KvMapIdentity identity = fits;
    change(&identity);
    const absl::Status status = CheckKvMapFits(map, identity);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    return std::string(status.message());
  };
  EXPECT_THAT(problem([](KvMapIdentity* i) { i->source[0] = 9; }),
              AllOf(HasSubstr("source is 0101"), HasSubstr("not 0901"), Not(HasSubstr("target"))));
  EXPECT_THAT(problem([](KvMapIdentity* i) { i->target[0] = 9; }), HasSubstr("target is abab"));
  EXPECT_THAT(problem([](KvMapIdentity* i) { i->kv_layout[0] = 9; }),
              HasSubstr("kv_layout_sha256 is 0303"));
  EXPECT_THAT(problem([](KvMapIdentity* i) { i->layers = 3; }), HasSubstr("layers is 2, not 3"));
  EXPECT_THAT(problem([](KvMapIdentity* i) { i->kv_heads = 3, i->head_dim = 4; }),
              AllOf(HasSubstr("kv_heads is 2, not 3"), HasSubstr("head_dim is 2, not 4")));
}

TEST(KvMap, IsReadFromAFile) {
  const std::string path = testing::TempDir() + "/carryover-kv-map-test.safetensors";
  const KvMap map = SomeMap(KvMapVariant::kLowRank);
  ASSERT_TRUE(WriteFileAtomically(path, FileOf(map)).ok());
  const absl::StatusOr<KvMap> read = ReadKvMap(path);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->Name(), map.Name());
  EXPECT_EQ(ReadKvMap(path + ".not").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace carryover
