// libcuda.so.1, which torch and triton load when they run. Here are the functions whose answers
// matter; compile_libraries.py adds every other one of cuda.h, which answers 0 (CUDA_SUCCESS).
#include <dlfcn.h>

#include <cstddef>
#include <cstring>

#include "hollow.h"

API void hollow_report(int kind, const char* name, long first, long second);
API int hollow_attribute(int attribute);
API int cudaMalloc(void** pointer, size_t bytes);
API int cudaFree(void* pointer);
API int cudaDriverGetVersion(int* version);
API int cudaGetDeviceCount(int* count);

static void* const context = reinterpret_cast<void*>(0x51);

static int launched(const void* function, long blocks, long threads) {
  hollow_report(static_cast<int>(Kind::launch), static_cast<const char*>(function), blocks, threads);
  return 0;
}

API int cuInit(unsigned) { return 0; }
API int cuDriverGetVersion(int* version) { return cudaDriverGetVersion(version); }
API int cuDeviceGet(int* device, int number) { *device = number; return 0; }
API int cuDeviceGetCount(int* count) { return cudaGetDeviceCount(count); }
API int cuDeviceGetAttribute(int* value, int attribute, int) { *value = hollow_attribute(attribute); return 0; }
API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { if (flags) *flags = 0; if (active) *active = 1; return 0; }
API int cuDevicePrimaryCtxRetain(void** found, int) { *found = context; return 0; }
API int cuCtxGetCurrent(void** found) { *found = context; return 0; }
API int cuCtxGetDevice(int* device) { *device = 0; return 0; }
API int cuCtxGetLimit(size_t* value, int) { *value = 1024; return 0; }
API int cuStreamGetCtx(void*, void** found) { *found = context; return 0; }
API int cuStreamIsCapturing(void*, int* capturing) { *capturing = 0; return 0; }
API int cuGetErrorString(int, const char** text) { *text = "error (hollow GPU)"; return 0; }
API int cuGetErrorName(int, const char** text) { *text = "HOLLOW"; return 0; }
API int cuModuleLoadData(void** module, const void*) { *module = const_cast<char*>("module"); return 0; }
API int cuModuleLoadDataEx(void** module, const void*, unsigned, void*, void*) { *module = const_cast<char*>("module"); return 0; }
API int cuModuleGetFunction(void** function, void*, const char* name) { *function = strdup(name); return 0; }
API int cuFuncGetAttribute(int* value, int attribute, void*) { *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0; return 0; }
API int cuPointerGetAttribute(void* data, int attribute, size_t pointer) {
  const int device_pointer = 3, device_memory = 2;
  if (attribute == device_pointer) *static_cast<size_t*>(data) = pointer;
  else *static_cast<int*>(data) = device_memory;
  return 0;
}
API int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned, void*, void**, void**) {
  return launched(function, static_cast<long>(x) * y * z, static_cast<long>(a) * b * c);
}
API int cuLaunchKernelEx(const unsigned* how, void* function, void**, void**) {
  return launched(function, static_cast<long>(how[0]) * how[1] * how[2], static_cast<long>(how[3]) * how[4] * how[5]);
}
// NVRTC and cuDNN ask for tables that no header describes, and would call through a null one.
API int cuGetExportTable(const void** table, const void*) { *table = nullptr; return 500; /* CUDA_ERROR_NOT_FOUND */ }
API int cuMemAlloc_v2(size_t* pointer, size_t bytes) { return cudaMalloc(reinterpret_cast<void**>(pointer), bytes); }
API int cuMemFree_v2(size_t pointer) { return cudaFree(reinterpret_cast<void*>(pointer)); }
API int cuGetProcAddress_v2(const char* name, void** found, int, size_t, int* result) {
  *found = dlsym(RTLD_DEFAULT, name);
  if (!*found) *found = dlsym(dlopen("libcuda.so.1", RTLD_LAZY), name);
  if (result) *result = *found ? 0 : 1;
  return 0;
}
