// Memory of the emulated device for tests that launch kernels themselves. A test fails when a
// launch went wrong and the test did not take the report.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/cuda/device.h"
#include "kernels/cuda/emulation/memory.h"

namespace carryover::emulated {

class DeviceMemoryTest : public testing::Test {
 protected:
  void TearDown() override {
    cudaDeviceSynchronize();
    EXPECT_EQ(emulation::CheckGuards(), "");
    for (void* p : memory_) cudaFree(p);
    EXPECT_EQ(emulation::TakeReport(), "") << "a test must take what it broke";
    emulation::SetOrder(emulation::Order::kForward);
  }

  // Full of NaN.
  template <typename T>
  T* Allocate(size_t count) {
    void* p = nullptr;
    EXPECT_EQ(cudaMalloc(&p, count * sizeof(T)), cudaSuccess);
    memory_.push_back(p);
    return static_cast<T*>(p);
  }
  template <typename T>
  T* Upload(const std::vector<T>& values) {
    T* const p = Allocate<T>(values.size());
    cudaMemcpyAsync(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice, nullptr);
    return p;
  }
  template <typename T>
  std::vector<T> Read(const T* device, size_t count) {
    std::vector<T> out(count);
    cudaMemcpyAsync(out.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost, nullptr);
    cudaStreamSynchronize(nullptr);
    return out;
  }
  // What went wrong in what was launched.
  std::string Report() {
    cudaDeviceSynchronize();
    return emulation::TakeReport();
  }

  std::vector<void*> memory_;
};

}  // namespace carryover::emulated
