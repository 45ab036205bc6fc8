#include "server/server_main.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "server/config.h"
#include "server/engine_collector.h"
#include "server/server.h"

namespace carryover {
namespace {

constexpr char kHelp[] = R"(Usage: carryover-server --config FILE [options]

Serves language models over gRPC and carries their KV caches over a model update.

  --config FILE          configuration, a carryover.v1.ServerConfig in protobuf text format
  --check                check the configuration, print it with all defaults, and exit
  --addresses-file FILE  once ready, write the addresses to FILE, one NAME ADDRESS a line
  --version              print the version and exit
  --help                 print this and exit

SIGTERM or SIGINT drains: new requests are refused, running ones finish, then it exits with 0.
A second signal exits at once.

A configuration that serves one model:

  load { model: "demo" version: "2026-10" path: "models/demo/2026-10" }

One where the update reuses the caches of the version before it:

  load { model: "demo" version: "2026-10" path: "models/demo/2026-10" }
  load { model: "demo" version: "2026-11" path: "models/demo/2026-11"
         carry_from: "2026-10" promote: 100 }
  cache { when_learning: CARRY }

Every field is documented in proto/carryover/v1/config.proto. Addresses without other settings:
completions 127.0.0.1:50051, admin 127.0.0.1:50052, http 127.0.0.1:8080.

On a GPU, where this program was built with CUDA:

  engine { backend: CUDA kv_cache_bytes: 17179869184 }
)";

struct Flags {
  std::string config;
  std::string addresses_file;
  bool check = false;
  bool help = false;
  bool version = false;
};

absl::StatusOr<Flags> ParseFlags(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    const absl::string_view arg = argv[i];
    // --name VALUE or --name=VALUE; false when arg is not this flag.
    absl::Status missing;
    const auto value_of = [&](absl::string_view name, std::string* value) {
      if (arg == name) {
        if (i + 1 >= argc) {
          missing = absl::InvalidArgumentError(absl::StrCat(name, " needs a value"));
        } else {
          *value = argv[++i];
        }
        return true;
      }
      if (absl::StartsWith(arg, absl::StrCat(name, "="))) {
        *value = std::string(arg.substr(name.size() + 1));
        return true;
      }
      return false;
    };
    if (arg == "--check") {
      flags.check = true;
    } else if (arg == "--help" || arg == "-h") {
      flags.help = true;
    } else if (arg == "--version") {
      flags.version = true;
    } else if (!value_of("--config", &flags.config) &&
               !value_of("--addresses-file", &flags.addresses_file)) {
      return absl::InvalidArgumentError(absl::StrCat("unknown argument: ", arg));
    }
    RETURN_IF_ERROR(missing);
  }
  if (flags.config.empty() && !flags.help && !flags.version) {
    return absl::InvalidArgumentError("--config is missing");
  }
  return flags;
}

// SIGTERM and SIGINT, taken by one thread of its own. REQUIRES: made before any other thread, so
// that all of them inherit the blocked mask.
class Signals {
 public:
  Signals() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGTERM);
    sigaddset(&set_, SIGINT);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
    signal(SIGPIPE, SIG_IGN);
    std::thread([this] { Watch(); }).detach();
  }

  // Waits for the first signal.
  void Wait() {
    MutexLock lock(&mutex_);
    while (!received_) changed_.Wait(&mutex_);
  }
  // From now on the first signal no longer ends the process.
  void SetReady() { ready_ = true; }

 private:
  void Watch() {
    for (int count = 0;; ++count) {
      int number = 0;
      sigwait(&set_, &number);
      if (count > 0 || !ready_) {
        LogWarning("exit_now", {{"signal", number}});
        _exit(128 + number);
      }
      MutexLock lock(&mutex_);
      received_ = true;
      changed_.SignalAll();
    }
  }

  sigset_t set_;
  std::atomic<bool> ready_{false};
  Mutex mutex_;
  CondVar changed_;
  bool received_ GUARDED_BY(mutex_) = false;
};

// Written under another name first, so that who waits for the file finds it whole.
absl::Status WriteAddresses(const std::string& path, const ServerAddresses& addresses) {
  const std::string temporary = absl::StrCat(path, ".", getpid());
  {
    std::ofstream file(temporary);
    file << "completions " << addresses.completions << "\nadmin " << addresses.admin << "\nhttp "
         << addresses.http << "\n";
    if (!file.flush()) return absl::InternalError(absl::StrCat("cannot write ", temporary));
  }
  std::error_code error;
  std::filesystem::rename(temporary, path, error);
  if (error) return absl::InternalError(absl::StrCat("cannot write ", path, ": ", error.message()));
  return absl::OkStatus();
}

// A connection is an open file, and the usual soft limit of 1024 is few. When files run out, gRPC
// 1.51 never accepts a connection again, so the limit of memory has to be reached before.
void RaiseOpenFiles(int64_t connection_memory_bytes) {
  constexpr int64_t kIdleConnectionBytes = 8 << 10;  // about, as measured
  constexpr int64_t kOtherFiles = 256;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  const int64_t needed = connection_memory_bytes / kIdleConnectionBytes + kOtherFiles;
  if (limit.rlim_cur < static_cast<rlim_t>(needed)) {
    LogWarning("few_open_files",
               {{"limit", static_cast<int64_t>(limit.rlim_cur)},
                {"needed", needed},
                {"remedy", "raise ulimit -n, or lower limits.connection_memory_bytes"}});
  }
}

// The ops that the configuration asks for; null where this program has none such.
const Ops* ChooseOps(const v1::ServerConfig& config, const ServerBackends& backends) {
  if (config.engine().backend() == v1::EngineConfig::CPU) return &CpuOps();
  return backends.cuda == nullptr ? nullptr : &backends.cuda();
}

absl::Status Serve(const Flags& flags, const v1::ServerConfig& config, const Ops& ops,
                   Signals* signals) {
  FidelityMetricsOptions fidelity;
  fidelity.ladder.assign(config.fidelity().gate().ladder().begin(),
                         config.fidelity().gate().ladder().end());
  fidelity.tasks.assign(config.fidelity().tasks().begin(), config.fidelity().tasks().end());
  auto observer = std::make_unique<PrometheusObserver>(fidelity);
  ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                   Engine::Create(ToEngineOptions(config), ops, observer.get()));
  LogInfo("backend", {{"name", ops.name}});
  ASSIGN_OR_RETURN(std::unique_ptr<Server> server,
                   Server::Start(config, std::move(observer), std::move(engine)));
  RETURN_IF_ERROR(server->LoadVersions());
  signals->SetReady();
  server->Open();
  const ServerAddresses& addresses = server->addresses();
  LogInfo("ready", {{"completions", addresses.completions},
                    {"admin", addresses.admin},
                    {"http", addresses.http}});
  if (!flags.addresses_file.empty())
    RETURN_IF_ERROR(WriteAddresses(flags.addresses_file, addresses));
  signals->Wait();
  const bool clean = server->Drain();
  server.reset();
  LogInfo("stopped", {{"all_finished", clean ? "yes" : "no"}});
  return absl::OkStatus();
}

}  // namespace

int ServerMain(int argc, char** argv, const ServerBackends& backends) {
  const absl::StatusOr<Flags> flags = ParseFlags(argc, argv);
  if (!flags.ok()) {
    std::cerr << "carryover-server: " << flags.status().message() << "\nTry --help.\n";
    return 2;
  }
  if (flags->help) {
    std::cout << kHelp;
    return 0;
  }
  if (flags->version) {
    std::cout << "carryover-server " << kBuildVersion << "\n";
    return 0;
  }
  const absl::StatusOr<v1::ServerConfig> config = LoadConfig(flags->config);
  if (!config.ok()) {
    std::cerr << config.status().message() << "\n";
    return 2;
  }
  const Ops* const ops = ChooseOps(*config, backends);
  if (ops == nullptr) {
    std::cerr << flags->config
              << ": engine.backend: this program was built without CUDA. It is built with it on a "
                 "machine that has nvcc (docs/cuda.md)\n";
    return 2;
  }
  if (flags->check) {
    std::cout << PrintConfig(*config);
    return 0;
  }
  SetLogLevel(config->log_level());
  RaiseOpenFiles(config->limits().connection_memory_bytes());
  // Never destroyed: its thread waits for as long as the process lives.
  auto* signals = new Signals;
  const absl::Status status = Serve(*flags, *config, *ops, signals);
  if (!status.ok()) {
    LogError("failed",
             {{"code", absl::StatusCodeToString(status.code())}, {"message", status.message()}});
    return 1;
  }
  return 0;
}

}  // namespace carryover
