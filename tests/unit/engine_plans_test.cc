// Plans that repair what they carry: what they compute, how it is labelled, and the two ends of
// the scale.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <thread>

#include "engine/block_pool.h"
#include "engine/model.h"
#include "tests/unit/shadow_fixture.h"

namespace carryover {
namespace {

using testing::HasSubstr;

class EnginePlansTest : public EngineShadowTest {
 protected:
  // T serves by this plan without being asked to prove it, and nothing is compared.
  void CarryBy(const std::string& plan) {
    options_.gate.when_learning_carry = true;
    options_.gate.ladder = {plan};
    options_.fidelity.sample_rate = options_.fidelity.learning_sample_rate = 0;
  }
  Answer Native(const std::vector<int32_t>& prompt, int max_tokens = 8) {
    CompletionRequest request = Ask("t", prompt, max_tokens);
    request.reuse = ReuseMode::kNativeOnly;
    request.store = false;
    return Run(request);
  }
  static void ExpectSameLogprobs(const Answer& answer, const Answer& truth) {
    EXPECT_EQ(answer.tokens, truth.tokens);
    ASSERT_EQ(answer.logprobs, truth.logprobs);  // bit for bit
  }
  EvaluateSpec Spec(int length, int max_tokens = 6) {
    EvaluateSpec spec;
    spec.prompt.model = "m";
    spec.prompt.version = "t";
    spec.prompt.tokens = Tokens(length, 3);
    spec.source = "s";
    spec.sampling.max_tokens = max_tokens;
    spec.sampling.ignore_eos = true;
    return spec;
  }
};

TEST_F(EnginePlansTest, ATailIsComputedOverCarriedBlocksAndSaysSo) {
  CarryBy("tail(20)");  // two blocks
  MakePair();
  const std::vector<int32_t> prompt = Tokens(100);
  const Answer truth = Native(prompt);
  ASSERT_TRUE(Warm("s", prompt).ok());
  const Answer answer = Run(Ask("t", prompt));
  EXPECT_EQ(answer.usage.carried_tokens, 64);
  EXPECT_EQ(answer.usage.repaired_tokens, 32);
  EXPECT_EQ(answer.usage.computed_tokens, 4);
  ExpectUsageAddsUp(answer);
  ASSERT_EQ(answer.cache.segments.size(), 3u);
  EXPECT_EQ(answer.cache.segments[0].source, "s");
  EXPECT_EQ(answer.cache.segments[0].plan, "direct");
  EXPECT_EQ(answer.cache.segments[0].tokens, 64);
  EXPECT_EQ(answer.cache.segments[1].source, "t over s");
  EXPECT_EQ(answer.cache.segments[1].plan, "tail(20)");
  EXPECT_EQ(answer.cache.segments[1].tier, "");
  EXPECT_EQ(answer.cache.segments[1].tokens, 32);
  EXPECT_EQ(answer.cache.segments[2].plan, "fresh");
  // The control: equal weights.
  ExpectSameLogprobs(answer, truth);

  // The tail was kept as what it is, and serves who comes next.
  const Answer second = Run(Ask("t", prompt));
  EXPECT_EQ(second.usage.carried_tokens, 96);
  EXPECT_EQ(second.usage.repaired_tokens, 0);
  EXPECT_EQ(second.cache.segments[0].source, "s");
  EXPECT_EQ(second.cache.segments[1].source, "t over s");
  ExpectSameLogprobs(second, truth);
  EXPECT_EQ(Native(prompt).usage.cached_tokens, 0);
  EXPECT_THAT(observed_.plans(),
              testing::ElementsAre("native", "native", "tail(20)", "tail(20)", "native"));
  ExpectIdle();
}

TEST_F(EnginePlansTest, ATailOverAllIsNative) {
  CarryBy("tail(100%)");
  MakeUpdatedPair();
  const std::vector<int32_t> prompt = Tokens(100);
  const Answer truth = Native(prompt);
  ASSERT_TRUE(Warm("s", prompt).ok());
  const Answer answer = Run(Ask("t", prompt));
  EXPECT_EQ(answer.usage.computed_tokens, 100);
  EXPECT_EQ(answer.usage.repaired_tokens, 0);
  EXPECT_EQ(observed_.plans().back(), "native");
  ExpectSameLogprobs(answer, truth);
  // It attended to nothing but its own, so that its blocks are native.
  const Answer again = Native(prompt);
  EXPECT_EQ(again.usage.cached_tokens, 96);
  ExpectSameLogprobs(again, truth);
  ExpectIdle();
}

// Between the ends: other weights show, and the longer the tail the less.
TEST_F(EnginePlansTest, EveryWayOfCarryingIsEvaluated) {
  MakeUpdatedPair();
  EvaluateSpec spec = Spec(100);
  spec.plans = {"direct", "tail(16)", "tail(50%)", "tail(95)", "tail(96)", "tail(1000)"};
  const auto evaluation = engine_->Evaluate(spec, nullptr);
  ASSERT_TRUE(evaluation.ok()) << evaluation.status();
  ASSERT_EQ(evaluation->carried.size(), 6u);
  const int repaired[] = {0, 16, 48, 0, 0, 0}, carried[] = {96, 80, 48, 0, 0, 0};
  for (size_t i = 0; i < 6; ++i) {
    const EvaluatedAnswer& answer = evaluation->carried[i];
    EXPECT_EQ(answer.plan, spec.plans[i]);
    EXPECT_EQ(answer.usage.repaired_tokens, repaired[i]) << answer.plan;
    EXPECT_EQ(answer.usage.carried_tokens, carried[i]) << answer.plan;
  }
  std::map<std::string, double> kl;
  for (const FidelitySample& sample : evaluation->samples) {
    if (sample.labels.comparison != FidelityComparison::kCarried) continue;
    for (const PositionFidelity& position : sample.positions) kl[sample.labels.plan] += position.kl;
  }
  ASSERT_EQ(kl.size(), 6u);
  EXPECT_GT(kl["direct"], 1e-3);
  EXPECT_GT(kl["tail(50%)"], 1e-6);
  EXPECT_LT(kl["tail(50%)"], kl["direct"]);
  for (const char* whole : {"tail(95)", "tail(96)", "tail(1000)"}) {
    EXPECT_EQ(kl[whole], 0) << whole;
    EXPECT_EQ(evaluation->carried[5].token_ids, evaluation->native.token_ids);
  }
  ExpectIdle();

  // Without plans it takes those of the ladder; what is none is refused.
  spec.plans.clear();
  EXPECT_EQ(engine_->Evaluate(spec, nullptr)->carried[0].plan, "direct");
  spec.plans = {"direct", "direct"};
  EXPECT_THAT(std::string(engine_->Evaluate(spec, nullptr).status().message()),
              HasSubstr("plans[1]: stands there twice"));
  spec.plans = {"native"};
  EXPECT_THAT(std::string(engine_->Evaluate(spec, nullptr).status().message()),
              HasSubstr("plans[0]: plan \"native\": carries nothing"));
  spec.plans.assign(9, "direct");
  EXPECT_EQ(engine_->Evaluate(spec, nullptr).status().code(), absl::StatusCode::kInvalidArgument);
}

// Shadows measure the rung that is judged: the first until it fails, then the next.
TEST_F(EnginePlansTest, ShadowsMeasureTheRungThatIsJudged) {
  options_.gate.ladder = {"direct", "tail(32)"};
  options_.gate.limit = {0.0001, 0.0001, 0.0001};
  options_.gate.max_floor = {0, 0, 0};
  options_.gate.min_prefixes = 1;
  options_.gate.alpha = 0.5;
  MakeUpdatedPair();
  int arms = 0;
  while (arms < 200 && observed_.changes().empty()) {
    AskAbout(arms++);
    observed_.WaitForArms(arms);
    engine_->ReportGate();  // the engine has told what came of it, too
  }
  ASSERT_EQ(observed_.changes().size(), 1u);
  EXPECT_EQ(observed_.changes()[0].cause, "next_rung");
  EXPECT_EQ(observed_.changes()[0].cell.plan, "direct");
  const int before = observed_.tokens();
  AskAbout(arms++);
  observed_.WaitForArms(arms);
  // Four tokens and the served ones as under direct, and the tail.
  EXPECT_EQ(observed_.tokens() - before, 32 + 4 + 7);
  const auto samples = observed_.samples(FidelityComparison::kCarried);
  ASSERT_EQ(samples.size(), static_cast<size_t>(arms));
  for (const FidelitySample& sample : samples) {
    EXPECT_EQ(sample.labels.plan, &sample == &samples.back() ? "tail(32)" : "direct");
  }
  const auto cells = engine_->ReportGate();
  ASSERT_EQ(cells.size(), 1u);
  EXPECT_EQ(cells[0].cell.plan, "tail(32)");
  EXPECT_EQ(cells[0].samples, 1);
}

// What serves is one plan and what is judged another: both are compared, each under its name.
TEST_F(EnginePlansTest, AnOperatorsRungAndTheJudgedOneAreBothCompared) {
  options_.gate.ladder = {"direct", "tail(32)"};
  MakePair();
  ASSERT_TRUE(engine_->SetGate({}, GateState::kRepaired, "anna").ok());
  const Answer answer = AskAbout(1);
  EXPECT_EQ(answer.usage.repaired_tokens, 32);
  EXPECT_EQ(answer.cache.gate, "repaired");
  observed_.WaitForArms(2);
  EXPECT_EQ(observed_.ended(),
            (std::map<std::string, int>{{"native completed", 1}, {"carried completed", 1}}));
  const auto samples = observed_.samples(FidelityComparison::kCarried);
  ASSERT_EQ(samples.size(), 2u);
  EXPECT_EQ(samples[0].labels.plan, "tail(32)");
  EXPECT_EQ(samples[1].labels.plan, "direct");
  for (const FidelitySample& sample : samples) {
    EXPECT_EQ(sample.along, Along::kServed);
    ExpectSame(sample);
  }
  ExpectIdle();
}

TEST_F(EnginePlansTest, HeldOutRequestsCompareThePlanThatWouldHaveServed) {
  CarryBy("tail(32)");
  options_.fidelity.hold_out_rate = 1;
  MakeUpdatedPair();
  EXPECT_EQ(AskAbout(1).usage.computed_tokens, 100);
  observed_.WaitForArms(2);
  const auto samples = observed_.samples(FidelityComparison::kCarried);
  ASSERT_EQ(samples.size(), 1u);
  EXPECT_EQ(samples[0].labels.plan, "tail(32)");
  ASSERT_EQ(observed_.trial().size(), 1u);
  EXPECT_EQ(observed_.trial()[0].plan, "tail(32)");
  EXPECT_TRUE(observed_.trial()[0].held_out);
}

// Nothing is compared where a tail leaves nothing to carry: it would be no news, and no drop
// either.
TEST_F(EnginePlansTest, WhatATailCoversWhollyIsNotCompared) {
  options_.gate.ladder = {"tail(96)"};
  MakePair();
  const Answer covered = AskAbout(1, 100);
  EXPECT_FALSE(covered.cache.shadowed);
  const Answer more = AskAbout(2, 132);
  EXPECT_TRUE(more.cache.shadowed);
  observed_.WaitForArms(1);
  EXPECT_EQ(observed_.ended(), (std::map<std::string, int>{{"carried completed", 1}}));
}

TEST_F(EnginePlansTest, WhoAsksToCarryIsServedByTheJudgedPlan) {
  options_.gate.ladder = {"tail(32)"};
  options_.fidelity.sample_rate = options_.fidelity.learning_sample_rate = 0;
  MakePair();
  const std::vector<int32_t> prompt = Tokens(100);
  ASSERT_TRUE(Warm("s", prompt).ok());
  CompletionRequest request = Ask("t", prompt);
  request.reuse = ReuseMode::kCarry;
  EXPECT_EQ(Run(request).usage.repaired_tokens, 32);
}

// One budget for all: of compared requests some compare every plan that has not failed.
TEST_F(EnginePlansTest, SomeRequestsCompareAllRungs) {
  options_.gate.ladder = {"direct", "tail(32)", "tail(64)"};
  for (const double rate : {0.0, 1.0}) {
    options_.fidelity.rungs_rate = rate;
    MakePair();
    const size_t before = observed_.samples(FidelityComparison::kCarried).size();
    AskAbout(1);
    observed_.WaitForArms(static_cast<int>(before) + (rate > 0 ? 3 : 1));
    const auto samples = observed_.samples(FidelityComparison::kCarried);
    ASSERT_EQ(samples.size() - before, rate > 0 ? 3u : 1u);
    const auto cells = engine_->ReportGate();
    ASSERT_EQ(cells.size(), 1u);
    ASSERT_EQ(cells[0].rungs.size(), 3u);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(cells[0].rungs[i].plan, options_.gate.ladder[i]);
      EXPECT_EQ(cells[0].rungs[i].samples, i == 0 || rate > 0 ? 1 : 0);
    }
    if (rate > 0) {
      for (int i = 0; i < 3; ++i) {
        EXPECT_EQ(samples[before + i].labels.plan, options_.gate.ladder[i]);
        ExpectSame(samples[before + i]);
      }
    }
    ExpectIdle();
  }
}

// From nothing: a ladder whose first plan is bad and whose last is good enough finds that.
TEST_F(EnginePlansTest, TheLadderFindsAPlanThatIsGoodEnough) {
  options_.gate.ladder = {"direct", "tail(400)"};
  options_.gate.limit = {0.4, 0.25, 0.4};
  options_.gate.max_floor = {0, 0, 0};
  MakeUpdatedPair();
  std::string gate;
  int asked = 0;
  for (; asked < 150 && gate != "repaired"; ++asked) {
    gate = AskAbout(asked, 420, 1).cache.gate;
    while (engine_->snapshot().shadows_waiting > 0) std::this_thread::yield();
  }
  const auto cells = engine_->ReportGate();
  ASSERT_EQ(cells.size(), 1u);
  EXPECT_EQ(cells[0].rungs[0].state, RungState::kFailed);
  EXPECT_EQ(cells[0].rungs[1].state, RungState::kProved) << cells[0].explanation;
  const Answer answer = AskAbout(asked, 420, 1);
  EXPECT_EQ(answer.usage.carried_tokens, 16);
  EXPECT_EQ(answer.usage.repaired_tokens, 400);
  ExpectIdle();
}

TEST_F(EnginePlansTest, BottomLayersAreComputedAndSaySo) {
  CarryBy("bottom(1)");
  MakePair();
  const std::vector<int32_t> prompt = Tokens(100);
  const Answer truth = Native(prompt);
  ASSERT_TRUE(Warm("s", prompt).ok());
  const Answer answer = Run(Ask("t", prompt));
  EXPECT_EQ(answer.usage.carried_tokens, 0);
  EXPECT_EQ(answer.usage.repaired_tokens, 96);
  EXPECT_EQ(answer.usage.computed_tokens, 4);
  ExpectUsageAddsUp(answer);
  ASSERT_EQ(answer.cache.segments.size(), 2u);
  EXPECT_EQ(answer.cache.segments[0].source, "t over s:bottom(1)");
  EXPECT_EQ(answer.cache.segments[0].plan, "bottom(1)");
  EXPECT_EQ(observed_.plans().back(), "bottom(1)");
  ExpectSameLogprobs(answer, truth);

  // What was repaired serves who comes next, by the same plan alone, and is native to nobody.
  const Answer second = Run(Ask("t", prompt));
  EXPECT_EQ(second.usage.carried_tokens, 96);
  EXPECT_EQ(second.cache.segments[0].source, "t over s:bottom(1)");
  ExpectSameLogprobs(second, truth);
  EXPECT_EQ(Native(prompt).usage.cached_tokens, 0);
  ExpectIdle();
  ASSERT_TRUE(engine_->Promote("m", "t", 100).ok());
  ASSERT_TRUE(engine_->Unload("m", "s").ok());
  EXPECT_EQ(Run(Ask("t", prompt)).usage.carried_tokens, 96);
  ASSERT_TRUE(engine_->Remove("m", "s").ok());
  EXPECT_EQ(Run(Ask("t", prompt)).usage.carried_tokens, 0);
  ExpectIdle();
}

// What the engine answers is what comes of putting the blocks together by hand.
TEST_F(EnginePlansTest, BottomLayersAreTheTargetsAndUpperOnesTheSources) {
  const std::string updated = PerturbedFolder(TinyPath("llama3"), "by-hand");
  auto backend = CpuOps().create({.threads = 1});
  ASSERT_TRUE(backend.ok());
  ModelOptions load;
  load.weights = load.kv_dtype = DType::kF32;
  const std::vector<int32_t> prompt = Tokens(100);
  std::vector<float> by_hand, all_layers, native;
  {
    auto source = Model::Load(TinyPath("llama3"), CpuOps(), *backend, load);
    auto target = Model::Load(updated, CpuOps(), *backend, load);
    ASSERT_TRUE(source.ok() && target.ok());
    const KvGeometry& geometry = (*source)->kv_layout().geometry;
    ASSERT_EQ(geometry.layers, 2);
    auto pool = BlockPool::Create(CpuOps(), *backend, {geometry.BlockBytes(), 64});
    ASSERT_TRUE(pool.ok());
    std::vector<BlockRef> blocks;
    std::vector<std::vector<int32_t>> tables(4);
    for (std::vector<int32_t>& table : tables) {
      for (int i = 0; i < 7; ++i) {
        blocks.push_back(*(*pool)->Allocate());
        table.push_back(blocks.back().id());
      }
    }
    const auto forward = [&](Model* model, const std::vector<int32_t>& table, int begin, int end,
                             int kv_layers, std::vector<float>* logits) {
      ForwardBatch batch;
      batch.kv_layers = kv_layers;
      batch.sequences.push_back({.row_begin = 0, .row_count = end - begin, .kv_begin = begin});
      for (int i = begin; i < end; ++i) {
        batch.tokens.push_back(prompt[i]);
        batch.positions.push_back(i);
      }
      batch.block_table = table;
      if (kv_layers == 0) batch.logit_rows.push_back(end - begin - 1);
      const absl::Status status = model->Forward(batch, (*pool)->base(), logits);
      ASSERT_TRUE(status.ok()) << status;
    };
    std::vector<float> unused;
    forward(source->get(), tables[0], 0, 96, 0, &unused);
    forward(target->get(), tables[1], 0, 48, 1, &unused);
    forward(target->get(), tables[1], 48, 96, 1, &unused);
    const absl::Span<const int32_t> from = absl::MakeConstSpan(tables[0]).first(6);
    const absl::Span<const int32_t> to = absl::MakeConstSpan(tables[1]).first(6);
    CpuOps().copy_kv(*backend, {from, to, 1, 2, (*pool)->base(), geometry});
    forward(target->get(), tables[1], 96, 100, 0, &by_hand);
    // All layers of K and V, without the last layer's attention and MLP, are a whole prefill.
    forward(target->get(), tables[2], 0, 32, 2, &unused);
    forward(target->get(), tables[2], 32, 96, 2, &unused);
    forward(target->get(), tables[2], 96, 100, 0, &all_layers);
    forward(target->get(), tables[3], 0, 100, 0, &native);
  }
  CpuOps().destroy(*backend);
  std::filesystem::remove_all(updated);
  EXPECT_EQ(all_layers, native);
  EXPECT_NE(by_hand, native);

  CarryBy("bottom(1)");
  MakeUpdatedPair();
  ASSERT_TRUE(Warm("s", prompt).ok());
  CompletionRequest request = Ask("t", prompt, 1);
  const Answer answer = Run(request);
  const int32_t token = answer.tokens[0][0];
  double sum = 0;
  for (const float logit : by_hand) sum += std::exp(double{logit});
  EXPECT_EQ(token, std::max_element(by_hand.begin(), by_hand.end()) - by_hand.begin());
  EXPECT_NEAR(answer.logprobs[0][0], by_hand[token] - std::log(sum), 1e-5);
  EXPECT_EQ(answer.usage.repaired_tokens, 96);
  ExpectIdle();
}

TEST_F(EnginePlansTest, PlansWithABottomAreEvaluated) {
  MakeUpdatedPair();
  EvaluateSpec spec = Spec(100);
  spec.plans = {"direct", "bottom(1)", "bottom(1)+tail(32)", "bottom(2)", "bottom(60%)"};
  const auto evaluation = engine_->Evaluate(spec, nullptr);
  ASSERT_TRUE(evaluation.ok()) << evaluation.status();
  const int repaired[] = {0, 96, 96, 0, 0};
  std::map<std::string, double> kl;
  for (const FidelitySample& sample : evaluation->samples) {
    if (sample.labels.comparison != FidelityComparison::kCarried) continue;
    for (const PositionFidelity& position : sample.positions) kl[sample.labels.plan] += position.kl;
  }
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(evaluation->carried[i].usage.repaired_tokens, repaired[i]) << spec.plans[i];
    EXPECT_EQ(kl[spec.plans[i]] == 0, i >= 3) << spec.plans[i];
  }
  EXPECT_NE(kl["bottom(1)"], kl["direct"]);
  EXPECT_NE(kl["bottom(1)"], kl["bottom(1)+tail(32)"]);
  for (int i : {3, 4}) {
    EXPECT_EQ(evaluation->carried[i].token_ids, evaluation->native.token_ids);
  }
  ExpectIdle();
}

// A repair takes no more of a step than a prefill does, and yields to nobody's loss.
TEST_F(EnginePlansTest, RepairsKeepToTheStepsBudget) {
  CarryBy("bottom(1)");
  options_.step_tokens = 32;
  MakePair();
  const std::vector<int32_t> prompt = Tokens(260);
  const Answer truth = Native(prompt);
  ASSERT_TRUE(Warm("s", prompt).ok());
  const int64_t before = engine_->snapshot().steps;
  const Answer answer = Run(Ask("t", prompt, 1));
  EXPECT_EQ(answer.usage.repaired_tokens, 256);
  // 64 rows of one layer of two cost as much as 32 rows of both: four passes, and one for the rest.
  EXPECT_EQ(engine_->snapshot().steps - before, 5);
  EXPECT_EQ(answer.tokens[0][0], truth.tokens[0][0]);

  // Beside others, and given up half-way.
  ASSERT_TRUE(Warm("s", Tokens(260, 5)).ok());
  Running other = Begin(Ask("s", Tokens(50, 9), 40));
  Running half = Begin(Ask("t", Tokens(260, 5), 8));
  half.start.wait();
  engine_->Cancel(half.ticket);
  EXPECT_EQ(other.end.get().tokens[0].size(), 40u);
  half.end.wait();
  ExpectIdle();
  ExpectSameLogprobs(Run(Ask("t", Tokens(260, 5))), Native(Tokens(260, 5)));
  ExpectIdle();
}

TEST_F(EnginePlansTest, ShadowsRepairFromBelow) {
  options_.gate.ladder = {"bottom(1)"};
  MakePair();
  for (int i = 0; i < 3; ++i) AskAbout(i);
  observed_.WaitForArms(3);
  for (const FidelitySample& sample : observed_.samples(FidelityComparison::kCarried)) {
    ExpectSame(sample);
    EXPECT_EQ(sample.labels.plan, "bottom(1)");
  }
  EXPECT_EQ(observed_.tokens(), 3 * (96 / 2 + 4 + 7));
  ExpectIdle();
}

TEST_F(EnginePlansTest, WhatIsNoPlanIsNoLadder) {
  options_.gate.ladder = {"direct", "tail"};
  const auto engine = Engine::Create(options_, CpuOps(), nullptr);
  EXPECT_EQ(engine.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(engine.status().message()), HasSubstr("ladder[1]: plan \"tail\""));
}

}  // namespace
}  // namespace carryover
