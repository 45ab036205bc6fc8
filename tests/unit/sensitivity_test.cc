// Which part of a carried cache the divergence comes from: parts, mixtures, and whole profiles of
// pairs whose difference is known.
#include "engine/sensitivity.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "tests/unit/shadow_fixture.h"
#include "tests/unit/store_fixture.h"

namespace carryover {
namespace {

using Kind = CachePart::Kind;

TEST(SensitivityTest, PartsCoverThePrefixAndTheLayersOnce) {
  for (const int layers : {1, 2, 30, 32, 33, 64, 100}) {
    for (const int blocks : {1, 2, 3, 4, 10, 32, 257}) {
      const std::vector<CachePart> parts = PartsOf(layers, blocks, 16);
      int layer = 0, token = 0, groups = 0, runs = 0;
      for (const CachePart& part : parts) {
        EXPECT_LT(part.begin, part.end) << part.name;
        if (part.kind == Kind::kLayers) {
          EXPECT_EQ(part.begin, layer);
          layer = part.end;
          ++groups;
        } else if (part.kind == Kind::kPositions) {
          EXPECT_EQ(part.begin, token);
          EXPECT_EQ(part.end % 16, 0);
          token = part.end;
          ++runs;
        }
      }
      EXPECT_EQ(layer, layers);
      EXPECT_EQ(token, blocks * 16);
      EXPECT_LE(groups, 32);
      EXPECT_EQ(runs, std::min(blocks, 10));
      EXPECT_LE(ProbesOf(parts).size(), 87u);
    }
  }
  const std::vector<CachePart> parts = PartsOf(33, 32, 16);
  EXPECT_EQ(parts[0].name, "all");
  EXPECT_EQ(parts[1].name, "layers 0-1");
  EXPECT_EQ(parts[17].name, "layer 32");
  const CachePart& eighth = parts[parts.size() - 2];
  EXPECT_EQ(eighth.name, "8/8");
  EXPECT_EQ(eighth.end, 31 * 16);
}

// What a mixed cache is made of lies in the store under two names; it has none, and what is
// computed over it is never native.
TEST(SensitivityTest, NobodyOwnsAMixedCache) {
  const KvGeometry geometry = {.layers = 2, .kv_heads = 1, .head_dim = 2, .dtype = DType::kF32};
  auto pool = BlockPool::Create(PlainMemoryOps(), nullptr, {geometry.BlockBytes(), 8});
  ASSERT_TRUE(pool.ok());
  ProvenanceRegistry registry;
  const Digest source = VersionNamed("s"), target = VersionNamed("t");
  PrefixStore store({}, pool->get(), &registry, {});
  const CacheRoot root = RootKey("", "", source, source);
  const Tokens tokens(32, 7);
  const auto stored = [&](const Digest& version) {
    std::vector<TableBlock> table(2);
    for (TableBlock& block : table) {
      block.block = *(*pool)->Allocate();
      block.origin = Lineage(&registry, version).current();
    }
    EXPECT_EQ(store.Insert(root, tokens, table).inserted, 2);
    for (TableBlock& block : table) block.reused = true;
    return table;
  };
  for (const bool carried : {true, false}) {
    store.EvictAll();
    std::vector<BlockRef> fresh;
    for (int i = 0; i < 2; ++i) fresh.push_back(*(*pool)->Allocate());
    Lineage lineage(&registry, target);
    MixedCache mixed;
    CachePart part = {Kind::kLayers, "layer 1", 1, 2};
    EXPECT_EQ(MixedCache::NewBlocks(part, 2), 2);
    mixed.Make({part, carried}, stored(target), stored(source), std::move(fresh), geometry,
               (*pool)->base(), &lineage);
    ASSERT_EQ(mixed.table.size(), 2u);
    ASSERT_EQ(mixed.copies.size(), 2u);
    for (const TableBlock& block : mixed.table) {
      EXPECT_EQ(block.origin.provenance(), ProvenanceId::kNone);
      EXPECT_FALSE(block.reused);
    }
    EXPECT_FALSE(registry.IsNativeOf(lineage.provenance(), target));
    EXPECT_EQ(store.Insert(root, Tokens(32, 8), mixed.table).refused, 2);
    EXPECT_EQ(store.EvictAll().in_use, 4) << "the copies may still read them";
  }
  // Whole blocks are taken as they are.
  store.EvictAll();
  Lineage lineage(&registry, target);
  MixedCache mixed;
  std::vector<TableBlock> native = stored(target), of_source = stored(source);
  const int32_t first = of_source[0].block.id(), second = native[1].block.id();
  mixed.Make({{Kind::kPositions, "first block", 0, 16}, true}, std::move(native),
             std::move(of_source), {}, geometry, (*pool)->base(), &lineage);
  EXPECT_TRUE(mixed.copies.empty());
  EXPECT_EQ(mixed.table[0].block.id(), first);
  EXPECT_EQ(mixed.table[1].block.id(), second);
  EXPECT_FALSE(registry.IsNativeOf(lineage.provenance(), target));
}

// A copy of the tiny model whose one tensor has other values.
std::string FolderWithOther(const std::string& folder, const std::string& tensor) {
  const std::string copy = testing::TempDir() + "/carryover-other-" + std::to_string(getpid());
  std::filesystem::remove_all(copy);
  std::filesystem::copy(folder, copy);
  bool found = false;
  for (const auto& file : std::filesystem::directory_iterator(copy)) {
    if (file.path().extension() != ".safetensors") continue;
    std::filesystem::permissions(file.path(), std::filesystem::perms::owner_write,
                                 std::filesystem::perm_options::add);
    std::fstream stream(file.path(), std::ios::in | std::ios::out | std::ios::binary);
    uint64_t size = 0;
    stream.read(reinterpret_cast<char*>(&size), 8);
    std::string header(size, 0);
    stream.read(header.data(), static_cast<std::streamsize>(size));
    const auto json = nlohmann::json::parse(header);
    if (!json.contains(tensor)) continue;
    found = true;
    const uint64_t begin = json[tensor]["data_offsets"][0], end = json[tensor]["data_offsets"][1];
    for (uint64_t at = 8 + size + begin + 3; at < 8 + size + end; at += 4 * 3) {
      stream.seekg(static_cast<std::streamoff>(at));
      const char byte = static_cast<char>(stream.get() ^ 0x80);
      stream.seekp(static_cast<std::streamoff>(at));
      stream.put(byte);
    }
  }
  EXPECT_TRUE(found) << tensor;
  return copy;
}

class EngineSensitivityTest : public EngineShadowTest {
 protected:
  // S, and T with other values in one tensor.
  void MakePairWithOther(const std::string& tensor) {
    Make(options_);
    ASSERT_TRUE(Load("s", "llama3").ok());
    const std::string folder = FolderWithOther(TinyPath("llama3"), tensor);
    LoadOptions load;
    load.model = "m";
    load.version = "t";
    load.path = folder;
    load.carry_from = {"s"};
    load.auto_dtype = false;
    load.weights = load.kv_dtype = DType::kF32;
    ASSERT_TRUE(engine_->Load(load, nullptr).ok());
    std::filesystem::remove_all(folder);
  }
  static EvaluateSpec Spec(int length) {
    EvaluateSpec spec;
    spec.prompt.model = "m";
    spec.prompt.version = "t";
    spec.prompt.tokens = EngineTest::Tokens(length, 3);
    spec.source = "s";
    spec.sensitivity = true;
    spec.plans = {"direct"};
    spec.sampling.max_tokens = 6;
    spec.sampling.ignore_eos = true;
    return spec;
  }
  Evaluation Profile(int length, std::vector<std::string> plans = {"direct"}) {
    EvaluateSpec spec = Spec(length);
    spec.plans = std::move(plans);
    auto evaluation = engine_->Evaluate(spec, nullptr);
    EXPECT_TRUE(evaluation.ok()) << evaluation.status();
    if (!evaluation.ok()) return {};
    EXPECT_TRUE(evaluation->sensitivity.has_value());
    for (const Sensitivity::Row& row : evaluation->sensitivity->rows) {
      EXPECT_TRUE(row.carried.valid) << row.part.name;
      carried_[row.part.name] = row.carried.tv;
      if (row.native) native_[row.part.name] = row.native->tv;
    }
    ExpectIdle();
    return *std::move(evaluation);
  }
  static double MeanTv(const FidelitySample& sample) {
    double sum = 0;
    for (const PositionFidelity& position : sample.positions) sum += position.tv;
    return sum / static_cast<double>(sample.positions.size());
  }

  std::map<std::string, double> carried_, native_;  // mean TV, by part
};

TEST_F(EngineSensitivityTest, OneLayersKeysShowThereAndNowhereElse) {
  MakePairWithOther("model.layers.1.self_attn.k_proj.weight");
  const Evaluation evaluation = Profile(100);
  ASSERT_TRUE(evaluation.sensitivity.has_value());
  EXPECT_EQ(evaluation.sensitivity->layers, 2);
  EXPECT_EQ(evaluation.sensitivity->prefix_tokens, 96);
  EXPECT_GT(carried_["all"], 1e-3);
  EXPECT_EQ(carried_["layer 0"], 0);
  EXPECT_EQ(carried_["layer 1"], carried_["all"]);
  EXPECT_EQ(carried_["keys"], carried_["all"]);
  EXPECT_EQ(carried_["values"], 0);
  EXPECT_EQ(native_["layer 0"], carried_["all"]);
  EXPECT_EQ(native_["layer 1"], 0);
  EXPECT_EQ(native_["keys"], 0);
  EXPECT_EQ(native_["values"], carried_["all"]);
  for (const char* part : {"first block", "1/4", "4/4", "last block"}) {
    EXPECT_GT(carried_[part], 0) << part;
    EXPECT_GT(native_[part], 0) << part;
  }
  EXPECT_EQ(native_.count("all"), 0u);
}

TEST_F(EngineSensitivityTest, OneLayersValuesShowInValues) {
  MakePairWithOther("model.layers.1.self_attn.v_proj.weight");
  Profile(100);
  EXPECT_EQ(carried_["layer 0"], 0);
  EXPECT_EQ(carried_["keys"], 0);
  EXPECT_EQ(carried_["values"], carried_["all"]);
  EXPECT_GT(carried_["all"], 1e-3);
}

// What a lower layer changes goes through all above it, but not in its own values.
TEST_F(EngineSensitivityTest, ALowerLayerBendsThoseAbove) {
  MakePairWithOther("model.layers.0.self_attn.k_proj.weight");
  Profile(100);
  EXPECT_GT(carried_["layer 0"], 0);
  EXPECT_GT(carried_["layer 1"], 0);
  EXPECT_GT(carried_["values"], 0);
}

TEST_F(EngineSensitivityTest, EqualWeightsShowNothing) {
  MakePair();
  Profile(100);
  EXPECT_EQ(carried_.size(), 1 + 2 + 2 + 6u);
  for (const auto& [part, tv] : carried_) EXPECT_EQ(tv, 0) << part;
  for (const auto& [part, tv] : native_) EXPECT_EQ(tv, 0) << part;
}

// Mixtures that plans make, too, or that two parts share, are the same to the last bit.
TEST_F(EngineSensitivityTest, MixturesAreWhatTheySay) {
  MakeUpdatedPair();
  const Evaluation evaluation = Profile(40, {"direct", "bottom(1)"});
  ASSERT_EQ(evaluation.samples.size(), 3u);
  ASSERT_EQ(evaluation.samples[1].labels.plan, "bottom(1)");
  EXPECT_EQ(carried_["all"], MeanTv(evaluation.samples[0]));
  EXPECT_EQ(native_["layer 0"], MeanTv(evaluation.samples[1]));
  EXPECT_EQ(carried_["layer 1"], native_["layer 0"]);  // of two layers
  EXPECT_EQ(carried_["layer 0"], native_["layer 1"]);
  EXPECT_EQ(carried_["first block"], native_["last block"]);  // of two blocks
  EXPECT_EQ(carried_["last block"], native_["first block"]);
  EXPECT_NE(carried_["first block"], carried_["last block"]);
  EXPECT_NE(carried_["keys"], carried_["values"]);
  EXPECT_EQ(native_["keys"], carried_["values"]);
  for (const auto& [part, tv] : carried_) EXPECT_GT(tv, 0) << part;
  EXPECT_TRUE(observed_.samples(FidelityComparison::kCarried).empty());  // counts nowhere
}

// Users push blocks out between two probes: to host memory, from where they come back, or out, and
// then there is no profile rather than another one.
TEST_F(EngineSensitivityTest, ProfilesAreTheSameUnderPressure) {
  options_.fidelity.kv_share = 1;
  options_.kv_cache_bytes = 30 * 8192;
  options_.host_cache_bytes = 1 << 20;
  MakeUpdatedPair();
  Profile(100);
  const auto carried = carried_, native = native_;
  std::atomic<bool> done{false};
  std::atomic<int> pause{500};  // microseconds
  std::thread users([&] {
    for (int i = 0; !done; ++i) {
      EXPECT_TRUE(Run(Ask("t", EngineTest::Tokens(350, 100 + i), 1)).status.ok());
      std::this_thread::sleep_for(std::chrono::microseconds(pause));
    }
  });
  int profiles = 0;
  EvaluateSpec spec = Spec(100);
  const auto from_host = [&] {
    int64_t tokens = 0;
    for (const StoreRow& row : engine_->snapshot().store) {
      if (row.tier == "host") tokens += row.hit_tokens;
    }
    return tokens;
  };
  // Until some came back from there, or it has lasted too long for a test.
  const auto start = std::chrono::steady_clock::now();
  const auto within = [&](int milliseconds) {
    return std::chrono::steady_clock::now() < start + std::chrono::milliseconds(milliseconds);
  };
  while ((profiles == 0 && within(20000)) || ((profiles < 3 || from_host() == 0) && within(700))) {
    const auto evaluation = engine_->Evaluate(spec, nullptr);
    if (!evaluation.ok()) {
      EXPECT_EQ(evaluation.status().code(), absl::StatusCode::kUnavailable) << evaluation.status();
      // On a slow machine, too, a profile gets through between two users.
      pause = std::min(pause * 3 / 2, 2000000);
      continue;
    }
    ++profiles;
    for (const Sensitivity::Row& row : evaluation->sensitivity->rows) {
      EXPECT_EQ(row.carried.tv, carried.at(row.part.name)) << row.part.name;
      if (row.native) {
        EXPECT_EQ(row.native->tv, native.at(row.part.name)) << row.part.name;
      }
    }
  }
  done = true;
  users.join();
  EXPECT_GT(profiles, 0);
  ExpectIdle();
}

TEST_F(EngineSensitivityTest, AProfileLeavesNothingBehind) {
  MakeUpdatedPair();
  Profile(100);
  const EngineSnapshot snapshot = engine_->snapshot();
  int64_t blocks = 0;
  for (const StoreRow& row : snapshot.store) blocks += row.blocks;
  EXPECT_EQ(blocks, 0);
  EXPECT_EQ(snapshot.provenance_violations, 0);
}

}  // namespace
}  // namespace carryover
