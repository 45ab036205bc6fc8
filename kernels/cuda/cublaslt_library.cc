// cuBLASLt's functions, as far as matmul.cc calls them. Its library of half a gigabyte is opened
// when a device is, and not linked: a program that serves on the CPU starts without it, and where
// it is missing, cublasLtCreate fails like any other call. Any thread may call.
#if !defined(CARRYOVER_EMULATED)
#include <cublasLt.h>
#include <dlfcn.h>

#include <string>

#define CARRYOVER_TEXT_OF(x) #x
#define CARRYOVER_TEXT(x) CARRYOVER_TEXT_OF(x)

namespace {

// The version that the headers are of, where the system looks for libraries or, else, where the one
// that we were built with was.
void* Library() {
  static void* const library = [] {
    const std::string name = "libcublasLt.so." CARRYOVER_TEXT(CUBLAS_VER_MAJOR);
    void* found = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (found == nullptr) {
      const std::string path = std::string(CARRYOVER_CUBLASLT_FOLDER) + "/" + name;
      found = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    }
    return found;
  }();
  return library;
}

// The library's function of the same name and type.
template <typename Function>
Function* Find(Function* /*ours*/, const char* name) {
  void* const library = Library();
  return library == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(library, name));
}

}  // namespace

#define CARRYOVER_FORWARD(name, ...)                                                    \
  do {                                                                                  \
    static const auto function = Find(&name, #name);                                    \
    return function == nullptr ? CUBLAS_STATUS_NOT_INITIALIZED : function(__VA_ARGS__); \
  } while (false)

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  CARRYOVER_FORWARD(cublasLtCreate, handle);
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  CARRYOVER_FORWARD(cublasLtDestroy, handle);
}

const char* cublasLtGetStatusString(cublasStatus_t status) {
  static const auto function = Find(&cublasLtGetStatusString, "cublasLtGetStatusString");
  return function == nullptr
             ? "there is no libcublasLt.so." CARRYOVER_TEXT(CUBLAS_VER_MAJOR) " (CUDA's cuBLASLt)"
             : function(status);
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  CARRYOVER_FORWARD(cublasLtMatmulDescCreate, desc, compute, scale);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  CARRYOVER_FORWARD(cublasLtMatmulDescDestroy, desc);
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  CARRYOVER_FORWARD(cublasLtMatmulDescSetAttribute, desc, attribute, value, bytes);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
  CARRYOVER_FORWARD(cublasLtMatrixLayoutCreate, layout, type, rows, cols, ld);
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  CARRYOVER_FORWARD(cublasLtMatrixLayoutDestroy, layout);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  CARRYOVER_FORWARD(cublasLtMatmulPreferenceCreate, preference);
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  CARRYOVER_FORWARD(cublasLtMatmulPreferenceDestroy, preference);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
  CARRYOVER_FORWARD(cublasLtMatmulPreferenceSetAttribute, preference, attribute, value, bytes);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int* found) {
  CARRYOVER_FORWARD(cublasLtMatmulAlgoGetHeuristic, handle, desc, a, b, c, d, preference, wanted,
                    results, found);
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo,
                              void* workspace, size_t workspace_bytes, cudaStream_t stream) {
  CARRYOVER_FORWARD(cublasLtMatmul, handle, desc, alpha, a, a_layout, b, b_layout, beta, c,
                    c_layout, d, d_layout, algo, workspace, workspace_bytes, stream);
}

}  // extern "C"
#endif  // !CARRYOVER_EMULATED
