// Keeps the gate's state in a file over a restart. What is wrong with the file or the disk is told
// in the log and never stops the server from serving. Made, started and finished by one thread; it
// saves on a thread of its own, and only copying the state takes the engine's time.
#pragma once

#include <cstddef>
#include <string>
#include <thread>

#include "base/mutex.h"
#include "engine/engine.h"

namespace carryover {

struct GateStateFileOptions {
  std::string path;
  double interval_seconds = 60;  // between saves while only samples come
  size_t max_bytes = 0;          // of a file that is read
};

class GateStateFile {
 public:
  // engine outlives it.
  GateStateFile(GateStateFileOptions options, Engine* engine);
  // Without Finish, what is not saved yet is lost.
  ~GateStateFile();
  GateStateFile(const GateStateFile&) = delete;
  GateStateFile& operator=(const GateStateFile&) = delete;

  // Once the versions are loaded and before requests are served. A file that cannot be used is
  // renamed to PATH.refused, over one of that name.
  void Restore();
  // Saves from now on: soon after a change of state, and in intervals while there are samples.
  void Start();
  // Ends that, and saves once more. REQUIRES: the engine drains.
  void Finish();

 private:
  void Refuse(absl::string_view reason);
  bool Save();  // whether it is on the disk
  void Work();
  void Stop();

  const GateStateFileOptions options_;
  Engine* const engine_;
  GateActivity saved_;  // what the file knows of; the thread's while it runs
  bool failing_ = false;

  Mutex mutex_;
  CondVar wake_;
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace carryover
