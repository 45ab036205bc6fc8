#include "engine/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"

namespace carryover {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string File(const std::string& header, const std::string& data) {
  std::string file(8, '\0');
  for (int i = 0; i < 8; ++i) file[i] = static_cast<char>(header.size() >> (8 * i));
  return file + header + data;
}

// Two tensors: a is (2, 3) F32 at 0, b is (4) BF16 behind it.
constexpr char kA[] = R"("a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]})";
constexpr char kB[] = R"("b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]})";

std::string Both(const std::string& a, const std::string& b) { return "{" + a + "," + b + "}"; }

std::string ErrorOf(const std::string& file) {
  const absl::StatusOr<TensorMap> parsed = ParseSafetensors(file, "x.safetensors");
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(parsed.status().message()), HasSubstr("x.safetensors: "));
  return std::string(parsed.status().message());
}

std::string ErrorOfEntry(const std::string& b) {
  return ErrorOf(File(Both(kA, b), std::string(32, 'x')));
}

TEST(Safetensors, GivesViewsOfTheData) {
  const std::string data = "aaaaaaaaaaaaaaaaaaaaaaaabbbbbbbb";
  const std::string file =
      File(std::string(R"({"__metadata__":{"format":"pt"},)") + kB + "," + kA + "}  ", data);
  const absl::StatusOr<TensorMap> tensors = ParseSafetensors(file, "x.safetensors");
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  ASSERT_EQ(tensors->size(), 2u);
  EXPECT_EQ(tensors->at("a").bytes, data.substr(0, 24));
  EXPECT_THAT(tensors->at("a").shape, ElementsAre(2, 3));
  EXPECT_EQ(tensors->at("a").dtype, DType::kF32);
  EXPECT_EQ(tensors->at("b").bytes, data.substr(24));
  EXPECT_EQ(tensors->at("b").dtype, DType::kBF16);
}

TEST(Safetensors, ChecksTheHeaderLength) {
  const std::string good = File(Both(kA, kB), std::string(32, 'x'));
  EXPECT_THAT(ErrorOf(good.substr(0, 7)), HasSubstr("8 bytes"));
  EXPECT_THAT(ErrorOf(good.substr(0, 8)), HasSubstr("header length"));
  std::string huge = good;
  for (int i = 0; i < 8; ++i) huge[i] = '\xff';
  EXPECT_THAT(ErrorOf(huge), HasSubstr("header length"));
  EXPECT_THAT(ErrorOf(File("", "")), HasSubstr("does not begin"));
  EXPECT_THAT(ErrorOf(File(" " + Both(kA, kB), std::string(32, 'x'))), HasSubstr("begin"));
  EXPECT_THAT(ErrorOf(File("{" + std::string(kA), std::string(24, 'x'))), HasSubstr("JSON"));
}

TEST(Safetensors, ATruncatedFileNamesTheTensorThatIsCut) {
  const std::string good = File(Both(kA, kB), std::string(32, 'x'));
  EXPECT_THAT(ErrorOf(good.substr(0, good.size() - 1)), HasSubstr("tensor 'b'"));
  EXPECT_THAT(ErrorOf(good.substr(0, good.size() - 10)), HasSubstr("truncated"));
  EXPECT_THAT(ErrorOf(good + "x"), HasSubstr("1 unused bytes behind"));
}

TEST(Safetensors, ChecksOffsetsAgainstShapes) {
  const struct {
    const char* entry;
    const char* error;
  } cases[] = {
      {R"("b":{"dtype":"BF16","shape":[5],"data_offsets":[24,32]})", "tensor 'b' has 8 bytes"},
      {R"("b":{"dtype":"F32","shape":[4],"data_offsets":[24,32]})", "tensor 'b' has 8 bytes"},
      {R"("b":{"dtype":"BF16","shape":[4],"data_offsets":[32,24]})", "ends before it begins"},
      {R"("b":{"dtype":"BF16","shape":[4],"data_offsets":[16,24]})", "overlaps"},
      {R"("b":{"dtype":"BF16","shape":[2],"data_offsets":[28,32]})", "4 unused bytes before"},
      {R"("b":{"dtype":"BF16","shape":[0],"data_offsets":[24,24]})", "8 unused bytes behind"},
      {R"("b":{"dtype":"BF16","shape":[-4],"data_offsets":[24,32]})", "shape of tensor 'b'"},
      {R"("b":{"dtype":"BF16","shape":[4.0],"data_offsets":[24,32]})", "shape of tensor 'b'"},
      {R"("b":{"dtype":"BF16","shape":4,"data_offsets":[24,32]})", "shape of tensor 'b'"},
      {R"("b":{"dtype":"BF16","shape":[1,1,1,1,1,1,1,1,4],"data_offsets":[24,32]})", "shape of"},
      {R"("b":{"dtype":"BF16","shape":[4294967296,4294967296],"data_offsets":[24,32]})",
       "needs more"},
      {R"("b":{"dtype":"BF16","shape":[9223372036854775809,2],"data_offsets":[24,32]})",
       "needs more"},
      {R"("b":{"dtype":"BF16","shape":[4],"data_offsets":[24]})", "data_offsets of tensor 'b'"},
      {R"("b":{"dtype":"BF16","shape":[4],"data_offsets":[24,"32"]})", "data_offsets of tensor"},
      {R"("b":{"dtype":"BF16","shape":[4],"data_offsets":[24,18446744073709551615]})", "truncated"},
      {R"("b":{"dtype":"I8","shape":[8],"data_offsets":[24,32]})", "dtype I8"},
      {R"("b":{"dtype":7,"shape":[8],"data_offsets":[24,32]})", "has no dtype"},
      {R"("b":{"shape":[8],"data_offsets":[24,32]})", "has no dtype"},
      {R"("b":{"dtype":"BF16","data_offsets":[24,32]})", "shape of tensor 'b'"},
      {R"("b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32],"x":1})", "unknown field 'x'"},
      {R"("b":[])", "tensor 'b' is not an object"},
      {R"("a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]})", "'a' twice"},
      {R"("b":{"dtype":[[[[[1]]]]]})", "nested deeper"},
      {R"("__metadata__":{"format":1})", "__metadata__"},
  };
  for (const auto& test : cases) EXPECT_THAT(ErrorOfEntry(test.entry), HasSubstr(test.error));
}

TEST(Safetensors, AnIndexNamesFilesOfItsFolderOnly) {
  for (const char* name :
       {"../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "", ".x.safetensors",
        "a\\\\b.safetensors", "a\\u0000.safetensors", "x.bin"}) {
    const std::string index = absl::StrCat(R"({"weight_map":{"t":")", name, "\"}}");
    EXPECT_THAT(std::string(ParseShardIndex(index).status().message()),
                HasSubstr("model.safetensors.index.json: weight_map['t']"))
        << name;
  }
  for (const char* index : {"{}", "[]", "", "{\"weight_map\":{}}", "{\"weight_map\":[]}",
                            "{\"weight_map\":{\"t\":1}}"}) {
    EXPECT_FALSE(ParseShardIndex(index).ok()) << index;
  }
}

class SafetensorsFolder : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "/safetensors.XXXXXX";
    ASSERT_NE(mkdtemp(folder_.data()), nullptr);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void Write(const std::string& name, const std::string& bytes) {
    std::ofstream(folder_ + "/" + name, std::ios::binary) << bytes;
  }
  std::string Error() { return std::string(OpenCheckpoint(folder_).status().message()); }

  std::string folder_;
};

TEST_F(SafetensorsFolder, OpensOneFileOrShards) {
  EXPECT_THAT(Error(), HasSubstr("has neither"));

  Write("one.safetensors", File("{" + std::string(kA) + "}", std::string(24, 'a')));
  Write("two.safetensors", File(R"({"b":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}})", "bb"));
  const auto index = [this](const std::string& map) {
    Write("model.safetensors.index.json", R"({"weight_map":{)" + map + "}}");
  };
  index(R"("a":"one.safetensors","b":"two.safetensors")");
  absl::StatusOr<Checkpoint> sharded = OpenCheckpoint(folder_);
  ASSERT_TRUE(sharded.ok()) << sharded.status();
  EXPECT_EQ(sharded->tensors.at("b").bytes, "bb");
  EXPECT_EQ(sharded->tensors.at("b").file, "two.safetensors");

  index(R"("a":"one.safetensors")");
  EXPECT_TRUE(OpenCheckpoint(folder_).ok());
  index(R"("a":"one.safetensors","b":"three.safetensors")");
  EXPECT_THAT(Error(), HasSubstr("tensor 'b' is in three.safetensors, which is not there"));
  index(R"("a":"two.safetensors")");
  EXPECT_THAT(Error(), HasSubstr("tensor 'a' is not in two.safetensors"));
  index(R"("a":"one.safetensors","c":"two.safetensors")");
  EXPECT_THAT(Error(), HasSubstr("tensor 'c' is not in two.safetensors"));
  index(R"("a":"one.safetensors","b":"two.safetensors")");
  Write("two.safetensors", File("{" + std::string(kA) + "}", std::string(24, 'a')));
  EXPECT_THAT(Error(), HasSubstr("tensor 'a' is in both"));

  Write("model.safetensors",
        File(R"({"c":{"dtype":"F16","shape":[],"data_offsets":[0,2]}})", "cc"));
  absl::StatusOr<Checkpoint> single = OpenCheckpoint(folder_);
  ASSERT_TRUE(single.ok()) << single.status();
  EXPECT_EQ(single->tensors.at("c").bytes, "cc");
}

}  // namespace
}  // namespace carryover
