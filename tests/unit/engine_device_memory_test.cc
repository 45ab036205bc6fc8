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

TEST_F(EngineDeviceMemoryTest, ARequestThatDoesNotFitFailsAlone) {
  const Answer refused = Run(Ask("s", Tokens(300), 2));
  EXPECT_EQ(refused.status.code(), absl::StatusCode::kResourceExhausted) << refused.status;
  const Answer small = Run(Ask("s", Tokens(20, 2), 2));
  EXPECT_TRUE(small.status.ok()) << small.status;
  ExpectIdle();

  emulation::SetDeviceLimit(limit_);
  const Answer again = Run(Ask("s", Tokens(300), 2));
  EXPECT_TRUE(again.status.ok()) << again.status;
  ExpectIdle();
}

}  // namespace
}  // namespace carryover
