// One embedded HTTP server for /metrics, /healthz, the status page at / with its files
// (server/page) and its data at /status.json. Nothing it shows holds a prompt, a tenant, a salt or
// an id.
#pragma once

#include <prometheus/collectable.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace carryover {

// What the server answers with; called from its own few threads.
struct HttpPages {
  std::function<std::string()> status_page;  // HTML
  std::function<std::string()> status_json;  // its data
  std::function<bool()> healthy;             // /healthz: 200 or 503
  std::vector<std::shared_ptr<prometheus::Collectable>> metrics;
};

class HttpServer {
 public:
  // address: HOST:PORT; port 0 takes a free one. UNAVAILABLE when it cannot listen.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address,
                                                           HttpPages pages);
  // Waits for requests that run.
  ~HttpServer();

  const std::string& address() const;  // with the actual port

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace carryover
