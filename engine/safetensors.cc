#include "engine/safetensors.h"

#include <sys/stat.h>

#include <algorithm>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "engine/bounded_json.h"

namespace carryover {
namespace {

using nlohmann::json;

constexpr size_t kLengthBytes = 8;
constexpr size_t kMaxHeaderBytes = 16u << 20;  // a 70B Llama's is about 100 KB
constexpr size_t kMaxIndexBytes = 16u << 20;
constexpr size_t kMaxTensors = 100000;
constexpr size_t kMaxRank = 8;
constexpr size_t kMaxShards = 1024;
constexpr size_t kMaxNameBytes = 255;
constexpr char kSingleFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";

struct FileError {
  const std::string& file;
  template <typename... Parts>
  absl::Status operator()(const Parts&... parts) const {
    return absl::InvalidArgumentError(absl::StrCat(file, ": ", parts...));
  }
};

uint64_t LittleEndian64(absl::string_view bytes) {
  uint64_t value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | static_cast<uint8_t>(bytes[i]);
  return value;
}

bool IsUnsigned(const json& value) { return value.is_number_unsigned(); }

bool DTypeFromName(const std::string& name, DType* dtype) {
  for (DType candidate : {DType::kF32, DType::kBF16, DType::kF16}) {
    if (name == DTypeName(candidate)) {
      *dtype = candidate;
      return true;
    }
  }
  return false;
}

// One entry of the header; `data` is the part of the file behind the header.
absl::StatusOr<TensorView> ParseTensor(const std::string& name, const json& entry,
                                       absl::string_view data, const FileError& error) {
  if (!entry.is_object()) return error("tensor '", name, "' is not an object");
  for (const auto& [key, value] : entry.items()) {
    if (key != "dtype" && key != "shape" && key != "data_offsets") {
      return error("tensor '", name, "' has the unknown field '", key, "'");
    }
  }
  TensorView tensor;
  tensor.file = error.file;
  const auto dtype = entry.find("dtype");
  if (dtype == entry.end() || !dtype->is_string()) return error("tensor '", name, "' has no dtype");
  if (!DTypeFromName(dtype->get_ref<const std::string&>(), &tensor.dtype)) {
    return error("tensor '", name, "' has the dtype ", dtype->get_ref<const std::string&>(),
                 "; F32, F16 and BF16 are supported");
  }
  const auto shape = entry.find("shape");
  if (shape == entry.end() || !shape->is_array() || shape->size() > kMaxRank ||
      !std::all_of(shape->begin(), shape->end(), IsUnsigned)) {
    return error("the shape of tensor '", name, "' is not a list of at most ", kMaxRank,
                 " whole numbers");
  }
  const auto offsets = entry.find("data_offsets");
  if (offsets == entry.end() || !offsets->is_array() || offsets->size() != 2 ||
      !std::all_of(offsets->begin(), offsets->end(), IsUnsigned)) {
    return error("the data_offsets of tensor '", name, "' are not two whole numbers");
  }
  const uint64_t begin = (*offsets)[0].get<uint64_t>();
  const uint64_t end = (*offsets)[1].get<uint64_t>();
  if (begin > end) return error("tensor '", name, "' ends before it begins");
  if (end > data.size()) {
    return error("tensor '", name, "' ends at byte ", end, " of ", data.size(),
                 ": the file is truncated or its header is wrong");
  }
  // The product never overflows: it is compared with the bytes at hand before each step.
  uint64_t bytes = DTypeBytes(tensor.dtype);
  bool empty = false;
  for (const json& value : *shape) {
    const uint64_t extent = value.get<uint64_t>();
    if (extent == 0) {
      empty = true;
    } else if (extent > data.size() / bytes) {
      return error("the shape of tensor '", name, "' needs more bytes than the file has");
    } else {
      bytes *= extent;
    }
    tensor.shape.push_back(static_cast<int64_t>(extent));
  }
  if (empty) bytes = 0;
  if (bytes != end - begin) {
    return error("tensor '", name, "' has ", end - begin,
                 " bytes of data, its shape and dtype need ", bytes);
  }
  tensor.bytes = data.substr(begin, end - begin);
  return tensor;
}

// The tensors must cover the data once and wholly.
absl::Status CheckCover(const TensorMap& tensors, absl::string_view data, const FileError& error) {
  std::vector<std::pair<size_t, const TensorMap::value_type*>> order;
  order.reserve(tensors.size());
  for (const auto& entry : tensors) {
    order.emplace_back(entry.second.bytes.data() - data.data(), &entry);
  }
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::make_pair(a.first, a.second->second.bytes.size()) <
           std::make_pair(b.first, b.second->second.bytes.size());
  });
  size_t covered = 0;
  for (const auto& [begin, entry] : order) {
    if (begin < covered) return error("tensor '", entry->first, "' overlaps another one");
    if (begin > covered) {
      return error("there are ", begin - covered, " unused bytes before tensor '", entry->first,
                   "'");
    }
    covered = begin + entry->second.bytes.size();
  }
  if (covered != data.size()) {
    return error("there are ", data.size() - covered, " unused bytes behind the last tensor");
  }
  return absl::OkStatus();
}

absl::Status AddShard(const std::string& folder, const std::string& name, Checkpoint* checkpoint) {
  ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(absl::StrCat(folder, "/", name)));
  absl::StatusOr<TensorMap> parsed = ParseSafetensors(file.bytes(), name);
  RETURN_IF_ERROR(file.CheckUnchanged());
  ASSIGN_OR_RETURN(TensorMap tensors, std::move(parsed));
  for (auto& [tensor, view] : tensors) {
    const auto [place, added] = checkpoint->tensors.emplace(tensor, std::move(view));
    if (!added) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor '", tensor, "' is in both ", place->second.file, " and ", name));
    }
  }
  checkpoint->files.push_back(std::move(file));
  return absl::OkStatus();
}

absl::StatusOr<Checkpoint> OpenShards(const std::string& folder) {
  ASSIGN_OR_RETURN(const std::string text,
                   ReadFile(absl::StrCat(folder, "/", kIndexFile), kMaxIndexBytes));
  ASSIGN_OR_RETURN(const auto index, ParseShardIndex(text));
  std::map<std::string, std::string> shards;  // to the first of its tensors, for errors
  for (const auto& [tensor, shard] : index) shards.emplace(shard, tensor);
  Checkpoint checkpoint;
  for (const auto& [shard, tensor] : shards) {
    const absl::Status added = AddShard(folder, shard, &checkpoint);
    if (absl::IsNotFound(added)) {
      return absl::NotFoundError(absl::StrCat(kIndexFile, ": tensor '", tensor, "' is in ", shard,
                                              ", which is not there: ", added.message()));
    }
    RETURN_IF_ERROR(added);
  }
  for (const auto& [tensor, shard] : index) {
    const auto found = checkpoint.tensors.find(tensor);
    if (found == checkpoint.tensors.end() || found->second.file != shard) {
      return absl::InvalidArgumentError(
          absl::StrCat(kIndexFile, ": tensor '", tensor, "' is not in ", shard));
    }
  }
  for (const auto& [tensor, view] : checkpoint.tensors) {
    if (index.find(tensor) == index.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat(view.file, ": tensor '", tensor, "' is missing in ", kIndexFile));
    }
  }
  return checkpoint;
}

}  // namespace

absl::StatusOr<TensorMap> ParseSafetensors(absl::string_view file, const std::string& file_name,
                                           std::map<std::string, std::string>* metadata) {
  const FileError error{file_name};
  if (file.size() < kLengthBytes) return error("is shorter than the 8 bytes of a header length");
  const uint64_t length = LittleEndian64(file.substr(0, kLengthBytes));
  if (length > file.size() - kLengthBytes) {
    return error("the header length ", length, " is more than the file's ", file.size(), " bytes");
  }
  if (length > kMaxHeaderBytes) {
    return error("the header length ", length, " is over the limit of ", kMaxHeaderBytes);
  }
  const absl::string_view text = file.substr(kLengthBytes, length);
  const absl::string_view data = file.substr(kLengthBytes + length);
  if (text.empty() || text[0] != '{') return error("the header does not begin with '{'");
  const absl::StatusOr<json> header =
      ParseBoundedJson(text, {.max_depth = 4, .max_values = 16 * kMaxTensors});
  if (!header.ok()) return error("the header ", header.status().message());
  if (header->size() > kMaxTensors) return error("the header has over ", kMaxTensors, " tensors");

  TensorMap tensors;
  for (const auto& [name, entry] : header->items()) {
    if (name == "__metadata__") {
      if (!entry.is_object() || !std::all_of(entry.begin(), entry.end(),
                                             [](const json& value) { return value.is_string(); })) {
        return error("__metadata__ is not an object of strings");
      }
      if (metadata != nullptr) {
        for (const auto& [key, value] : entry.items()) (*metadata)[key] = value.get<std::string>();
      }
      continue;
    }
    ASSIGN_OR_RETURN(TensorView tensor, ParseTensor(name, entry, data, error));
    tensors.emplace(name, std::move(tensor));
  }
  RETURN_IF_ERROR(CheckCover(tensors, data, error));
  return tensors;
}

std::string WriteSafetensors(const std::map<std::string, std::string>& metadata,
                             absl::Span<const NamedTensor> tensors) {
  json header = {{"__metadata__", metadata}};
  size_t bytes = 0;
  for (const NamedTensor& tensor : tensors) {
    const size_t end = bytes + tensor.values.size() * sizeof(float);
    header[tensor.name] = {
        {"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {bytes, end}}};
    bytes = end;
  }
  std::string text = header.dump();
  // Data begins at a multiple of 8, as the format's own writer has it.
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string file;
  file.reserve(kLengthBytes + text.size() + bytes);
  for (int i = 0; i < 8; ++i) file.push_back(static_cast<char>(uint64_t{text.size()} >> (8 * i)));
  file += text;
  for (const NamedTensor& tensor : tensors) {
    file.append(reinterpret_cast<const char*>(tensor.values.data()),
                tensor.values.size() * sizeof(float));
  }
  return file;
}

absl::StatusOr<std::map<std::string, std::string>> ParseShardIndex(absl::string_view text) {
  const std::string file_name = kIndexFile;
  const FileError error{file_name};
  const absl::StatusOr<json> index =
      ParseBoundedJson(text, {.max_depth = 8, .max_values = 2 * kMaxTensors});
  if (!index.ok()) return error(index.status().message());
  if (!index->is_object()) return error("is not a JSON object");
  const auto map = index->find("weight_map");
  if (map == index->end() || !map->is_object() || map->empty()) {
    return error("weight_map is missing, empty or not an object");
  }
  std::map<std::string, std::string> result;
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : map->items()) {
    if (!shard.is_string()) return error("weight_map['", tensor, "'] is not a string");
    const std::string& name = shard.get_ref<const std::string&>();
    if (name.empty() || name.size() > kMaxNameBytes || name[0] == '.' ||
        !absl::EndsWith(name, ".safetensors") ||
        name.find_first_of("/\\\0", 0, 3) != std::string::npos) {
      return error("weight_map['", tensor,
                   "'] is not the plain name of a .safetensors file in the folder");
    }
    shards.insert(name);
    if (shards.size() > kMaxShards) return error("weight_map names over ", kMaxShards, " files");
    result.emplace(tensor, name);
  }
  return result;
}

absl::StatusOr<Checkpoint> OpenCheckpoint(const std::string& folder) {
  Checkpoint checkpoint;
  const absl::Status single = AddShard(folder, kSingleFile, &checkpoint);
  if (single.ok()) return checkpoint;
  if (!absl::IsNotFound(single)) return single;
  struct stat info;
  if (stat(absl::StrCat(folder, "/", kIndexFile).c_str(), &info) != 0) {
    return absl::NotFoundError(
        absl::StrCat(folder, ": has neither ", kSingleFile, " nor ", kIndexFile));
  }
  return OpenShards(folder);
}

}  // namespace carryover
