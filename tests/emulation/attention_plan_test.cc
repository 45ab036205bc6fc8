// How a pass is cut into the items of attention kernels: every query over every split that it sees,
// once, with places of their own for what splits leave.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/attention.h"
#include "kernels/cuda/attention_tiles.h"
#include "tests/emulation/device_memory.h"

namespace carryover::emulated {
namespace {

constexpr KvGeometry kTensor = {
    .layers = 1, .kv_heads = 2, .head_dim = 64, .block_tokens = 16, .dtype = DType::kBF16};
constexpr AttentionLimits kRoomy = {
    .multiprocessors = 132, .shared_bytes = 227 << 10, .scratch_bytes = 256 << 20};

AttentionPlan PlanOf(const KvGeometry& geometry, int group, int window,
                     const AttentionLimits& limits, const std::vector<SequenceRows>& sequences) {
  AttentionPlan plan;
  // What was planned before leaves no trace.
  const SequenceRows other = {0, 300, 3000, 0};
  PlanAttention(geometry, geometry.kv_heads * group, 0, limits, &other, 1, &plan);
  PlanAttention(geometry, geometry.kv_heads * group, window, limits, sequences.data(),
                static_cast<int>(sequences.size()), &plan);
  return plan;
}

// Fails where a plan does not do what attention.h says.
void Check(const AttentionPlan& plan, const KvGeometry& geometry, int group, int window,
           const AttentionLimits& limits, const std::vector<SequenceRows>& sequences) {
  const bool tensor = HasTensorCoreAttention(geometry);
  ASSERT_EQ(plan.items.size(), static_cast<size_t>(plan.wide + plan.narrow + plan.merges));
  // (sequence, query, split) that some item does, and (query, split) places in scratch.
  std::set<std::array<int, 3>> done;
  std::set<int64_t> slots;
  int merge_queries = 0, wide_queries = 0, longest = INT32_MAX;
  bool split_wide = false;
  for (int at = 0; at < plan.wide + plan.narrow; ++at) {
    const AttentionItem& item = plan.items[at];
    const auto sequence =
        std::find_if(sequences.begin(), sequences.end(),
                     [&](const SequenceRows& s) { return s.row_begin == item.row; });
    ASSERT_NE(sequence, sequences.end());
    ASSERT_EQ(item.kv_begin, sequence->kv_begin);
    ASSERT_EQ(item.table_begin, sequence->table_begin);
    ASSERT_GT(item.query_count, 0);
    ASSERT_LE(item.query_begin + item.query_count, sequence->row_count * group);
    const bool narrow = at >= plan.wide;
    ASSERT_EQ(narrow, tensor && sequence->row_count * group <= kNarrowQueries);
    ASSERT_LE(item.query_count, narrow   ? kNarrowQueries
                                : tensor ? kWideWarps * kWarpQueries
                                         : kPlainQueries);
    ASSERT_TRUE(!tensor || narrow || item.query_begin % kWarpQueries == 0);
    if (!narrow) wide_queries = std::max(wide_queries, static_cast<int>(item.query_count));
    for (int q = 0; q < item.query_count; ++q) {
      for (int split = item.split_begin; split < item.split_end; ++split) {
        const bool fresh = done.insert({static_cast<int>(sequence - sequences.begin()),
                                        item.query_begin + q, split})
                               .second;
        ASSERT_TRUE(fresh) << "query " << item.query_begin + q << " twice over split " << split;
      }
    }
    const int last = item.kv_begin + (item.query_begin + item.query_count - 1) / group;
    const int first = item.kv_begin + item.query_begin / group;
    const int seen_begin = (window > 0 ? std::max(0, first - window + 1) : 0) / kAttentionSplit;
    const bool whole =
        item.split_begin == seen_begin && item.split_end == last / kAttentionSplit + 1;
    split_wide |= !narrow && !whole;
    ASSERT_LT(item.split_begin, item.split_end);
    ASSERT_GE(item.split_begin, seen_begin) << "tokens that nobody sees";
    ASSERT_LE(item.split_end, last / kAttentionSplit + 1);
    ASSERT_TRUE(!narrow || item.split_end == item.split_begin + 1);
    // Places: of an item that is part of its queries' splits, or walks several on tensor cores.
    if (!whole || (tensor && item.split_end - item.split_begin > 1)) {
      for (int q = 0; q < item.query_count; ++q) {
        ASSERT_TRUE(slots.insert(item.slot + q).second) << "a place for two";
        ASSERT_LT(item.slot + q, plan.state_slots);
      }
    }
    if (whole) continue;
    // A merge of these queries finds this split where it looks for it.
    const AttentionItem* merge = nullptr;
    for (int m = plan.wide + plan.narrow; m < static_cast<int>(plan.items.size()); ++m) {
      const AttentionItem& candidate = plan.items[m];
      if (candidate.row == item.row && candidate.query_begin == item.query_begin)
        merge = &candidate;
    }
    ASSERT_NE(merge, nullptr);
    ASSERT_EQ(merge->query_count, item.query_count);
    ASSERT_EQ(merge->split_begin, seen_begin);
    ASSERT_EQ(merge->split_end, last / kAttentionSplit + 1);
    ASSERT_EQ(item.slot, merge->slot + (item.split_begin - seen_begin) * item.query_count);
    merge_queries = std::max(merge_queries, static_cast<int>(item.query_count));
  }
  // Where no item was split because there were many.
  const bool sorted = !split_wide && plan.wide * geometry.kv_heads > limits.multiprocessors / 2;
  for (int at = 0; at < plan.wide && sorted; ++at) {
    const AttentionItem& item = plan.items[at];
    const int last = item.kv_begin + (item.query_begin + item.query_count - 1) / group;
    const int tokens = window > 0 ? std::min(window, last + 1) : last + 1;
    ASSERT_LE(tokens, longest) << "the longest come first";
    longest = tokens;
  }
  for (size_t s = 0; s < sequences.size(); ++s) {
    for (int q = 0; q < sequences[s].row_count * group; ++q) {
      const int position = sequences[s].kv_begin + q / group;
      const int first = window > 0 ? std::max(0, position - window + 1) : 0;
      for (int split = first / kAttentionSplit; split <= position / kAttentionSplit; ++split) {
        ASSERT_EQ(done.count({static_cast<int>(s), q, split}), 1u)
            << "query " << q << " of sequence " << s << " misses split " << split;
      }
    }
  }
  EXPECT_EQ(plan.merge_queries, merge_queries);
  EXPECT_EQ(plan.wide_queries, wide_queries);
  EXPECT_EQ(plan.state_slots, static_cast<int64_t>(slots.size()));
  EXPECT_EQ(plan.scratch_bytes,
            slots.size() * geometry.kv_heads * (geometry.head_dim + 2) * sizeof(float));
}

TEST(AttentionPlan, EveryQueryMeetsEverySplitOnce) {
  std::mt19937 random(std::random_device{}());
  const auto pick = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int round = 0; round < 60; ++round) {
    KvGeometry geometry = kTensor;
    geometry.kv_heads = pick(1, 8);
    geometry.head_dim = std::array{16, 64, 80, 96, 128, 256}[pick(0, 5)];
    geometry.dtype = pick(0, 3) == 0 ? DType::kF32 : DType::kBF16;
    const int group = pick(1, 9);
    const int window = pick(0, 1) * pick(1, 2000);
    const AttentionLimits limits = {pick(1, 150), static_cast<size_t>(pick(100, 227)) << 10,
                                    static_cast<size_t>(pick(0, 1 << 22))};
    std::vector<SequenceRows> sequences;
    int row = 0;
    for (int s = pick(1, 6); s > 0; --s) {
      const int rows = pick(0, 2) == 0 ? pick(1, 300) : pick(1, 4);
      sequences.push_back({row, rows, pick(0, 1) * pick(0, 5000), 400 * s});
      row += rows;
    }
    SCOPED_TRACE(testing::Message() << "head_dim " << geometry.head_dim << " kv heads "
                                    << geometry.kv_heads << " group " << group << " window "
                                    << window << " of " << DTypeName(geometry.dtype));
    const AttentionPlan plan = PlanOf(geometry, group, window, limits, sequences);
    Check(plan, geometry, group, window, limits, sequences);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(AttentionPlan, SplitsOfAFewRowsAreSpreadOverADevice) {
  const std::vector<SequenceRows> few = {{0, 40, 5000, 0}};
  AttentionPlan plan = PlanOf(kTensor, 4, 0, kRoomy, few);
  EXPECT_EQ(plan.wide, 2 * 10) << "two items of 80 queries over 10 splits";
  EXPECT_EQ(plan.merges, 2);

  AttentionLimits limits = kRoomy;
  limits.multiprocessors = 4;  // two items of two KV heads are more than half
  plan = PlanOf(kTensor, 4, 0, limits, few);
  EXPECT_EQ(plan.wide, 2);
  EXPECT_EQ(plan.merges, 0);
  EXPECT_EQ(plan.state_slots, 160) << "each walks its splits and keeps a total";

  limits = kRoomy;
  limits.scratch_bytes = 160 * 10 * 2 * 66 * 4 - 1;
  EXPECT_EQ(PlanOf(kTensor, 4, 0, limits, few).merges, 0) << "no room for states";
  ++limits.scratch_bytes;
  EXPECT_EQ(PlanOf(kTensor, 4, 0, limits, few).merges, 2);

  // One split needs neither merges nor memory; one token of a long context always splits.
  plan = PlanOf(kTensor, 4, 0, kRoomy, {{0, 40, 400, 0}});
  EXPECT_EQ(plan.wide, 2);
  EXPECT_EQ(plan.scratch_bytes, 0u);
  limits.multiprocessors = 1;
  limits.scratch_bytes = 0;
  plan = PlanOf(kTensor, 4, 0, limits, {{0, 1, 5119, 0}});
  EXPECT_EQ(plan.narrow, 10);
  EXPECT_EQ(plan.merges, 1);
}

TEST(AttentionPlan, ABlockHasNoMoreQueriesThanSharedMemoryHolds) {
  KvGeometry geometry = kTensor;
  geometry.head_dim = 256;  // whose queries lie in shared memory
  AttentionLimits limits = kRoomy;
  EXPECT_EQ(PlanOf(geometry, 1, 0, limits, {{0, 512, 0, 0}}).wide_queries, 128);
  limits.shared_bytes = WideSharedBytes(256, 8) - 1;
  EXPECT_EQ(PlanOf(geometry, 1, 0, limits, {{0, 512, 0, 0}}).wide_queries, 64);
  limits.shared_bytes = 99 << 10;  // of sm_86 and sm_89
  EXPECT_LE(
      WideSharedBytes(256, PlanOf(geometry, 1, 0, limits, {{0, 512, 0, 0}}).wide_queries / 16),
      limits.shared_bytes);
  // Whatever the head size, what a block of 16 queries asks for is there on these too.
  for (const int dim : {64, 80, 96, 128, 256}) {
    EXPECT_LE(NarrowSharedBytes(dim), limits.shared_bytes) << dim;
    EXPECT_LE(WideSharedBytes(dim, 1), limits.shared_bytes) << dim;
  }
  EXPECT_LE(PlainSharedBytes(kMaxHeadDim), limits.shared_bytes);
}

TEST(AttentionPlan, NothingIsPlannedForNothing) {
  AttentionPlan plan = PlanOf(kTensor, 4, 0, kRoomy, {});
  EXPECT_TRUE(plan.items.empty());
  plan = PlanOf(kTensor, 4, 0, kRoomy, {{0, 0, 100, 0}});
  EXPECT_TRUE(plan.items.empty());
  EXPECT_EQ(plan.wide + plan.narrow + plan.merges, 0);
}

TEST(AttentionPlan, OnlySomeHeadSizesHaveTensorCores) {
  KvGeometry geometry = kTensor;
  for (const int dim : {64, 80, 96, 128, 256}) {
    geometry.head_dim = dim;
    geometry.dtype = DType::kBF16;
    EXPECT_TRUE(HasTensorCoreAttention(geometry)) << dim;
    geometry.dtype = DType::kF32;
    EXPECT_FALSE(HasTensorCoreAttention(geometry)) << dim;
  }
  geometry.dtype = DType::kBF16;
  geometry.head_dim = 72;
  EXPECT_FALSE(HasTensorCoreAttention(geometry));
}

class PaddedPlanTest : public DeviceMemoryTest {};

// Empty items write nothing, wherever they stand.
TEST_F(PaddedPlanTest, AnswersTheSame) {
  constexpr int kHeads = 4, kRows = 23, kTokens = 1600;
  const KvGeometry g = kTensor;
  std::mt19937 random(std::random_device{}());
  std::normal_distribution<float> normal;
  std::vector<float> qkv(kRows * (kHeads + 2 * g.kv_heads) * g.head_dim);
  for (float& v : qkv) v = normal(random);
  std::vector<Bf16> kv((kTokens / 16 + 1) * g.BlockBytes() / 2);
  for (Bf16& v : kv) v = ToBf16(normal(random));
  std::vector<int32_t> table(kTokens / 16 + 1);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
  // Wide, narrow with merges, and narrow without.
  const std::vector<SequenceRows> sequences = {
      {0, 20, kTokens - 20, 0}, {20, 1, kTokens - 1, 0}, {21, 2, 30, 0}};
  const std::vector<int32_t> tables = table;
  AttentionLaunch launch;
  launch.qkv = Upload(qkv);
  launch.kv_base = Upload(kv);
  launch.geometry = g;
  launch.heads = kHeads;
  launch.scale = 0.125f;
  launch.block_table = Upload(tables);

  AttentionPlan plan = PlanOf(g, kHeads / g.kv_heads, 0, kRoomy, sequences);
  ASSERT_GT(plan.wide, 1);
  ASSERT_GT(plan.merges, 1);
  const auto run = [&] {
    float* const out = Allocate<float>(kRows * kHeads * g.head_dim);
    launch.out = out;
    launch.items = Upload(plan.items);
    launch.scratch = Allocate<char>(plan.scratch_bytes);
    LaunchAttention(launch, plan, nullptr);
    return Read(out, kRows * kHeads * g.head_dim);
  };
  const std::vector<float> want = run();
  for (const float v : want) ASSERT_FALSE(std::isnan(v));
  const AttentionPlan before = plan;
  ASSERT_EQ(before.narrow, 5);
  PadAttentionPlan(g, &plan);
  EXPECT_EQ(plan.narrow, 8);
  EXPECT_EQ(plan.merges, static_cast<int>(std::bit_ceil(static_cast<unsigned>(before.merges))));
  EXPECT_EQ(plan.state_slots,
            static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(before.state_slots))));
  EXPECT_EQ(static_cast<int>(plan.items.size()), plan.wide + plan.narrow + plan.merges);
  EXPECT_EQ(run(), want);
  const AttentionPlan padded = plan;
  PadAttentionPlan(g, &plan);
  EXPECT_TRUE(static_cast<const AttentionCounts&>(plan) == padded) << "nothing to add";
}

}  // namespace
}  // namespace carryover::emulated
