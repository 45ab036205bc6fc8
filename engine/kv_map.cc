#include "engine/kv_map.h"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/mapped_file.h"
#include "base/status_macros.h"
#include "engine/safetensors.h"

namespace carryover {
namespace {

constexpr char kFormat[] = "carryover-kv-map-1";
constexpr int kMaxLayers = 1024;
constexpr int kMaxKvHeads = 1024;
constexpr int kMaxHeadDim = 256;
constexpr KvMapVariant kVariants[] = {KvMapVariant::kPerLayer, KvMapVariant::kPerHead,
                                      KvMapVariant::kLowRank};

using Metadata = std::map<std::string, std::string>;

// One tensor of a layer: where its values are, and its shape.
struct Part {
  const char* name;
  std::vector<float> KvMapLayer::*values;
  std::vector<int64_t> shape;
};

// In the order of their names.
std::vector<Part> PartsOf(const KvMapInfo& info) {
  const int64_t dim = info.dim(), head = 2 * info.head_dim, rank = info.rank;
  std::vector<Part> parts = {{"bias", &KvMapLayer::bias, {dim}}};
  switch (info.variant) {
    case KvMapVariant::kPerLayer:
      parts.push_back({"weight", &KvMapLayer::weight, {dim, dim}});
      break;
    case KvMapVariant::kPerHead:
      parts.push_back({"weight", &KvMapLayer::weight, {info.kv_heads, head, head}});
      break;
    case KvMapVariant::kLowRank:
      parts.push_back({"down", &KvMapLayer::down, {rank, dim}});
      parts.push_back({"up", &KvMapLayer::up, {dim, rank}});
      break;
  }
  return parts;
}

int64_t Elements(const Part& part) {
  int64_t product = 1;
  for (int64_t extent : part.shape) product *= extent;
  return product;
}

std::string TensorName(int layer, const char* part) {
  return absl::StrCat("layers.", layer, ".", part);
}

bool AllFinite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(),
                     [](float value) { return std::isfinite(value); });
}

// What a reader and a writer have in common: each field once.
template <class Visitor>
void VisitFields(KvMapInfo* info, Visitor&& visit) {
  visit.Fingerprint("source", &info->source);
  visit.Fingerprint("target", &info->target);
  visit.Fingerprint("kv_layout_sha256", &info->kv_layout);
  visit.Int("layers", &info->layers, 1, kMaxLayers);
  visit.Int("kv_heads", &info->kv_heads, 1, kMaxKvHeads);
  visit.Int("head_dim", &info->head_dim, 2, kMaxHeadDim);
  visit.Variant("variant", &info->variant);
  visit.Int("rank", &info->rank, 0, 2 * kMaxKvHeads * kMaxHeadDim);
  visit.Real("lambda", &info->lambda);
  visit.Count("texts", &info->texts);
  visit.Count("tokens", &info->tokens);
  visit.Count("held_texts", &info->held_texts);
  visit.Count("held_positions", &info->held_positions);
  visit.Real("direct_tv", &info->direct.tv);
  visit.Real("direct_kl", &info->direct.kl);
  visit.Real("direct_flips", &info->direct.flips);
  visit.Real("mapped_tv", &info->mapped.tv);
  visit.Real("mapped_kl", &info->mapped.kl);
  visit.Real("mapped_flips", &info->mapped.flips);
}

struct FieldWriter {
  Metadata fields;
  void Fingerprint(const char* name, const Digest* value) { fields[name] = ToHex(*value); }
  void Int(const char* name, const int* value, int, int) { fields[name] = absl::StrCat(*value); }
  void Count(const char* name, const int64_t* value) { fields[name] = absl::StrCat(*value); }
  void Real(const char* name, const double* value) {
    fields[name] = absl::StrFormat("%.9g", *value);
  }
  void Variant(const char* name, const KvMapVariant* value) {
    fields[name] = KvMapVariantName(*value);
  }
};

// Takes the fields out; the first problem stands.
struct FieldReader {
  Metadata fields;
  std::string problem;

  std::string Take(const char* name) {
    const auto found = fields.find(name);
    if (found == fields.end()) {
      Problem(name, "is missing");
      return "";
    }
    std::string value = std::move(found->second);
    fields.erase(found);
    return value;
  }
  void Problem(const char* name, absl::string_view what) {
    if (problem.empty()) problem = absl::StrCat("the metadata field '", name, "' ", what);
  }
  void Fingerprint(const char* name, Digest* value) {
    const std::string hex = Take(name);
    const bool lower_hex = std::all_of(hex.begin(), hex.end(), [](char c) {
      return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
    });
    if (hex.size() != 2 * value->size() || !lower_hex) {
      return Problem(name, "is not a SHA-256 in lower-case hex");
    }
    const std::string bytes = absl::HexStringToBytes(hex);
    std::copy(bytes.begin(), bytes.end(), value->begin());
  }
  void Int(const char* name, int* value, int least, int most) {
    if (!absl::SimpleAtoi(Take(name), value) || *value < least || *value > most) {
      Problem(name, absl::StrCat("is not a whole number from ", least, " to ", most));
    }
  }
  void Count(const char* name, int64_t* value) {
    if (!absl::SimpleAtoi(Take(name), value) || *value < 0) Problem(name, "is not a count");
  }
  void Real(const char* name, double* value) {
    if (!absl::SimpleAtod(Take(name), value) || !std::isfinite(*value) || *value < 0) {
      Problem(name, "is not a number from 0");
    }
  }
  void Variant(const char* name, KvMapVariant* value) {
    const std::string text = Take(name);
    for (KvMapVariant variant : kVariants) {
      if (text != KvMapVariantName(variant)) continue;
      *value = variant;
      return;
    }
    Problem(name, "is not per_layer, per_head or low_rank");
  }
};

// What no single field shows. "" when all is well.
std::string InfoProblem(const KvMapInfo& info) {
  if (info.head_dim % 2 != 0) return "the metadata field 'head_dim' is odd";
  const bool low_rank = info.variant == KvMapVariant::kLowRank;
  if (low_rank != (info.rank > 0) || info.rank > info.dim()) {
    return absl::StrCat("the metadata field 'rank' is ", info.rank, " for a map that is ",
                        KvMapVariantName(info.variant), " of ", info.dim(), " values");
  }
  return "";
}

}  // namespace

const char* KvMapVariantName(KvMapVariant variant) {
  constexpr const char* kNames[] = {"per_layer", "per_head", "low_rank"};
  return kNames[static_cast<int>(variant)];
}

std::vector<float> KvMap::Weight(int layer) const {
  const KvMapLayer& values = layers[layer];
  if (info.variant == KvMapVariant::kPerLayer) return values.weight;
  const int64_t dim = info.dim();
  std::vector<float> weight(dim * dim, 0);
  if (info.variant == KvMapVariant::kLowRank) {
    using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    Eigen::Map<Matrix>(weight.data(), dim, dim).noalias() =
        Eigen::Map<const Matrix>(values.up.data(), dim, info.rank) *
        Eigen::Map<const Matrix>(values.down.data(), info.rank, dim);
    return weight;
  }
  // Value i of head h is value h * head_dim + i of K; the head's V comes behind all K.
  const int64_t head_dim = info.head_dim, half = dim / 2;
  const float* from = values.weight.data();
  for (int64_t head = 0; head < info.kv_heads; ++head) {
    for (int64_t out = 0; out < 2 * head_dim; ++out) {
      const int64_t row = head * head_dim + out % head_dim + (out < head_dim ? 0 : half);
      float* to = weight.data() + row * dim + head * head_dim;
      std::copy_n(from, head_dim, to);
      std::copy_n(from + head_dim, head_dim, to + half);
      from += 2 * head_dim;
    }
  }
  return weight;
}

std::string KvMap::Name() const {
  Hasher hasher;
  hasher.Add(kFormat).AddDigest(info.source).AddDigest(info.target).AddDigest(info.kv_layout);
  hasher.Add(KvMapVariantName(info.variant));
  for (const KvMapLayer& layer : layers) {
    for (const Part& part : PartsOf(info)) {
      const std::vector<float>& values = layer.*part.values;
      hasher.Add(absl::string_view(reinterpret_cast<const char*>(values.data()),
                                   values.size() * sizeof(float)));
    }
  }
  return ToHex(hasher.Finish());
}

absl::StatusOr<std::string> WriteKvMap(const KvMap& map) {
  KvMapInfo info = map.info;
  FieldWriter writer;
  writer.fields["format"] = kFormat;
  VisitFields(&info, writer);
  // A reader of our own says what is wrong, so that what was written can be read.
  FieldReader reader{writer.fields, ""};
  VisitFields(&info, reader);
  if (reader.problem.empty()) reader.problem = InfoProblem(info);
  if (!reader.problem.empty()) return absl::InvalidArgumentError("KV map: " + reader.problem);
  if (static_cast<int>(map.layers.size()) != info.layers) {
    return absl::InvalidArgumentError("KV map: it does not have as many layers as it says");
  }
  std::vector<NamedTensor> tensors;
  for (int layer = 0; layer < info.layers; ++layer) {
    for (const Part& part : PartsOf(info)) {
      const std::vector<float>& values = map.layers[layer].*part.values;
      const std::string name = TensorName(layer, part.name);
      if (static_cast<int64_t>(values.size()) != Elements(part)) {
        return absl::InvalidArgumentError(absl::StrCat("KV map: ", name, " has ", values.size(),
                                                       " values, not ", Elements(part)));
      }
      if (!AllFinite(values)) {
        return absl::InvalidArgumentError(
            absl::StrCat("KV map: ", name, " has a value that is not finite"));
      }
      tensors.push_back({name, part.shape, values});
    }
  }
  return WriteSafetensors(writer.fields, tensors);
}

absl::StatusOr<KvMap> ParseKvMap(absl::string_view file, const std::string& file_name) {
  const auto error = [&](const auto&... parts) {
    return absl::InvalidArgumentError(absl::StrCat(file_name, ": ", parts...));
  };
  Metadata metadata;
  ASSIGN_OR_RETURN(TensorMap tensors, ParseSafetensors(file, file_name, &metadata));
  FieldReader reader{std::move(metadata), ""};
  if (const std::string format = reader.Take("format"); format != kFormat) {
    return error("is not a KV map: the metadata field 'format' is not ", kFormat);
  }
  KvMap map;
  VisitFields(&map.info, reader);
  if (reader.problem.empty()) reader.problem = InfoProblem(map.info);
  if (reader.problem.empty() && !reader.fields.empty()) {
    reader.problem = absl::StrCat("the metadata has the unknown field '",
                                  absl::CHexEscape(reader.fields.begin()->first), "'");
  }
  if (!reader.problem.empty()) return error(reader.problem);

  const std::vector<Part> parts = PartsOf(map.info);
  const size_t wanted = map.info.layers * parts.size();
  if (tensors.size() != wanted) {
    return error("has ", tensors.size(), " tensors, a ", KvMapVariantName(map.info.variant),
                 " map of ", map.info.layers, " layers has ", wanted);
  }
  for (int index = 0; index < map.info.layers; ++index) {
    KvMapLayer& layer = map.layers.emplace_back();
    for (const Part& part : parts) {
      const std::string name = TensorName(index, part.name);
      const auto found = tensors.find(name);
      if (found == tensors.end()) return error("tensor '", name, "' is missing");
      const TensorView& tensor = found->second;
      if (tensor.dtype != DType::kF32) return error("tensor '", name, "' is not F32");
      if (tensor.shape != part.shape) {
        return error("tensor '", name, "' is (", absl::StrJoin(tensor.shape, ", "), "), not (",
                     absl::StrJoin(part.shape, ", "), ")");
      }
      std::vector<float>& values = layer.*part.values;
      values.resize(tensor.bytes.size() / sizeof(float));
      std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
      if (!AllFinite(values)) return error("tensor '", name, "' has a value that is not finite");
    }
  }
  return map;
}

absl::StatusOr<KvMap> ReadKvMap(const std::string& path) {
  ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  absl::StatusOr<KvMap> map = ParseKvMap(file.bytes(), path);
  RETURN_IF_ERROR(file.CheckUnchanged());
  return map;
}

absl::Status CheckKvMapFits(const KvMap& map, const KvMapIdentity& identity) {
  const KvMapInfo& info = map.info;
  std::vector<std::string> differ;
  const auto digest = [&](const char* name, const Digest& is, const Digest& wanted) {
    if (is == wanted) return;
    differ.push_back(absl::StrCat(name, " is ", ToHex(is), ", not ", ToHex(wanted)));
  };
  const auto number = [&](const char* name, int is, int wanted) {
    if (is != wanted) differ.push_back(absl::StrCat(name, " is ", is, ", not ", wanted));
  };
  digest("source", info.source, identity.source);
  digest("target", info.target, identity.target);
  digest("kv_layout_sha256", info.kv_layout, identity.kv_layout);
  number("layers", info.layers, identity.layers);
  number("kv_heads", info.kv_heads, identity.kv_heads);
  number("head_dim", info.head_dim, identity.head_dim);
  if (differ.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the map was fitted for others: ", absl::StrJoin(differ, "; ")));
}

}  // namespace carryover
