// The options that give a prompt, for every command that takes one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "carryover/v1/cache.pb.h"
#include "carryover/v1/completions.pb.h"
#include "client/args.h"

namespace carryover {

struct PromptInput {
  std::optional<std::string> prompt;
  std::optional<std::string> prompt_file;  // "-": standard input
  std::vector<int32_t> tokens;
  std::optional<bool> add_special_tokens;

  void AddOptions(Args* args);
  bool given() const { return prompt.has_value() || prompt_file.has_value() || !tokens.empty(); }
  // Reads the file. INVALID_ARGUMENT unless exactly one of them was given and is valid UTF-8.
  absl::Status Resolve();

  // After Resolve.
  void Fill(v1::CompleteRequest* request) const;
  void Fill(v1::Prefix* prefix) const;
};

// The whole of a file, or of standard input for "-". At most 1 GiB.
absl::Status ReadFile(const std::string& path, std::string* content);

}  // namespace carryover
