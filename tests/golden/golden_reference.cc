#include "tests/golden/golden_reference.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/mapped_file.h"
#include "base/status_macros.h"
#include "engine/safetensors.h"
#include "tests/source_dir.h"

namespace carryover {
namespace {

std::vector<float> Floats(const TensorMap& tensors, const std::string& name) {
  const auto found = tensors.find(name);
  if (found == tensors.end()) return {};
  std::vector<float> values(found->second.bytes.size() / sizeof(float));
  std::memcpy(values.data(), found->second.bytes.data(), values.size() * sizeof(float));
  return values;
}

// Whole numbers are kept as floats, which hold every id below 2^24.
std::vector<int32_t> Ints(const TensorMap& tensors, const std::string& name) {
  const std::vector<float> values = Floats(tensors, name);
  return {values.begin(), values.end()};
}

}  // namespace

absl::StatusOr<GoldenReference> LoadGoldenReference(const std::string& name) {
  const std::string path =
      absl::StrCat(SourceDir(), "/tests/golden/reference/", name, ".safetensors");
  ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  ASSIGN_OR_RETURN(const TensorMap tensors, ParseSafetensors(file.bytes(), path));
  GoldenReference reference;
  reference.std = Floats(tensors, "std").at(0);
  for (int i = 0; tensors.count(absl::StrCat(i, ".tokens")) > 0; ++i) {
    const std::string prefix = absl::StrCat(i, ".");
    GoldenPrompt prompt;
    prompt.tokens = Ints(tensors, prefix + "tokens");
    prompt.stride = Ints(tensors, prefix + "stride").at(0);
    prompt.logits = Floats(tensors, prefix + "logits");
    prompt.logsumexp = Floats(tensors, prefix + "logsumexp");
    prompt.top_ids = Ints(tensors, prefix + "top_ids");
    prompt.top = Floats(tensors, prefix + "top");
    prompt.greedy = Ints(tensors, prefix + "greedy");
    reference.prompts.push_back(std::move(prompt));
  }
  if (reference.prompts.empty()) return absl::InvalidArgumentError(path + ": holds no prompt");
  return reference;
}

}  // namespace carryover
