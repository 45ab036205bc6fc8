// A device that has no memory left refuses, and goes on serving what fits.
#include <gtest/gtest.h>

#include "kernels/cuda/emulation/memory.h"
#include "tests/unit/engine_fixture.h"

namespace carryover {
namespace {

class EngineDeviceMemoryTest : public EngineTest {
 protected:
  void SetUp() override {
    limit_ = emulation::DeviceLimit();
    ops_ = &EmulatedCudaOps();
    Make({});
    const auto loaded = Load("s", "llama3");
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    ASSERT_TRUE(Run(Ask("s", Tokens(20), 2)).status.ok());
    emulation::SetDeviceLimit(emulation::DeviceBytes());
  }
  void TearDown() override {
    emulation::SetDeviceLimit(limit_);
    engine_.reset();
  }

  size_t limit_ = 0;
};

TEST_F(EngineDeviceMemoryTest, AVersionThatDoesNotFitIsRefusedAndLeavesNothing) {
  const size_t before = emulation::DeviceBytes();
  const auto second = Load("t", "qwen3");
  EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted) << second.status();
  EXPECT_NE(second.status().message().find("device memory"), std::string::npos) << second.status();
  EXPECT_EQ(emulation::DeviceBytes(), before);
  EXPECT_EQ(engine_->ListVersions("m").size(), 1u);
  EXPECT_TRUE(Run(Ask("s", Tokens(20, 1), 2)).status.ok());

  emulation::SetDeviceLimit(limit_);
  const auto again = Load("t", "qwen3");
  EXPECT_TRUE(again.ok()) << again.status();
}

// Passes of as many rows as there is memory for give the same answers.
TEST_F(EngineDeviceMemoryTest, RequestsThatDoNotFitTogetherRunInParts) {
  const auto run = [&] {
    std::vector<Running> running;
    for (int i = 0; i < 6; ++i) {
      CompletionRequest request = Ask("s", Tokens(20 + 50 * i, 10 + i), 6);
      request.sampling.n = 1 + i % 2;
      request.store = false;
      running.push_back(Begin(std::move(request)));
    }
    std::vector<std::vector<std::vector<int32_t>>> tokens;
    for (Running& one : running) {
      const Answer answer = one.end.get();
      EXPECT_TRUE(answer.status.ok()) << answer.status;
      tokens.push_back(answer.tokens);
    }
    ExpectIdle();
    return tokens;
  };
  const int64_t before = engine_->snapshot().steps;
  const auto small = run();
  EXPECT_LE(emulation::DeviceBytes(), emulation::DeviceLimit());
  const int64_t small_steps = engine_->snapshot().steps - before;
  emulation::SetDeviceLimit(limit_);
  engine_.reset();
  Make({});
  ASSERT_TRUE(Load("s", "llama3").ok());
  EXPECT_EQ(run(), small);
  EXPECT_GT(small_steps, 2 * engine_->snapshot().steps);
}

TEST_F(EngineDeviceMemoryTest, WhatCannotRunAtAllIsRefusedWithTheFigures) {
  engine_.reset();
  emulation::SetDeviceLimit(limit_);
  Make({});
  ASSERT_TRUE(Load("s", "llama3").ok());
  emulation::SetDeviceLimit(emulation::DeviceBytes());
  const Answer refused = Run(Ask("s", Tokens(300), 2));
  EXPECT_EQ(refused.status.code(), absl::StatusCode::kResourceExhausted) << refused.status;
  EXPECT_NE(refused.status.message().find("bytes of device memory, of which"), std::string::npos)
      << refused.status;
  ExpectIdle();

  emulation::SetDeviceLimit(limit_);
  const Answer again = Run(Ask("s", Tokens(300), 2));
  EXPECT_TRUE(again.status.ok()) << again.status;
  ExpectIdle();
}

}  // namespace
}  // namespace carryover
