// The process's parts put together: engine, gRPC services on two addresses, HTTP. Used by main and
// by tests; Start, Drain and the destructor from one thread.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "carryover/v1/config.pb.h"
#include "engine/engine.h"
#include "server/prometheus_observer.h"

namespace carryover {

struct ServerAddresses {  // with actual ports
  std::string completions;
  std::string admin;
  std::string http;
};

class Server {
 public:
  // Listens on all addresses; health says NOT_SERVING and completions get UNAVAILABLE until Open.
  // config is a checked one. observer is the one that the engine tells.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const v1::ServerConfig& config,
                                                       std::unique_ptr<PrometheusObserver> observer,
                                                       std::unique_ptr<Engine> engine);
  ~Server();

  // Loads the versions of the configuration, one after the other, and then what the gate knew.
  absl::Status LoadVersions();
  // Takes requests from now on.
  void Open();
  // Refuses new work, lets what runs finish for up to drain_timeout_seconds, ends the rest, and
  // stops listening. Returns how it went: false when something had to be ended.
  bool Drain();

  const ServerAddresses& addresses() const;

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace carryover
