#include "base/hash.h"

#include <openssl/evp.h>

#include "base/status_macros.h"

namespace carryover {
namespace {

// EVP_sha256() makes OpenSSL 3 look the algorithm up for every digest, which costs four times what
// hashing a block's key does.
const EVP_MD* FetchedSha256() {
  static const EVP_MD* const md = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  CHECK(md != nullptr);
  return md;
}

}  // namespace

std::string ToHex(const Digest& digest) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  hex.reserve(2 * digest.size());
  for (uint8_t byte : digest) {
    hex.push_back(kDigits[byte >> 4]);
    hex.push_back(kDigits[byte & 15]);
  }
  return hex;
}

std::string ShortHex(const Digest& digest) { return ToHex(digest).substr(0, 12); }

Digest Sha256(absl::string_view bytes) {
  Digest digest;
  unsigned int size = 0;
  CHECK(EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, FetchedSha256(), nullptr) ==
        1);
  return digest;
}

Hasher::Hasher() : context_(EVP_MD_CTX_new()) {
  CHECK(EVP_DigestInit_ex(static_cast<EVP_MD_CTX*>(context_), FetchedSha256(), nullptr) == 1);
}

Hasher::~Hasher() { EVP_MD_CTX_free(static_cast<EVP_MD_CTX*>(context_)); }

Hasher& Hasher::Add(absl::string_view bytes) {
  AddInt(bytes.size());
  CHECK(EVP_DigestUpdate(static_cast<EVP_MD_CTX*>(context_), bytes.data(), bytes.size()) == 1);
  return *this;
}

Hasher& Hasher::AddInt(uint64_t value) {
  uint8_t little_endian[8];
  for (int i = 0; i < 8; ++i) little_endian[i] = static_cast<uint8_t>(value >> (8 * i));
  CHECK(EVP_DigestUpdate(static_cast<EVP_MD_CTX*>(context_), little_endian, 8) == 1);
  return *this;
}

Hasher& Hasher::AddDigest(const Digest& digest) {
  return Add(absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
}

Hasher& Hasher::AddTokens(absl::Span<const int32_t> tokens) {
  return Add(absl::string_view(reinterpret_cast<const char*>(tokens.data()),
                               tokens.size() * sizeof(int32_t)));
}

Digest Hasher::Finish() {
  Digest digest;
  unsigned int size = 0;
  CHECK(EVP_DigestFinal_ex(static_cast<EVP_MD_CTX*>(context_), digest.data(), &size) == 1);
  return digest;
}

}  // namespace carryover
