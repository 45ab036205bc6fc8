// A model that is not the one it was copied from: what a real update looks like to a measure.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace carryover {

// A copy of `folder`, with the signs of every 29th weight turned. `name` keeps copies apart.
inline std::string PerturbedFolder(const std::string& folder, const std::string& name) {
  const std::string copy =
      testing::TempDir() + "/carryover-perturbed-" + name + "-" + std::to_string(getpid());
  std::filesystem::remove_all(copy);
  std::filesystem::copy(folder, copy);
  for (const auto& file : std::filesystem::directory_iterator(copy)) {
    if (file.path().extension() != ".safetensors") continue;
    std::filesystem::permissions(file.path(), std::filesystem::perms::owner_write,
                                 std::filesystem::perm_options::add);
    std::fstream stream(file.path(), std::ios::in | std::ios::out | std::ios::binary);
    uint64_t header = 0;
    stream.read(reinterpret_cast<char*>(&header), 8);
    const auto size = std::filesystem::file_size(file.path());
    for (uint64_t at = 8 + header + 3; at < size; at += 4 * 29) {
      stream.seekg(at);
      const char byte = static_cast<char>(stream.get() ^ 0x80);
      stream.seekp(at);
      stream.put(byte);
    }
  }
  return copy;
}

}  // namespace carryover
