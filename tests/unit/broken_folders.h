// Model folders that are broken in one way each, for the tests of what loading says about them.
#pragma once

#include <string>
#include <vector>

namespace carryover {

// One broken folder: its files (absent where empty), and what the error must say.
struct BrokenFolder {
  std::string what;
  std::string config;
  std::string safetensors;
  std::vector<std::string> named;  // all of these stand in the error
  std::string index;
  std::string generation;
};

// Every one of them, in a fixed order.
std::vector<BrokenFolder> BrokenFolders();

}  // namespace carryover
