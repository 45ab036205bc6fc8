// Which prefixes requests carried lately, and what a native copy of each is worth: the list that
// refresh works off, hottest first. Bounded; what is worth least is forgotten. Engine thread only.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "base/hash.h"
#include "engine/prefix_store.h"

namespace carryover {

struct CarriedPrefix {
  Digest target{};  // fingerprint of the version that carries it
  CacheRoot root;
  std::vector<int32_t> tokens;  // whole blocks, up to the last that was carried
};

class CarriedPrefixes {
 public:
  // What a use is worth halves in that time, in seconds.
  static constexpr double kHalfLife = 600;

  CarriedPrefixes(int max_prefixes, int64_t max_tokens)
      : max_prefixes_(max_prefixes), max_tokens_(max_tokens) {}

  // A request of `target` carried `carried` tokens, the last of them in `end`. tokens are the
  // prefix up to there; copied when it is new. `now` is in seconds of a steady clock.
  void Used(const Digest& target, const CacheRoot& root, const EntryRef& end,
            absl::Span<const int32_t> tokens, int carried, double now);

  // Removes the prefix that is worth most: the sum of its uses' carried tokens, aged.
  std::optional<CarriedPrefix> TakeHottest();

  void Forget(const Digest& target);

  int size() const { return static_cast<int>(entries_.size()); }
  int64_t tokens() const { return tokens_; }

 private:
  struct Key {
    Digest target;
    uint32_t slot, generation;
    bool operator==(const Key&) const = default;
    template <typename H>
    friend H AbslHashValue(H hash, const Key& key) {
      return H::combine(std::move(hash), key.target, key.slot, key.generation);
    }
  };
  struct Entry {
    CarriedPrefix prefix;
    double worth = 0;  // log2 of the sum of carried * 2^(time / kHalfLife): needs no ageing
  };
  using Entries = absl::flat_hash_map<Key, Entry>;

  void Erase(Entries::iterator at);
  Entries::iterator Least();

  const int max_prefixes_;
  const int64_t max_tokens_;
  Entries entries_;
  int64_t tokens_ = 0;
};

}  // namespace carryover
