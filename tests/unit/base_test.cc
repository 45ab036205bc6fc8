#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "base/hash.h"
#include "base/mapped_file.h"
#include "base/utf8.h"

namespace carryover {
namespace {

TEST(Sha256, MatchesTheStandardsExample) {
  // FIPS 180-2, appendix B.1.
  EXPECT_EQ(ToHex(Sha256("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(Hasher, FieldBordersCount) {
  EXPECT_NE(Hasher().Add("ab").Add("c").Finish(), Hasher().Add("a").Add("bc").Finish());
}

TEST(Utf8, FindsTheFirstBadByte) {
  EXPECT_EQ(FirstInvalidUtf8("naïve 日本 😀"), std::string("naïve 日本 😀").size());
  EXPECT_EQ(FirstInvalidUtf8("a\xC0\xAF"), 1u);         // overlong
  EXPECT_EQ(FirstInvalidUtf8("\xED\xA0\x80"), 0u);      // surrogate
  EXPECT_EQ(FirstInvalidUtf8("\xF4\x90\x80\x80"), 0u);  // above U+10FFFF
  EXPECT_EQ(FirstInvalidUtf8("ok\xE6\x97"), 2u);        // cut
}

TEST(Utf8, HoldsBackOnlyWhatCanStillBecomeACharacter) {
  EXPECT_EQ(IncompleteUtf8Suffix("a\xE6\x97"), 2u);
  EXPECT_EQ(IncompleteUtf8Suffix("a\xF0\x9F\x98"), 3u);
  EXPECT_EQ(IncompleteUtf8Suffix("日"), 0u);
  EXPECT_EQ(IncompleteUtf8Suffix("a\x80"), 0u);
  EXPECT_EQ(IncompleteUtf8Suffix("a\xE0\x80"), 0u);  // never valid
}

TEST(Utf8, ReplacesMaximalSubparts) {
  EXPECT_EQ(ReplaceInvalidUtf8("a\xE6\x97z"), "a\uFFFDz");
  EXPECT_EQ(ReplaceInvalidUtf8("\xC0\xAF"), "\uFFFD\uFFFD");
}

// A page that is gone ends the process, unless somebody sees to it.
TEST(MappedFile, AFileThatIsCutShortReadsAsZerosAndSaysSo) {
  const std::string path = absl::StrCat(testing::TempDir(), "/carryover-mapped-", getpid());
  constexpr size_t kPage = 65536;  // the largest in use
  std::ofstream(path) << std::string(3 * kPage, 'x');
  const auto file = MappedFile::Open(path);
  const auto other = MappedFile::Open(path);
  ASSERT_TRUE(file.ok() && other.ok());
  EXPECT_EQ(file->bytes()[3 * kPage - 1], 'x');
  EXPECT_TRUE(file->CheckUnchanged().ok());
  std::filesystem::resize_file(path, kPage);
  EXPECT_EQ(file->bytes()[0], 'x');
  EXPECT_EQ(file->bytes()[2 * kPage], '\0');
  EXPECT_EQ(file->bytes()[3 * kPage - 1], '\0');
  EXPECT_EQ(file->CheckUnchanged().code(), absl::StatusCode::kDataLoss);
  // Long enough again, and all the same not what was read.
  std::filesystem::resize_file(path, 3 * kPage);
  EXPECT_EQ(file->CheckUnchanged().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(other->CheckUnchanged().code(), absl::StatusCode::kDataLoss);
  std::filesystem::remove(path);
}

TEST(MappedFileDeathTest, OtherBusErrorsStayWhatTheyAre) {
  const std::string path = absl::StrCat(testing::TempDir(), "/carryover-bus-", getpid());
  std::ofstream(path) << std::string(65536, 'x');
  const auto file = MappedFile::Open(path);
  ASSERT_TRUE(file.ok());
  EXPECT_DEATH(raise(SIGBUS), "");
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace carryover
