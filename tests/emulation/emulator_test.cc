// The emulated device catches what breaks CUDA's rules, and does as a device does otherwise.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tests/emulation/device_memory.h"

namespace carryover::emulated {
namespace {

using emulation::Order;
using testing::AllOf;
using testing::HasSubstr;

class EmulatorTest : public DeviceMemoryTest {};

// Each thread reads what its neighbour wrote.
__global__ void Rotate(float* out, bool barrier) {
  float* const shared = DynamicShared<float>();
  const unsigned i = threadIdx.x;
  shared[i] = static_cast<float>(i);
  if (barrier) SyncThreads();
  out[blockIdx.x * blockDim.x + i] = shared[(i + 1) % blockDim.x];
}

TEST_F(EmulatorTest, AMissingBarrierShowsInTheOrder) {
  const auto run = [&](Order order, bool barrier) {
    emulation::SetOrder(order);
    float* const out = Allocate<float>(2 * 96);
    Launch(Rotate, {2}, 96, 96 * sizeof(float), nullptr, out, barrier);
    return Read(out, 2 * 96);
  };
  const std::vector<float> right = run(Order::kForward, true);
  EXPECT_EQ(right[96 + 5], 6);
  EXPECT_EQ(right[95], 0);
  EXPECT_EQ(run(Order::kReverse, true), right);
  EXPECT_TRUE(std::isnan(run(Order::kForward, false)[5])) << "shared memory starts as NaN";
  EXPECT_NE(run(Order::kReverse, false), run(Order::kForward, false));
}

__global__ void CountUp(float* out) {
  if (threadIdx.x == 0) *out += 1;
}

TEST_F(EmulatorTest, AGraphDoesWhatItsStreamWasAskedFor) {
  float* const out = Allocate<float>(1);
  ASSERT_EQ(cudaMemsetAsync(out, 0, sizeof(float), nullptr), cudaSuccess);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t made = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  for (int i = 0; i < 3; ++i) Launch(CountUp, {1}, 32, 0, stream, out);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&made, graph, 0), cudaSuccess);
  EXPECT_EQ(Read(out, 1)[0], 0) << "what is captured is not done";
  for (int i = 0; i < 2; ++i) ASSERT_EQ(cudaGraphLaunch(made, nullptr), cudaSuccess);
  EXPECT_EQ(Read(out, 1)[0], 6);
  EXPECT_EQ(cudaGraphExecDestroy(made), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);

  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorStreamCaptureUnsupported);
  EXPECT_NE(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_THAT(Report(), HasSubstr("cudaStreamSynchronize: not while a stream is captured"));
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

__global__ void SomeMeetTheBarrier() {
  if (threadIdx.x < 40) SyncThreads();
}
constexpr unsigned kSomeMeetLine = __LINE__ - 2;

TEST_F(EmulatorTest, ABarrierThatSomeThreadsMissIsDiagnosed) {
  Launch(SomeMeetTheBarrier, {1}, 64, 0, nullptr);
  EXPECT_THAT(Report(), AllOf(HasSubstr("threads 0 to 39 wait at the barrier of"),
                              HasSubstr("emulator_test.cc:" + std::to_string(kSomeMeetLine)),
                              HasSubstr("threads 40 to 63 have ended")));
  float* const out = Allocate<float>(96);
  Launch(Rotate, {1}, 96, 96 * sizeof(float), nullptr, out, true);
  EXPECT_EQ(Read(out, 96)[95], 0) << "the device goes on after an error that was heard";
}

__global__ void TwoBarriers() {
  if (threadIdx.x % 2 == 0) {
    SyncThreads();
  } else {
    SyncThreads();
  }
}
constexpr unsigned kTwoBarriersLine = __LINE__ - 5;

TEST_F(EmulatorTest, TwoBarriersAreNotOne) {
  Launch(TwoBarriers, {1}, 32, 0, nullptr);
  EXPECT_THAT(Report(), AllOf(HasSubstr("emulator_test.cc:" + std::to_string(kTwoBarriersLine)),
                              HasSubstr(":" + std::to_string(kTwoBarriersLine + 2)),
                              HasSubstr("thread 1 of block (0, 0, 0)")));
}

__global__ void DivergentShuffle(int* out) {
  if (LaneId() < 16) out[threadIdx.x] = ShuffleXor(LaneId(), 1);
}
__global__ void ShufflesApart(int* out) {
  if (LaneId() < 16) {
    out[threadIdx.x] = ShuffleXor(LaneId(), 1);
  } else {
    out[threadIdx.x] = ShuffleXor(LaneId(), 2);
  }
}
constexpr unsigned kShufflesApartLine = __LINE__ - 3;

TEST_F(EmulatorTest, ADivergentShuffleIsDiagnosed) {
  int* const out = Allocate<int>(64);
  Launch(DivergentShuffle, {1}, 64, 0, nullptr, out);
  EXPECT_THAT(Report(), AllOf(HasSubstr("threads 0 to 15 wait in the warp operation of"),
                              HasSubstr("threads 16 to 31 have ended")));
  Launch(ShufflesApart, {1}, 64, 0, nullptr, out);
  EXPECT_THAT(Report(), AllOf(HasSubstr(":" + std::to_string(kShufflesApartLine) + ": thread 16"),
                              HasSubstr("reached this warp operation")));
}

__global__ void WriteUpTo(float* out, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
    out[i] = 1;
  }
}

TEST_F(EmulatorTest, AWriteOutOfBoundsIsReported) {
  float* const out = Allocate<float>(101);
  constexpr int kLine = __LINE__ + 1;
  Launch(WriteUpTo, {1}, 32, 0, nullptr, out, 102);
  EXPECT_THAT(Report(), AllOf(HasSubstr("emulator_test.cc:" + std::to_string(kLine)),
                              HasSubstr("byte 404 of an allocation of 404 bytes")));
  float* const other = Allocate<float>(8);
  Launch(WriteUpTo, {1}, 32, 0, nullptr, other - 1, 3);
  EXPECT_THAT(Report(), HasSubstr("4 bytes before an allocation of 32 bytes"));
  EXPECT_EQ(Report(), "") << "each write is told once";
}

__global__ void WriteShared(int at) {
  if (threadIdx.x == 0) DynamicShared<char>()[at] = 1;
}

TEST_F(EmulatorTest, AWriteBeyondSharedMemoryIsReported) {
  Launch(WriteShared, {1}, 32, 100, nullptr, 99);
  EXPECT_EQ(Report(), "");
  Launch(WriteShared, {1}, 32, 100, nullptr, 100);
  EXPECT_THAT(Report(), HasSubstr("beyond its 100 bytes of shared memory, at 100"));
}

TEST_F(EmulatorTest, AnOutputThatWasNotWrittenIsNan) {
  float* const out = Allocate<float>(64);
  Launch(WriteUpTo, {1}, 32, 0, nullptr, out, 63);
  const std::vector<float> values = Read(out, 64);
  EXPECT_EQ(values[62], 1);
  EXPECT_TRUE(std::isnan(values[63]));
  EXPECT_TRUE(std::isnan(out[64])) << "and so is what lies behind it";
}

__global__ void Twice(const float* in, float* out) { out[threadIdx.x] = 2 * in[threadIdx.x]; }

TEST_F(EmulatorTest, AReadBeforeACopysEventIsCaught) {
  cudaStream_t copies, kernels;
  cudaEvent_t copied;
  cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking);
  cudaStreamCreateWithFlags(&kernels, cudaStreamNonBlocking);
  cudaEventCreateWithFlags(&copied, cudaEventDisableTiming);
  for (const bool wait : {true, false}) {
    float* const in = Allocate<float>(32);
    float* const out = Allocate<float>(32);
    const std::vector<float> host(32, 4);
    cudaMemcpyAsync(in, host.data(), 128, cudaMemcpyHostToDevice, copies);
    cudaEventRecord(copied, copies);
    if (wait) cudaStreamWaitEvent(kernels, copied, 0);
    Launch(Twice, {1}, 32, 0, kernels, in, out);
    cudaStreamSynchronize(kernels);
    if (wait) {
      EXPECT_EQ(Read(out, 32)[31], 8);
    } else {
      EXPECT_TRUE(std::isnan(Read(out, 32)[31]));
    }
    EXPECT_EQ(cudaEventSynchronize(copied), cudaSuccess);
    EXPECT_EQ(Read(in, 32)[31], 4);
  }
  cudaEventDestroy(copied);
  cudaStreamDestroy(copies);
  cudaStreamDestroy(kernels);
}

TEST_F(EmulatorTest, ACopyToTheHostIsThereOnlyOnceItWasWaitedFor) {
  float* const in = Allocate<float>(32);
  Launch(WriteUpTo, {1}, 32, 0, nullptr, in, 32);
  float host[32] = {};
  cudaMemcpyAsync(host, in, sizeof(host), cudaMemcpyDeviceToHost, nullptr);
  EXPECT_TRUE(std::isnan(host[3]));
  cudaStreamSynchronize(nullptr);
  EXPECT_EQ(host[3], 1);
}

TEST_F(EmulatorTest, PinnedMemoryIsReadLateAndOtherMemoryAtOnce) {
  void* pinned = nullptr;
  ASSERT_EQ(cudaHostAlloc(&pinned, 4, cudaHostAllocDefault), cudaSuccess);
  float* const device = Allocate<float>(1);
  auto* const late = static_cast<float*>(pinned);
  *late = 1;
  cudaMemcpyAsync(device, late, 4, cudaMemcpyHostToDevice, nullptr);
  *late = 2;
  EXPECT_EQ(Read(device, 1)[0], 2);
  float plain = 1;
  cudaMemcpyAsync(device, &plain, 4, cudaMemcpyHostToDevice, nullptr);
  plain = 2;
  EXPECT_EQ(Read(device, 1)[0], 1);
  cudaFreeHost(pinned);
}

TEST_F(EmulatorTest, CopiesStayWithinAllocations) {
  float* const device = Allocate<float>(4);
  float host[5] = {};
  EXPECT_EQ(cudaMemcpyAsync(device, host, 20, cudaMemcpyHostToDevice, nullptr),
            cudaErrorInvalidValue);
  EXPECT_THAT(Report(), HasSubstr("20 bytes that are not within an allocation"));
  EXPECT_EQ(cudaFree(device + 1), cudaErrorInvalidValue);
}

TEST_F(EmulatorTest, MemoryRunsOut) {
  void* p = nullptr;
  EXPECT_EQ(cudaMalloc(&p, size_t{1} << 40), cudaErrorMemoryAllocation);
  size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  EXPECT_EQ(cudaMalloc(&p, free + 1), cudaErrorMemoryAllocation);
}

TEST_F(EmulatorTest, ShapesThatNoDeviceTakesAreRefused) {
  float* const out = Allocate<float>(64);
  Launch(WriteUpTo, {1}, 33, 0, nullptr, out, 1);
  EXPECT_THAT(Report(), HasSubstr("a block of 33 threads"));
  Launch(WriteUpTo, {0}, 32, 0, nullptr, out, 1);
  EXPECT_THAT(Report(), HasSubstr("a grid of (0, 1, 1) blocks"));
  Launch(WriteUpTo, {1}, 32, size_t{1} << 20, nullptr, out, 1);
  EXPECT_THAT(Report(), HasSubstr("1048576 bytes of shared memory"));
}

__global__ void LoadVector(const float* in, float* out) {
  Store(out, Load<4>(in));
  if (threadIdx.x != 0) return;
}

TEST_F(EmulatorTest, VectorsWantAlignedAddresses) {
  float* const in = Allocate<float>(16);
  float* const out = Allocate<float>(16);
  Launch(WriteUpTo, {1}, 32, 0, nullptr, in, 16);
  Launch(LoadVector, {1}, 32, 0, nullptr, in + 4, out);
  EXPECT_EQ(Read(out, 4)[3], 1);
  Launch(LoadVector, {1}, 32, 0, nullptr, in + 1, out);
  EXPECT_THAT(Report(), HasSubstr("an address that is no multiple of its size"));
}

struct Lanes {
  int rotated, down, from_seven, gathered;
  unsigned ballot;
  int any, all, sum, most;
};

__global__ void EveryWarpOperation(Lanes* out, double* block) {
  const int lane = LaneId();
  Lanes lanes;
  lanes.rotated = ShuffleXor(lane, 5);
  lanes.down = ShuffleDown(lane, 3);
  lanes.from_seven = Shuffle(lane, 7);
  lanes.gathered = emulation::WarpGather(lane)[31 - lane];
  lanes.ballot = Ballot(lane % 3 == 0);
  lanes.any = Any(lane == 9);
  lanes.all = All(lane != 9);
  lanes.sum = WarpSum(lane);
  lanes.most = WarpMax((lane * 7) % 32);
  out[threadIdx.x] = lanes;
  double* const scratch = DynamicShared<double>();
  const double sum = BlockSum(static_cast<double>(threadIdx.x), scratch);
  block[threadIdx.x] = sum + 1000 * BlockMax(static_cast<double>(threadIdx.x), scratch);
}

TEST_F(EmulatorTest, WarpOperationsDoAsOnADevice) {
  for (const Order order : {Order::kForward, Order::kReverse}) {
    emulation::SetOrder(order);
    Lanes* const out = Allocate<Lanes>(96);
    double* const block = Allocate<double>(96);
    Launch(EveryWarpOperation, {1}, 96, 32 * sizeof(double), nullptr, out, block);
    const std::vector<Lanes> lanes = Read(out, 96);
    for (int i = 0; i < 96; ++i) {
      const int lane = i % 32;
      EXPECT_EQ(lanes[i].rotated, lane ^ 5);
      EXPECT_EQ(lanes[i].down, lane + 3 < 32 ? lane + 3 : lane);
      EXPECT_EQ(lanes[i].from_seven, 7);
      EXPECT_EQ(lanes[i].gathered, 31 - lane);
      EXPECT_EQ(lanes[i].ballot, 0x49249249u);
      EXPECT_EQ(lanes[i].any, 1);
      EXPECT_EQ(lanes[i].all, 0);
      EXPECT_EQ(lanes[i].sum, 496);
      EXPECT_EQ(lanes[i].most, 31);
      EXPECT_EQ(Read(block, 96)[i], 95 * 96 / 2 + 95000);
    }
  }
}

struct Counted {
  static inline int alive = 0;
  int calls = 0;
  Counted() { ++alive; }
  ~Counted() { --alive; }
};

__global__ void CountCalls(int* out) {
  ++emulation::PerThread<Counted>().calls;
  SyncThreads();
  out[threadIdx.x] = ++emulation::PerThread<Counted>().calls;
  if (blockIdx.x == 2) emulation::FailThread("gave up", Site::current());
}

TEST_F(EmulatorTest, WhatATwinKeepsForAThreadEndsWithTheBlock) {
  int* const out = Allocate<int>(64);
  Launch(CountCalls, {2}, 64, 0, nullptr, out);
  EXPECT_EQ(Read(out, 64), std::vector<int>(64, 2));
  EXPECT_EQ(Counted::alive, 0);
  Launch(CountCalls, {3}, 64, 0, nullptr, out);
  EXPECT_THAT(Report(), HasSubstr("thread 0 of block (2, 0, 0) gave up"));
  EXPECT_EQ(Counted::alive, 0);
}

TEST_F(EmulatorTest, TypesAreRoundedAsOnADevice) {
  EXPECT_EQ(ToBf16(1.0f).bits, 0x3f80);
  EXPECT_EQ(ToBf16(1.0f + 0x1p-8f).bits, 0x3f80) << "ties to even";
  EXPECT_EQ(ToBf16(1.0f + 3 * 0x1p-8f).bits, 0x3f82);
  EXPECT_TRUE(std::isnan(ToFloat(ToBf16(std::numeric_limits<float>::signaling_NaN()))));
  EXPECT_EQ(ToFloat(F16{0x3c00}), 1.0f);
  EXPECT_EQ(ToFloat(F16{0x8001}), -0x1p-24f);
  EXPECT_EQ(ToFloat(F16{0x7bff}), 65504.0f);
  EXPECT_TRUE(std::isinf(ToFloat(F16{0xfc00})));
  EXPECT_EQ(FastExp2(-std::numeric_limits<float>::infinity()), 0);
}

}  // namespace
}  // namespace carryover::emulated
