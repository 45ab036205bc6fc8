// Carried keys and values changed by a map: what is served, how it is labelled and kept.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/atomic_file.h"
#include "engine/kv_map.h"
#include "tests/unit/shadow_fixture.h"

namespace carryover {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

// Multiplies an F32 tensor, where the file has it.
void Scale(const std::filesystem::path& path, const std::string& tensor, float by) {
  std::filesystem::permissions(path, std::filesystem::perms::owner_write,
                               std::filesystem::perm_options::add);
  std::fstream stream(path, std::ios::in | std::ios::out | std::ios::binary);
  uint64_t size = 0;
  stream.read(reinterpret_cast<char*>(&size), 8);
  std::string header(size, ' ');
  stream.read(header.data(), static_cast<std::streamsize>(size));
  const size_t name = header.find('"' + tensor + '"');
  if (name == std::string::npos) return;  // in another shard
  const size_t at = header.find('[', header.find("data_offsets", name));
  uint64_t begin = 0, end = 0;
  char comma;
  std::istringstream(header.substr(at + 1)) >> begin >> comma >> end;
  std::vector<float> values((end - begin) / sizeof(float));
  stream.seekg(static_cast<std::streamoff>(8 + size + begin));
  stream.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(end - begin));
  for (float& value : values) value *= by;
  stream.seekp(static_cast<std::streamoff>(8 + size + begin));
  stream.write(reinterpret_cast<const char*>(values.data()),
               static_cast<std::streamsize>(end - begin));
}

// T is S with half as large again keys and twice as large values in its last layer: an update that
// a map undoes wholly.
class EngineCalibratedTest : public EngineShadowTest {
 protected:
  EngineCalibratedTest()
      : folder_(testing::TempDir() + "/carryover-scaled-" + std::to_string(getpid())) {
    std::filesystem::remove_all(folder_);
    std::filesystem::copy(TinyPath("llama3"), folder_);
    for (const auto& file : std::filesystem::directory_iterator(folder_)) {
      if (file.path().extension() != ".safetensors") continue;
      Scale(file.path(), "model.layers.1.self_attn.k_proj.weight", 1.5f);
      Scale(file.path(), "model.layers.1.self_attn.v_proj.weight", 2);
    }
  }
  ~EngineCalibratedTest() override { std::filesystem::remove_all(folder_); }

  void CarryBy(const std::string& plan) {
    options_.gate.when_learning_carry = true;
    options_.gate.ladder = {plan};
    options_.fidelity.sample_rate = options_.fidelity.learning_sample_rate = 0;
  }

  absl::StatusOr<VersionInfo> LoadTarget(const std::string& name, std::vector<std::string> maps,
                                         DType type = DType::kF32) {
    LoadOptions load;
    load.model = "m";
    load.version = name;
    load.path = folder_;
    load.carry_from = {"s"};
    load.maps = std::move(maps);
    load.auto_dtype = false;
    load.weights = load.kv_dtype = type;
    return engine_->Load(load, nullptr);
  }

  // S and T, with the map that undoes the update.
  void MakeScaledPair(DType type = DType::kF32) {
    Make(options_);
    const auto s = Load("s", "llama3", {}, "", type);
    ASSERT_TRUE(s.ok()) << s.status();
    const auto t = LoadTarget("t", {}, type);
    ASSERT_TRUE(t.ok()) << t.status();
    KvMap map;
    map.info.source = FromHex(s->fingerprint);
    map.info.target = FromHex(t->fingerprint);
    map.info.kv_layout = FromHex(s->kv_layout_sha256);
    map.info.layers = 2;
    map.info.kv_heads = 2;
    map.info.head_dim = 16;
    map.info.lambda = 1;
    map.layers.resize(2);
    for (KvMapLayer& layer : map.layers) {
      layer.weight.assign(64 * 64, 0);
      layer.bias.assign(64, 0);
    }
    for (int i = 0; i < 64; ++i) map.layers[1].weight[i * 64 + i] = i < 32 ? 0.5f : 1;
    name_ = map.Name();
    map_file_ = folder_ + "/map.safetensors";
    const auto file = WriteKvMap(map);
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_TRUE(WriteFileAtomically(map_file_, *file).ok());
    ASSERT_TRUE(engine_->Remove("m", "t").ok());
    const auto again = LoadTarget("t", {map_file_}, type);
    ASSERT_TRUE(again.ok()) << again.status();
  }

  static Digest FromHex(const std::string& hex) {
    Digest digest{};
    for (size_t i = 0; i < digest.size(); ++i) {
      digest[i] = static_cast<uint8_t>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
    }
    return digest;
  }

  Answer Native(const std::vector<int32_t>& prompt) {
    CompletionRequest request = Ask("t", prompt);
    request.reuse = ReuseMode::kNativeOnly;
    request.store = false;
    return Run(request);
  }
  Answer Carried(const std::vector<int32_t>& prompt) { return Run(Ask("t", prompt)); }

  // The largest difference of logprobs of equal answers.
  static double Apart(const Answer& answer, const Answer& truth) {
    EXPECT_EQ(answer.tokens, truth.tokens);
    double apart = 0;
    for (size_t i = 0; i < truth.logprobs[0].size(); ++i) {
      apart = std::max<double>(apart, std::abs(answer.logprobs[0][i] - truth.logprobs[0][i]));
    }
    return apart;
  }
  std::string MappedName() const { return "s:map-" + name_.substr(0, 12); }
  int64_t BlocksOf(const std::string& provenance) {
    int64_t blocks = 0;
    for (const StoreRow& row : engine_->snapshot().store) {
      if (row.provenance == provenance) blocks += row.blocks;
    }
    return blocks;
  }

  int64_t HitsOf(const std::string& provenance) {
    int64_t tokens = 0;
    for (const StoreRow& row : engine_->snapshot().store) {
      if (row.provenance == provenance) tokens += row.hit_tokens;
    }
    return tokens;
  }

  const std::string folder_;
  std::string map_file_, name_;
};

TEST_F(EngineCalibratedTest, AMapUndoesWhatAnUpdateDid) {
  CarryBy("calibrated");
  MakeScaledPair();
  const std::vector<int32_t> prompt = Tokens(100);
  const Answer truth = Native(prompt);
  ASSERT_TRUE(Warm("s", prompt).ok());
  const Answer answer = Carried(prompt);
  EXPECT_EQ(answer.usage.carried_tokens, 96);
  EXPECT_EQ(answer.usage.repaired_tokens, 0);
  ExpectUsageAddsUp(answer);
  ASSERT_EQ(answer.cache.segments.size(), 2u);
  EXPECT_EQ(answer.cache.segments[0].source, MappedName());
  EXPECT_EQ(answer.cache.segments[0].plan, "calibrated");
  EXPECT_EQ(observed_.plans().back(), "calibrated");
  EXPECT_LT(Apart(answer, truth), 1e-4);

  // Written once, found by who comes next, native to nobody.
  EXPECT_EQ(BlocksOf(MappedName()), 6);
  const Answer second = Carried(prompt);
  EXPECT_EQ(second.usage.carried_tokens, 96);
  EXPECT_EQ(second.cache.segments[0].source, MappedName());
  EXPECT_EQ(second.cache.segments[0].plan, "calibrated");
  EXPECT_LT(Apart(second, truth), 1e-4);
  EXPECT_EQ(BlocksOf(MappedName()), 6);
  EXPECT_EQ(Native(prompt).usage.cached_tokens, 0);
  ExpectIdle();

  // What the target computed over them goes on from them.
  std::vector<int32_t> longer = Tokens(100);
  for (int32_t token : Tokens(60, 9)) longer.push_back(token);
  const Answer first_turn = Carried(longer);
  EXPECT_EQ(first_turn.usage.carried_tokens, 96);
  EXPECT_EQ(BlocksOf("t over s:~map-" + name_.substr(0, 12)), 4);
  const Answer next_turn = Carried(longer);
  EXPECT_EQ(next_turn.usage.carried_tokens, 144);
  EXPECT_LT(Apart(next_turn, Native(longer)), 1e-4);
  ExpectIdle();

  // They outlive the source's weights, and nothing outlives the source.
  ASSERT_TRUE(engine_->Promote("m", "t", 100).ok());
  ASSERT_TRUE(engine_->Unload("m", "s").ok());
  EXPECT_EQ(Carried(prompt).usage.carried_tokens, 96);
  ASSERT_TRUE(engine_->Remove("m", "s").ok());
  EXPECT_EQ(Carried(prompt).usage.carried_tokens, 0);
  EXPECT_EQ(BlocksOf(MappedName()), 0);
  ExpectIdle();
}

// The map shows: without it the same caches answer otherwise.
TEST_F(EngineCalibratedTest, EveryPlanWithAMapIsEvaluated) {
  MakeScaledPair();
  EvaluateSpec spec;
  spec.prompt.model = "m";
  spec.prompt.version = "t";
  spec.prompt.tokens = Tokens(100, 3);
  spec.source = "s";
  spec.sampling.max_tokens = 6;
  spec.sampling.ignore_eos = true;
  spec.plans = {"direct",
                "calibrated",
                "calibrated+tail(32)",
                "calibrated+bottom(1)",
                "calibrated+bottom(1)+tail(32)",
                "bottom(1)",
                "calibrated+bottom(2)",
                "calibrated+tail(100%)"};
  const auto evaluation = engine_->Evaluate(spec, nullptr);
  ASSERT_TRUE(evaluation.ok()) << evaluation.status();
  std::map<std::string, double> tv;
  for (const FidelitySample& sample : evaluation->samples) {
    if (sample.labels.comparison != FidelityComparison::kCarried) continue;
    for (const PositionFidelity& position : sample.positions) tv[sample.labels.plan] += position.tv;
  }
  ASSERT_EQ(tv.size(), 8u);
  EXPECT_GT(tv["direct"], 1e-3);
  // Only the last layer differs, so that the others' repair changes nothing.
  EXPECT_NEAR(tv["bottom(1)"], tv["direct"], 1e-4);
  for (const char* mapped : {"calibrated", "calibrated+tail(32)", "calibrated+bottom(1)",
                             "calibrated+bottom(1)+tail(32)"}) {
    EXPECT_LT(tv[mapped], 1e-4) << mapped;
  }
  EXPECT_EQ(tv["calibrated+bottom(2)"], 0);
  EXPECT_EQ(tv["calibrated+tail(100%)"], 0);
  const int carried[] = {96, 96, 64, 0, 0}, repaired[] = {0, 0, 32, 96, 96};
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(evaluation->carried[i].usage.carried_tokens, carried[i]) << spec.plans[i];
    EXPECT_EQ(evaluation->carried[i].usage.repaired_tokens, repaired[i]) << spec.plans[i];
  }
  EXPECT_EQ(evaluation->carried[3].cache.segments[0].plan, "calibrated+bottom(1)");
  EXPECT_THAT(evaluation->carried[3].cache.segments[0].source, StartsWith("t over s:"));
  ExpectIdle();
}

TEST_F(EngineCalibratedTest, TheMapIsAppliedInBf16Too) {
  CarryBy("calibrated+tail(16)");
  MakeScaledPair(DType::kBF16);
  const std::vector<int32_t> prompt = Tokens(100);
  const Answer truth = Native(prompt);
  ASSERT_TRUE(Warm("s", prompt).ok());
  const Answer answer = Carried(prompt);
  EXPECT_EQ(answer.usage.repaired_tokens, 16);
  EXPECT_NEAR(answer.logprobs[0][0], truth.logprobs[0][0], 0.05);
  // The tail serves who comes next.
  EXPECT_EQ(Carried(prompt).usage.repaired_tokens, 0);
  ExpectIdle();
}

TEST_F(EngineCalibratedTest, ATailBehindABottomIsFoundAgain) {
  CarryBy("calibrated+bottom(1)+tail(16)");
  MakeScaledPair();
  const std::vector<int32_t> prompt = Tokens(100);
  ASSERT_TRUE(Warm("s", prompt).ok());
  EXPECT_EQ(Carried(prompt).usage.repaired_tokens, 96);
  const Answer second = Carried(prompt);
  EXPECT_EQ(second.usage.repaired_tokens, 0);
  EXPECT_EQ(second.usage.carried_tokens, 96);
  EXPECT_LT(Apart(second, Native(prompt)), 1e-4);
  ExpectIdle();
}

// Shadows measure a plan with a map as any other, and leave the mapped blocks behind.
TEST_F(EngineCalibratedTest, ShadowsApplyTheMap) {
  options_.gate.ladder = {"direct", "calibrated"};
  options_.fidelity.rungs_rate = 1;
  MakeScaledPair();
  AskAbout(1);
  observed_.WaitForArms(2);
  const auto samples = observed_.samples(FidelityComparison::kCarried);
  ASSERT_EQ(samples.size(), 2u);
  EXPECT_EQ(samples[0].labels.plan, "direct");
  EXPECT_EQ(samples[1].labels.plan, "calibrated");
  EXPECT_GT(samples[0].positions[0].tv, 1e-4);
  ExpectSame(samples[1]);
  while (engine_->snapshot().shadows_waiting > 0 || BlocksOf(MappedName()) == 0) {
    std::this_thread::yield();
  }
  EXPECT_EQ(BlocksOf(MappedName()), 6);
  ExpectIdle();
}

// Promotion maps what is hot while nobody asks, and no more than its share.
TEST_F(EngineCalibratedTest, PromotionMapsHotPrefixesAhead) {
  CarryBy("calibrated");
  options_.map_ahead_share = 10.5 / (8 * 1024 * 1024 / (16 * 64 * 2 * sizeof(float)));
  MakeScaledPair();
  const std::vector<int32_t> hot = Tokens(100, 1), cold = Tokens(100, 2);
  ASSERT_TRUE(Warm("s", cold).ok());
  ASSERT_TRUE(Warm("s", hot).ok());
  Run(Ask("s", hot));
  const int64_t hits = HitsOf("s");
  ASSERT_TRUE(engine_->Promote("m", "t", 10).ok());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (observed_.mapped_ahead() < 10 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT_EQ(observed_.mapped_ahead(),
            10);  // in passes of four, all of the hot one, some of the cold
  ExpectIdle();
  EXPECT_EQ(BlocksOf(MappedName()), 10);
  EXPECT_EQ(HitsOf("s"), hits);

  const Answer answer = Carried(hot);
  EXPECT_EQ(answer.cache.segments[0].source, MappedName());
  EXPECT_EQ(answer.usage.carried_tokens, 96);
  EXPECT_LT(Apart(answer, Native(hot)), 1e-4);
  EXPECT_EQ(BlocksOf(MappedName()), 10);
  EXPECT_LT(Apart(Carried(cold), Native(cold)), 1e-4);
  EXPECT_EQ(BlocksOf(MappedName()), 12);
  ExpectIdle();
}

// Under pressure they go like any block, and what is left is never taken for something else.
TEST_F(EngineCalibratedTest, MappedBlocksSurviveEvictionPressure) {
  CarryBy("calibrated");
  options_.kv_cache_bytes = 64 * 16 * 64 * 2 * sizeof(float);  // 64 blocks
  options_.host_cache_bytes = 40 * 16 * 64 * 2 * sizeof(float);
  MakeScaledPair();
  std::vector<std::vector<int32_t>> prompts;
  std::vector<Answer> truths;
  for (int i = 0; i < 8; ++i) {
    prompts.push_back(Tokens(100 + 16 * i, i));
    truths.push_back(Native(prompts.back()));
  }
  int carried = 0;
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 8; ++i) {
      if ((i + round) % 3 == 0) ASSERT_TRUE(Warm("s", prompts[i]).ok());
      if ((i + round) % 5 == 0) ASSERT_TRUE(engine_->Promote("m", "t", 10 + round).ok());
      const Answer answer = Carried(prompts[i]);
      EXPECT_LT(Apart(answer, truths[i]), 1e-4) << round << " " << i;
      ExpectUsageAddsUp(answer);
      carried += answer.usage.carried_tokens > 0;
    }
    ExpectIdle();
  }
  EXPECT_GT(carried, 8);
  EXPECT_EQ(engine_->snapshot().provenance_violations, 0);
  int64_t evicted = 0;
  for (const auto& row : engine_->snapshot().evictions) evicted += row.count;
  EXPECT_GT(evicted, 64);
}

// Without its map a plan is passed over, and the ladder goes on.
TEST_F(EngineCalibratedTest, APlanWithoutItsMapIsPassedOver) {
  options_.gate.ladder = {"calibrated", "direct"};
  options_.gate.when_learning_carry = true;
  MakePair();
  const Answer answer = AskAbout(1);
  EXPECT_EQ(answer.usage.carried_tokens, 96);
  EXPECT_EQ(answer.cache.segments[0].plan, "direct");
  observed_.WaitForArms(1);
  EXPECT_EQ(observed_.samples(FidelityComparison::kCarried)[0].labels.plan, "direct");
  const auto cells = engine_->ReportGate();
  ASSERT_EQ(cells.size(), 1u);
  EXPECT_EQ(cells[0].cell.plan, "direct");
  EXPECT_FALSE(cells[0].rungs[0].usable);
  EXPECT_THAT(cells[0].explanation, HasSubstr("calibrated (no map): cannot be used"));
  ExpectIdle();

  // With no other plan nothing is carried.
  options_.gate.ladder = {"calibrated"};
  MakePair();
  const Answer native = AskAbout(2);
  EXPECT_EQ(native.usage.computed_tokens, 100);
  EXPECT_FALSE(native.cache.shadowed);
  EXPECT_EQ(engine_->ReportGate()[0].state, GateState::kLearning);
  ExpectIdle();
}

// A map waits for its turn in the step like any repair.
TEST_F(EngineCalibratedTest, MapsKeepToTheStepsBudget) {
  CarryBy("calibrated");
  options_.step_tokens = 32;
  MakeScaledPair();
  const std::vector<int32_t> prompt = Tokens(400);
  const Answer truth = Native(prompt);
  ASSERT_TRUE(Warm("s", prompt).ok());
  const int64_t before = engine_->snapshot().steps;
  const Answer answer = Carried(prompt);
  EXPECT_EQ(answer.usage.carried_tokens, 384);
  EXPECT_LT(Apart(answer, truth), 1e-4);
  // 64 rows of a map cost as much as 32 of two layers; 16 tokens of prompt, and 7 decodes.
  EXPECT_EQ(engine_->snapshot().steps - before, 6 + 1 + 7);
  ExpectIdle();
}

}  // namespace
}  // namespace carryover
