#include "engine/kv_tier.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "tests/unit/store_fixture.h"

namespace carryover {
namespace {

KvImageHeader SomeHeader(uint64_t bytes) {
  KvImageHeader header;
  header.tokenizer_sha256 = Sha256("tokenizer");
  header.kv_layout_sha256 = Sha256("layout");
  header.shard = 1;
  header.shards = 2;
  header.provenance = ComputedOver(VersionNamed("T"), {NativeOf(VersionNamed("S"))});
  header.provenance.map = "fit";
  header.root = Sha256("root");
  header.parent = Sha256("parent");
  header.key = Sha256("key");
  header.tokens = {1, -2, 300000};
  header.payload_bytes = bytes;
  return header;
}

TEST(KvImageHeader, SurvivesEncoding) {
  const std::string bytes = EncodeKvImageHeader(SomeHeader(99));
  const absl::StatusOr<KvImageHeader> header = DecodeKvImageHeader(bytes);
  ASSERT_TRUE(header.ok());
  EXPECT_EQ(EncodeKvImageHeader(*header), bytes);
  EXPECT_EQ(header->provenance, SomeHeader(99).provenance);
  EXPECT_EQ(header->tokens, SomeHeader(99).tokens);
  EXPECT_EQ(header->payload_bytes, 99u);
}

TEST(KvImageHeader, BrokenBytesAreAnError) {
  const std::string bytes = EncodeKvImageHeader(SomeHeader(99));
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(DecodeKvImageHeader(bytes.substr(0, size)).ok()) << size;
  }
  EXPECT_FALSE(DecodeKvImageHeader(bytes + "x").ok());
  std::mt19937 random(1);
  for (int i = 0; i < 5000; ++i) {
    std::string broken = bytes;
    broken[random() % broken.size()] = static_cast<char>(random());
    const absl::StatusOr<KvImageHeader> header = DecodeKvImageHeader(broken);
    // Either refused, or taken for exactly what it says.
    if (header.ok()) {
      EXPECT_EQ(EncodeKvImageHeader(*header), broken);
    }
  }
}

// A host tier and what a test needs to wait for it and to spoil its memory.
struct HostFixture {
  explicit HostFixture(size_t budget) {
    current = this;
    ops.alloc_host = [](Backend*, size_t bytes) -> absl::StatusOr<void*> {
      if (current->out_of_memory) return absl::ResourceExhaustedError("no memory");
      current->last = std::malloc(bytes);
      ++current->allocated;
      return current->last.load();
    };
    ops.release_host = [](Backend*, void* memory) {
      --current->allocated;
      std::free(memory);
    };
    ops.prepare_copy = [](Backend*) {
      ++current->copies;
      return reinterpret_cast<Copy*>(current);
    };
    ops.finish_copy = [](Backend*, Copy* copy) {
      EXPECT_EQ(copy, reinterpret_cast<Copy*>(current));
      --current->copies;
      return absl::OkStatus();
    };
    tier = NewHostTier(budget, ops, nullptr);
    tier->SetWakeup([this] { ++wakeups; });
  }
  void PollUntil(const bool& done) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!done && std::chrono::steady_clock::now() < deadline) {
      if (tier->Poll() == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    ASSERT_TRUE(done);
  }
  absl::Status Write(KvTier::ImageId image, const KvImageHeader& header, const void* source) {
    absl::Status result;
    bool done = false;
    const absl::Status started = tier->StartWrite(image, header, source, [&](absl::Status status) {
      result = status;
      done = true;
    });
    if (!started.ok()) return started;
    PollUntil(done);
    return result;
  }
  absl::Status Read(KvTier::ImageId image, const KvImageHeader& expected, void* destination) {
    absl::Status result;
    bool done = false;
    tier->StartRead(image, expected, destination, [&](absl::Status status) {
      result = status;
      done = true;
    });
    PollUntil(done);
    return result;
  }

  static inline HostFixture* current = nullptr;  // ops are plain functions
  Ops ops = CpuOps();
  std::atomic<bool> out_of_memory = false;
  std::atomic<void*> last = nullptr;
  std::atomic<int> allocated = 0;
  std::atomic<int> copies = 0;  // prepared and not finished
  std::atomic<int> wakeups = 0;
  std::unique_ptr<KvTier> tier;
};

TEST(HostTier, GivesBackWhatWasWritten) {
  HostFixture host(1 << 20);
  const std::string content(1000, 'k');
  EXPECT_TRUE(host.Write(1, SomeHeader(1000), content.data()).ok());
  // It is called after the completion is there to be polled, so it may still be on its way.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (host.wakeups == 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  EXPECT_GE(host.wakeups, 1);
  std::string read(1000, ' ');
  EXPECT_TRUE(host.Read(1, SomeHeader(1000), read.data()).ok());
  EXPECT_EQ(read, content);
  EXPECT_GE(host.tier->used_bytes(), 1000u);
  host.tier->Remove(1);
  EXPECT_EQ(host.tier->used_bytes(), 0u);
  EXPECT_TRUE(absl::IsNotFound(host.Read(1, SomeHeader(1000), read.data())));
  EXPECT_EQ(host.copies, 0);
  EXPECT_EQ(host.allocated, 1);  // for the next
  ASSERT_TRUE(host.Write(2, SomeHeader(1000), content.data()).ok());
  EXPECT_EQ(host.allocated, 1);
  host.tier.reset();
  EXPECT_EQ(host.allocated, 0);
}

TEST(HostTier, AnotherBlocksImageIsRefused) {
  HostFixture host(1 << 20);
  const std::string content(64, 'k');
  ASSERT_TRUE(host.Write(1, SomeHeader(64), content.data()).ok());
  std::string read(64, ' ');
  const std::vector<std::function<void(KvImageHeader*)>> changes = {
      [](KvImageHeader* h) { h->tokenizer_sha256[0] ^= 1; },
      [](KvImageHeader* h) { h->kv_layout_sha256[31] ^= 1; },
      [](KvImageHeader* h) { h->shard = 0; },
      [](KvImageHeader* h) { h->shards = 3; },
      [](KvImageHeader* h) { h->provenance = NativeOf(VersionNamed("T")); },
      [](KvImageHeader* h) { h->root[5] ^= 1; },
      [](KvImageHeader* h) { h->parent[5] ^= 1; },
      [](KvImageHeader* h) { h->key[5] ^= 1; },
      [](KvImageHeader* h) { h->tokens[1] = 5; },
  };
  for (const auto& change : changes) {
    KvImageHeader expected = SomeHeader(64);
    change(&expected);
    EXPECT_TRUE(absl::IsDataLoss(host.Read(1, expected, read.data())));
  }
  EXPECT_EQ(read, std::string(64, ' '));
  EXPECT_TRUE(host.Read(1, SomeHeader(64), read.data()).ok());
}

TEST(HostTier, ChangedMemoryIsNoticed) {
  HostFixture host(1 << 20);
  const std::string content(512, 'k');
  ASSERT_TRUE(host.Write(1, SomeHeader(512), content.data()).ok());
  std::string read(512, ' ');
  char* payload = static_cast<char*>(host.last.load());
  payload[511] ^= 4;
  EXPECT_TRUE(absl::IsDataLoss(host.Read(1, SomeHeader(512), read.data())));
  payload[511] ^= 4;
  EXPECT_TRUE(host.Read(1, SomeHeader(512), read.data()).ok());
}

TEST(HostTier, KeepsToItsBudget) {
  HostFixture host(4000);
  const std::string content(1000, 'k');
  ASSERT_TRUE(host.Write(1, SomeHeader(1000), content.data()).ok());
  ASSERT_TRUE(host.Write(2, SomeHeader(1000), content.data()).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(host.Write(3, SomeHeader(1000), content.data())));
  EXPECT_TRUE(absl::IsResourceExhausted(host.Write(4, SomeHeader(1 << 30), content.data())));
  EXPECT_LE(host.tier->used_bytes(), host.tier->budget_bytes());
  host.tier->Remove(1);
  EXPECT_TRUE(host.Write(5, SomeHeader(1000), content.data()).ok());
}

TEST(HostTier, LackOfMemoryIsAnError) {
  HostFixture host(1 << 20);
  host.out_of_memory = true;
  const std::string content(64, 'k');
  EXPECT_TRUE(absl::IsResourceExhausted(host.Write(1, SomeHeader(64), content.data())));
  EXPECT_EQ(host.tier->used_bytes(), 0u);
}

TEST(HostTier, MayEndWithTransfersUnderWay) {
  for (int round = 0; round < 20; ++round) {
    HostFixture host(1 << 20);
    const std::string content(4096, 'k');
    int called = 0;
    for (int i = 0; i < 20; ++i) {
      ASSERT_TRUE(host.tier
                      ->StartWrite(i + 1, SomeHeader(4096), content.data(),
                                   [&](const absl::Status&) { ++called; })
                      .ok());
    }
    host.tier.reset();
    EXPECT_EQ(called, 0);
    EXPECT_EQ(host.allocated, 0);
    EXPECT_EQ(host.copies, 0);
  }
}

}  // namespace
}  // namespace carryover
