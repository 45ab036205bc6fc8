#include <algorithm>
#include <bit>

#include "kernels/cuda/attention.h"
#include "kernels/cuda/attention_tiles.h"

namespace carryover::CARRYOVER_DEVICE {
namespace {

struct Planner {
  const KvGeometry& geometry;
  const int group;
  const int window;
  const SequenceRows* const sequences;
  const int count;
  AttentionPlan* const plan;

  AttentionItem ItemOf(const SequenceRows& s, int begin, int queries) const {
    AttentionItem item = {};
    item.row = s.row_begin;
    item.kv_begin = s.kv_begin;
    item.table_begin = s.table_begin;
    item.query_begin = begin;
    item.query_count = queries;
    const int first = s.kv_begin + begin / group;
    const int last = s.kv_begin + (begin + queries - 1) / group;
    item.split_begin = (window > 0 ? std::max(0, first - window + 1) : 0) / kAttentionSplit;
    item.split_end = last / kAttentionSplit + 1;
    return item;
  }

  static int Splits(const AttentionItem& item) { return item.split_end - item.split_begin; }
  // What an item costs, about: the tokens that its last query sees.
  int Tokens(const AttentionItem& item) const {
    const int last = item.kv_begin + (item.query_begin + item.query_count - 1) / group;
    return window > 0 ? std::min(last + 1, window) : last + 1;
  }

  // Calls visit(item) for whole items of at most `most` queries, of equal size as near as `unit`
  // allows, of the sequences that have more than `above` queries and at most `up_to`.
  template <typename Visit>
  void ForItems(int most, int unit, int64_t above, int64_t up_to, const Visit& visit) const {
    for (int s = 0; s < count; ++s) {
      const int64_t queries = int64_t{sequences[s].row_count} * group;
      if (queries <= above || queries > up_to) continue;
      const int64_t items = (queries + most - 1) / most;
      const int64_t each = ((queries + items - 1) / items + unit - 1) / unit * unit;
      for (int64_t begin = 0; begin < queries; begin += each) {
        visit(ItemOf(sequences[s], static_cast<int>(begin),
                     static_cast<int>(std::min(each, queries - begin))));
      }
    }
  }

  int32_t TakeSlots(int64_t queries) const {
    const int64_t slot = plan->state_slots;
    plan->state_slots += queries;
    return static_cast<int32_t>(slot);
  }

  // An item as one item per split, with slots one behind the other; as it is when it has only one.
  void AddSplit(AttentionItem item, std::vector<AttentionItem>* merges) const {
    if (Splits(item) > 1) {
      item.slot = TakeSlots(int64_t{item.query_count} * Splits(item));
      merges->push_back(item);
      plan->merge_queries = std::max(plan->merge_queries, static_cast<int>(item.query_count));
    }
    AttentionItem part = item;
    for (int split = item.split_begin; split < item.split_end; ++split) {
      part.split_begin = split;
      part.split_end = split + 1;
      plan->items.push_back(part);
      part.slot += item.query_count;
    }
  }
};

size_t StateBytes(const KvGeometry& geometry, int64_t slots) {
  return static_cast<size_t>(slots) * geometry.kv_heads * (geometry.head_dim + 2) * sizeof(float);
}

}  // namespace

bool HasTensorCoreAttention(const KvGeometry& geometry) {
  const int d = geometry.head_dim;
  return geometry.dtype == DType::kBF16 && (d == 64 || d == 80 || d == 96 || d == 128 || d == 256);
}

void PlanAttention(const KvGeometry& geometry, int heads, int window, const AttentionLimits& limits,
                   const SequenceRows* sequences, int sequence_count, AttentionPlan* plan) {
  plan->items.clear();
  plan->wide = plan->narrow = plan->merges = plan->merge_queries = plan->wide_queries = 0;
  plan->state_slots = 0;
  plan->scratch_bytes = 0;
  const Planner planner{geometry, heads / geometry.kv_heads, window, sequences, sequence_count,
                        plan};
  const bool tensor_cores = HasTensorCoreAttention(geometry);

  int most = kPlainQueries;
  if (tensor_cores) {
    int warps = kWideWarps;
    while (warps > 1 && WideSharedBytes(geometry.head_dim, warps) > limits.shared_bytes) warps /= 2;
    most = warps * kWarpQueries;
  }
  const int64_t narrow_up_to = tensor_cores ? kNarrowQueries : 0;
  const int unit = tensor_cores ? kWarpQueries : 1;
  const auto for_wide = [&](const auto& visit) {
    planner.ForItems(most, unit, narrow_up_to, INT64_MAX, visit);
  };

  // Items that see many tokens take long and come first. Where they would leave more than half of
  // the processors idle, their splits become items of their own.
  int64_t blocks = 0, split_slots = 0;
  for_wide([&](const AttentionItem& item) {
    blocks += geometry.kv_heads;
    if (Planner::Splits(item) > 1) {
      split_slots += int64_t{item.query_count} * Planner::Splits(item);
    }
  });
  const bool split = blocks <= limits.multiprocessors / 2 &&
                     StateBytes(geometry, split_slots) <= limits.scratch_bytes;
  std::vector<AttentionItem>& merges = plan->merge_items;
  merges.clear();
  for_wide([&](AttentionItem item) {
    plan->wide_queries = std::max(plan->wide_queries, static_cast<int>(item.query_count));
    if (split) {
      planner.AddSplit(item, &merges);
    } else {
      if (tensor_cores && Planner::Splits(item) > 1)
        item.slot = planner.TakeSlots(item.query_count);
      plan->items.push_back(item);
    }
  });
  plan->wide = static_cast<int>(plan->items.size());
  if (!split) {
    std::stable_sort(plan->items.begin(), plan->items.end(),
                     [&](const AttentionItem& a, const AttentionItem& b) {
                       return planner.Tokens(a) > planner.Tokens(b);
                     });
  }
  planner.ForItems(kNarrowQueries, 1, 0, narrow_up_to,
                   [&](const AttentionItem& item) { planner.AddSplit(item, &merges); });
  plan->narrow = static_cast<int>(plan->items.size()) - plan->wide;
  plan->merges = static_cast<int>(merges.size());
  plan->items.insert(plan->items.end(), merges.begin(), merges.end());
  plan->scratch_bytes = StateBytes(geometry, plan->state_slots);
}

void PadAttentionPlan(const KvGeometry& geometry, AttentionPlan* plan) {
  const auto up = [](int64_t n) {  // 0 stays 0
    return n == 0 ? 0 : static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n)));
  };
  const int narrow = static_cast<int>(up(plan->narrow)),
            merges = static_cast<int>(up(plan->merges));
  plan->items.insert(plan->items.begin() + plan->wide + plan->narrow, narrow - plan->narrow, {});
  plan->narrow = narrow;
  plan->items.resize(plan->items.size() + merges - plan->merges, {});
  plan->merges = merges;
  plan->state_slots = up(plan->state_slots);
  plan->scratch_bytes = StateBytes(geometry, plan->state_slots);
}

}  // namespace carryover::CARRYOVER_DEVICE
