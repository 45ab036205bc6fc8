// A byte-pair-encoding model, as "model" of tokenizer.json describes it: a word's characters (or
// bytes) are its first symbols, and the adjacent pair whose merge ranks first is joined, again and
// again, the leftmost first among equals. Immutable and thread-safe once parsed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "engine/json_value.h"

namespace carryover {

class Bpe {
 public:
  // bytes: words come as bytes, and the vocabulary spells them in GPT-2's characters.
  // INVALID_ARGUMENT for what is malformed, inconsistent or not supported.
  static absl::StatusOr<Bpe> Parse(const JsonValue& model, bool bytes);

  // Appends the ids of word, in O(n log n).
  void Encode(absl::string_view word, std::vector<int32_t>* ids) const;

  // The token's id, or -1.
  int32_t Find(absl::string_view token) const;
  // By id; "" where the vocabulary has no such id.
  const std::vector<std::string>& tokens() const { return tokens_; }

  struct Merge {
    uint32_t rank;
    int32_t id;  // of what the pair becomes
  };
  // By left id << 32 | right id.
  const absl::flat_hash_map<uint64_t, Merge>& merges() const { return merges_; }

  // Ids up to this are accepted for n entries: a lone huge id must not make a huge table.
  static int64_t MaxId(size_t entries) { return static_cast<int64_t>(entries) * 2 + 65536; }

 private:
  absl::Status ParseVocabulary(const JsonValue& json);
  absl::Status ParseMerges(const JsonValue& json);
  absl::Status ParseOptions(const JsonValue& model);
  void FirstSymbols(absl::string_view characters, std::vector<int32_t>* symbols) const;
  void MergeShort(std::vector<int32_t>* symbols, size_t from) const;
  void MergeLong(std::vector<int32_t>* symbols, size_t from) const;

  std::vector<std::string> tokens_;
  absl::flat_hash_map<absl::string_view, int32_t> ids_;  // keys lie in tokens_
  absl::flat_hash_map<uint64_t, Merge> merges_;
  std::vector<int32_t> byte_ids_;      // (256) of the bytes' characters, -1 where there is none
  std::vector<int32_t> fallback_ids_;  // (256) of <0x00> to <0xFF>; empty without byte fallback
  bool bytes_ = false;
  bool all_bytes_ = false;  // byte_ids_ has no -1
  bool ignore_merges_ = false;
  bool fuse_unk_ = false;
  int32_t unk_id_ = -1;
};

}  // namespace carryover
