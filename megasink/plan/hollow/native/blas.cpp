// cuBLAS and cuBLASLt: a product of matrices is reported with its floating-point operations.
// Declared here, not included: the wheels of torch do not always bring these headers.
#include <cstdint>
#include <cstring>

#include "hollow.h"

static int product(const char* name, long m, long n, long k, long batch = 1) {
  report(Kind::gemm, name, 2 * m * n * k * batch, m);
  return 0;
}

// Handles, sizes m, n, k: all functions for one product begin alike.
#define PRODUCT(f) \
  API int f(void*, int, int, int m, int n, int k) { return product(#f, m, n, k); }
PRODUCT(cublasGemmEx) PRODUCT(cublasSgemmEx) PRODUCT(cublasSgemm_v2) PRODUCT(cublasDgemm_v2)

API int cublasGemmStridedBatchedEx(void*, int, int, int m, int n, int k, const void*, const void*, int, int, long long, const void*, int, int, long long, const void*, void*, int, int, long long, int batch, int, int) {
  return product("cublasGemmStridedBatchedEx", m, n, k, batch);
}
#define STRIDED(f) \
  API int f(void*, int, int, int m, int n, int k, const void*, const void*, int, long long, const void*, int, long long, const void*, void*, int, long long, int batch) { return product(#f, m, n, k, batch); }
STRIDED(cublasSgemmStridedBatched) STRIDED(cublasDgemmStridedBatched)

#define VECTOR(f) \
  API int f(void*, int, int m, int n) { return product(#f, m, n, 1); }
VECTOR(cublasSgemv_v2) VECTOR(cublasDgemv_v2)

#define DOT(f) \
  API int f(void*, int n) { return product(#f, 1, 1, n); }
DOT(cublasSdot_v2) DOT(cublasDdot_v2) DOT(cublasDotEx)

#define HANDLE(f) API int f(void** handle) { *handle = new_handle(); return 0; }
#define NOTHING(f) API int f() { return 0; }
HANDLE(cublasCreate_v2) NOTHING(cublasDestroy_v2)
NOTHING(cublasSetStream_v2) NOTHING(cublasSetWorkspace_v2) NOTHING(cublasSetMathMode)
NOTHING(cublasSetPointerMode_v2) NOTHING(cublasSetSmCountTarget)
API int cublasGetMathMode(void*, int* mode) { *mode = 0; return 0; }
API int cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return 0; }

// ---- cuBLASLt: sizes are in the layouts

struct Layout { long rows, columns, batch; };
const int batch_count = 5;  // CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT
API int cublasLtMatrixLayoutCreate(Layout** layout, int, uint64_t rows, uint64_t columns, int64_t) {
  *layout = new Layout{static_cast<long>(rows), static_cast<long>(columns), 1};
  return 0;
}
API int cublasLtMatrixLayoutSetAttribute(Layout* layout, int attribute, const void* value, size_t) {
  if (attribute == batch_count) layout->batch = *static_cast<const int32_t*>(value);
  return 0;
}
API int cublasLtMatrixLayoutDestroy(Layout* layout) { delete layout; return 0; }

API int cublasLtMatmul(void*, void*, const void*, const void*, const Layout* a, const void*, const Layout*, const void*, const void*, const Layout*, void*, const Layout* d) {
  return product("cublasLtMatmul", d->rows, d->columns, a->rows * a->columns / (d->rows ? d->rows : 1), d->batch);
}
API size_t cublasLtGetVersion() { return 130400; }
// TransformerEngine's groups: the sizes of each are on the device, in a layout of the caller.
API int cublasLtGroupedMatrixLayoutInit_internal(Layout* layout, size_t, int, int groups, const void*, const void*, const void*) {
  *layout = {0, 0, groups};
  return 0;
}
API int cublasLtMatmulAlgoConfigGetAttribute(const void*, int, void* value, size_t bytes, size_t* written) {
  memset(value, 0, bytes);
  if (written) *written = bytes;
  return 0;
}
API const char* cublasGetStatusString(int status) { return status ? "error (hollow GPU)" : "success"; }
HANDLE(cublasLtCreate) HANDLE(cublasLtMatmulDescCreate) HANDLE(cublasLtMatmulPreferenceCreate)
NOTHING(cublasLtMatmulDescInit_internal) NOTHING(cublasLtMatmulPreferenceInit_internal)
NOTHING(cublasLtMatmulDescDestroy) NOTHING(cublasLtMatmulDescSetAttribute)
NOTHING(cublasLtMatmulPreferenceDestroy) NOTHING(cublasLtMatmulPreferenceSetAttribute)
NOTHING(cublasLtMatmulAlgoCheck) NOTHING(cublasLtMatmulAlgoInit)
const size_t result_bytes = 96;  // of cublasLtMatmulHeuristicResult_t; all zero is a valid one
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results, int* found) {
  memset(results, 0, result_bytes);
  *found = 1;
  return 0;
}
