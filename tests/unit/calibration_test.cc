#include "engine/calibration.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "base/atomic_file.h"
#include "tests/unit/shadow_fixture.h"

namespace carryover {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<int32_t> Count(int begin, int count) {
  std::vector<int32_t> tokens(count);
  for (int i = 0; i < count; ++i) tokens[i] = begin + i;
  return tokens;
}

CalibrationOptions SmallPieces() {
  CalibrationOptions options;
  options.piece_tokens = 96;
  options.positions = 4;
  return options;
}

TEST(CutPieces, CutsTextsAndHoldsSomeOut) {
  // Ten pieces and a rest of 70, cut to whole blocks, and one that is too short.
  const CalibrationPieces pieces = CutPieces({Count(0, 1070), Count(5000, 67)}, SmallPieces(), 16);
  EXPECT_EQ(pieces.held.size(), 2u);
  EXPECT_EQ(pieces.fit.size(), 9u);
  EXPECT_EQ(pieces.fit_tokens, 8 * 100 + 68);
  std::set<int32_t> seen;
  for (const auto* half : {&pieces.fit, &pieces.held}) {
    for (const std::vector<int32_t>& piece : *half) {
      EXPECT_EQ((piece.size() - 4) % 16, 0u);
      for (int32_t token : piece) EXPECT_TRUE(seen.insert(token).second) << "twice: " << token;
    }
  }
  EXPECT_EQ(seen.size(), 1068u);
}

TEST(CutPieces, HoldsWholeTextsOutWhereThereAreMany) {
  std::vector<std::vector<int32_t>> texts;
  for (int i = 0; i < 10; ++i) texts.push_back(Count(10000 * i, 200));
  const CalibrationPieces pieces = CutPieces(texts, SmallPieces(), 16);
  ASSERT_EQ(pieces.held.size(), 4u);
  std::set<int> fit, held;
  for (const auto& piece : pieces.fit) fit.insert(piece[0] / 10000);
  for (const auto& piece : pieces.held) held.insert(piece[0] / 10000);
  EXPECT_EQ(held, std::set<int>({2, 7}));
  for (int text : held) EXPECT_EQ(fit.count(text), 0u);
}

TEST(CutPieces, KeepsToItsLimits) {
  CalibrationOptions options = SmallPieces();
  options.max_tokens = 250;
  options.held_pieces = 1;
  options.lead = {7, 8};
  const CalibrationPieces pieces = CutPieces({Count(100, 3000)}, options, 16);
  EXPECT_EQ(pieces.held.size(), 1u);
  EXPECT_EQ(pieces.fit.size(), 2u);
  EXPECT_EQ(pieces.fit_tokens, 200);
  for (const auto& piece : pieces.fit) {
    EXPECT_EQ(piece.size(), 100u);
    EXPECT_EQ(piece[0], 7);
    EXPECT_EQ(piece[1], 8);
    EXPECT_EQ(piece[2] % 98, 100 % 98) << "each begins where the one before ended";
  }
}

class CalibrateTest : public EngineShadowTest {
 protected:
  // Words of chance, in texts of some hundred tokens.
  static CalibrateSpec Spec(int texts = 12) {
    CalibrateSpec spec;
    spec.model = "m";
    spec.source = "s";
    spec.target = "t";
    spec.options.piece_tokens = 64;
    spec.options.positions = 8;
    spec.options.held_pieces = 4;
    spec.options.chunk_tokens = 40;
    std::mt19937 random(3);
    for (int i = 0; i < texts; ++i) {
      std::string text;
      while (text.size() < 700) {
        for (int n = 2 + random() % 6; n > 0; --n) text += static_cast<char>('a' + random() % 26);
        text += ' ';
      }
      spec.texts.push_back(text);
    }
    return spec;
  }
};

TEST_F(CalibrateTest, EqualWeightsNeedNoMap) {
  MakePair();
  const auto calibration = engine_->Calibrate(Spec(), {});
  ASSERT_TRUE(calibration.ok()) << calibration.status();
  EXPECT_LT(calibration->map.info.direct.tv, 1e-5);
  EXPECT_LT(calibration->map.info.mapped.tv, 1e-4);
  for (int layer = 0; layer < calibration->map.info.layers; ++layer) {
    const KvMapLayer& values = calibration->map.layers[layer];
    for (const auto* part : {&values.weight, &values.up, &values.bias}) {
      for (float value : *part) EXPECT_NEAR(value, 0, 1e-4);
    }
  }
  ExpectIdle();
}

TEST_F(CalibrateTest, AMapBringsAnUpdateNearer) {
  MakeUpdatedPair();
  std::map<std::string, int64_t> most;
  std::vector<CalibrationCandidate> told;
  CalibrateHooks hooks;
  hooks.progress = [&](const char* phase, int64_t done, int64_t total) {
    EXPECT_LE(done, total);
    EXPECT_GE(done, most[phase]);
    most[phase] = done;
  };
  hooks.candidate = [&](const CalibrationCandidate& candidate) { told.push_back(candidate); };
  const CalibrateSpec spec = Spec();
  const auto calibration = engine_->Calibrate(spec, hooks);
  ASSERT_TRUE(calibration.ok()) << calibration.status();
  const KvMapInfo& info = calibration->map.info;
  EXPECT_GT(info.direct.tv, 0.001);
  EXPECT_LT(info.mapped.tv, 0.9 * info.direct.tv);
  EXPECT_EQ(info.held_positions, info.held_texts * 8);
  EXPECT_EQ(most["held out"], info.held_texts);
  EXPECT_EQ(most["fit"], info.tokens);
  EXPECT_EQ(most["choose"], 8);

  // The one that is chosen is the best of those that saw all tokens.
  ASSERT_EQ(told.size(), calibration->candidates.size() + 1);
  EXPECT_EQ(told[0].tokens, 0);
  EXPECT_EQ(told[0].quality.tv, info.direct.tv);
  int parts = 0, whole = 0;
  double best = 1;
  for (const CalibrationCandidate& candidate : calibration->candidates) {
    if (candidate.tokens < info.tokens) {
      ++parts;
    } else {
      ++whole;
      best = std::min(best, candidate.quality.tv);
    }
  }
  EXPECT_EQ(parts, 3);
  EXPECT_EQ(whole, 8);
  EXPECT_EQ(best, info.mapped.tv);

  const std::vector<VersionInfo> versions = engine_->ListVersions("m");
  EXPECT_EQ(ToHex(info.source), versions[0].fingerprint);
  EXPECT_EQ(ToHex(info.target), versions[1].fingerprint);
  EXPECT_EQ(ToHex(info.kv_layout), versions[0].kv_layout_sha256);
  EXPECT_TRUE(WriteKvMap(calibration->map).ok());

  // Nothing of it is found by requests, and it comes out the same again.
  EXPECT_EQ(Run(Ask("t", Tokens(100, 3), 2)).usage.carried_tokens, 0);
  const auto again = engine_->Calibrate(spec, {});
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->map.Name(), calibration->map.Name());
}

TEST_F(CalibrateTest, AMapIsLoadedWithTheVersionsThatItIsFor) {
  MakePair();
  const auto calibration = engine_->Calibrate(Spec(), {});
  ASSERT_TRUE(calibration.ok()) << calibration.status();
  const std::string path = testing::TempDir() + "/carryover-calibrate-test.safetensors";
  ASSERT_TRUE(WriteFileAtomically(path, *WriteKvMap(calibration->map)).ok());
  const auto load = [&](const std::string& version, std::vector<std::string> carry_from,
                        std::vector<std::string> maps, const std::string& distinct) {
    LoadOptions options;
    options.model = "m";
    options.version = version;
    options.path = TinyPath("llama3");
    options.carry_from = std::move(carry_from);
    options.maps = std::move(maps);
    options.distinct = distinct;
    options.auto_dtype = false;
    options.weights = options.kv_dtype = DType::kF32;
    return engine_->Load(options, nullptr);
  };
  const auto again = load("t2", {"t", "s"}, {path}, "control");
  ASSERT_TRUE(again.ok()) << again.status();
  ASSERT_EQ(again->maps.size(), 1u);
  EXPECT_EQ(again->maps[0].first, calibration->map.Name());
  EXPECT_EQ(again->maps[0].second.tokens, calibration->map.info.tokens);

  const auto problem = [](const absl::StatusOr<VersionInfo>& loaded, absl::StatusCode code) {
    EXPECT_EQ(loaded.status().code(), code);
    return std::string(loaded.status().message());
  };
  using Code = absl::StatusCode;
  EXPECT_THAT(problem(load("x", {"s"}, {path}, "other"), Code::kFailedPrecondition),
              AllOf(HasSubstr("map: " + path), HasSubstr("target is"), Not(HasSubstr("source"))));
  EXPECT_THAT(problem(load("x", {"t"}, {path}, "control"), Code::kFailedPrecondition),
              HasSubstr("source is"));
  EXPECT_THAT(problem(load("x", {}, {path}, "control"), Code::kFailedPrecondition),
              HasSubstr("carries from none"));
  EXPECT_THAT(problem(load("x", {"s"}, {path, path}, "control"), Code::kFailedPrecondition),
              HasSubstr("another map"));
  problem(load("x", {"s"}, {path + ".not"}, "control"), Code::kNotFound);
  ASSERT_TRUE(WriteFileAtomically(path, "not a map").ok());
  EXPECT_THAT(problem(load("x", {"s"}, {path}, "control"), Code::kInvalidArgument),
              HasSubstr(path));
}

TEST_F(CalibrateTest, WaitsWhileThereAreUsersAndEndsWhenCancelled) {
  MakePair();
  Running hold = Hold(LongAsk("s", Tokens(20, 77)));
  hold.start.wait();
  std::atomic<bool> cancelled{false};
  std::atomic<int> pieces{0};
  std::thread caller([&] {
    CalibrateHooks hooks;
    hooks.cancelled = [&] { return cancelled.load(); };
    hooks.progress = [&](const char*, int64_t done, int64_t) { pieces += done > 0; };
    EXPECT_EQ(engine_->Calibrate(Spec(), hooks).status().code(), absl::StatusCode::kCancelled);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_EQ(pieces, 0);
  // One at a time.
  EXPECT_EQ(engine_->Calibrate(Spec(), {}).status().code(), absl::StatusCode::kResourceExhausted);
  cancelled = true;
  caller.join();
  EXPECT_GT(engine_->snapshot().running, 0) << "the other request was to outlast it";
  engine_->Cancel(hold.ticket);
  hold.end.wait();
  EXPECT_TRUE(engine_->Calibrate(Spec(), {}).ok());
}

TEST_F(CalibrateTest, EndsWhenTheServerDrains) {
  MakePair();
  engine_->StartDrain();
  EXPECT_EQ(engine_->Calibrate(Spec(), {}).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(CalibrateTest, SaysWhatIsWrong) {
  MakePair();
  const auto problem = [&](absl::StatusCode code, auto change) {
    CalibrateSpec spec = Spec();
    change(&spec);
    const auto calibration = engine_->Calibrate(spec, {});
    EXPECT_EQ(calibration.status().code(), code);
    return std::string(calibration.status().message());
  };
  using Code = absl::StatusCode;
  problem(Code::kNotFound, [](CalibrateSpec* spec) { spec->source = "x"; });
  EXPECT_THAT(problem(Code::kFailedPrecondition, [](auto* spec) { spec->source = "t"; }),
              HasSubstr("target"));
  EXPECT_THAT(problem(Code::kInvalidArgument, [](auto* spec) { spec->texts = {"too short"}; }),
              HasSubstr("texts"));
  EXPECT_THAT(problem(Code::kInvalidArgument, [](auto* spec) { spec->options.piece_tokens = 510; }),
              HasSubstr("piece_tokens"));
  EXPECT_THAT(problem(Code::kInvalidArgument, [](auto* spec) { spec->options.max_tokens = 1; }),
              HasSubstr("max_tokens"));
  EXPECT_THAT(problem(Code::kInvalidArgument, [](auto* spec) { spec->texts[3] = "\xff\xfe"; }),
              HasSubstr("texts[3]"));
  ASSERT_TRUE(engine_->Promote("m", "t", 100).ok());
  ASSERT_TRUE(engine_->Unload("m", "s").ok());
  EXPECT_THAT(problem(Code::kFailedPrecondition, [](auto*) {}), HasSubstr("source"));
}

}  // namespace
}  // namespace carryover
