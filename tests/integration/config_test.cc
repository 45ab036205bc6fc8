// The configuration: what is read, filled in, refused and printed.

#include "server/config.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/integration/server_process.h"

namespace carryover {
namespace {

std::string Problem(const std::string& text) {
  const auto config = ParseConfig(text, "f", "/base");
  return config.ok() ? "" : std::string(config.status().message());
}

TEST(ConfigTest, EmptyHasAllDefaults) {
  const auto config = ParseConfig("", "f", "/base");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->listen().completions(), "127.0.0.1:50051");
  EXPECT_EQ(config->limits().max_message_bytes(), 16 << 20);
  EXPECT_EQ(config->cache().when_learning(), v1::CacheConfig::NATIVE);
  EXPECT_EQ(config->log_level(), "info");

  // The defaults are those that the engine documents.
  const EngineOptions options = ToEngineOptions(*config), fresh;
  EXPECT_EQ(options.kv_cache_bytes, fresh.kv_cache_bytes);
  EXPECT_EQ(options.block_tokens, fresh.block_tokens);
  EXPECT_EQ(options.max_running, fresh.max_running);
  EXPECT_EQ(options.step_tokens, fresh.step_tokens);
  EXPECT_EQ(options.max_waiting_requests, fresh.max_waiting_requests);
  EXPECT_EQ(options.max_waiting_tokens, fresh.max_waiting_tokens);
  EXPECT_EQ(options.gate.when_learning_carry, fresh.gate.when_learning_carry);
  EXPECT_EQ(options.min_carried_tokens, fresh.min_carried_tokens);
  EXPECT_EQ(options.store_tainted, fresh.store_tainted);
  EXPECT_EQ(options.source_share, fresh.source_share);
  EXPECT_EQ(options.map_ahead_share, fresh.map_ahead_share);
  EXPECT_EQ(options.fidelity.sample_rate, fresh.fidelity.sample_rate);
  EXPECT_EQ(options.fidelity.learning_sample_rate, fresh.fidelity.learning_sample_rate);
  EXPECT_EQ(options.fidelity.hold_out_rate, fresh.fidelity.hold_out_rate);
  EXPECT_EQ(options.fidelity.control_rate, fresh.fidelity.control_rate);
  EXPECT_EQ(options.fidelity.old_rate, fresh.fidelity.old_rate);
  EXPECT_EQ(options.fidelity.positions, fresh.fidelity.positions);
  EXPECT_EQ(options.fidelity.max_queue, fresh.fidelity.max_queue);
  EXPECT_EQ(options.fidelity.max_age_seconds, fresh.fidelity.max_age_seconds);
  EXPECT_EQ(options.fidelity.kv_share, fresh.fidelity.kv_share);
  EXPECT_EQ(options.fidelity.time_share, fresh.fidelity.time_share);
  EXPECT_EQ(options.fidelity.store_native, fresh.fidelity.store_native);
  EXPECT_EQ(options.gate.limit, fresh.gate.limit);
  EXPECT_EQ(options.gate.alpha, fresh.gate.alpha);
  EXPECT_EQ(options.gate.min_prefixes, fresh.gate.min_prefixes);
  EXPECT_EQ(options.gate.ladder, fresh.gate.ladder);
  EXPECT_EQ(options.gate.min_completion, fresh.gate.min_completion);
  EXPECT_EQ(options.gate.cooldown_seconds, fresh.gate.cooldown_seconds);
  EXPECT_EQ(options.gate.max_cells, fresh.gate.max_cells);
  const RequestLimits limits = ToRequestLimits(*config), fresh_limits;
  EXPECT_EQ(limits.max_n, fresh_limits.max_n);
  EXPECT_EQ(limits.max_stop, fresh_limits.max_stop);
  EXPECT_EQ(limits.max_logit_bias, fresh_limits.max_logit_bias);
  EXPECT_EQ(limits.max_logprobs, fresh_limits.max_logprobs);
}

TEST(ConfigTest, ZeroIsNotADefault) {
  const auto config = ParseConfig("drain_timeout_seconds: 0 limits { max_stop: 0 }", "f", "");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->drain_timeout_seconds(), 0);
  EXPECT_EQ(config->limits().max_stop(), 0);
}

TEST(ConfigTest, PrintedConfigReadsBackTheSame) {
  const auto config = ParseConfig(
      "load { model: 'm' version: 'v' path: 'x/../y' carry_from: 'u' promote: 0 }\n"
      "cache { when_learning: CARRY source_share: 0.25 } engine { threads: 3 }",
      "f", "/base");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->load(0).path(), "/base/y");
  const auto again = ParseConfig(PrintConfig(*config), "g", "/elsewhere");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(PrintConfig(*again), PrintConfig(*config));
  EXPECT_TRUE(ToEngineOptions(*again).gate.when_learning_carry);
  EXPECT_EQ(ToEngineOptions(*again).threads, 3);
}

TEST(ConfigTest, ErrorsNameLineAndField) {
  EXPECT_EQ(Problem("engine {\n  thread: 2\n}"),
            "f:2:9: Message type \"carryover.v1.EngineConfig\" has no field named \"thread\".");
  EXPECT_EQ(Problem("\n\nengine { threads: -1 }"), "f:3: engine.threads: must be from 0 to 1024");
  EXPECT_EQ(Problem("engine {\n block_tokens: 24\n}"),
            "f:2: engine.block_tokens: must be a multiple of 16");
  EXPECT_EQ(Problem("cache { source_share: nan }"), "f:1: cache.source_share: must be from 0 to 1");
  EXPECT_EQ(Problem("load { model: 'a b' version: 'v' path: 'p' }"),
            "f:1: load[0].model: may only hold letters, digits and - _ . / :");
  EXPECT_EQ(Problem("fidelity {\n tasks: 'a b' }"),
            "f:2: fidelity.tasks: may only hold letters, digits and - _ . / :");
  EXPECT_EQ(Problem("fidelity { gate {\n ladder: 'direct'\n ladder: 'tail(0)' } }"),
            "f:3: fidelity.gate.ladder: plan \"tail(0)\": tail takes a number from 1 to 1048576 or "
            "a percentage from 1% to 100% in brackets");
  EXPECT_EQ(Problem("fidelity { gate { ladder: 'direct'\n ladder: 'direct' } }"),
            "f:2: fidelity.gate.ladder: stands there twice");
  EXPECT_EQ(Problem("fidelity {\n gate {\n alpha: 0 } }"),
            "f:3: fidelity.gate.alpha: must be from 1e-06 to 0.5");
  EXPECT_EQ(Problem("log_level: 'loud'"),
            "f:1: log_level: must be debug, info, warning, error or off");
  // All of them at once.
  const std::string all = Problem("engine { threads: -1 }\nlimits { max_n: 0 }\nload {}");
  for (const char* part :
       {"f:1: engine.threads:", "f:2: limits.max_n:", "load[0].model: is missing",
        "load[0].version: is missing", "load[0].path: is missing"}) {
    EXPECT_NE(all.find(part), std::string::npos) << part << " in\n" << all;
  }
}

TEST(ConfigTest, OnlyLoopbackUnlessInsecure) {
  for (const char* address :
       {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1", "127.0.0.1.example.org:1",
        "localhost.example.org:1", "[::1%eth0]:1"}) {
    EXPECT_NE(Problem(absl::StrCat("listen { completions: '", address, "' }")), "") << address;
    EXPECT_EQ(Problem(absl::StrCat("insecure: true listen { completions: '", address, "' }")), "")
        << address;
    EXPECT_NE(Problem(absl::StrCat("listen { http: '", address, "' }")), "") << address;
  }
  for (const char* address : {"127.0.0.1:1", "localhost:1", "127.9.9.9:1", "[::1]:1", "unix:/x"}) {
    EXPECT_EQ(Problem(absl::StrCat("listen { completions: '", address, "' }")), "") << address;
  }
  for (const char* address :
       {"127.0.0.1", "127.0.0.1:", ":1", "127.0.0.1:65536", "127.0.0.1:-1", "::1:1", "unix:"}) {
    EXPECT_NE(Problem(absl::StrCat("listen { completions: '", address, "' }")), "") << address;
  }
  EXPECT_NE(Problem("listen { http: 'unix:/x' }"), "");
  EXPECT_NE(Problem("listen { completions: '127.0.0.1:7' admin: '127.0.0.1:7' }"), "");
}

TEST(ConfigTest, TheGateStateFileNeedsAFolder) {
  const auto problem = [](const std::string& file) {
    return Problem(absl::StrCat("fidelity { gate {\nstate_file: '", file, "' } }"));
  };
  const std::string folder =
      (std::filesystem::path(testing::TempDir()) / absl::StrCat("gate-config-", getpid())).string();
  std::filesystem::create_directory(folder);
  EXPECT_EQ(problem(folder + "/gate.state"), "");
  EXPECT_EQ(problem("/no/such/folder/gate.state"),
            "f:2: fidelity.gate.state_file: there is no folder /no/such/folder");
  EXPECT_NE(problem(folder).find("is a folder"), std::string::npos);
  EXPECT_NE(problem(folder + "/").find("is a folder"), std::string::npos);
  EXPECT_NE(problem("a\\0b").find("zero byte"), std::string::npos);
  // A pipe would keep the server from ever starting.
  ASSERT_EQ(mkfifo((folder + "/pipe").c_str(), 0600), 0);
  EXPECT_NE(problem(folder + "/pipe").find("is no regular file"), std::string::npos);
  std::filesystem::remove(folder + "/pipe");
  // Relative to the configuration's folder.
  const auto config = ParseConfig("fidelity { gate { state_file: 'x/../state' } }", "f", folder);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->fidelity().gate().state_file(), folder + "/state");
  EXPECT_EQ(config->fidelity().gate().state_interval_seconds(), 60);
  std::filesystem::remove(folder);
}

// The binary itself.
TEST(ConfigTest, CheckPrintsTheEffectiveConfig) {
  const std::string path = testing::TempDir() + "/carryover-check-" + std::to_string(getpid());
  std::ofstream(path) << "engine { threads: 2 }\n";
  CommandResult result = RunServer({"--check", "--config", path});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_NE(result.output.find("threads: 2"), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("max_message_bytes: 16777216"), std::string::npos) << result.output;

  std::ofstream(path) << "engine { threads: 2\n";
  result = RunServer({"--config=" + path, "--check"});
  EXPECT_EQ(result.exit_code, 2) << result.output;
  EXPECT_NE(result.output.find(path + ":"), std::string::npos) << result.output;
  std::filesystem::remove(path);
}

TEST(ConfigTest, CommandLine) {
  EXPECT_EQ(RunServer({"--version"}).output, "carryover-server 0.1.0\n");
  const CommandResult help = RunServer({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_NE(help.output.find("--addresses-file"), std::string::npos);
  EXPECT_EQ(RunServer({}).exit_code, 2);
  EXPECT_EQ(RunServer({"--config"}).exit_code, 2);
  EXPECT_EQ(RunServer({"--nonsense"}).exit_code, 2);
  const CommandResult missing = RunServer({"--config", "/no/such/file"});
  EXPECT_EQ(missing.exit_code, 2);
  EXPECT_NE(missing.output.find("/no/such/file"), std::string::npos);
}

}  // namespace
}  // namespace carryover
