// Launchers of the kernels other than attention. All pointers are device memory; what each does is
// told at the op of its name in kernels/ops.h. Nothing here allocates or waits; errors are the
// stream's. Sums are taken in an order that depends on a row's length alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/kv_layout.h"
#include "kernels/cuda/runtime.h"
#include "kernels/shapes.h"

namespace carryover::CARRYOVER_DEVICE {

// Where a row of a pass belongs.
struct RowPlace {
  int32_t position;     // of the rotation
  int32_t token;        // its place in its sequence's KV
  int32_t table_begin;  // its sequence's first entry in the block table
};

void LaunchEmbed(const void* table, DType type, const int32_t* tokens, int rows, int dim, float* x,
                 cudaStream_t stream);
void LaunchRmsNorm(const float* x, const float* weight, int rows, int dim, float eps, void* out,
                   DType out_type, cudaStream_t stream);
void LaunchSiluMul(const float* gate_up, int rows, int dim, void* out, DType out_type,
                   cudaStream_t stream);
void LaunchGatherRows(const float* x, const int32_t* rows, int count, int dim, float* out,
                      cudaStream_t stream);

struct RopeLaunch {
  float* qkv;
  const float* q_norm;
  const float* k_norm;
  float norm_eps;
  const float* cos_sin;
  int heads;
  int rows;
  const RowPlace* places;  // (rows)
  const int32_t* block_table;
  void* kv_base;
  DeviceKv kv;
  bool operator==(const RopeLaunch&) const = default;
};
void LaunchRopeWrite(const RopeLaunch& args, DType kv_type, cudaStream_t stream);

struct ReadKvLaunch {
  const float* cos_sin;
  int rows;
  const RowPlace* places;  // (rows)
  const int32_t* block_table;
  const void* kv_base;
  DeviceKv kv;
  float* out;
  void* copy;  // the same once more as copy_type, or null
  DType copy_type;
  bool operator==(const ReadKvLaunch&) const = default;
};
void LaunchReadKv(const ReadKvLaunch& args, DType kv_type, cudaStream_t stream);

// Block to[i] gets `runs` runs of bytes of block from[i], the first at `first`, each `stride`
// behind the one before. All are multiples of 16.
struct CopyKvLaunch {
  char* kv_base;
  const int32_t* from;  // (blocks)
  const int32_t* to;    // (blocks)
  int blocks;
  int64_t block_bytes;
  int64_t first;
  int64_t stride;
  int64_t run_bytes;
  int runs;
  bool operator==(const CopyKvLaunch&) const = default;
};
void LaunchCopyKv(const CopyKvLaunch& args, cudaStream_t stream);

struct DivergenceLaunch {
  const float* native;
  const float* carried;
  int rows;
  int vocab;
  const int32_t* stop_tokens;  // (stop_count), unique, within the vocabulary
  int stop_count;
  const int32_t* answers;  // (rows), -1 for none; or null
  DivergenceRow* out;
  void* scratch;  // DivergenceScratchBytes, at a multiple of 16
  bool operator==(const DivergenceLaunch&) const = default;
};
size_t DivergenceScratchBytes(int rows, int vocab);
void LaunchDivergence(const DivergenceLaunch& args, cudaStream_t stream);

struct SampleLaunch {
  float* logits;
  int vocab;
  const SampleSpec* rows;  // (count)
  int count;
  const LogitEdit* edits;
  float* saved;  // (edits), what they stand in place of
  SampledToken* out;
  bool operator==(const SampleLaunch&) const = default;
};
void LaunchSample(const SampleLaunch& args, cudaStream_t stream);

}  // namespace carryover::CARRYOVER_DEVICE
