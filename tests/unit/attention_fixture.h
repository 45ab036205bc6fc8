// What the tests of attention and of keys and values share: sequences in KV blocks, passes over
// them, and what must come out, in fp64. K and V are only seen through what ops make of them: their
// order inside a block is the backend's own.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "tests/unit/ops_testing.h"

namespace carryover {

// A layer of attention, some sequences' inputs, and the KV memory that passes fill. Block ids are
// dealt in random order; every byte of KV starts as NaN.
struct World {
  KvGeometry geometry;
  int heads = 0;
  int layer = 0;
  int window = 0;
  float scale = 0;
  float eps = 1e-5f;
  std::vector<float> q_norm, k_norm;  // empty: none
  std::vector<float> cos_sin;         // (max_positions, 2, head_dim / 2)
  int max_positions = 0;
  std::vector<std::vector<float>> qkv;       // by sequence: (tokens, width)
  std::vector<std::vector<int32_t>> tables;  // by sequence: block ids
  int blocks = 0;
  int position_shift = 0;  // of the rotation against the place in KV
  void* kv = nullptr;

  int Group() const { return heads / geometry.kv_heads; }
  size_t Width() const {
    return static_cast<size_t>(heads + 2 * geometry.kv_heads) * geometry.head_dim;
  }
  size_t OutWidth() const { return static_cast<size_t>(heads) * geometry.head_dim; }
};

// Some next tokens of a sequence.
struct Chunk {
  int sequence;
  int begin;
  int count;
};

class AttentionTestBase : public OpsTestBase {
 protected:
  // Numbers of heads that are 0 are chosen at random.
  World MakeWorld(DType kv_type, int head_dim, const std::vector<int>& lengths, int kv_heads = 0,
                  int group = 0) {
    World w;
    w.geometry.layers = Random(1, 3);
    w.geometry.kv_heads = kv_heads > 0 ? kv_heads : Random(1, 3);
    w.geometry.head_dim = head_dim;
    w.geometry.block_tokens = 16 * Random(1, 3);
    w.geometry.dtype = kv_type;
    w.heads = w.geometry.kv_heads * (group > 0 ? group : Random(1, 5));
    w.layer = Random(0, w.geometry.layers - 1);
    w.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(head_dim)));
    if (Coin()) {
      w.q_norm = Values(head_dim);
      w.k_norm = Values(head_dim);
    }
    w.position_shift = Random(0, 5);
    w.max_positions = *std::max_element(lengths.begin(), lengths.end()) + w.position_shift;
    for (int p = 0; p < w.max_positions; ++p) {
      for (int part = 0; part < 2; ++part) {
        for (int i = 0; i < head_dim / 2; ++i) {
          const double angle = p * std::pow(10000.0, -2.0 * i / head_dim);
          w.cos_sin.push_back(static_cast<float>(part == 0 ? std::cos(angle) : std::sin(angle)));
        }
      }
    }
    for (int length : lengths) {
      w.qkv.push_back(Values(length * w.Width()));
      w.tables.emplace_back((length + w.geometry.block_tokens - 1) / w.geometry.block_tokens);
      w.blocks += static_cast<int>(w.tables.back().size());
    }
    ++w.blocks;  // one spare
    std::vector<int32_t> ids(w.blocks);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random_);
    for (std::vector<int32_t>& table : w.tables) {
      for (int32_t& id : table) {
        id = ids.back();
        ids.pop_back();
      }
    }
    w.kv = Poisoned(w.blocks * w.geometry.BlockBytes());
    return w;
  }

  // Begins a pass over `chunks` and writes their keys and values. Gives the rotated rows.
  float* Write(const World& w, const std::vector<Chunk>& chunks) {
    sequences_.clear();
    positions_.clear();
    table_.clear();
    std::vector<float> rows;
    for (const Chunk& c : chunks) {
      sequences_.push_back({static_cast<int32_t>(positions_.size()), c.count, c.begin,
                            static_cast<int32_t>(table_.size())});
      const std::vector<int32_t>& blocks = w.tables[c.sequence];
      table_.insert(table_.end(), blocks.begin(), blocks.end());
      for (int i = 0; i < c.count; ++i) positions_.push_back(c.begin + i + w.position_shift);
      const auto from = w.qkv[c.sequence].begin() + c.begin * w.Width();
      rows.insert(rows.end(), from, from + c.count * w.Width());
    }
    ops().begin_pass(backend_, {sequences_, positions_, table_});
    RopeWriteArgs rope;
    rope.qkv = Upload(rows);
    rope.q_norm = w.q_norm.empty() ? nullptr : Upload(w.q_norm);
    rope.k_norm = w.k_norm.empty() ? nullptr : Upload(w.k_norm);
    rope.norm_eps = w.eps;
    rope.cos_sin = Upload(w.cos_sin);
    rope.heads = w.heads;
    rope.layer = w.layer;
    rope.kv_base = w.kv;
    rope.geometry = w.geometry;
    ops().rope_write(backend_, rope);
    return rope.qkv;
  }

  // One pass over `chunks`. Gives (rows, heads * head_dim) in the chunks' order.
  std::vector<float> Pass(const World& w, const std::vector<Chunk>& chunks, DType out_type) {
    AttentionArgs args;
    args.qkv = Write(w, chunks);
    args.heads = w.heads;
    args.layer = w.layer;
    args.scale = w.scale;
    args.window = w.window;
    args.kv_base = w.kv;
    args.geometry = w.geometry;
    size_t count = 0;
    for (const Chunk& c : chunks) count += c.count * w.OutWidth();
    args.out = Poisoned(count * DTypeBytes(out_type));
    args.out_type = out_type;
    ops().attention(backend_, args);
    return Download(args.out, count, out_type);
  }

  // Tokens [begin, end) of a sequence in chunks of at most `most` tokens.
  std::vector<float> InChunks(const World& w, int sequence, int begin, int end, int most,
                              DType out_type) {
    std::vector<float> out;
    while (begin < end) {
      const int count = std::min(Random(1, most), end - begin);
      const std::vector<float> part = Pass(w, {{sequence, begin, count}}, out_type);
      out.insert(out.end(), part.begin(), part.end());
      begin += count;
    }
    return out;
  }

  // Normalised, if the world says so, and rotated.
  static std::vector<double> Rotated(const World& w, const float* x, const std::vector<float>& norm,
                                     int position) {
    const int dim = w.geometry.head_dim;
    const int half = dim / 2;
    std::vector<double> v(x, x + dim);
    if (!norm.empty()) {
      double squares = 0;
      for (double e : v) squares += e * e;
      const double scale = 1 / std::sqrt(squares / dim + double{w.eps});
      for (int i = 0; i < dim; ++i) v[i] *= scale * norm[i];
    }
    const float* const cos = &w.cos_sin[static_cast<size_t>(position) * dim];
    const float* const sin = cos + half;
    std::vector<double> out(dim);
    for (int i = 0; i < half; ++i) {
      out[i] = v[i] * cos[i] - v[half + i] * sin[i];
      out[half + i] = v[half + i] * cos[i] + v[i] * sin[i];
    }
    return out;
  }

  // Rows [begin, end) of a sequence in fp64: (end - begin, heads * head_dim).
  static std::vector<double> Reference(const World& w, int sequence, int begin, int end) {
    const int dim = w.geometry.head_dim;
    const DType type = w.geometry.dtype;
    std::vector<double> out((end - begin) * w.OutWidth());
    for (int kv_head = 0; kv_head < w.geometry.kv_heads; ++kv_head) {
      std::vector<std::vector<double>> keys, values;
      for (int t = 0; t < end; ++t) {
        const float* const k = &w.qkv[sequence][t * w.Width() + (w.heads + kv_head) * dim];
        const float* const v = k + w.geometry.kv_heads * dim;
        keys.push_back(Rotated(w, k, w.k_norm, t + w.position_shift));
        for (double& e : keys.back()) e = RoundTo(type, static_cast<float>(e));
        values.emplace_back(v, v + dim);
        for (double& e : values.back()) e = RoundTo(type, static_cast<float>(e));
      }
      for (int t = begin; t < end; ++t) {
        for (int h = kv_head * w.Group(); h < (kv_head + 1) * w.Group(); ++h) {
          const std::vector<double> q =
              Rotated(w, &w.qkv[sequence][t * w.Width() + h * dim], w.q_norm, t + w.position_shift);
          const int first = w.window > 0 ? std::max(0, t - w.window + 1) : 0;
          std::vector<double> weights;
          for (int j = first; j <= t; ++j) {
            weights.push_back(w.scale *
                              std::inner_product(q.begin(), q.end(), keys[j].begin(), 0.0));
          }
          const double max = *std::max_element(weights.begin(), weights.end());
          double sum = 0;
          for (double& weight : weights) sum += weight = std::exp(weight - max);
          double* const row = &out[(t - begin) * w.OutWidth() + h * dim];
          for (int j = first; j <= t; ++j) {
            for (int i = 0; i < dim; ++i) row[i] += weights[j - first] / sum * values[j][i];
          }
        }
      }
    }
    return out;
  }

  static void ExpectNear(const std::vector<float>& got, const std::vector<double>& want,
                         double tolerance) {
    ASSERT_EQ(got.size(), want.size());
    double worst = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      const double error = std::fabs(got[i] - want[i]);
      worst = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(worst, error);
    }
    EXPECT_LE(worst, tolerance);
  }

 private:
  // Of the pass under way.
  std::vector<SequenceRows> sequences_;
  std::vector<int32_t> positions_;
  std::vector<int32_t> table_;
};

}  // namespace carryover
