#include "kernels/cuda/emulation/cublaslt.h"

#include <cstring>
#include <vector>

#include "kernels/cuda/emulation/memory.h"

namespace carryover::emulated {

struct BlasHandle {};
struct BlasPreference {
  uint32_t x_alignment = 256;
  uint32_t y_alignment = 256;
};
struct BlasProduct {
  int transpose = CUBLAS_OP_N;
  int epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const float* bias = nullptr;
};
struct BlasLayout {
  cudaDataType type;
  uint64_t rows;
  uint64_t cols;
  int64_t ld;

  size_t Bytes() const {
    const size_t width = type == CUDA_R_32F ? 4 : 2;
    return (static_cast<size_t>(ld) * (cols - 1) + rows) * width;
  }
};

namespace {

// Column `column` as floats.
const float* Column(const void* matrix, const BlasLayout& layout, uint64_t column,
                    std::vector<float>* widened) {
  const size_t at = static_cast<size_t>(layout.ld) * column;
  if (layout.type == CUDA_R_32F) return static_cast<const float*>(matrix) + at;
  const uint16_t* const from = static_cast<const uint16_t*>(matrix) + at;
  widened->resize(layout.rows);
  for (uint64_t i = 0; i < layout.rows; ++i) {
    const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
    std::memcpy(&(*widened)[i], &bits, sizeof(bits));
  }
  return widened->data();
}

float Dot(const float* a, const float* b, uint64_t count) {
  constexpr int kLanes = 16;
  float lanes[kLanes] = {};
  uint64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lanes[j] += a[i + j] * b[i + j];
  }
  for (int j = 0; i < count; ++i, ++j) lanes[j] += a[i] * b[i];
  float sum = 0;
  for (float lane : lanes) sum += lane;
  return sum;
}

struct Job {
  BlasProduct product;
  BlasLayout a_layout, b_layout, d_layout;
  const void* a;
  const void* b;
  float* d;
  float beta;
};

std::string Run(const Job& job) {
  const uint64_t n = job.a_layout.cols, k = job.a_layout.rows, rows = job.b_layout.cols;
  std::vector<std::vector<float>> widened(rows);
  std::vector<const float*> x(rows);
  for (uint64_t r = 0; r < rows; ++r) x[r] = Column(job.b, job.b_layout, r, &widened[r]);
  std::vector<float> weights;
  for (uint64_t c = 0; c < n; ++c) {
    const float* const w = Column(job.a, job.a_layout, c, &weights);
    for (uint64_t r = 0; r < rows; ++r) {
      float* const out = job.d + static_cast<size_t>(job.d_layout.ld) * r + c;
      float y = Dot(w, x[r], k);
      if (job.beta != 0) y += job.beta * *out;
      if (job.product.epilogue == CUBLASLT_EPILOGUE_BIAS) y += job.product.bias[c];
      *out = y;
    }
  }
  return emulation::CheckGuards();
}

}  // namespace

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = new BlasHandle;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* product,
                                        cublasComputeType_t /*compute*/, cudaDataType scale) {
  if (scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  *product = new BlasProduct;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t product) {
  delete product;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t product,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  int number = 0;
  if (attribute == CUBLASLT_MATMUL_DESC_BIAS_POINTER) {
    if (bytes != sizeof(void*)) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(&product->bias, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
  }
  if (bytes != sizeof(number)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&number, value, bytes);
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      product->transpose = number;
      break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      product->epilogue = number;
      break;
    default:
      if (number != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;  // of the bias
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
  if (rows == 0 || cols == 0 || ld < static_cast<int64_t>(rows)) return CUBLAS_STATUS_INVALID_VALUE;
  *layout = new BlasLayout{type, rows, cols, ld};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new BlasPreference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
  if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) {
    return bytes == sizeof(uint64_t) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
  }
  uint32_t alignment = 0;
  if (bytes != sizeof(alignment)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&alignment, value, bytes);
  if (attribute == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES) preference->x_alignment = alignment;
  if (attribute == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES) preference->y_alignment = alignment;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t /*handle*/, cublasLtMatmulDesc_t /*product*/, cublasLtMatrixLayout_t /*a*/,
    cublasLtMatrixLayout_t /*b*/, cublasLtMatrixLayout_t /*c*/, cublasLtMatrixLayout_t /*d*/,
    cublasLtMatmulPreference_t preference, int wanted, cublasLtMatmulHeuristicResult_t* results,
    int* found) {
  if (wanted < 1) return CUBLAS_STATUS_INVALID_VALUE;
  results[0] = {};
  results[0].algo.data[0] = preference->x_alignment;
  results[0].algo.data[1] = preference->y_alignment;
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t /*handle*/, cublasLtMatmulDesc_t product,
                              const void* alpha, const void* a, cublasLtMatrixLayout_t a_layout,
                              const void* b, cublasLtMatrixLayout_t b_layout, const void* beta,
                              const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo,
                              void* /*workspace*/, size_t /*workspace_bytes*/,
                              cudaStream_t stream) {
  float factor, old;
  std::memcpy(&factor, alpha, sizeof(factor));
  std::memcpy(&old, beta, sizeof(old));
  const bool fits = product->transpose == CUBLAS_OP_T && a_layout->rows == b_layout->rows &&
                    d_layout->rows == a_layout->cols && d_layout->cols == b_layout->cols &&
                    d_layout->type == CUDA_R_32F && a_layout->type == b_layout->type;
  if (!fits || factor != 1 || c != d || c_layout->ld != d_layout->ld || algo == nullptr) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  if (!emulation::IsDevice(a, a_layout->Bytes()) || !emulation::IsDevice(b, b_layout->Bytes()) ||
      !emulation::IsDevice(d, d_layout->Bytes())) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (reinterpret_cast<uintptr_t>(b) % algo->data[0] != 0 ||
      reinterpret_cast<uintptr_t>(d) % algo->data[1] != 0) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  const Job job = {*product, *a_layout, *b_layout, *d_layout, a, b, static_cast<float*>(d), old};
  emulation::Enqueue(stream, "cublasLtMatmul: ", [job] { return Run(job); });
  return CUBLAS_STATUS_SUCCESS;
}

const char* cublasLtGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS         ? "CUBLAS_STATUS_SUCCESS"
         : status == CUBLAS_STATUS_INVALID_VALUE ? "CUBLAS_STATUS_INVALID_VALUE"
                                                 : "CUBLAS_STATUS_NOT_SUPPORTED";
}

}  // namespace carryover::emulated
