// A read-only memory-mapped file. Thread-safe once open.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carryover {

class MappedFile {
 public:
  // NOT_FOUND when there is no such file, INVALID_ARGUMENT when it is not a regular file or is
  // empty, INTERNAL when it cannot be read. The message names the path.
  static absl::StatusOr<MappedFile> Open(const std::string& path);

  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  absl::string_view bytes() const { return {static_cast<const char*>(data_), size_}; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  void* data_ = nullptr;
  size_t size_ = 0;
};

// The whole of a small text file. INVALID_ARGUMENT when it is larger than max_bytes.
absl::StatusOr<std::string> ReadFile(const std::string& path, size_t max_bytes);

}  // namespace carryover
