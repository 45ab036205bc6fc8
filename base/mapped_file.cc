#include "base/mapped_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace carryover {
namespace {

// A mapped range that may lose its pages. Free where begin is 0.
struct Guard {
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};
  std::atomic<bool> lost{false};  // zeros stand for some of its pages
};
constexpr int kGuards = 8192;
Guard guards[kGuards];
struct sigaction previous_action;

// Zeros for the rest of the range, from the page that could not be read on.
bool FillWithZeros(Guard& guard, uintptr_t address) {
  const uintptr_t page = address & ~(static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)) - 1);
  guard.lost = true;
  return mmap(reinterpret_cast<void*>(page), guard.end - page, PROT_READ,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
}

// Calls only what a signal handler may call. What is not ours is left to the action that was there
// before: a fault happens again by itself, a signal that was sent has to be sent again.
void OnBusError(int number, siginfo_t* info, void*) {
  const bool fault = info->si_code > 0;
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  for (Guard& guard : guards) {
    if (!fault) break;
    const uintptr_t begin = guard.begin;
    if (begin != 0 && address >= begin && address < guard.end && FillWithZeros(guard, address)) {
      return;
    }
  }
  sigaction(SIGBUS, &previous_action, nullptr);
  if (!fault) raise(number);
}

// Index of a guard over the range, or -1.
int AddGuard(const void* data, size_t size) {
  static const bool installed = [] {
    struct sigaction action = {};
    action.sa_sigaction = OnBusError;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    return sigaction(SIGBUS, &action, &previous_action) == 0;
  }();
  if (!installed) return -1;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  for (int i = 0; i < kGuards; ++i) {
    uintptr_t none = 0;
    if (!guards[i].begin.compare_exchange_strong(none, begin)) continue;
    guards[i].lost = false;
    guards[i].end = begin + size;
    return i;
  }
  return -1;
}

}  // namespace

absl::StatusOr<MappedFile> MappedFile::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    const std::string reason = absl::StrCat(path, ": ", std::strerror(errno));
    return errno == ENOENT ? absl::NotFoundError(reason) : absl::InternalError(reason);
  }
  struct stat info;
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    close(fd);
    return absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file"));
  }
  if (info.st_size == 0) {
    close(fd);
    return absl::InvalidArgumentError(absl::StrCat(path, ": the file is empty"));
  }
  void* data = mmap(nullptr, info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
  if (data == MAP_FAILED) {
    const std::string reason = absl::StrCat(path, ": cannot map: ", std::strerror(errno));
    close(fd);
    return absl::InternalError(reason);
  }
  MappedFile file;
  file.path_ = path;
  file.fd_ = fd;
  file.data_ = data;
  file.size_ = info.st_size;
  file.modified_ = info.st_mtim;
  file.guard_ = AddGuard(data, file.size_);
  if (file.guard_ < 0) {
    return absl::ResourceExhaustedError(absl::StrCat(path, ": too many files are mapped"));
  }
  return file;
}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(guard_, other.guard_);
  std::swap(modified_, other.modified_);
  return *this;
}

MappedFile::~MappedFile() {
  // Before the range can become somebody else's.
  if (guard_ >= 0) {
    guards[guard_].end = 0;
    guards[guard_].begin = 0;
  }
  if (data_ != nullptr) munmap(data_, size_);
  if (fd_ >= 0) close(fd_);
}

absl::Status MappedFile::CheckUnchanged() const {
  if (data_ == nullptr) return absl::OkStatus();
  struct stat now;
  if (guards[guard_].lost || fstat(fd_, &now) != 0 || static_cast<size_t>(now.st_size) != size_ ||
      now.st_mtim.tv_sec != modified_.tv_sec || now.st_mtim.tv_nsec != modified_.tv_nsec) {
    return absl::DataLossError(
        absl::StrCat(path_, ": was changed, or could not be read, while it was being read"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadFile(const std::string& path, size_t max_bytes) {
  ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  if (file.bytes().size() > max_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", file.bytes().size(),
                                                   " bytes, more than the limit of ", max_bytes));
  }
  std::string content(file.bytes());
  RETURN_IF_ERROR(file.CheckUnchanged());
  return content;
}

}  // namespace carryover
