// Checkpoints in the safetensors format: one file or shards with an index, memory-mapped, every
// offset checked before anything is read through it. Functions are thread-safe; a Checkpoint is
// immutable once open.
//
// Format: https://github.com/huggingface/safetensors (8 bytes of little-endian header length, a
// JSON header, then the tensors' bytes without holes).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/mapped_file.h"
#include "kernels/ops.h"

namespace carryover {

// One tensor where it lies in a mapped file; no alignment is promised.
struct TensorView {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  absl::string_view bytes;
  std::string file;  // plain name, for errors
};

using TensorMap = std::map<std::string, TensorView>;

// Checks a whole file and returns views into it. INVALID_ARGUMENT names file_name and, where there
// is one, the tensor. Nothing larger than the header is allocated.
// metadata, where it is not null, gets the strings of __metadata__.
absl::StatusOr<TensorMap> ParseSafetensors(absl::string_view file, const std::string& file_name,
                                           std::map<std::string, std::string>* metadata = nullptr);

// A tensor to write, in F32: (shape), row-major.
struct NamedTensor {
  std::string name;
  std::vector<int64_t> shape;
  absl::Span<const float> values;
};

// The bytes of a file, tensors in the order given. Equal input gives equal bytes.
// REQUIRES: names differ, and none is "__metadata__"; shapes fit the values; names and metadata are
// UTF-8.
std::string WriteSafetensors(const std::map<std::string, std::string>& metadata,
                             absl::Span<const NamedTensor> tensors);

// Tensor names to shard names, from the text of model.safetensors.index.json. Shard names are plain
// file names: an index never reaches out of its folder.
absl::StatusOr<std::map<std::string, std::string>> ParseShardIndex(absl::string_view text);

struct Checkpoint {
  std::vector<MappedFile> files;
  TensorMap tensors;  // views into files
};

// model.safetensors, or else the shards of model.safetensors.index.json. NOT_FOUND or
// INVALID_ARGUMENT names the file and the tensor. A file that somebody truncates later, while it is
// mapped, still ends the process: model folders must not be written to while they are loaded.
absl::StatusOr<Checkpoint> OpenCheckpoint(const std::string& folder);

}  // namespace carryover
