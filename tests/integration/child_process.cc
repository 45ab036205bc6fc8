#include "tests/integration/child_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

extern char** environ;

namespace carryover {

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

ChildProcess::ChildProcess() {
  folder_ = (std::filesystem::temp_directory_path() / "carryover-test-XXXXXX").string();
  if (mkdtemp(folder_.data()) == nullptr) {
    folder_.clear();
    ADD_FAILURE() << "no folder for a process";
  }
}

ChildProcess::~ChildProcess() {
  if (running()) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  if (!folder_.empty()) std::filesystem::remove_all(folder_);
}

bool ChildProcess::Start(const std::string& program, const std::vector<std::string>& args,
                         const std::string& output, const std::string& errors,
                         const std::vector<std::string>& settings) {
  std::vector<char*> argv = {const_cast<char*>(program.c_str())}, environment;
  for (const std::string& arg : args) argv.push_back(const_cast<char*>(arg.c_str()));
  argv.push_back(nullptr);
  // Of two settings of one name getenv finds the first.
  for (const std::string& setting : settings) {
    environment.push_back(const_cast<char*>(setting.c_str()));
  }
  for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
  environment.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  constexpr int kNew = O_WRONLY | O_CREAT | O_APPEND;
  posix_spawn_file_actions_addopen(&actions, 1, (folder_ + "/" + output).c_str(), kNew, 0600);
  posix_spawn_file_actions_addopen(&actions, 2, (folder_ + "/" + errors).c_str(), kNew, 0600);
  const int error =
      posix_spawn(&pid_, program.c_str(), &actions, nullptr, argv.data(), environment.data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) pid_ = -1;
  return error == 0;
}

void ChildProcess::Signal(int number) const {
  if (pid_ > 0) kill(pid_, number);
}

bool ChildProcess::running() {
  if (pid_ <= 0) return false;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return true;
  pid_ = -1;
  status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return false;
}

int ChildProcess::Wait(double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  while (running()) {
    if (std::chrono::duration<double>(Clock::now() - start).count() > seconds) return -1;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return status_;
}

}  // namespace carryover
