// Weights as checkpoints have them, multiplied by cuBLASLt.
//
// f32 weights are multiplied by one algorithm, chosen once a matrix, so that a row's bits do not
// depend on how many rows there are. With bf16 that would cost either prompts or single tokens
// their speed: there each class of row counts has its algorithm, and bits agree within a class.
#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/backend.h"
#include "kernels/host_matrix.h"

namespace carryover::CARRYOVER_DEVICE {
namespace {

constexpr int kClassRows[DeviceMatrix::kClasses] = {16, 64, 256, 2048};  // that each is chosen for

int ClassOf(DType type, int rows) {
  if (type == DType::kF32) return 1;
  int at = 0;
  while (at + 1 < DeviceMatrix::kClasses && rows > kClassRows[at]) ++at;
  return at;
}

// `count` values from a checkpoint, as type `to`.
void Convert(const char* from, DType from_type, size_t count, DType to, char* out) {
  if (from_type == to) {
    std::memcpy(out, from, count * DTypeBytes(to));
    return;
  }
  for (size_t i = 0; i < count; ++i) {
    const float value = HostValue(from, from_type, i);
    if (to == DType::kF32) {
      std::memcpy(out + 4 * i, &value, 4);
    } else {
      const uint16_t half = Bf16FromFloat(value);
      std::memcpy(out + 2 * i, &half, 2);
    }
  }
}

// All descriptors of one product; gone with it.
struct Product {
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t w = nullptr;
  cublasLtMatrixLayout_t x = nullptr;
  cublasLtMatrixLayout_t y = nullptr;
  absl::Status status;

  Product(const DeviceMatrix& matrix, int rows) {
    const cudaDataType type = matrix.type == DType::kF32 ? CUDA_R_32F : CUDA_R_16BF;
    const auto n = static_cast<uint64_t>(matrix.n), k = static_cast<uint64_t>(matrix.k);
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const auto check = [&](cublasStatus_t error) { status.Update(ToStatus(error, "cuBLASLt")); };
    check(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    check(cublasLtMatrixLayoutCreate(&w, type, k, n, matrix.k));
    check(cublasLtMatrixLayoutCreate(&x, type, k, static_cast<uint64_t>(rows), matrix.k));
    check(cublasLtMatrixLayoutCreate(&y, CUDA_R_32F, n, static_cast<uint64_t>(rows), matrix.n));
    if (!status.ok()) return;
    check(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                         sizeof(transposed)));
    if (matrix.bias == nullptr) return;
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    const cudaDataType bias_type = CUDA_R_32F;
    check(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                         sizeof(epilogue)));
    check(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &matrix.bias,
                                         sizeof(matrix.bias)));
    check(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias_type,
                                         sizeof(bias_type)));
  }
  ~Product() {
    for (cublasLtMatrixLayout_t layout : {w, x, y}) {
      if (layout != nullptr) cublasLtMatrixLayoutDestroy(layout);
    }
    if (desc != nullptr) cublasLtMatmulDescDestroy(desc);
  }
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;
};

// What any run of whole rows is aligned to, up to the 16 bytes of the widest load.
uint32_t RowAlignment(int values, DType type) {
  const uint32_t bytes = static_cast<uint32_t>(values) * static_cast<uint32_t>(DTypeBytes(type));
  return std::min(bytes & (~bytes + 1), uint32_t{16});
}

absl::Status Choose(DeviceBackend* backend, const DeviceMatrix& matrix, int rows,
                    MatMulChoice* choice) {
  const Product product(matrix, rows);
  if (!product.status.ok()) return product.status;
  // Unless told otherwise, cuBLASLt takes everything to be at multiples of 256 bytes.
  const uint32_t x_alignment = RowAlignment(matrix.k, matrix.type);
  const uint32_t y_alignment = RowAlignment(matrix.n, DType::kF32);
  for (const auto& [attribute, bytes] :
       {std::pair(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, x_alignment),
        std::pair(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, y_alignment),
        std::pair(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, y_alignment)}) {
    const absl::Status set = ToStatus(
        cublasLtMatmulPreferenceSetAttribute(backend->preference, attribute, &bytes, sizeof(bytes)),
        "cuBLASLt alignment");
    if (!set.ok()) return set;
  }
  cublasLtMatmulHeuristicResult_t result = {};
  int found = 0;
  const cublasStatus_t error =
      cublasLtMatmulAlgoGetHeuristic(backend->blas, product.desc, product.w, product.x, product.y,
                                     product.y, backend->preference, 1, &result, &found);
  if (error != CUBLAS_STATUS_SUCCESS || found == 0) {
    return absl::InternalError(absl::StrCat("cuBLASLt knows no product of ", rows, " rows with a (",
                                            matrix.n, ", ", matrix.k, ") matrix of ",
                                            DTypeName(matrix.type)));
  }
  choice->algo = result.algo;
  choice->found = true;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PackedMatrix*> Pack(Backend* backend, absl::Span<const HostMatrix> parts,
                                   absl::Span<const float> bias, DType type, bool gated) {
  if (type == DType::kI8) {
    return absl::InvalidArgumentError("INT8 weights are for the CPU alone");
  }
  const absl::StatusOr<MatrixSize> size = StackedSize(parts, bias, type, gated);
  if (!size.ok()) return size.status();
  const auto [n, k] = *size;
  static std::atomic<uint64_t> last_id{0};
  auto matrix = std::make_unique<DeviceMatrix>();
  matrix->id = ++last_id;
  matrix->type = type;
  matrix->gated = gated;
  matrix->n = static_cast<int>(n);
  matrix->k = static_cast<int>(k);
  const size_t row_bytes = static_cast<size_t>(k) * DTypeBytes(type);
  absl::Status status =
      AllocateDevice(&matrix->data, static_cast<size_t>(n) * row_bytes, " for weights");
  void* bias_data = nullptr;
  if (status.ok() && !bias.empty()) {
    status = AllocateDevice(&bias_data, bias.size() * sizeof(float), " for a bias");
  }
  if (!status.ok()) {
    cudaFree(matrix->data);
    return status;
  }
  matrix->bias = static_cast<float*>(bias_data);
  // In pieces: the whole matrix once more in host memory may be too much.
  constexpr size_t kPiece = size_t{16} << 20;
  const int64_t piece_rows = std::max<int64_t>(1, static_cast<int64_t>(kPiece / row_bytes));
  std::vector<char> piece(static_cast<size_t>(std::min(piece_rows, n)) * row_bytes);
  const cudaStream_t stream = Of(backend)->stream;
  auto* to = static_cast<char*>(matrix->data);
  for (const HostMatrix& part : parts) {
    for (int64_t row = 0; row < part.rows && status.ok(); row += piece_rows) {
      const auto rows = static_cast<size_t>(std::min(piece_rows, part.rows - row));
      Convert(static_cast<const char*>(part.data) + row * k * DTypeBytes(part.dtype), part.dtype,
              rows * static_cast<size_t>(k), type, piece.data());
      status.Update(ToStatus(
          cudaMemcpyAsync(to, piece.data(), rows * row_bytes, cudaMemcpyHostToDevice, stream),
          "copy of weights"));
      to += rows * row_bytes;
    }
  }
  if (!bias.empty()) {
    status.Update(ToStatus(cudaMemcpyAsync(matrix->bias, bias.data(), bias.size() * sizeof(float),
                                           cudaMemcpyHostToDevice, stream),
                           "copy of a bias"));
  }
  auto* const packed = reinterpret_cast<PackedMatrix*>(matrix.release());
  if (status.ok()) return packed;
  ReleaseMatrix(backend, packed);
  return status;
}

void ReleaseMatrix(Backend* /*backend*/, PackedMatrix* matrix) {
  auto* const device = reinterpret_cast<DeviceMatrix*>(matrix);
  if (device == nullptr) return;
  cudaFree(device->data);
  cudaFree(device->bias);
  delete device;
}

size_t MatrixBytes(const PackedMatrix* matrix) {
  const auto& device = *reinterpret_cast<const DeviceMatrix*>(matrix);
  return static_cast<size_t>(device.n) * device.k * DTypeBytes(device.type) +
         (device.bias == nullptr ? 0 : device.n * sizeof(float));
}

namespace {

struct MatMulLaunch {
  DeviceBackend* backend;
  const DeviceMatrix* matrix;
  uint64_t id;  // the matrix's, since another may come to lie where it lay
  const void* x;
  int rows;
  float* out;
  bool accumulate;
  bool operator==(const MatMulLaunch&) const = default;
};

absl::Status LaunchMatMul(const MatMulLaunch& args, cudaStream_t stream) {
  DeviceBackend& device = *args.backend;
  const DeviceMatrix& matrix = *args.matrix;
  const Product product(matrix, args.rows);
  if (!product.status.ok()) return product.status;
  const float alpha = 1, beta = args.accumulate ? 1 : 0;
  const auto run = [&](const MatMulChoice& by) {
    return cublasLtMatmul(device.blas, product.desc, &alpha, matrix.data, product.w, args.x,
                          product.x, &beta, args.out, product.y, args.out, product.y, &by.algo,
                          device.blas_workspace.data, device.blas_workspace.bytes, stream);
  };
  cublasStatus_t error = run(matrix.choices[ClassOf(matrix.type, args.rows)]);
  if (error == CUBLAS_STATUS_NOT_SUPPORTED || error == CUBLAS_STATUS_INVALID_VALUE) {
    // An algorithm may turn down a row count far from the one that it was chosen for, for want of
    // workspace. An answer whose bits differ from its class's is better than none.
    MatMulChoice exact;
    if (Choose(&device, matrix, args.rows, &exact).ok()) error = run(exact);
  }
  return ToStatus(error, "cublasLtMatmul");
}

void Multiply(DeviceBackend* device, const void* x, DeviceMatrix* matrix, int rows, float* out,
              bool accumulate) {
  const int row_class = ClassOf(matrix->type, rows);
  MatMulChoice& choice = matrix->choices[row_class];
  if (!choice.found) device->Note(Choose(device, *matrix, kClassRows[row_class], &choice));
  if (!choice.found) return;
  device->Do(LaunchMatMul, MatMulLaunch{device, matrix, matrix->id, x, rows, out, accumulate});
}

// Choices are the engine thread's alone, like all products.
DeviceMatrix* Of(const PackedMatrix* w) {
  return const_cast<DeviceMatrix*>(reinterpret_cast<const DeviceMatrix*>(w));
}

}  // namespace

void MatMul(Backend* backend, const void* x, const PackedMatrix* w, int rows, float* out,
            bool accumulate) {
  DeviceBackend& device = *Of(backend);
  DeviceMatrix* const matrix = Of(w);
  device.Note(CheckGated(matrix->gated, false));
  if (rows <= 0 || matrix->gated) return;
  Multiply(&device, x, matrix, rows, out, accumulate);
}

void MatMulGated(Backend* backend, const void* x, const PackedMatrix* w, int rows, void* out) {
  DeviceBackend& device = *Of(backend);
  DeviceMatrix* const matrix = Of(w);
  device.Note(CheckGated(matrix->gated, true));
  if (rows <= 0 || !matrix->gated) return;
  auto* const gate_up = static_cast<float*>(
      device.Reserve(&device.gate_up, sizeof(float) * rows * static_cast<size_t>(matrix->n)));
  if (gate_up == nullptr) return;
  Multiply(&device, x, matrix, rows, gate_up, false);
  device.Do(LaunchSiluMul, gate_up, rows, matrix->n / 2, out, matrix->type);
}

}  // namespace carryover::CARRYOVER_DEVICE
