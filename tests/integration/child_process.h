// A program in a process of its own, for one test, and a folder for what it reads and writes.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace carryover {

// A file's bytes; "" when there is none.
std::string ReadAll(const std::string& path);

class ChildProcess {
 public:
  ChildProcess();   // makes the folder; fails the test where that is not possible
  ~ChildProcess();  // kills it, and removes the folder
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  const std::string& folder() const { return folder_; }
  // Once. Its output goes to files of the folder, which may be the same. `settings` ("NAME=value")
  // go before what the environment has. False when there is no such program.
  bool Start(const std::string& program, const std::vector<std::string>& args,
             const std::string& output, const std::string& errors,
             const std::vector<std::string>& settings = {});

  void Signal(int number) const;
  bool running();
  // The exit status, 128 and the number where a signal ended it, or -1 when it still runs after so
  // long.
  int Wait(double seconds);
  // What a file of the folder holds.
  std::string Read(const std::string& file) const { return ReadAll(folder_ + "/" + file); }

 private:
  pid_t pid_ = -1;
  int status_ = -1;
  std::string folder_;
};

}  // namespace carryover
