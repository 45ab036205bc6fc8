#include "tests/integration/perturbed_model.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numbers>
#include <random>

#include "nlohmann/json.hpp"

namespace carryover {
namespace {

float FromBf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

uint16_t ToBf16(float value) {  // finite values only; to the nearest, ties to even
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// By Box and Muller: what std::normal_distribution gives is left to the library.
class Normal {
 public:
  double Next() {
    const double u = (static_cast<double>(random_()) + 1) / 4294967296.0;
    const double v = static_cast<double>(random_()) / 4294967296.0;
    return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v);
  }

 private:
  std::mt19937 random_{20261201};
};

void AddNoise(uint16_t* values, size_t count, double step, Normal* normal) {
  double squares = 0;
  for (size_t i = 0; i < count; ++i) {
    const double value = FromBf16(values[i]);
    squares += value * value;
  }
  const double scale = step * std::sqrt(squares / static_cast<double>(count));
  for (size_t i = 0; i < count; ++i) {
    values[i] = ToBf16(static_cast<float>(FromBf16(values[i]) + scale * normal->Next()));
  }
}

}  // namespace

std::string PerturbedModel(const std::string& folder, const std::string& tensors, double step) {
  std::string copy =
      (std::filesystem::temp_directory_path() / "carryover-perturbed-XXXXXX").string();
  if (mkdtemp(copy.data()) == nullptr) {
    ADD_FAILURE() << "no folder for a model";
    return "";
  }
  for (const char* name : {"config.json", "tokenizer.json"}) {
    std::filesystem::copy(folder + "/" + name, copy);
  }
  std::ifstream in(folder + "/model.safetensors", std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(in)), {});
  uint64_t header_bytes = 0;
  if (bytes.size() > 8)
    std::copy(bytes.begin(), bytes.begin() + 8, reinterpret_cast<char*>(&header_bytes));
  const auto header = nlohmann::json::parse(bytes.substr(8, header_bytes), nullptr, false);
  Normal normal;
  int changed = 0;
  for (const auto& [name, tensor] : header.items()) {
    if (name == "__metadata__" || !name.starts_with(tensors)) continue;
    EXPECT_EQ(tensor["dtype"], "BF16") << name;
    const size_t begin = tensor["data_offsets"][0], end = tensor["data_offsets"][1];
    AddNoise(reinterpret_cast<uint16_t*>(bytes.data() + 8 + header_bytes + begin),
             (end - begin) / sizeof(uint16_t), step, &normal);
    ++changed;
  }
  std::ofstream(copy + "/model.safetensors", std::ios::binary) << bytes;
  if (changed > 0) return copy;
  ADD_FAILURE() << folder << ": no tensor is called " << tensors;
  std::filesystem::remove_all(copy);
  return "";
}

}  // namespace carryover
