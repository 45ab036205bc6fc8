// A sink for a caller that waits: collects a request of one choice.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "engine/request.h"

namespace carryover {

class WaitingSink final : public CompletionSink {
 public:
  struct Answer {
    std::string text;
    std::vector<int32_t> token_ids;
    ChoiceFinish finish;
    CompletionDone done;
  };

  void OnStart(const std::string&, const Usage& usage, const CacheInfo&) override {
    Update(usage.cached_tokens);
  }
  void OnPrefillProgress(int done_tokens, int) override { Update(done_tokens); }
  void OnPromptLogprobs(std::vector<PositionLogprobs>) override {}
  void OnDelta(ChoiceDelta delta) override {
    MutexLock lock(&mutex_);
    answer_.text += delta.text;
    answer_.token_ids.insert(answer_.token_ids.end(), delta.token_ids.begin(),
                             delta.token_ids.end());
  }
  void OnFinish(const ChoiceFinish& finish) override {
    MutexLock lock(&mutex_);
    answer_.finish = finish;
  }
  void OnDone(const CompletionDone& done) override {
    MutexLock lock(&mutex_);
    answer_.done = done;
    ended_ = true;
    changed_.SignalAll();
  }

  // Waits a little, for progress or the end. True once the request has ended. tokens: of the
  // prompt, that are computed.
  bool Wait(int* tokens) {
    MutexLock lock(&mutex_);
    if (!ended_) changed_.WaitUntil(&mutex_, std::chrono::steady_clock::now() + kPatience);
    *tokens = tokens_;
    return ended_;
  }
  // REQUIRES: Wait returned true.
  Answer answer() {
    MutexLock lock(&mutex_);
    return answer_;
  }

 private:
  static constexpr auto kPatience = std::chrono::milliseconds(50);

  void Update(int tokens) {
    MutexLock lock(&mutex_);
    tokens_ = tokens;
    changed_.SignalAll();
  }

  Mutex mutex_;
  CondVar changed_;
  int tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  Answer answer_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace carryover
