// engine.backend: CUDA, over gRPC. A GPU is nowhere needed: the program under test is the server
// with the emulated device in its place, and the real one only has to say clearly why it cannot
// serve.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/integration/server_process.h"

namespace carryover {
namespace {

constexpr char kQuiet[] =
    "fidelity { hold_out_rate: 0 sample_rate: 0 learning_sample_rate: 0 }"
    "cache { when_learning: CARRY }";
constexpr char kAnywhere[] =
    "listen { completions: '127.0.0.1:0' admin: '127.0.0.1:0' http: '127.0.0.1:0' }";

class CudaBackendTest : public testing::Test {
 protected:
  // Runs a server that is not expected to stay.
  CommandResult Run(const std::string& config, const std::vector<std::string>& args,
                    const std::string& program) {
    const std::string path = testing::TempDir() + absl::StrCat("/carryover-cuda-", getpid());
    std::ofstream(path) << config;
    std::vector<std::string> all = {"--config", path};
    all.insert(all.end(), args.begin(), args.end());
    const CommandResult result = RunServer(all, program);
    std::filesystem::remove(path);
    return result;
  }
};

v1::CompleteResponse Ask(ServerProcess& server, const std::string& version, bool carry) {
  v1::CompleteRequest request = Tokens(SomeTokens(100, 5), 8);
  request.set_version(version);
  request.set_logprobs(5);
  request.mutable_cache()->set_reuse(carry ? v1::CacheOptions::CARRY
                                           : v1::CacheOptions::NATIVE_ONLY);
  return Complete(server.completions(), request);
}

void ExpectSameAnswer(const v1::CompleteResponse& a, const v1::CompleteResponse& b, double near) {
  EXPECT_EQ(a.choices(0).text(), b.choices(0).text());
  ASSERT_EQ(a.choices(0).logprobs_size(), 8);
  ASSERT_EQ(b.choices(0).logprobs_size(), 8);
  for (int i = 0; i < 8; ++i) {
    for (int k = 0; k < 5; ++k) {
      EXPECT_NEAR(a.choices(0).logprobs(i).top(k).logprob(),
                  b.choices(0).logprobs(i).top(k).logprob(), near);
    }
  }
}

// Cold, hit and carried say the same for equal weights, and what the CPU says.
TEST_F(CudaBackendTest, NativeHitAndCarriedOverGrpc) {
  const std::string models =
      LoadEntry("m", "S", TinyModel("llama3")) +
      LoadEntry("m", "T", TinyModel("llama3"), "carry_from: 'S' distinct: 'control'") + kQuiet;
  const auto device = ServerProcess::Start(
      models + "engine { backend: CUDA kv_cache_bytes: 8388608 host_cache_bytes: 4194304 }",
      CARRYOVER_EMULATED_SERVER);
  const auto cpu = ServerProcess::Start(models + "engine { kv_cache_bytes: 8388608 }");
  ASSERT_TRUE(device != nullptr && cpu != nullptr);
  EXPECT_NE(device->log().find("name=emulated"), std::string::npos) << device->log();
  EXPECT_NE(cpu->log().find("name=cpu"), std::string::npos) << cpu->log();

  const v1::CompleteResponse cold = Ask(*device, "S", false);
  EXPECT_EQ(cold.usage().computed_tokens(), 100);
  ExpectSameAnswer(cold, Ask(*cpu, "S", false), 1e-3);
  const v1::CompleteResponse hit = Ask(*device, "S", true);
  EXPECT_EQ(hit.usage().cached_tokens(), 96);
  ExpectSameAnswer(hit, cold, 0);
  const v1::CompleteResponse carried = Ask(*device, "T", true);
  EXPECT_EQ(carried.usage().carried_tokens(), 96);
  EXPECT_EQ(carried.usage().computed_tokens(), 4);
  ExpectSameAnswer(carried, cold, 0);
  EXPECT_EQ(device->Metric("carryover_provenance_violations_total"), 0);
  device->Signal(SIGTERM);
  EXPECT_EQ(device->Wait(30), 0);
}

TEST_F(CudaBackendTest, TooLittleDeviceMemoryEndsTheStart) {
  const CommandResult result =
      Run(absl::StrCat(kAnywhere, LoadEntry("m", "S", TinyModel("llama3")),
                       "engine { backend: CUDA kv_cache_bytes: 1099511627776 }"),
          {}, CARRYOVER_EMULATED_SERVER);
  EXPECT_EQ(result.exit_code, 1);
  for (const char* part : {"kv_cache_bytes: 1099511627776 bytes of device memory, of which ",
                           "of 8589934592 are free", "RESOURCE_EXHAUSTED"}) {
    EXPECT_NE(result.output.find(part), std::string::npos) << part << " in\n" << result.output;
  }
}

TEST_F(CudaBackendTest, TheRealServerSaysWhatItLacks) {
  const std::string config = absl::StrCat(kAnywhere, "engine { backend: CUDA }");
  const CommandResult check = Run(config, {"--check"}, "");
  if (CARRYOVER_SERVER_HAS_CUDA) {
    EXPECT_EQ(check.exit_code, 0) << check.output;
    EXPECT_NE(check.output.find("backend: CUDA"), std::string::npos) << check.output;
    if (std::filesystem::exists("/dev/nvidia0")) GTEST_SKIP() << "there is a GPU";
    const CommandResult started = Run(config, {}, "");
    EXPECT_EQ(started.exit_code, 1);
    EXPECT_NE(started.output.find("backend CUDA finds no device"), std::string::npos)
        << started.output;
  } else {
    EXPECT_EQ(check.exit_code, 2) << check.output;
    EXPECT_NE(check.output.find("engine.backend: this program was built without CUDA"),
              std::string::npos)
        << check.output;
  }
}

TEST_F(CudaBackendTest, CheckPrintsTheDefault) {
  EXPECT_NE(Run("log_level: 'info'", {"--check"}, "").output.find("backend: CPU"),
            std::string::npos);
}

}  // namespace
}  // namespace carryover
