// SHA-256: identities of versions, keys of blocks, checksums of moved blocks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace carryover {

using Digest = std::array<uint8_t, 32>;

// Lower-case hex, 64 characters.
std::string ToHex(const Digest& digest);

// The first 12 hex characters: enough for a person to tell versions apart, never used as identity.
std::string ShortHex(const Digest& digest);

Digest Sha256(absl::string_view bytes);

// Hashes a sequence of fields. Each Add* writes the length before the bytes, so that no two
// different sequences of fields give the same input ("ab","c" and "a","bc" differ).
class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(const Hasher&) = delete;
  Hasher& operator=(const Hasher&) = delete;

  Hasher& Add(absl::string_view bytes);
  Hasher& AddInt(uint64_t value);
  Hasher& AddDigest(const Digest& digest);
  Hasher& AddTokens(absl::Span<const int32_t> tokens);
  Digest Finish();

 private:
  void* context_;  // EVP_MD_CTX
};

// For hash maps keyed by digests: a SHA-256 is already uniform.
struct DigestHash {
  size_t operator()(const Digest& digest) const {
    size_t value;
    std::memcpy(&value, digest.data(), sizeof(value));
    return value;
  }
};

}  // namespace carryover
