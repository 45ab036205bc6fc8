// The plain data that ops take and give, for ops.h and for device code: nothing but the language.
#pragma once

#include <cstddef>
#include <cstdint>

namespace carryover {

enum class DType : uint8_t { kF32, kBF16, kF16, kI8 };

constexpr size_t DTypeBytes(DType type) {
  return type == DType::kF32 ? 4 : type == DType::kI8 ? 1 : 2;
}
constexpr const char* DTypeName(DType type) {
  return type == DType::kF32    ? "F32"
         : type == DType::kBF16 ? "BF16"
         : type == DType::kI8   ? "INT8"
                                : "F16";
}
// Of activations, and of what is not a matrix, beside matrices of a type.
constexpr DType ActivationDType(DType weights) {
  return weights == DType::kI8 ? DType::kBF16 : weights;
}

// Where one layer's K and V of a block lie. A block is one extent of all layers; inside a layer the
// order is the backend's own, chosen for its attention kernel, and named in kv_format: blocks of
// different formats are never mixed.
struct KvGeometry {
  int layers = 0;
  int kv_heads = 0;
  int head_dim = 0;            // even, at most 256
  int block_tokens = 16;       // a multiple of 16
  DType dtype = DType::kBF16;  // kBF16 or kF32

  size_t PlaneBytes() const {  // K or V of one layer
    return static_cast<size_t>(kv_heads) * block_tokens * head_dim * DTypeBytes(dtype);
  }
  size_t LayerBytes() const { return 2 * PlaneBytes(); }
  size_t BlockBytes() const { return LayerBytes() * layers; }
  bool operator==(const KvGeometry&) const = default;
};

// The rows of one sequence within a batch.
struct SequenceRows {
  int32_t row_begin = 0;    // its first row in the batch
  int32_t row_count = 0;    // its new tokens, at positions kv_begin ... kv_begin + row_count - 1
  int32_t kv_begin = 0;     // tokens already in its KV before this pass
  int32_t table_begin = 0;  // its first entry in the block table
};

enum class KvPlanes : uint8_t { kBoth, kKeys, kValues };

inline constexpr int kDivergenceTop = 10;

// How far two distributions over one vocabulary are apart: native p = softmax(z), carried
// q = softmax(w). Nats. Plain data, as the device writes it.
//   kl = sum p ln(p / q) (Kullback and Leibler 1951); +inf where q is 0 and p is not
//   js = (KL(p, m) + KL(q, m)) / 2 with m = (p + q) / 2, at most ln 2 (Lin 1991)
//   tv = sum |p - q| / 2, at most 1
// Rounding never makes kl or js negative, nor js or tv larger than they can be. A logit of -inf
// is a token that cannot come; all others are possible, however unlikely.
struct DivergenceRow {
  // False when a logit is NaN or +inf, or all of a row are -inf. Then ids are -1 and counts 0, and
  // all other numbers are NaN.
  int32_t valid;
  int32_t overlap;                     // how many of native_top are in carried_top
  int32_t native_count;                // possible tokens in native_top: min(10, how many there are)
  int32_t carried_count;               // the same in carried_top
  int32_t native_top[kDivergenceTop];  // ids, most likely first, the lower id first among equals;
  int32_t carried_top[kDivergenceTop];  // -1 behind the last. [0] is the argmax
  double kl;
  double js;
  double tv;
  double native_log_sum_exp;  // ln P(j) = z[j] - native_log_sum_exp
  double carried_log_sum_exp;
  // m(z) = z[a] - max over j != a of z[j], with a = the row's answer or, without one,
  // native_top[0]. -inf when a cannot come, +inf when nothing else can.
  double native_margin;
  double carried_margin;  // m(w), with the same a
  double native_gap;      // m(z) for a = native_top[0], whatever the answer
  // max - min of w[j] - z[j] over the union of both tops; +inf when one of them is possible in one
  // arm alone. No two tokens of the union came nearer to one another than by this.
  double delta_range;
  double native_stop;   // sum of p over stop_tokens
  double carried_stop;  // sum of q over stop_tokens
};

// How a token is chosen from a row of logits. Plain data, as ops take it to a device.
struct SampleSpec {
  int32_t row = 0;         // of the logits
  int32_t top_k = 0;       // 0: all
  float temperature = 1;   // 0: the largest logit, the lower id among equals
  float top_p = 1;         // (0, 1]
  float min_p = 0;         // [0, 1], of the most likely token's probability
  int32_t logprobs = -1;   // alternatives to rank, at most kSampleTop; -1: no log-probabilities
  double uniform = 0;      // [0, 1): where in the distribution
  int32_t edit_begin = 0;  // its edits of the logits
  int32_t edit_count = 0;
};

// Before anything else x becomes x + bias; then x / repetition where it is positive and
// x * repetition where not; then x - minus.
struct LogitEdit {
  int32_t token;
  float bias;  // -inf: the token cannot come
  float repetition;
  float minus;
};

inline constexpr int kSampleTop = 20;

// What was chosen; the rest, of logits without edits, where log-probabilities were asked for.
struct SampledToken {
  int32_t token;
  int32_t rank;             // 1: the most likely; the lower id first among equals
  int32_t top_count;        // as many as asked for, or the vocabulary has
  int32_t top[kSampleTop];  // ids, most likely first; undefined behind the last
  float logprob;            // natural logarithms
  float top_logprob[kSampleTop];
};

}  // namespace carryover
