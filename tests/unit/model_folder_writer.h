// Writes model folders, right and wrong ones, for tests.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace carryover {

struct TestTensor {
  std::string name;
  std::string dtype;
  nlohmann::json shape;
  nlohmann::json begin;
  nlohmann::json end;
};

// A safetensors file as its parts, so that a test can break any one of them.
struct TestSafetensors {
  std::vector<TestTensor> tensors;
  std::string data;

  std::string Header() const;
  std::string File() const;
  static std::string File(const std::string& header, const std::string& data);
  static std::string File(uint64_t length, const std::string& header, const std::string& data);
};

// The config of a small untied Llama of one layer, and tensors to match, of small random values.
nlohmann::json TestLlamaConfig();
TestSafetensors TestLlamaTensors();

void WriteTestFile(const std::string& path, const std::string& bytes);
// An empty folder of this test's own.
std::string NewTestFolder();

}  // namespace carryover
