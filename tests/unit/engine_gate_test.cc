// The gate in the engine: who carries by what was measured, an operator's word, and a restart.
#include <thread>

#include "tests/unit/shadow_fixture.h"

namespace carryover {
namespace {

using EngineGateTest = EngineShadowTest;

TEST_F(EngineGateTest, TheGateOpensOnEvidenceAndClosesOnIt) {
  // Loose limits and no floor: a few dozen samples settle it.
  options_.gate.limit = {0.2, 0.2, 0.2};
  options_.gate.max_floor = {0, 0, 0};
  MakePair();
  int asked = 0;
  Answer answer;
  for (; asked < 300; ++asked) {
    answer = AskAbout(1000 + asked, 40, 2);
    if (answer.usage.carried_tokens > 0) break;
    // Comparisons that found no room in the queue would count against opening.
    if (asked % 16 == 15) observed_.WaitForArms(asked + 1);
  }
  EXPECT_EQ(answer.cache.gate, "open") << asked;
  ASSERT_FALSE(observed_.changes().empty());
  EXPECT_EQ(observed_.changes()[0].from, "learning");
  EXPECT_EQ(observed_.changes()[0].to, "open");
  // An operator closes it: the next request is native.
  EXPECT_EQ(engine_->SetGate({.task = "zzz"}, GateState::kClosed, "test").status().code(),
            absl::StatusCode::kInvalidArgument);
  auto changed = engine_->SetGate({.source = "s"}, GateState::kClosed, "test");
  ASSERT_TRUE(changed.ok()) << changed.status();
  EXPECT_EQ(*changed, 1);
  answer = AskAbout(5000, 40, 2);
  EXPECT_EQ(answer.usage.carried_tokens, 0);
  EXPECT_EQ(answer.cache.gate, "closed");
  const auto cells = engine_->ReportGate();
  ASSERT_EQ(cells.size(), 1u);
  EXPECT_EQ(cells[0].cell.source, "s");
  EXPECT_TRUE(cells[0].forced);
  EXPECT_FALSE(cells[0].explanation.empty());
}

TEST_F(EngineGateTest, BadCarryingClosesTheGate) {
  options_.gate.when_learning_carry = true;
  options_.fidelity.hold_out_rate = 0.1;
  MakeUpdatedPair();
  Answer answer;
  int asked = 0;
  for (; asked < 400; ++asked) {
    answer = AskAbout(asked, 60, 4);
    if (answer.cache.gate == "closed") break;
    if (asked % 16 == 15) observed_.WaitForArms(asked + 1);
  }
  EXPECT_EQ(answer.cache.gate, "closed");
  EXPECT_EQ(answer.usage.carried_tokens, 0);
}

// Nobody asks for anything meanwhile.
TEST_F(EngineGateTest, ACoolDownEndsOnAnIdleServer) {
  options_.gate.cooldown_seconds = 0.3;
  MakeUpdatedPair();
  const auto closed = [&] {
    for (const GateChange& change : observed_.changes()) {
      if (change.to == "closed") return true;
    }
    return false;
  };
  for (int asked = 0; asked < 400 && !closed(); ++asked) {
    AskAbout(asked, 60, 4);
    observed_.WaitForArms(asked + 1);
  }
  ASSERT_TRUE(closed());
  const auto becomes = [&](const std::string& state) {
    for (int i = 0; i < 400 && (*engine_->snapshot().gates)[0].state != state; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return (*engine_->snapshot().gates)[0].state == state;
  };
  ASSERT_TRUE(becomes("closed"));
  EXPECT_TRUE(becomes("learning"));
}

// Who opens a cell that the evidence has closed goes on seeing how far off it is.
TEST_F(EngineGateTest, AnOperatorsOpenCellIsComparedThoughTheEvidenceClosedIt) {
  options_.gate.cooldown_seconds = 1e6;
  options_.fidelity.sample_rate = 1;
  options_.fidelity.hold_out_rate = 0;
  MakeUpdatedPair();
  const auto closed = [&] {
    const std::vector<GateChange> changes = observed_.changes();
    return std::any_of(changes.begin(), changes.end(),
                       [](const GateChange& change) { return change.to == "closed"; });
  };
  int asked = 0;
  for (; asked < 400 && !closed(); ++asked) {
    AskAbout(asked, 60, 4);
    observed_.WaitForArms(asked + 1);
  }
  ASSERT_TRUE(closed());
  const int compared = static_cast<int>(observed_.samples(FidelityComparison::kCarried).size());
  AskAbout(asked, 60, 4);
  EXPECT_EQ(observed_.samples(FidelityComparison::kCarried).size(),
            compared);  // nothing is carried, so nothing is learnt

  ASSERT_TRUE(engine_->SetGate({.source = "s"}, GateState::kOpen, "anna").ok());
  const Answer answer = AskAbout(asked + 1, 60, 4);
  EXPECT_GT(answer.usage.carried_tokens, 0);
  EXPECT_TRUE(answer.cache.shadowed);
  observed_.WaitForArms(asked + 1);
  ASSERT_EQ(observed_.samples(FidelityComparison::kCarried).size(), compared + 1);
  EXPECT_EQ(observed_.samples(FidelityComparison::kCarried).back().labels.plan, "direct");
}

TEST_F(EngineGateTest, ARemovedVersionLeavesNoCell) {
  options_.fidelity.time_share = 0;
  options_.fidelity.old_rate = 0;
  MakePair();
  AskAbout(1);
  observed_.WaitForArms(1);
  EXPECT_EQ(engine_->ReportGate().size(), 1u);
  Running hold = Hold(LongAsk("t", Tokens(20, 77)));
  AskAbout(2);
  ASSERT_TRUE(engine_->Promote("m", "t", 100).ok());
  ASSERT_TRUE(engine_->Remove("m", "s").ok());
  EXPECT_TRUE(engine_->ReportGate().empty());
  engine_->Cancel(hold.ticket);
  hold.end.wait();
  observed_.WaitForArms(2);
  EXPECT_EQ(observed_.ended()["carried version"], 1);
  EXPECT_TRUE(engine_->ReportGate().empty());
}

TEST_F(EngineGateTest, AnotherEngineGoesOnWithWhatWasSaved) {
  MakePair();
  for (int i = 0; i < 5; ++i) AskAbout(i, 40, 2);
  observed_.WaitForArms(5);
  CellPattern pattern;
  pattern.source = "s";
  pattern.task = "qa";
  ASSERT_TRUE(engine_->SetGate(pattern, GateState::kOpen, "anna").ok());
  EXPECT_EQ(engine_->gate_activity().samples, 5);
  EXPECT_EQ(engine_->gate_activity().changes, 1);
  const std::string bytes = engine_->SaveGate();

  // The same weights under other names.
  Make(options_);
  EXPECT_EQ(engine_->RestoreGate("nonsense").code(), absl::StatusCode::kDataLoss);
  ASSERT_TRUE(engine_->RestoreGate(bytes).ok());
  auto rules = engine_->ListGateRules();
  ASSERT_EQ(rules.size(), 1u);
  EXPECT_EQ(rules[0].pattern.source.size(), 12u);   // nobody has that version yet
  EXPECT_TRUE(engine_->snapshot().gates->empty());  // nor is it a series
  EXPECT_EQ(engine_->ReportGate().size(), 1u);
  ASSERT_TRUE(Load("before", "llama3").ok());
  ASSERT_TRUE(Load("after", "llama3", {"before"}, "control").ok());
  rules = engine_->ListGateRules();
  EXPECT_EQ(rules[0].pattern.source, "before");
  EXPECT_EQ(rules[0].pattern.task, "qa");
  EXPECT_EQ(rules[0].state, GateState::kOpen);
  EXPECT_EQ(rules[0].who, "anna");
  const auto cells = engine_->ReportGate();
  ASSERT_EQ(cells.size(), 1u);
  EXPECT_EQ(cells[0].cell.source, "before");
  EXPECT_EQ(cells[0].cell.target, "after");
  EXPECT_EQ(cells[0].samples, 5);
  ASSERT_EQ(engine_->snapshot().gates->size(), 1u);
  EXPECT_EQ((*engine_->snapshot().gates)[0].cell.model, "m");
  EXPECT_EQ((*engine_->snapshot().gates)[0].samples, 5);
}

// What was learned about versions of long ago must not keep new ones from being learned about.
TEST_F(EngineGateTest, VersionsThatAreGoneTakeNoMoreThanHalfTheRoom) {
  options_.gate.max_cells = 5;
  MakePair();
  const auto learn = [&](int cells) {
    for (int i = 0; i < cells; ++i) {
      ASSERT_TRUE(Warm("s", Tokens(40, i)).ok());
      CompletionRequest request = Ask("t", Tokens(40, i), i % 2 == 0 ? 2 : 9);
      request.task = i < 2 ? "qa" : "";
      Run(request);
    }
  };
  learn(2);
  const std::string few = engine_->SaveGate();
  learn(4);
  const std::string many = engine_->SaveGate();
  EXPECT_EQ(engine_->ReportGate().size(), 4u);
  for (const bool loaded : {false, true}) {
    Make(options_);
    if (loaded) {
      ASSERT_TRUE(Load("s", "llama3").ok());
      ASSERT_TRUE(Load("t", "llama3", {"s"}, "control").ok());
    }
    ASSERT_TRUE(engine_->RestoreGate(few).ok());
    EXPECT_EQ(engine_->ReportGate().size(), 2u);
    ASSERT_TRUE(engine_->RestoreGate(many).ok());
    EXPECT_EQ(engine_->ReportGate().size(), loaded ? 4u : 0u);
  }
}

}  // namespace
}  // namespace carryover
