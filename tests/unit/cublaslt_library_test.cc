// kernels/cuda/cublaslt_library.cc against NVIDIA's own library, which makes and checks descriptors
// without a GPU: our calls arrive, and the attributes that matmul.cc sets are of the sizes that it
// takes.
#if defined(CARRYOVER_CUDA)

#include <cublasLt.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

namespace carryover {
namespace {

class CublasLtLibrary : public testing::Test {
 protected:
  void SetUp() override {
    const std::string text = cublasLtGetStatusString(CUBLAS_STATUS_SUCCESS);
    if (text.find("there is no libcublasLt") == 0) GTEST_SKIP() << text;
  }
};

TEST_F(CublasLtLibrary, TakesWhatDescribesAProduct) {
  cublasLtMatmulDesc_t desc = nullptr;
  ASSERT_EQ(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), CUBLAS_STATUS_SUCCESS);
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    return cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof(value));
  };
  EXPECT_EQ(set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS), CUBLAS_STATUS_SUCCESS);
  const float* const bias = nullptr;
  EXPECT_EQ(set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_32F), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(set(CUBLASLT_MATMUL_DESC_TRANSA, char{1}), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(cublasLtMatmulDescDestroy(desc), CUBLAS_STATUS_SUCCESS);

  cublasLtMatrixLayout_t layout = nullptr;
  ASSERT_EQ(cublasLtMatrixLayoutCreate(&layout, CUDA_R_16BF, 64, 10, 64), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(cublasLtMatrixLayoutDestroy(layout), CUBLAS_STATUS_SUCCESS);
}

TEST_F(CublasLtLibrary, TakesWhatChoosesAnAlgorithm) {
  cublasLtMatmulPreference_t preference = nullptr;
  ASSERT_EQ(cublasLtMatmulPreferenceCreate(&preference), CUBLAS_STATUS_SUCCESS);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    return cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value));
  };
  EXPECT_EQ(set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{1} << 25),
            CUBLAS_STATUS_SUCCESS);
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    EXPECT_EQ(set(attribute, uint32_t{16}), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(set(attribute, uint64_t{16}), CUBLAS_STATUS_INVALID_VALUE);
  }
  EXPECT_EQ(cublasLtMatmulPreferenceDestroy(preference), CUBLAS_STATUS_SUCCESS);
}

}  // namespace
}  // namespace carryover

#endif  // CARRYOVER_CUDA
