#include "server/http.h"

#include <CivetServer.h>
#include <netdb.h>
#include <prometheus/text_serializer.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <iterator>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/page_files.h"

namespace carryover {
namespace {

// The page's own files and nothing else; no inline script or style, no frame around it.
constexpr char kPolicy[] =
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

// The answer to a HEAD is the same without its body.
void Respond(mg_connection* connection, const char* status, const char* type,
             absl::string_view body) {
  const std::string header = absl::StrCat(
      "HTTP/1.1 ", status, "\r\nContent-Type: ", type, "\r\nContent-Length: ", body.size(),
      "\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: "
      "no-referrer\r\nContent-Security-Policy: ",
      kPolicy, "\r\nConnection: close\r\n\r\n");
  mg_write(connection, header.data(), header.size());
  if (absl::string_view(mg_get_request_info(connection)->request_method) != "HEAD") {
    mg_write(connection, body.data(), body.size());
  }
}

// Null when the path is none of the page's files. The page itself is made for each request.
const PageFile* FindFile(absl::string_view path) {
  for (const PageFile& file : PageFiles()) {
    if (path.substr(0, 1) == "/" && path.substr(1) == file.name && file.name != "index.html") {
      return &file;
    }
  }
  return nullptr;
}

const char* TypeOf(absl::string_view name) {
  if (absl::EndsWith(name, ".js")) return "text/javascript; charset=utf-8";
  if (absl::EndsWith(name, ".css")) return "text/css; charset=utf-8";
  if (absl::EndsWith(name, ".svg")) return "image/svg+xml";
  return "application/octet-stream";
}

class Pages final : public CivetHandler {
 public:
  explicit Pages(HttpPages pages) : pages_(std::move(pages)) {}

  bool handleGet(CivetServer* server, mg_connection* connection) override {
    const std::string path = mg_get_request_info(connection)->local_uri;
    if (path == "/") {
      Respond(connection, "200 OK", "text/html; charset=utf-8", pages_.status_page());
    } else if (path == "/status.json") {
      Respond(connection, "200 OK", "application/json", pages_.status_json());
    } else if (path == "/healthz") {
      if (pages_.healthy()) {
        Respond(connection, "200 OK", "text/plain", "ok\n");
      } else {
        Respond(connection, "503 Service Unavailable", "text/plain", "not serving\n");
      }
    } else if (path == "/metrics") {
      std::vector<prometheus::MetricFamily> all;
      for (const auto& source : pages_.metrics) {
        auto families = source->Collect();
        all.insert(all.end(), std::make_move_iterator(families.begin()),
                   std::make_move_iterator(families.end()));
      }
      std::ostringstream text;
      prometheus::TextSerializer().Serialize(text, all);
      Respond(connection, "200 OK", "text/plain; version=0.0.4; charset=utf-8", text.str());
    } else if (const PageFile* file = FindFile(path)) {
      Respond(connection, "200 OK", TypeOf(file->name), file->content);
    } else {
      Respond(connection, "404 Not Found", "text/plain", "not found\n");
    }
    return true;
  }

  bool handleHead(CivetServer* server, mg_connection* connection) override {
    return handleGet(server, connection);
  }

 private:
  const HttpPages pages_;
};

// Connects to HOST:PORT and hangs up.
void Knock(const std::string& address) {
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  if (host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &found) != 0) return;
  const int fd =
      socket(found->ai_family, found->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, /*protocol=*/0);
  if (fd >= 0) {
    connect(fd, found->ai_addr, found->ai_addrlen);
    close(fd);
  }
  freeaddrinfo(found);
}

}  // namespace

struct HttpServer::Impl {
  std::unique_ptr<Pages> pages;
  std::unique_ptr<CivetServer> server;  // after pages, which its threads use
  std::string address;
};

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address,
                                                              HttpPages pages) {
  auto impl = std::make_unique<Impl>();
  impl->pages = std::make_unique<Pages>(std::move(pages));
  std::string host = address.substr(0, address.rfind(':'));
  const std::string port = address.substr(address.rfind(':'));
  // CivetWeb takes numbers only.
  const std::string listen = absl::StrCat(host == "localhost" ? "127.0.0.1" : host, port);
  try {
    impl->server = std::make_unique<CivetServer>(std::vector<std::string>{
        "listening_ports", listen, "num_threads", "4", "request_timeout_ms", "10000",
        "enable_keep_alive", "no", "linger_timeout_ms", "1000"});
  } catch (const CivetException& error) {
    return absl::UnavailableError(
        absl::StrCat("listen.http: cannot listen on ", address, ": ", error.what()));
  }
  const std::vector<int> ports = impl->server->getListeningPorts();
  if (ports.empty()) {
    return absl::UnavailableError(absl::StrCat("listen.http: cannot listen on ", address));
  }
  impl->address = absl::StrCat(host, ":", ports[0]);
  impl->server->addHandler("/", *impl->pages);
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

// CivetWeb looks at its stop flag when a connection comes, or else every 2 seconds: so one comes.
HttpServer::~HttpServer() {
  std::atomic<bool> closed{false};
  std::thread closer([&] {
    impl_->server->close();
    closed = true;
  });
  while (!closed) {
    Knock(impl_->address);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  closer.join();
}

const std::string& HttpServer::address() const { return impl_->address; }

}  // namespace carryover
