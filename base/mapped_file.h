// A read-only memory-mapped file. Thread-safe once open.
//
// A file that somebody cuts short, or a disk that fails, would end the process with SIGBUS when a
// page is read that is no longer there. A handler puts zeros in its place instead, and
// CheckUnchanged tells.
#pragma once

#include <time.h>

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carryover {

class MappedFile {
 public:
  // NOT_FOUND when there is no such file, INVALID_ARGUMENT when it is not a regular file or is
  // empty, INTERNAL when it cannot be read, RESOURCE_EXHAUSTED when thousands are open. The message
  // names the path.
  static absl::StatusOr<MappedFile> Open(const std::string& path);

  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  absl::string_view bytes() const { return {static_cast<const char*>(data_), size_}; }
  const std::string& path() const { return path_; }

  // DATA_LOSS when the file was written to or cut short since Open, or could not be read: then what
  // was made of bytes() is to be thrown away.
  absl::Status CheckUnchanged() const;

 private:
  std::string path_;
  int fd_ = -1;
  void* data_ = nullptr;
  size_t size_ = 0;
  int guard_ = -1;  // among the ranges that the handler knows
  timespec modified_ = {};
};

// The whole of a small text file. INVALID_ARGUMENT when it is larger than max_bytes.
absl::StatusOr<std::string> ReadFile(const std::string& path, size_t max_bytes);

}  // namespace carryover
