#include "engine/kv_tier.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace carryover {
namespace {

constexpr absl::string_view kMagic = "COKV";

void PutInt(uint64_t value, int bytes, std::string* out) {
  for (int i = 0; i < bytes; ++i) out->push_back(static_cast<char>(value >> (8 * i)));
}

void PutDigest(const Digest& digest, std::string* out) {
  out->append(reinterpret_cast<const char*>(digest.data()), digest.size());
}

// Reads fields one after another; after the first that does not fit, ok() is false and all
// further ones are zero.
class Reader {
 public:
  explicit Reader(absl::string_view bytes) : rest_(bytes) {}

  absl::string_view Bytes(uint64_t size) {
    if (size > rest_.size()) {
      ok_ = false;
      rest_ = {};
      return {};
    }
    const absl::string_view bytes = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return bytes;
  }
  uint64_t Int(int size) {
    const absl::string_view bytes = Bytes(size);
    uint64_t value = 0;
    for (size_t i = 0; i < bytes.size(); ++i) {
      value |= uint64_t{static_cast<uint8_t>(bytes[i])} << (8 * i);
    }
    return value;
  }
  Digest ReadDigest() {
    Digest digest{};
    const absl::string_view bytes = Bytes(digest.size());
    if (!bytes.empty()) std::memcpy(digest.data(), bytes.data(), bytes.size());
    return digest;
  }
  // A count of things of `size` bytes each, all of which are still there.
  uint64_t Count(int size) {
    const uint64_t count = Int(4);
    if (count > rest_.size() / size) {
      ok_ = false;
      rest_ = {};
      return 0;
    }
    return count;
  }
  bool ok() const { return ok_; }
  bool done() const { return rest_.empty(); }

 private:
  absl::string_view rest_;
  bool ok_ = true;
};

}  // namespace

const char* TierName(Tier tier) {
  switch (tier) {
    case Tier::kDevice:
      return "device";
    case Tier::kHost:
      return "host";
    case Tier::kDisk:
      return "disk";
    case Tier::kRemote:
      return "remote";
  }
  return "unknown";
}

std::string EncodeKvImageHeader(const KvImageHeader& header) {
  std::string out;
  out.reserve(256 + 32 * header.provenance.sources.size() + 4 * header.tokens.size());
  out.append(kMagic.data(), kMagic.size());
  PutInt(header.format, 4, &out);
  PutDigest(header.tokenizer_sha256, &out);
  PutDigest(header.kv_layout_sha256, &out);
  PutInt(header.shard, 4, &out);
  PutInt(header.shards, 4, &out);
  PutDigest(header.provenance.computed_by, &out);
  PutInt(header.provenance.sources.size(), 4, &out);
  for (const Digest& source : header.provenance.sources) PutDigest(source, &out);
  PutInt(header.provenance.map.size(), 4, &out);
  out += header.provenance.map;
  PutDigest(header.root, &out);
  PutDigest(header.parent, &out);
  PutDigest(header.key, &out);
  PutInt(header.tokens.size(), 4, &out);
  for (int32_t token : header.tokens) PutInt(static_cast<uint32_t>(token), 4, &out);
  PutInt(header.payload_bytes, 8, &out);
  return out;
}

absl::StatusOr<KvImageHeader> DecodeKvImageHeader(absl::string_view bytes) {
  Reader reader(bytes);
  if (reader.Bytes(kMagic.size()) != kMagic) return absl::DataLossError("KV image: no magic");
  KvImageHeader header;
  header.format = static_cast<uint32_t>(reader.Int(4));
  if (header.format != KvImageHeader::kFormat) {
    return absl::DataLossError(absl::StrCat("KV image: format ", header.format, " is not known"));
  }
  header.tokenizer_sha256 = reader.ReadDigest();
  header.kv_layout_sha256 = reader.ReadDigest();
  header.shard = static_cast<uint32_t>(reader.Int(4));
  header.shards = static_cast<uint32_t>(reader.Int(4));
  header.provenance.computed_by = reader.ReadDigest();
  header.provenance.sources.resize(reader.Count(sizeof(Digest)));
  for (Digest& source : header.provenance.sources) source = reader.ReadDigest();
  const absl::string_view map = reader.Bytes(reader.Count(1));
  header.provenance.map.assign(map.data(), map.size());
  header.root = reader.ReadDigest();
  header.parent = reader.ReadDigest();
  header.key = reader.ReadDigest();
  header.tokens.resize(reader.Count(4));
  for (int32_t& token : header.tokens) {
    token = static_cast<int32_t>(static_cast<uint32_t>(reader.Int(4)));
  }
  header.payload_bytes = reader.Int(8);
  if (!reader.ok() || !reader.done()) return absl::DataLossError("KV image: header has wrong size");
  return header;
}

Digest KvImageChecksum(absl::string_view header, const void* payload, size_t bytes) {
  return Hasher()
      .Add(header)
      .Add(absl::string_view(static_cast<const char*>(payload), bytes))
      .Finish();
}

std::vector<std::unique_ptr<KvTier>> NewKvTiers(const KvTierOptions& options, const Ops& ops,
                                                Backend* backend) {
  std::vector<std::unique_ptr<KvTier>> tiers;
  if (options.host_bytes > 0) tiers.push_back(NewHostTier(options.host_bytes, ops, backend));
  return tiers;
}

}  // namespace carryover
