#include "engine/model_identity.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <thread>
#include <vector>

#include "absl/strings/string_view.h"
#include "engine/weights.h"

namespace carryover {
namespace {

void AddRope(const RopeConfig& rope, Hasher* hasher) {
  hasher->AddInt(static_cast<uint64_t>(rope.scaling));
  for (double value : {rope.theta, rope.factor, rope.low_freq_factor, rope.high_freq_factor}) {
    hasher->AddInt(std::bit_cast<uint64_t>(value));
  }
  hasher->AddInt(rope.original_max_positions);
}

void AddWindows(const std::vector<int>& windows, Hasher* hasher) {
  hasher->AddInt(windows.size());
  for (int window : windows) hasher->AddInt(window);
}

// The fields of the config that change what the model computes. What only bounds its use
// (max_positions) or ends a text (eos_ids) is left out.
void AddMaths(const ModelConfig& config, Hasher* hasher) {
  hasher->Add(config.model_type);
  for (int value : {config.vocab, config.hidden, config.layers, config.heads, config.kv_heads,
                    config.head_dim, config.intermediate}) {
    hasher->AddInt(value);
  }
  hasher->AddInt(std::bit_cast<uint64_t>(config.norm_eps));
  for (bool value : {config.qkv_bias, config.out_bias, config.mlp_bias, config.qk_norm,
                     config.tied_embeddings}) {
    hasher->AddInt(value);
  }
  AddRope(config.rope, hasher);
  AddWindows(config.windows, hasher);
}

struct TensorHash {
  const TensorMap::value_type* entry = nullptr;
  Digest digest{};
};

// Digests of all tensors that take part, in the order of their names.
std::vector<TensorHash> HashTensors(const ModelConfig& config, const TensorMap& tensors) {
  std::vector<TensorHash> hashes;
  for (const auto& entry : tensors) {
    if (!IsUnusedTensor(config, entry.first)) hashes.push_back({&entry});
  }
  // The largest first, so that no thread is left alone with one at the end.
  std::vector<TensorHash*> order;
  for (TensorHash& hash : hashes) order.push_back(&hash);
  std::sort(order.begin(), order.end(), [](const TensorHash* a, const TensorHash* b) {
    return a->entry->second.bytes.size() > b->entry->second.bytes.size();
  });
  std::atomic<size_t> next{0};
  const auto work = [&order, &next] {
    for (size_t i = next.fetch_add(1); i < order.size(); i = next.fetch_add(1)) {
      order[i]->digest = Sha256(order[i]->entry->second.bytes);
    }
  };
  const size_t threads =
      std::min<size_t>({std::max(1u, std::thread::hardware_concurrency()), 32u, order.size()});
  std::vector<std::thread> helpers;
  for (size_t i = 1; i < threads; ++i) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
  return hashes;
}

}  // namespace

ModelDigests HashModel(const ModelConfig& config, const TensorMap& tensors, DType weights,
                       DType kv_dtype) {
  Hasher bytes, all;
  bytes.Add("carryover weights 1");
  all.Add("carryover fingerprint 1");
  for (const TensorHash& hash : HashTensors(config, tensors)) {
    const auto& [name, tensor] = *hash.entry;
    bytes.Add(name).AddDigest(hash.digest);
    all.Add(name).Add(DTypeName(tensor.dtype)).AddInt(tensor.shape.size());
    for (int64_t extent : tensor.shape) all.AddInt(extent);
    all.AddDigest(hash.digest);
  }
  AddMaths(config, &all);
  // Activations are of the type of the weights.
  all.Add(DTypeName(weights)).Add(DTypeName(weights)).Add(DTypeName(kv_dtype));
  return {bytes.Finish(), all.Finish()};
}

KvLayout MakeKvLayout(const ModelConfig& config, DType kv_dtype, int block_tokens,
                      const char* kv_format) {
  KvLayout layout;
  layout.geometry = {.layers = config.layers,
                     .kv_heads = config.kv_heads,
                     .head_dim = config.head_dim,
                     .block_tokens = block_tokens,
                     .dtype = kv_dtype};
  layout.format = kv_format;
  const size_t row_bytes = layout.geometry.PlaneBytes() / block_tokens * config.layers;
  layout.planes = {{"k", 1, row_bytes}, {"v", 1, row_bytes}};

  Hasher hasher;
  hasher.Add("carryover kv layout 1").Add(config.model_type).Add(kv_format);
  for (int value : {config.layers, config.kv_heads, config.head_dim, block_tokens}) {
    hasher.AddInt(value);
  }
  hasher.Add(DTypeName(kv_dtype)).AddInt(config.qk_norm);
  AddRope(config.rope, &hasher);
  AddWindows(config.windows, &hasher);
  layout.sha256 = hasher.Finish();
  return layout;
}

}  // namespace carryover
