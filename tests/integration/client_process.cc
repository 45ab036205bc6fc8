#include "tests/integration/client_process.h"

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

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

extern char** environ;

namespace carryover {
namespace {

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

std::unique_ptr<ClientProcess> ClientProcess::Start(const ServerProcess& server,
                                                    const std::vector<std::string>& args) {
  auto client = std::unique_ptr<ClientProcess>(new ClientProcess);
  std::string folder =
      (std::filesystem::temp_directory_path() / "carryover-client-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) {
    ADD_FAILURE() << "no folder for a client";
    return nullptr;
  }
  client->folder_ = folder;
  std::vector<std::string> words = {CARRYOVER_CLIENT};
  words.insert(words.end(), args.begin(), args.end());
  std::vector<std::string> settings = {absl::StrCat("CARRYOVER_ADDRESS=", server.address()),
                                       absl::StrCat("CARRYOVER_ADMIN=", server.admin_address())};
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (!absl::StartsWith(*entry, "CARRYOVER_A")) settings.push_back(*entry);
  }
  std::vector<char*> argv, environment;
  for (std::string& word : words) argv.push_back(word.data());
  for (std::string& setting : settings) environment.push_back(setting.data());
  argv.push_back(nullptr);
  environment.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  constexpr int kNew = O_WRONLY | O_CREAT | O_APPEND;
  posix_spawn_file_actions_addopen(&actions, 1, (folder + "/out").c_str(), kNew, 0600);
  posix_spawn_file_actions_addopen(&actions, 2, (folder + "/err").c_str(), kNew, 0600);
  const int error = posix_spawn(&client->pid_, CARRYOVER_CLIENT, &actions, nullptr, argv.data(),
                                environment.data());
  posix_spawn_file_actions_destroy(&actions);
  if (error == 0) return client;
  client->pid_ = -1;
  ADD_FAILURE() << CARRYOVER_CLIENT << " does not start: " << error;
  return nullptr;
}

ClientProcess::~ClientProcess() {
  if (running()) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  std::filesystem::remove_all(folder_);
}

void ClientProcess::Signal(int number) const {
  if (pid_ > 0) kill(pid_, number);
}

bool ClientProcess::running() {
  if (pid_ <= 0) return false;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return true;
  pid_ = -1;
  status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return false;
}

int ClientProcess::Wait(double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  while (running()) {
    if (std::chrono::duration<double>(Clock::now() - start).count() > seconds) return -1;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return status_;
}

std::string ClientProcess::out() const { return ReadAll(folder_ + "/out"); }
std::string ClientProcess::err() const { return ReadAll(folder_ + "/err"); }

ClientResult RunClient(const ServerProcess& server, const std::vector<std::string>& args) {
  const auto client = ClientProcess::Start(server, args);
  if (client == nullptr) return {};
  const int code = client->Wait();
  return {code, client->out(), client->err()};
}

}  // namespace carryover
