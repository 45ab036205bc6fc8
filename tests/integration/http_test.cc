// The embedded HTTP server alone.
#include "server/http.h"

#include <gtest/gtest.h>

#include <chrono>

namespace carryover {
namespace {

TEST(HttpServerTest, StopsAtOnce) {
  const auto start = std::chrono::steady_clock::now();
  for (const char* address : {"127.0.0.1:0", "localhost:0", "0.0.0.0:0"}) {
    const auto server = HttpServer::Start(address, {});
    ASSERT_TRUE(server.ok()) << server.status();
  }
  // Left alone, CivetWeb takes 2 seconds each.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(3));
}

}  // namespace
}  // namespace carryover
