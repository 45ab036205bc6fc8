#include "server/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <atomic>
#include <chrono>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "server/cache_service.h"
#include "server/completion_service.h"
#include "server/config.h"
#include "server/engine_collector.h"
#include "server/fidelity_service.h"
#include "server/gate_state_file.h"
#include "server/http.h"
#include "server/status_data.h"
#include "server/status_page.h"
#include "server/versions_service.h"
#include "server/worker_pool.h"

namespace carryover {
namespace {

// Evaluate, Warm, Load and Remove take as long as requests do, and must not keep an operator's word
// waiting.
constexpr int kSlowAdminWorkers = 8;
constexpr int kQuickAdminWorkers = 4;
constexpr size_t kAdminJobs = 256;
constexpr double kLastBytesSeconds = 5;
constexpr double kWatchersSeconds = 1;        // for samples that are on their way to who watches
constexpr int kAdminMessageBytes = 64 << 20;  // the operator's own

// A dead client is noticed within a minute and a half, and one that pings often is not cut off.
constexpr int kKeepaliveMs = 60'000;
constexpr int kKeepaliveTimeoutMs = 20'000;
constexpr int kMinPingMs = 5'000;

// The operator's address has limits of its own, so that it answers when the other one is full.
constexpr int kAdminCalls = 256;
constexpr int64_t kAdminMemoryBytes = 256 << 20;

struct ConnectionLimits {
  int message_bytes;  // of one request
  int calls;          // of one connection
  int64_t memory_bytes;
};

double UnixSeconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

absl::StatusOr<std::unique_ptr<grpc::Server>> Listen(const char* field, const std::string& address,
                                                     const ConnectionLimits& limits,
                                                     std::initializer_list<grpc::Service*> services,
                                                     std::string* actual) {
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
  builder.SetMaxReceiveMessageSize(limits.message_bytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, limits.calls);
  grpc::ResourceQuota quota(field);
  quota.Resize(static_cast<size_t>(limits.memory_bytes));
  builder.SetResourceQuota(quota);
  // Two servers on one port would each get a share of the calls.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kMinPingMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // Reflection is a synchronous service; everything else uses callbacks.
  builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 2);
  for (grpc::Service* service : services) builder.RegisterService(service);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  const bool is_unix = absl::StartsWith(address, "unix:");
  if (server == nullptr || (!is_unix && port == 0)) {
    return absl::UnavailableError(absl::StrCat("listen.", field, ": cannot listen on ", address));
  }
  *actual = is_unix ? address : absl::StrCat(address.substr(0, address.rfind(':')), ":", port);
  server->GetHealthCheckService()->SetServingStatus(false);
  return server;
}

}  // namespace

struct Server::Impl {
  v1::ServerConfig config;
  // Destroyed from the last to the first: listeners before services before the engine.
  std::unique_ptr<PrometheusObserver> observer;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<GateStateFile> gate_state;  // may be null
  std::unique_ptr<WorkerPool> slow_workers;
  std::unique_ptr<WorkerPool> quick_workers;
  std::unique_ptr<CompletionService> completions;
  std::unique_ptr<VersionsService> versions;
  std::unique_ptr<CacheService> cache;
  std::unique_ptr<FidelityService> fidelity;
  std::unique_ptr<grpc::Server> public_server;
  std::unique_ptr<grpc::Server> admin_server;
  std::unique_ptr<HttpServer> http;
  std::atomic<bool> serving{false};
  ServerAddresses addresses;

  void SetServing(bool now) {
    serving = now;
    public_server->GetHealthCheckService()->SetServingStatus(now);
    public_server->GetHealthCheckService()->SetServingStatus("carryover.v1.Completions", now);
    admin_server->GetHealthCheckService()->SetServingStatus(now);
  }
};

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const v1::ServerConfig& config,
                                                      std::unique_ptr<PrometheusObserver> observer,
                                                      std::unique_ptr<Engine> engine) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();

  auto impl = std::make_unique<Impl>();
  impl->config = config;
  impl->observer = std::move(observer);
  impl->engine = std::move(engine);
  Engine* const the_engine = impl->engine.get();
  PrometheusObserver* const the_observer = impl->observer.get();
  if (const v1::GateConfig& gate = config.fidelity().gate(); !gate.state_file().empty()) {
    impl->gate_state = std::make_unique<GateStateFile>(
        GateStateFileOptions{.path = gate.state_file(),
                             .interval_seconds = gate.state_interval_seconds(),
                             .max_bytes = Gate::MaxSavedBytes(ToEngineOptions(config).gate)},
        the_engine);
  }
  const RequestLimits limits = ToRequestLimits(config);
  impl->slow_workers = std::make_unique<WorkerPool>(kSlowAdminWorkers, kAdminJobs);
  impl->quick_workers = std::make_unique<WorkerPool>(kQuickAdminWorkers, kAdminJobs);
  const AdminWorkers workers = {impl->quick_workers.get(), impl->slow_workers.get()};
  impl->completions = std::make_unique<CompletionService>(
      the_engine, the_observer, limits, static_cast<size_t>(config.limits().stream_queue_events()));
  impl->versions = std::make_unique<VersionsService>(the_engine, the_observer, workers);
  impl->cache = std::make_unique<CacheService>(the_engine, the_observer, workers, limits);
  impl->fidelity = std::make_unique<FidelityService>(the_engine, the_observer, workers, limits);

  // From here on the destructor has to stop what listens, also when a later part fails.
  auto server = std::unique_ptr<Server>(new Server(std::move(impl)));
  Impl& self = *server->impl_;
  ASSIGN_OR_RETURN(
      self.public_server,
      Listen("completions", config.listen().completions(),
             {config.limits().max_message_bytes(), config.limits().max_calls_per_connection(),
              config.limits().connection_memory_bytes()},
             {self.completions.get()}, &self.addresses.completions));
  ASSIGN_OR_RETURN(
      self.admin_server,
      Listen("admin", config.listen().admin(), {kAdminMessageBytes, kAdminCalls, kAdminMemoryBytes},
             {self.versions.get(), self.cache.get(), self.fidelity.get()}, &self.addresses.admin));
  HttpPages pages;
  pages.status_page = [the_engine] {
    return StatusPage(the_engine->ListVersions(""), the_engine->snapshot(), kBuildVersion);
  };
  pages.healthy = [&self] { return self.serving.load(); };
  pages.metrics = {self.observer->registry(), std::make_shared<EngineCollector>(the_engine),
                   std::make_shared<ProcessCollector>()};
  const auto status = std::make_shared<StatusSource>([&self, started = UnixSeconds()] {
    StatusFacts facts;
    facts.build = kBuildVersion;
    facts.serving = self.serving;
    facts.unix_seconds = UnixSeconds();
    facts.started_unix_seconds = started;
    facts.versions = self.engine->ListVersions("");
    facts.engine = self.engine->snapshot();
    facts.families = self.observer->registry()->Collect();
    facts.gate_changes = self.observer->gate_change_log().Latest();
    return facts;
  });
  pages.status_json = [status] { return status->Json(); };
  ASSIGN_OR_RETURN(self.http, HttpServer::Start(config.listen().http(), std::move(pages)));
  self.addresses.http = self.http->address();
  return server;
}

Server::~Server() {
  // Requests that still run are ended first: a call only finishes once the engine is done with it.
  impl_->engine->StartDrain();
  impl_->engine->FinishDrain(0);
  const auto now = std::chrono::system_clock::now();
  if (impl_->public_server != nullptr) impl_->public_server->Shutdown(now);
  if (impl_->admin_server != nullptr) impl_->admin_server->Shutdown(now);
}

absl::Status Server::LoadVersions() {
  for (const v1::StartVersion& version : impl_->config.load()) {
    const absl::StatusOr<VersionInfo> info =
        impl_->engine->Load(ToLoadOptions(version), [](double) {});
    if (!info.ok()) {
      return absl::Status(info.status().code(),
                          absl::StrCat("loading ", version.model(), " ", version.version(), ": ",
                                       info.status().message()));
    }
    if (version.has_promote()) {
      RETURN_IF_ERROR(
          impl_->engine->Promote(version.model(), version.version(), version.promote()));
    }
  }
  if (impl_->gate_state != nullptr) impl_->gate_state->Restore();
  return absl::OkStatus();
}

void Server::Open() {
  if (impl_->gate_state != nullptr) impl_->gate_state->Start();
  impl_->completions->Open();
  impl_->SetServing(true);
}

bool Server::Drain() {
  impl_->SetServing(false);
  impl_->engine->StartDrain();
  LogInfo("draining", {{"timeout_seconds", impl_->config.drain_timeout_seconds()}});
  const bool clean = impl_->engine->FinishDrain(impl_->config.drain_timeout_seconds());
  if (impl_->gate_state != nullptr) impl_->gate_state->Finish();
  impl_->observer->samples().Close(kWatchersSeconds);
  // What has been generated still has to reach its clients. Idle connections are not waited for.
  impl_->completions->WaitForCalls(kLastBytesSeconds);
  const auto now = std::chrono::system_clock::now();
  impl_->public_server->Shutdown(now);
  impl_->admin_server->Shutdown(now);
  return clean;
}

const ServerAddresses& Server::addresses() const { return impl_->addresses; }

}  // namespace carryover
