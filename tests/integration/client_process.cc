#include "tests/integration/client_process.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace carryover {

std::unique_ptr<ClientProcess> ClientProcess::Start(const ServerProcess& server,
                                                    const std::vector<std::string>& args) {
  auto client = std::unique_ptr<ClientProcess>(new ClientProcess);
  if (client->child_.Start(CARRYOVER_CLIENT, args, "out", "err",
                           {absl::StrCat("CARRYOVER_ADDRESS=", server.address()),
                            absl::StrCat("CARRYOVER_ADMIN=", server.admin_address())})) {
    return client;
  }
  ADD_FAILURE() << CARRYOVER_CLIENT << " does not start";
  return nullptr;
}

ClientResult RunClient(const ServerProcess& server, const std::vector<std::string>& args) {
  const auto client = ClientProcess::Start(server, args);
  if (client == nullptr) return {};
  const int code = client->Wait();
  return {code, client->out(), client->err()};
}

}  // namespace carryover
