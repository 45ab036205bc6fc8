#include "engine/reuse_policy.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace carryover {
namespace {

Digest Print(const char* name) { return Sha256(name); }

class ReusePolicyTest : public testing::Test {
 protected:
  // One string a level, each letter an entry: t native of the target, s and r native of two
  // sources, x what the target computed over s, y over s and a version that is no source, b blocks
  // of s whose lowest two layers the target computed, v what it computed over those, m blocks of s
  // changed by its map, w what the target computed over those, c blocks of m with two computed
  // layers.
  ChainMatch Match(const std::vector<std::string>& levels) {
    ChainMatch match;
    match.block_tokens = 16;
    for (const std::string& level : levels) {
      match.level_begin.push_back(match.entries.size());
      for (char letter : level) {
        MatchEntry entry;
        entry.provenance = Id(letter);
        entry.ready = true;
        match.entries.push_back(entry);
      }
    }
    match.level_begin.push_back(match.entries.size());
    return match;
  }

  ProvenanceId Id(char letter) {
    switch (letter) {
      case 't':
        return registry_.Native(Print("t"));
      case 's':
        return registry_.Native(Print("s"));
      case 'r':
        return registry_.Native(Print("r"));
      case 'x':
        return registry_.Intern(ComputedOver(Print("t"), {NativeOf(Print("s"))}));
      case 'y':
        return registry_.Intern(
            ComputedOver(Print("t"), {NativeOf(Print("s")), NativeOf(Print("q"))}));
      case 'b': {
        Provenance repaired = ComputedOver(Print("t"), {NativeOf(Print("s"))});
        repaired.map = "bottom(2)";
        return registry_.Intern(repaired);
      }
      case 'v': {
        Provenance over = ComputedOver(Print("t"), {NativeOf(Print("s"))});
        over.map = "~bottom(2)";
        return registry_.Intern(over);
      }
      case 'm':
        return registry_.Intern(MappedBy(NativeOf(Print("s")), "map"));
      case 'w':
        return registry_.Intern(ComputedOver(Print("t"), {MappedBy(NativeOf(Print("s")), "map")}));
      case 'c': {
        Provenance repaired = ComputedOver(Print("t"), {NativeOf(Print("s"))});
        repaired.map = "bottom(2),map";
        return registry_.Intern(repaired);
      }
      default:
        return registry_.Native(Print("q"));
    }
  }

  // The chosen letters, carried ones in upper case.
  std::string Plan(const std::vector<std::string>& levels, const std::string& sources,
                   int min_carried = 0, const char* carry = "direct") {
    ReuseQuery query;
    query.native = Id('t');
    for (char letter : sources) {
      query.sources.push_back(Id(letter));
      query.maps.push_back(letter == 's' ? "map" : "");  // r has none
    }
    query.min_carried_tokens = min_carried;
    query.carry = *ParseCarryPlan(carry);
    query.layers = 4;
    std::string out;
    const ReusePlan plan = PlanReuse(Match(levels), query, registry_);
    int carried = 0;
    for (const PlannedBlock& block : plan.blocks) {
      for (char letter : std::string("tsrxyqbvmwc")) {
        if (block.entry.provenance == Id(letter)) out += block.carried ? toupper(letter) : letter;
      }
      if (block.map) out += '*';
      if (block.repair) out += '!';
      carried += block.carried;
    }
    EXPECT_EQ(carried, plan.carried_blocks);
    return out + std::string(plan.repaired_blocks, '-');
  }

  ProvenanceRegistry registry_;
};

TEST_F(ReusePolicyTest, NativeOnlyWithoutSources) {
  EXPECT_EQ(Plan({"ts", "t", "s"}, ""), "tt");
  EXPECT_EQ(Plan({"s", "s"}, ""), "");
  EXPECT_EQ(Plan({"x"}, ""), "");
}

TEST_F(ReusePolicyTest, NativeFirstThenCarried) {
  EXPECT_EQ(Plan({"ts", "ts", "s", "s"}, "s"), "ttSS");
}

TEST_F(ReusePolicyTest, NativeBehindCarriedIsStillNative) {
  EXPECT_EQ(Plan({"s", "ts", "s"}, "s"), "StS");
}

TEST_F(ReusePolicyTest, LongestRunThenTheMoreWanted) {
  EXPECT_EQ(Plan({"sr", "sr", "r"}, "sr"), "RRR");
  EXPECT_EQ(Plan({"sr", "sr"}, "sr"), "SS");
  EXPECT_EQ(Plan({"sr", "sr"}, "rs"), "RR");
}

TEST_F(ReusePolicyTest, UndeclaredSourcesAreNeverRead) {
  EXPECT_EQ(Plan({"q", "q"}, "s"), "");
  EXPECT_EQ(Plan({"s", "q"}, "s"), "S");
}

TEST_F(ReusePolicyTest, TaintedNeedsAllItsSources) {
  EXPECT_EQ(Plan({"s", "x"}, "s"), "SX");
  EXPECT_EQ(Plan({"s", "x"}, "r"), "");
  EXPECT_EQ(Plan({"s", "y"}, "s"), "S");
  EXPECT_EQ(Plan({"t", "x"}, "r"), "t");
}

TEST_F(ReusePolicyTest, TooLittleIsNotCarried) {
  EXPECT_EQ(Plan({"t", "s"}, "s", 17), "t");
  EXPECT_EQ(Plan({"t", "s", "s"}, "s", 17), "tSS");
}

TEST_F(ReusePolicyTest, ANativePlanCarriesNothing) {
  EXPECT_EQ(Plan({"ts", "s", "s"}, "s", 0, "native"), "t");
}

TEST_F(ReusePolicyTest, ATailIsComputedOverWhatLiesInFrontOfIt) {
  EXPECT_EQ(Plan({"s", "s", "s", "s"}, "s", 0, "tail(16)"), "SSS-");
  EXPECT_EQ(Plan({"s", "s", "s", "s"}, "s", 0, "tail(17)"), "SS--");
  EXPECT_EQ(Plan({"s", "s", "s", "s"}, "s", 0, "tail(50%)"), "SS--");
  EXPECT_EQ(Plan({"s", "s", "s", "s"}, "s", 0, "tail(1%)"), "SSS-");
  EXPECT_EQ(Plan({"t", "s", "s", "s"}, "s", 0, "tail(32)"), "tS--");
}

TEST_F(ReusePolicyTest, NativeBlocksAtTheEndNeedNoTail) {
  EXPECT_EQ(Plan({"s", "s", "ts"}, "s", 0, "tail(32)"), "SSt");
  EXPECT_EQ(Plan({"t", "t"}, "s", 0, "tail(32)"), "tt");
  EXPECT_EQ(Plan({}, "s", 0, "tail(32)"), "");
  // In the midst of the tail one stays, but not behind what is computed.
  EXPECT_EQ(Plan({"s", "s", "t", "s"}, "s", 0, "tail(32)"), "SSt-");
  EXPECT_EQ(Plan({"s", "s", "t", "s"}, "s", 0, "tail(48)"), "S---");
}

TEST_F(ReusePolicyTest, WhatTheTargetComputedOverSourcesIsATail) {
  EXPECT_EQ(Plan({"s", "s", "sx", "sx"}, "s", 0, "tail(32)"), "SSXX");
  EXPECT_EQ(Plan({"s", "s", "sx", "sx"}, "s", 0, "tail(16)"), "SSXX");
  EXPECT_EQ(Plan({"s", "s", "sx", "sx"}, "s", 0, "direct"), "SSSS");
  EXPECT_EQ(Plan({"s", "s", "sx", "s"}, "s", 0, "tail(32)"), "SSX-");
  EXPECT_EQ(Plan({"s", "s", "s", "sx"}, "s", 0, "tail(32)"), "SS--");
  EXPECT_EQ(Plan({"s", "s", "x", "x", "x"}, "s", 0, "tail(32)"), "SSXXX");
  // Over a version that is no source it is not read.
  EXPECT_EQ(Plan({"s", "s", "s", "sy"}, "s", 0, "tail(16)"), "SSS-");
}

TEST_F(ReusePolicyTest, ABottomIsComputedInEveryCarriedBlock) {
  EXPECT_EQ(Plan({"t", "s", "s"}, "s", 0, "bottom(2)"), "tS!S!");
  EXPECT_EQ(Plan({"t", "s", "s"}, "s", 0, "bottom(50%)"), "tS!S!");
  EXPECT_EQ(Plan({"t", "sb", "s"}, "s", 0, "bottom(2)"), "tBS!");
  EXPECT_EQ(Plan({"t", "sb", "s"}, "s", 0, "bottom(1)"), "tS!S!");
  EXPECT_EQ(Plan({"t", "sb", "b"}, "s", 0, "bottom(2)"), "tBB");
  EXPECT_EQ(Plan({"t", "sb", "b"}, "s", 0, "direct"), "tS");
  EXPECT_EQ(Plan({"t", "sb", "b"}, "r", 0, "bottom(2)"), "t");
  // What was computed over the source as it is would not be this plan.
  EXPECT_EQ(Plan({"s", "x"}, "s", 0, "bottom(2)"), "S!");
  EXPECT_EQ(Plan({"s", "sbv", "v"}, "s", 0, "bottom(2)+tail(16)"), "S!VV");
  EXPECT_EQ(Plan({"s", "s", "s"}, "s", 0, "bottom(2)+tail(16)"), "S!S!-");
  // All layers: a native prefill.
  EXPECT_EQ(Plan({"t", "s", "s"}, "s", 0, "bottom(4)"), "t");
  EXPECT_EQ(Plan({"t", "s", "s"}, "s", 0, "bottom(80%)"), "t");
}

TEST_F(ReusePolicyTest, AMapChangesEveryCarriedBlock) {
  EXPECT_EQ(Plan({"t", "s", "s"}, "s", 0, "calibrated"), "tS*S*");
  EXPECT_EQ(Plan({"t", "sm", "s", "m"}, "s", 0, "calibrated"), "tMS*M");
  EXPECT_EQ(Plan({"s", "sm", "m"}, "s", 0, "direct"), "SS");
  // From a source without a map nothing is carried; nor is what was not made by this plan.
  EXPECT_EQ(Plan({"r", "r"}, "r", 0, "calibrated"), "");
  EXPECT_EQ(Plan({"rs", "rs", "r"}, "rs", 0, "calibrated"), "S*S*");
  EXPECT_EQ(Plan({"m", "m"}, "r", 0, "calibrated"), "");
  EXPECT_EQ(Plan({"s", "x"}, "s", 0, "calibrated"), "S*");
  EXPECT_EQ(Plan({"s", "w", "w"}, "s", 0, "calibrated"), "S*WW");
  EXPECT_EQ(Plan({"s", "w"}, "s", 0, "direct"), "S");
  EXPECT_EQ(Plan({"s", "s", "s"}, "s", 0, "calibrated+tail(16)"), "S*S*-");
  EXPECT_EQ(Plan({"m", "m", "sw"}, "s", 0, "calibrated+tail(16)"), "MMW");
  EXPECT_EQ(Plan({"s", "sm", "smb", "smbc"}, "s", 0, "calibrated+bottom(2)"), "S*!M!M!C");
  EXPECT_EQ(Plan({"smc", "c"}, "s", 0, "calibrated"), "M");
  EXPECT_EQ(Plan({"smc", "sc"}, "s", 0, "bottom(2)"), "S!S!");
}

TEST_F(ReusePolicyTest, ATailOverAllThatIsCarriedIsNative) {
  EXPECT_EQ(Plan({"s", "s"}, "s", 0, "tail(32)"), "");
  EXPECT_EQ(Plan({"s", "s"}, "s", 0, "tail(100%)"), "");
  EXPECT_EQ(Plan({"t", "s", "s"}, "s", 0, "tail(1000)"), "t");
  // What is left is too little to be carried at all.
  EXPECT_EQ(Plan({"t", "s", "s"}, "s", 17, "tail(16)"), "t");
}

}  // namespace
}  // namespace carryover
