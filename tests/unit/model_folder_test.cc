// Broken model folders: each gives one clear error that names the file, tensor or field, and never
// a crash, a hang or a large allocation.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/model.h"
#include "engine/model_config.h"
#include "engine/safetensors.h"
#include "engine/weights.h"
#include "kernels/ops.h"
#include "tests/unit/broken_folders.h"
#include "tests/unit/model_folder_writer.h"

namespace carryover {
namespace {

using nlohmann::json;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr char kShard[] = "model.safetensors";
constexpr char kIndex[] = "model.safetensors.index.json";

// Limits the memory that this process may still map, so that a huge allocation fails at once, even
// one that nobody touches. AddressSanitizer maps terabytes by itself: there it does nothing.
class MemoryLimit {
 public:
  explicit MemoryLimit(size_t more_bytes) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    getrlimit(RLIMIT_AS, &before_);
    rlimit limit = before_;
    limit.rlim_cur = MappedBytes() + more_bytes;
    setrlimit(RLIMIT_AS, &limit);
    set_ = true;
#endif
  }
  ~MemoryLimit() {
    if (set_) setrlimit(RLIMIT_AS, &before_);
  }

 private:
  static size_t MappedBytes() {
    FILE* file = std::fopen("/proc/self/statm", "r");
    unsigned long pages = 0;
    if (file == nullptr || std::fscanf(file, "%lu", &pages) != 1) pages = 1 << 20;
    if (file != nullptr) std::fclose(file);
    return pages * 4096;
  }

  rlimit before_ = {};
  bool set_ = false;
};

class ModelFolder : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = NewTestFolder();
    auto backend = CpuOps().create({.threads = 1});
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *backend;
  }
  void TearDown() override {
    std::filesystem::remove_all(folder_);
    CpuOps().destroy(backend_);
  }

  void Write(const char* name, const std::string& bytes) {
    if (bytes.empty()) {
      std::filesystem::remove(folder_ + "/" + name);
    } else {
      WriteTestFile(folder_ + "/" + name, bytes);
    }
  }
  absl::StatusOr<std::unique_ptr<Model>> Load() {
    return Model::Load(folder_, CpuOps(), backend_,
                       {.weights = DType::kF32, .kv_dtype = DType::kF32});
  }

  std::string folder_;
  Backend* backend_ = nullptr;
};

TEST_F(ModelFolder, TheUnbrokenOneLoads) {
  Write("config.json", TestLlamaConfig().dump());
  Write(kShard, TestLlamaTensors().File());
  const auto model = Load();
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->config().vocab, 16);
  EXPECT_GT((*model)->weight_bytes(), 0u);
}

// Written to while it is loaded: what was hashed may not be what was packed.
TEST_F(ModelFolder, OneThatChangesWhileItLoadsIsRefused) {
  const std::string file = TestLlamaTensors().File();
  const auto load_and = [&](const std::function<void()>& change) {
    Write("config.json", TestLlamaConfig().dump());
    Write(kShard, file);
    bool done = false;
    ModelOptions options{.weights = DType::kF32, .kv_dtype = DType::kF32};
    options.progress = [&](double) {
      if (!std::exchange(done, true)) change();
    };
    return Model::Load(folder_, CpuOps(), backend_, options).status();
  };
  const std::string path = folder_ + "/" + kShard;
  EXPECT_TRUE(load_and([] {}).ok());
  absl::Status status = load_and([&] { std::filesystem::resize_file(path, 0); });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr(path));
  status = load_and([&] { std::ofstream(path, std::ios::app) << "x"; });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  // Put in place by a rename, as it should be, another file takes nothing away from this one.
  status = load_and([&] {
    Write("new", "x");
    std::filesystem::rename(folder_ + "/new", path);
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(ModelFolder, EveryBrokenOneGivesAnErrorThatNamesThePlace) {
  const std::vector<BrokenFolder> all = BrokenFolders();
  EXPECT_GE(all.size(), 200u);
  const MemoryLimit limit(256u << 20);
  const auto begin = std::chrono::steady_clock::now();
  for (const BrokenFolder& broken : all) {
    Write("config.json", broken.config);
    Write("generation_config.json", broken.generation);
    Write(kShard, broken.safetensors);
    Write(kIndex, broken.index);
    const absl::Status status = Load().status();
    EXPECT_THAT(status.code(),
                AnyOf(absl::StatusCode::kInvalidArgument, absl::StatusCode::kNotFound))
        << broken.what << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(folder_)) << broken.what;
    for (const std::string& named : broken.named) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(named)) << broken.what;
    }
    EXPECT_LT(status.message().size(), 1000u) << broken.what;
  }
  const auto time = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(std::chrono::duration<double>(time).count(), 0.2 * all.size());
  RecordProperty("broken_folders", static_cast<int>(all.size()));
}

TEST_F(ModelFolder, ToleratesBuffersAndACopyOfATiedHead) {
  TestSafetensors tensors = TestLlamaTensors();
  const size_t begin = tensors.data.size();
  tensors.data.append(8, '\0');
  tensors.tensors.push_back(
      {"model.layers.0.self_attn.rotary_emb.inv_freq", "F32", {2}, begin, begin + 8});
  json config = TestLlamaConfig();
  Write("config.json", config.dump());
  Write(kShard, tensors.File());
  EXPECT_TRUE(Load().ok()) << Load().status();

  config["tie_word_embeddings"] = true;
  Write("config.json", config.dump());
  EXPECT_THAT(std::string(Load().status().message()), HasSubstr("lm_head.weight"));
  // The head lies first in the file, the embedding behind it.
  const size_t bytes = tensors.tensors[0].end.get<size_t>();
  tensors.data.replace(0, bytes, tensors.data.substr(bytes, bytes));
  Write(kShard, tensors.File());
  EXPECT_TRUE(Load().ok()) << Load().status();
}

TEST_F(ModelFolder, TheFingerprintIsOfWhatComputes) {
  const auto load = [this](const json& config, const std::string& file, DType weights,
                           DType kv_dtype) {
    Write("config.json", config.dump());
    Write(kShard, file);
    auto model =
        Model::Load(folder_, CpuOps(), backend_, {.weights = weights, .kv_dtype = kv_dtype});
    EXPECT_TRUE(model.ok()) << model.status();
    return *std::move(model);
  };
  const json config = TestLlamaConfig();
  const TestSafetensors tensors = TestLlamaTensors();
  const auto base = load(config, tensors.File(), DType::kF32, DType::kF32);
  EXPECT_EQ(load(config, tensors.File(), DType::kF32, DType::kF32)->fingerprint(),
            base->fingerprint());

  // Other precision: another function, over the same bytes.
  for (const auto& other : {load(config, tensors.File(), DType::kBF16, DType::kF32),
                            load(config, tensors.File(), DType::kF32, DType::kBF16)}) {
    EXPECT_NE(other->fingerprint(), base->fingerprint());
    EXPECT_EQ(other->weights_sha256(), base->weights_sha256());
  }
  EXPECT_EQ(load(config, tensors.File(), DType::kBF16, DType::kF32)->kv_layout().sha256,
            base->kv_layout().sha256);
  EXPECT_NE(load(config, tensors.File(), DType::kF32, DType::kBF16)->kv_layout().sha256,
            base->kv_layout().sha256);

  // One bit of one weight.
  TestSafetensors flipped = tensors;
  flipped.data.back() = static_cast<char>(flipped.data.back() ^ 1);
  const auto other_bytes = load(config, flipped.File(), DType::kF32, DType::kF32);
  EXPECT_NE(other_bytes->fingerprint(), base->fingerprint());
  EXPECT_NE(other_bytes->weights_sha256(), base->weights_sha256());
  EXPECT_EQ(other_bytes->kv_layout().sha256, base->kv_layout().sha256);

  // Maths that the config decides. RoPE is also part of what a cached key means.
  json other_rope = config;
  other_rope["rope_theta"] = 20000.0;
  const auto rope = load(other_rope, tensors.File(), DType::kF32, DType::kF32);
  EXPECT_NE(rope->fingerprint(), base->fingerprint());
  EXPECT_NE(rope->kv_layout().sha256, base->kv_layout().sha256);
  json other_eps = config;
  other_eps["rms_norm_eps"] = 1e-6;
  const auto eps = load(other_eps, tensors.File(), DType::kF32, DType::kF32);
  EXPECT_NE(eps->fingerprint(), base->fingerprint());
  EXPECT_EQ(eps->kv_layout().sha256, base->kv_layout().sha256);
  // What ends a text, or bounds it, changes no function.
  json other_bounds = config;
  other_bounds["eos_token_id"] = 3;
  other_bounds["max_position_embeddings"] = 128;
  EXPECT_EQ(load(other_bounds, tensors.File(), DType::kF32, DType::kF32)->fingerprint(),
            base->fingerprint());

  // The order in the file and its metadata do not matter.
  TestSafetensors reordered = tensors;
  std::swap(reordered.tensors[0], reordered.tensors[3]);
  EXPECT_EQ(load(config, reordered.File(), DType::kF32, DType::kF32)->fingerprint(),
            base->fingerprint());
}

TEST(ModelFolderFuzz, RandomBytesNeverCrashTheChecks) {
  const std::string config_text = TestLlamaConfig().dump();
  const TestSafetensors tensors = TestLlamaTensors();
  const std::string file = tensors.File();
  const size_t header_bytes = file.size() - tensors.data.size();
  const auto good_config = ParseModelConfig(config_text, "");
  ASSERT_TRUE(good_config.ok());
  const MemoryLimit limit(256u << 20);
  std::mt19937 random(11);
  int refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string changed = file;
    for (int flips = 1 + random() % 3; flips > 0; --flips) {
      changed[random() % header_bytes] = static_cast<char>(random());
    }
    const auto parsed = ParseSafetensors(changed, kShard);
    if (parsed.ok()) {
      refused += !CheckTensors(*good_config, *parsed).ok();
    } else {
      EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_TRUE(absl::StartsWith(parsed.status().message(), "model.safetensors: "));
      ++refused;
    }
    std::string changed_config = config_text;
    for (int flips = 1 + random() % 3; flips > 0; --flips) {
      changed_config[random() % changed_config.size()] = static_cast<char>(random());
    }
    const auto config = ParseModelConfig(changed_config, "");
    if (!config.ok()) {
      EXPECT_TRUE(absl::StartsWith(config.status().message(), "config.json: "));
    }
  }
  EXPECT_GT(refused, 2500);
}

}  // namespace
}  // namespace carryover
