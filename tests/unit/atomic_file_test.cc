#include "base/atomic_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"

namespace carryover {
namespace {

namespace fs = std::filesystem;

std::string Read(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

TEST(AtomicFileTest, ReplacesTheWholeAndLeavesNothingBeside) {
  const fs::path folder = fs::path(testing::TempDir()) / absl::StrCat("atomic-", getpid());
  fs::create_directory(folder);
  const std::string path = folder / "state";
  ASSERT_TRUE(WriteFileAtomically(path, std::string(100000, 'a')).ok());
  ASSERT_TRUE(WriteFileAtomically(path, "short").ok());
  EXPECT_EQ(Read(path), "short");
  struct stat info;
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), fs::directory_iterator()), 1);

  // A folder stands where the file should: nothing is replaced, nothing is left.
  const std::string blocked = folder / "blocked";
  fs::create_directories(blocked + "/full");
  const absl::Status status = WriteFileAtomically(blocked, "x");
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_NE(status.message().find(blocked), absl::string_view::npos) << status;
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), fs::directory_iterator()), 2);
  EXPECT_FALSE(WriteFileAtomically(folder / "none" / "state", "x").ok());
  fs::remove_all(folder);
}

}  // namespace
}  // namespace carryover
