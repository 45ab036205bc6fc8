// How far two rows of logits are apart; kernels/ops.h has the formulas, kernels/cpu/divergence.cc
// the same steps in sequence.
//
// A row is cut into chunks of kChunk logits, whatever the number of rows, so that few rows fill a
// device and a row's bits depend on nothing else. Three kernels: each arm's chunks by themselves
// (largest logits, sum of exponentials); both arms' chunks side by side, now that both rows are
// distributions; then a warp a row puts the chunks together.
//
// Exponentials are fp32, and so is the sum of a thread's kPerThread terms, all of one sign where it
// matters; everything else is added in fp64. That leaves sums, and with them norms, wrong by some
// 1e-8; divergence_terms.h says why small measures bear it.
#include <math.h>

#include "kernels/cuda/device.h"
#include "kernels/cuda/divergence_terms.h"
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
// And what both arms' chunks are together: sums of Terms, and over 0 where q cannot give what p
// can.
enum SumOf { kKl, kJs, kTv, kExcess, kSignedQ, kLost, kSums };
struct Sums {
  double at[kSums];
};

struct Scratch {
  Scan* scans;  // (2 rows, chunks): native, carried
  Sums* sums;   // (rows, chunks)
  int chunks;
};

// The largest keys of kCount a lane, one after another, in every lane; 0 where there are no more.
template <int kCount>
__device__ inline void WarpTop(const Key (&keys)[kCount], Key (&top)[kDivergenceTop]) {
  Key last = ~static_cast<Key>(0);
#pragma unroll
  for (int k = 0; k < kDivergenceTop; ++k) {
    Key best = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) best = keys[i] < last ? Max(best, keys[i]) : best;
    top[k] = last = WarpMax(best);
  }
}

// The ten largest logits of a chunk, to out[0...9], by one warp. They are logits of the ten threads
// whose largest ones are the largest; `bests` is what all threads have.
__device__ inline void ChunkTop(const Key* bests, const float* logits, int chunk, int vocab,
                                Key* out) {
  Key keys[kThreads / kWarpSize];
#pragma unroll
  for (int i = 0; i < kThreads / kWarpSize; ++i) keys[i] = bests[i * kWarpSize + LaneId()];
  Key top[kDivergenceTop];
  WarpTop(keys, top);
  // Of half a warp each thread's logits, read again.
  static_assert(kPerThread == kWarpSize / 2 && kDivergenceTop % 2 == 0);
  Key candidates[kDivergenceTop / 2];
#pragma unroll
  for (int i = 0; i < kDivergenceTop / 2; ++i) {
    const Key winner = LaneId() < kPerThread ? top[2 * i] : top[2 * i + 1];
    candidates[i] = 0;
    if (winner == 0) continue;
    const int id = chunk * kChunk + LaneId() % kPerThread * kThreads +
                   (IdOf(winner) - chunk * kChunk) % kThreads;
    if (id < vocab && logits[id] > -INFINITY) candidates[i] = MakeKey(logits[id], id);
  }
  WarpTop(candidates, top);
  if (LaneId() != 0) return;
#pragma unroll
  for (int k = 0; k < kDivergenceTop; ++k) out[k] = top[k];
}

constexpr size_t kScanSharedBytes = sizeof(Key) * (kWarpSize + kThreads);

__global__ void __launch_bounds__(kThreads) ScanChunks(DivergenceLaunch args, Scratch scratch) {
  auto* const shared = DynamicShared<Key>();  // (32)
  Key* const bests = shared + kWarpSize;      // (kThreads)
  const int chunk = static_cast<int>(blockIdx.x), arm = static_cast<int>(blockIdx.z);
  const int64_t row = blockIdx.y;
  const float* const logits = (arm == 0 ? args.native : args.carried) + row * args.vocab;
  const int first = chunk * kChunk + static_cast<int>(threadIdx.x);
  float values[kPerThread];
  float most = -INFINITY;
  int most_id = first;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int id = first + i * kThreads;
    values[i] = id < args.vocab ? logits[id] : -INFINITY;
    if (!(values[i] <= most)) {  // also for NaN, which counts as +inf
      most = values[i] < INFINITY ? values[i] : INFINITY;
      most_id = id;
    }
  }
  bests[threadIdx.x] = most > -INFINITY ? MakeKey(most, most_id) : 0;
  most = BlockMax(most, reinterpret_cast<float*>(shared));
  Scan* const out = scratch.scans + (row * 2 + arm) * scratch.chunks + chunk;
  if (most == INFINITY || most == -INFINITY) {
    if (threadIdx.x == 0) {
      out->sum = 0;
      out->max = -INFINITY;
      out->broken = most > 0 ? 1 : 0;
      for (int k = 0; k < kDivergenceTop; ++k) out->top[k] = 0;
    }
    return;
  }
  float part = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) part += expf(values[i] - most);
  const double sum = BlockSum(static_cast<double>(part), reinterpret_cast<double*>(shared));
  if (WarpId() != 0) return;
  ChunkTop(bests, logits, chunk, args.vocab, out->top);
  if (LaneId() == 0) {
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

constexpr int kWarps = kThreads / kWarpSize;
constexpr size_t kCompareSharedBytes = sizeof(double) * kSums * kWarps;

__global__ void __launch_bounds__(kThreads) CompareChunks(DivergenceLaunch args, Scratch scratch) {
  auto* const shared = DynamicShared<double>();  // (kSums, kWarps)
  const int chunk = static_cast<int>(blockIdx.x);
  const int64_t row = blockIdx.y;
  // A warp an arm; then one thread cuts what all need into floats.
  auto* const norms_at = reinterpret_cast<Norms*>(shared + 2);
  static_assert(2 * sizeof(double) + sizeof(Norms) <= kCompareSharedBytes);
  const Scan* const scans = scratch.scans + row * 2 * scratch.chunks;
  if (WarpId() < 2) {
    const double norm = LogSumExp(scans + WarpId() * scratch.chunks, scratch.chunks);
    if (LaneId() == 0) shared[WarpId()] = norm;
  }
  SyncThreads();
  if (threadIdx.x == 0) {
    *norms_at = {SplitDouble(shared[0]), SplitDouble(shared[1]),
                 SplitDouble(shared[0] - shared[1])};
  }
  SyncThreads();
  const Norms norms = *norms_at;
  SyncThreads();
  const float* const native = args.native + row * args.vocab;
  const float* const carried = args.carried + row * args.vocab;
  float part[kSums] = {};
#pragma unroll 4
  for (int i = 0; i < kPerThread; ++i) {
    const int id = chunk * kChunk + i * kThreads + static_cast<int>(threadIdx.x);
    if (id >= args.vocab) continue;
    const float z = native[id], w = carried[id];
    if (z > -INFINITY && w == -INFINITY) part[kLost] = 1;
    const Terms terms = PairTerms(z, w, norms);
    part[kKl] += terms.kl;
    part[kJs] += terms.js;
    part[kTv] += terms.tv;
    part[kExcess] += terms.excess;
    part[kSignedQ] += terms.signed_q;
  }
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
    const double sum = WarpSum(static_cast<double>(part[k]));
    if (LaneId() == 0) shared[k * kWarps + WarpId()] = sum;
  }
  SyncThreads();
  if (threadIdx.x >= kSums) return;
  double sum = 0;
  for (int i = 0; i < kWarps; ++i) sum += shared[threadIdx.x * kWarps + i];
  scratch.sums[row * scratch.chunks + chunk].at[threadIdx.x] = sum;
}

// Takes back what the norms' difference was wrong by, as far as that shows: q's sum, less 1, tells
// it. Returns what q's norm lacks.
__device__ inline double Correct(double (&sums)[kSums]) {
  const double u = sums[kExcess];
  sums[kKl] -= u - log1p(u);
  sums[kJs] -= 0.25 * u * u;
  sums[kTv] -= u * sums[kSignedQ];
  return log1p(u);
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
  double sums[kSums] = {};
  for (int i = LaneId(); i < chunks; i += kWarpSize) {
#pragma unroll
    for (int k = 0; k < kSums; ++k) sums[k] += scratch.sums[row * chunks + i].at[k];
  }
#pragma unroll
  for (int k = 0; k < kSums; ++k) sums[k] = WarpSum(sums[k]);
  out.carried_log_sum_exp += Correct(sums);
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
  out.kl = sums[kLost] > 0 ? Infinity() : Max(0.0, sums[kKl]);
  out.js = Min(Max(0.5 * sums[kJs], 0.0), kLn2);
  out.tv = Min(Max(0.5 * sums[kTv], 0.0), 1.0);
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
    Launch(ScanChunks, {columns, rows, 2}, kThreads, kScanSharedBytes, stream, part, scratch);
    Launch(CompareChunks, {columns, rows}, kThreads, kCompareSharedBytes, stream, part, scratch);
    Launch(FinishRows, {rows}, kWarpSize, 0, stream, part, scratch);
  }
}

}  // namespace carryover::CARRYOVER_DEVICE
