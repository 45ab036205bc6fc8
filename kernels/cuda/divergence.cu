// How far two rows of logits are apart; kernels/ops.h has the formulas, kernels/cpu/divergence.cc
// the same steps in sequence.
//
// A row is cut into chunks of kChunk logits, whatever the number of rows, so that few rows fill a
// device and a row's bits depend on nothing else. Three kernels: each arm's chunks by themselves
// (largest logits, sum of exponentials); both arms' chunks side by side, now that both rows are
// distributions; then a warp a row puts the chunks together.
#include <math.h>

#include "kernels/cuda/device.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/logit_key.h"

namespace carryover::CARRYOVER_DEVICE {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 16;
constexpr int kChunk = kThreads * kPerThread;
constexpr double kLn2 = 0.69314718055994531;

__device__ inline double Infinity() { return static_cast<double>(INFINITY); }

// What one arm's chunk is by itself.
struct Scan {
  double sum;  // of exp(logit - max)
  float max;
  int broken;  // a NaN or +inf was seen
  Key top[kDivergenceTop];
};
// And what both arms' chunks are together.
struct Sums {
  double kl;
  double js;
  double tv;
  double lost;  // over 0 where q cannot give what p can
};

struct Scratch {
  Scan* scans;  // (2 rows, chunks): native, carried
  Sums* sums;   // (rows, chunks)
  int chunks;
};

__global__ void __launch_bounds__(kThreads) ScanChunks(DivergenceLaunch args, Scratch scratch) {
  auto* const shared = DynamicShared<Key>();  // (32)
  const int chunk = static_cast<int>(blockIdx.x), arm = static_cast<int>(blockIdx.z);
  const int64_t row = blockIdx.y;
  const float* const logits = (arm == 0 ? args.native : args.carried) + row * args.vocab;
  float values[kPerThread];
  float most = -INFINITY;
  int broken = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int id = chunk * kChunk + i * kThreads + static_cast<int>(threadIdx.x);
    values[i] = id < args.vocab ? logits[id] : -INFINITY;
    if (!(values[i] < INFINITY)) broken = 1;  // also for NaN
    most = Max(most, values[i]);
  }
  broken = BlockMax(broken, reinterpret_cast<int*>(shared));
  most = BlockMax(most, reinterpret_cast<float*>(shared));
  Scan* const out = scratch.scans + (row * 2 + arm) * scratch.chunks + chunk;
  if (broken != 0 || most == -INFINITY) {
    if (threadIdx.x == 0) {
      out->sum = 0;
      out->max = -INFINITY;
      out->broken = broken;
      for (int k = 0; k < kDivergenceTop; ++k) out->top[k] = 0;
    }
    return;
  }
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    sum += exp(static_cast<double>(values[i]) - static_cast<double>(most));
  }
  sum = BlockSum(sum, reinterpret_cast<double*>(shared));
  // The largest of all threads' best ones, ten times; each time one thread looks for its next best.
  Key last = ~static_cast<Key>(0), best = 0;
  bool look = true;
  for (int k = 0; k < kDivergenceTop; ++k) {
    if (look) {
      best = 0;
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        if (values[i] == -INFINITY) continue;
        const Key key =
            MakeKey(values[i], chunk * kChunk + i * kThreads + static_cast<int>(threadIdx.x));
        if (key < last && key > best) best = key;
      }
    }
    const Key winner = BlockMax(best, shared);
    look = winner != 0 && winner == best;
    if (look) last = winner;
    if (threadIdx.x == 0) out->top[k] = winner;
  }
  if (threadIdx.x == 0) {
    out->sum = sum;
    out->max = most;
    out->broken = 0;
  }
}

// ln of the sum of exponentials over all chunks; NaN for what is no distribution. Every lane of the
// warp gets it.
__device__ inline double LogSumExp(const Scan* scans, int chunks) {
  float most = -INFINITY;
  int broken = 0;
  for (int i = LaneId(); i < chunks; i += kWarpSize) {
    most = Max(most, scans[i].max);
    broken |= scans[i].broken;
  }
  most = WarpMax(most);
  broken = WarpMax(broken);
  double sum = 0;
  for (int i = LaneId(); i < chunks; i += kWarpSize) {
    if (scans[i].max != -INFINITY) {
      sum += scans[i].sum * exp(static_cast<double>(scans[i].max) - static_cast<double>(most));
    }
  }
  sum = WarpSum(sum);
  if (broken != 0 || most == -INFINITY) return static_cast<double>(NAN);
  return static_cast<double>(most) + log(sum);
}

__global__ void __launch_bounds__(kThreads) CompareChunks(DivergenceLaunch args, Scratch scratch) {
  auto* const shared = DynamicShared<double>();  // (32)
  const int chunk = static_cast<int>(blockIdx.x);
  const int64_t row = blockIdx.y;
  const Scan* const scans = scratch.scans + row * 2 * scratch.chunks;
  const double p_norm = LogSumExp(scans, scratch.chunks);
  const double q_norm = LogSumExp(scans + scratch.chunks, scratch.chunks);
  const float* const native = args.native + row * args.vocab;
  const float* const carried = args.carried + row * args.vocab;
  // In place of -inf, so that differences of two masked logits are no NaN. Its exponential is 0.
  const double lowest = -3.4028234663852886e38;
  Sums sums = {};
#pragma unroll 2
  for (int i = 0; i < kPerThread; ++i) {
    const int id = chunk * kChunk + i * kThreads + static_cast<int>(threadIdx.x);
    if (id >= args.vocab) continue;
    const float z = native[id], w = carried[id];
    if (z > -INFINITY && w == -INFINITY) sums.lost = 1;
    const double log_p = (z == -INFINITY ? lowest : static_cast<double>(z)) - p_norm;
    const double log_q = (w == -INFINITY ? lowest : static_cast<double>(w)) - q_norm;
    const double difference = log_p - log_q;
    const double distance = fabs(difference);
    const double ratio = exp(-distance);  // of the smaller one to the larger one
    const double larger = exp(Max(log_p, log_q));
    const double smaller = larger * ratio;
    const double p = difference >= 0 ? larger : smaller;
    sums.kl += p * difference;
    sums.tv += larger - smaller;
    // p ln(p / m) + q ln(q / m), with ln m = ln larger + ln((1 + ratio) / 2).
    const double log_mean = log1p(0.5 * (ratio - 1));
    sums.js -= smaller * distance + (larger + smaller) * log_mean;
  }
  sums.kl = BlockSum(sums.kl, shared);
  sums.js = BlockSum(sums.js, shared);
  sums.tv = BlockSum(sums.tv, shared);
  sums.lost = BlockMax(sums.lost, shared);
  if (threadIdx.x == 0) scratch.sums[row * scratch.chunks + chunk] = sums;
}

// The ten largest of all chunks, in every lane. Returns how many there are.
__device__ inline int MergeTops(const Scan* scans, int chunks, Key* top) {
  Key last = ~static_cast<Key>(0);
  int count = 0;
  for (int k = 0; k < kDivergenceTop; ++k) {
    Key best = 0;
    for (int i = LaneId(); i < chunks * kDivergenceTop; i += kWarpSize) {
      const Key key = scans[i / kDivergenceTop].top[i % kDivergenceTop];
      if (key < last && key > best) best = key;
    }
    last = WarpMax(best);
    top[k] = last;
    if (last != 0) ++count;
  }
  return count;
}

// logits[a] less the largest other one.
__device__ inline double Margin(const float* logits, const Key* top, int count, int a) {
  const int other = IdOf(top[0]) == a ? 1 : 0;
  return static_cast<double>(logits[a]) -
         (other < count ? static_cast<double>(logits[IdOf(top[other])]) : -Infinity());
}

__device__ inline double StopMass(const DivergenceLaunch& args, const float* logits,
                                  double log_sum_exp) {
  double sum = 0;
  for (int i = LaneId(); i < args.stop_count; i += kWarpSize) {
    sum += exp(static_cast<double>(logits[args.stop_tokens[i]]) - log_sum_exp);
  }
  return Min(WarpSum(sum), 1.0);
}

// A warp a row.
__global__ void FinishRows(DivergenceLaunch args, Scratch scratch) {
  const int64_t row = blockIdx.x;
  const int chunks = scratch.chunks;
  const Scan* const scans = scratch.scans + row * 2 * chunks;
  const float* const native = args.native + row * args.vocab;
  const float* const carried = args.carried + row * args.vocab;
  DivergenceRow out = {};
  out.native_log_sum_exp = LogSumExp(scans, chunks);
  out.carried_log_sum_exp = LogSumExp(scans + chunks, chunks);
  Key p_top[kDivergenceTop], q_top[kDivergenceTop];
  const int p_count = MergeTops(scans, chunks, p_top);
  const int q_count = MergeTops(scans + chunks, chunks, q_top);
  Sums sums = {};
  for (int i = LaneId(); i < chunks; i += kWarpSize) {
    const Sums& part = scratch.sums[row * chunks + i];
    sums.kl += part.kl;
    sums.js += part.js;
    sums.tv += part.tv;
    sums.lost = Max(sums.lost, part.lost);
  }
  sums.kl = WarpSum(sums.kl);
  sums.js = WarpSum(sums.js);
  sums.tv = WarpSum(sums.tv);
  sums.lost = WarpMax(sums.lost);
  out.native_stop = StopMass(args, native, out.native_log_sum_exp);
  out.carried_stop = StopMass(args, carried, out.carried_log_sum_exp);
  if (LaneId() != 0) return;

  out.valid = isnan(out.native_log_sum_exp) || isnan(out.carried_log_sum_exp) ? 0 : 1;
  for (int i = 0; i < kDivergenceTop; ++i) {
    out.native_top[i] = out.valid != 0 && i < p_count ? IdOf(p_top[i]) : -1;
    out.carried_top[i] = out.valid != 0 && i < q_count ? IdOf(q_top[i]) : -1;
  }
  if (out.valid == 0) {
    const double nan = static_cast<double>(NAN);
    out.kl = out.js = out.tv = out.native_log_sum_exp = out.carried_log_sum_exp = nan;
    out.native_margin = out.carried_margin = out.native_gap = out.delta_range = nan;
    out.native_stop = out.carried_stop = nan;
    args.out[row] = out;
    return;
  }
  out.native_count = p_count;
  out.carried_count = q_count;
  double least = Infinity(), most = -Infinity();
  for (int i = 0; i < p_count + q_count; ++i) {
    const int id = IdOf(i < p_count ? p_top[i] : q_top[i - p_count]);
    const double delta = static_cast<double>(carried[id]) - static_cast<double>(native[id]);
    least = Min(least, delta);
    most = Max(most, delta);
    for (int j = 0; i < p_count && j < q_count; ++j) out.overlap += IdOf(q_top[j]) == id ? 1 : 0;
  }
  out.delta_range = isinf(least) || isinf(most) ? Infinity() : most - least;
  // What can only be rounding is cut off.
  out.kl = sums.lost > 0 ? Infinity() : Max(0.0, sums.kl);
  out.js = Min(Max(0.5 * sums.js, 0.0), kLn2);
  out.tv = Min(Max(0.5 * sums.tv, 0.0), 1.0);
  const int first = IdOf(p_top[0]);
  const int given = args.answers == nullptr ? -1 : args.answers[row];
  const int answer = given >= 0 && given < args.vocab ? given : first;
  out.native_margin = Margin(native, p_top, p_count, answer);
  out.carried_margin = Margin(carried, q_top, q_count, answer);
  out.native_gap = Margin(native, p_top, p_count, first);
  args.out[row] = out;
}

int Chunks(int vocab) { return (vocab + kChunk - 1) / kChunk; }

}  // namespace

size_t DivergenceScratchBytes(int rows, int vocab) {
  return static_cast<size_t>(rows) * Chunks(vocab) * (2 * sizeof(Scan) + sizeof(Sums));
}

void LaunchDivergence(const DivergenceLaunch& args, cudaStream_t stream) {
  const int chunks = Chunks(args.vocab);
  constexpr int kMostRows = 65535;
  for (int begin = 0; begin < args.rows; begin += kMostRows) {
    DivergenceLaunch part = args;
    const int64_t at = static_cast<int64_t>(begin) * args.vocab;
    part.native += at;
    part.carried += at;
    part.rows = Min(args.rows - begin, kMostRows);
    if (part.answers != nullptr) part.answers += begin;
    part.out += begin;
    Scratch scratch;
    scratch.chunks = chunks;
    scratch.scans = static_cast<Scan*>(args.scratch) + static_cast<int64_t>(begin) * 2 * chunks;
    scratch.sums = reinterpret_cast<Sums*>(static_cast<Scan*>(args.scratch) +
                                           static_cast<int64_t>(args.rows) * 2 * chunks) +
                   static_cast<int64_t>(begin) * chunks;
    const auto columns = static_cast<unsigned>(chunks), rows = static_cast<unsigned>(part.rows);
    Launch(ScanChunks, {columns, rows, 2}, kThreads, 32 * sizeof(Key), stream, part, scratch);
    Launch(CompareChunks, {columns, rows}, kThreads, 32 * sizeof(double), stream, part, scratch);
    Launch(FinishRows, {rows}, kWarpSize, 0, stream, part, scratch);
  }
}

}  // namespace carryover::CARRYOVER_DEVICE
