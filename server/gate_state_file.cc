#include "server/gate_state_file.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/atomic_file.h"
#include "base/log.h"
#include "base/mapped_file.h"

namespace carryover {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kTick = std::chrono::milliseconds(500);
// Copying the state is a pause for users: it may take a hundredth of the time, however often the
// gate changes.
constexpr double kPause = 100;
constexpr double kRetrySeconds = 10;  // of a save that failed

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

GateStateFile::GateStateFile(GateStateFileOptions options, Engine* engine)
    : options_(std::move(options)), engine_(engine) {}

GateStateFile::~GateStateFile() { Stop(); }

void GateStateFile::Restore() {
  const absl::StatusOr<std::string> bytes = ReadFile(options_.path, options_.max_bytes);
  if (absl::IsNotFound(bytes.status())) {
    LogInfo("gate_state_new", {{"file", options_.path}});
    return;
  }
  if (!bytes.ok()) return Refuse(bytes.status().message());
  const absl::Status restored = engine_->RestoreGate(*bytes);
  if (!restored.ok()) return Refuse(restored.message());
  LogInfo("gate_restored", {{"file", options_.path},
                            {"cells", engine_->ReportGate().size()},
                            {"overrides", engine_->ListGateRules().size()}});
}

void GateStateFile::Refuse(absl::string_view reason) {
  const std::string aside = absl::StrCat(options_.path, ".refused");
  const bool kept = std::rename(options_.path.c_str(), aside.c_str()) == 0;
  const std::string where =
      kept ? aside : absl::StrCat("nowhere, it will be replaced: ", std::strerror(errno));
  LogWarning("gate_state_refused", {{"file", options_.path},
                                    {"reason", reason},
                                    {"kept_as", where},
                                    {"effect", "all cells start to learn, overrides are gone"}});
}

void GateStateFile::Start() {
  thread_ = std::thread([this] { Work(); });
}

void GateStateFile::Work() {
  Clock::time_point soon = Clock::now(), later = soon;
  while (true) {
    {
      MutexLock lock(&mutex_);
      if (!stopping_) wake_.WaitUntil(&mutex_, Clock::now() + kTick);
      if (stopping_) return;
    }
    const GateActivity now = engine_->gate_activity();
    const Clock::time_point begin = Clock::now();
    const bool changed = now.changes != saved_.changes && begin >= soon;
    const bool sampled = now.samples != saved_.samples && begin >= later;
    if (!changed && !sampled) continue;
    const bool ok = Save();
    const Clock::time_point end = Clock::now();
    const auto after = [&](double seconds) {
      return end + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(
                       std::max(seconds, kPause * Seconds(end - begin))));
    };
    soon = after(ok ? 0 : kRetrySeconds);
    later = after(ok ? options_.interval_seconds : kRetrySeconds);
  }
}

bool GateStateFile::Save() {
  // Asked before the state is taken: what comes in between is saved twice rather than never.
  const GateActivity activity = engine_->gate_activity();
  const absl::Status written = WriteFileAtomically(options_.path, engine_->SaveGate());
  if (written.ok()) {
    saved_ = activity;
    if (failing_) LogInfo("gate_state_saved_again", {{"file", options_.path}});
  } else {
    LogWarning("gate_state_not_saved",
               {{"reason", written.message()},
                {"effect", "a restart now would lose what was learned since the last save"}});
  }
  failing_ = !written.ok();
  return written.ok();
}

void GateStateFile::Finish() {
  Stop();
  Save();  // whatever the counts say: comparisons that the drain drops may still be under way
}

void GateStateFile::Stop() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    wake_.Signal();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace carryover
