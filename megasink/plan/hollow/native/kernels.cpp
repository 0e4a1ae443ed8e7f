// Kernels: their names are registered as the libraries of torch are loaded; a launch is reported.
#include <cuda_runtime_api.h>

#include <cstring>
#include <mutex>
#include <unordered_map>

#include "hollow.h"

// Never destroyed: libraries still call when the process ends.
static std::mutex& lock() { static auto* it = new std::mutex; return *it; }
static std::unordered_map<const void*, const char*>& names() {
  static auto* it = new std::unordered_map<const void*, const char*>;
  return *it;
}

API void** __cudaRegisterFatBinary(void*) { static void* handle[4]; return handle; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  std::lock_guard<std::mutex> held(lock());
  names()[function] = name;
}

struct Configuration { dim3 grid, block; size_t shared; void* stream; };
static thread_local Configuration pushed;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *static_cast<void**>(stream) = pushed.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

static cudaError_t launched(const void* function, dim3 grid, dim3 block) {
  const char* name = "unknown kernel";
  {
    std::lock_guard<std::mutex> held(lock());
    auto found = names().find(function);
    if (found != names().end()) name = found->second;
  }
  report(Kind::launch, name, static_cast<long>(grid.x) * grid.y * grid.z, static_cast<long>(block.x) * block.y * block.z);
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t) { return launched(kernel, grid, block); }
API cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t, cudaStream_t) { return launched(function, grid, block); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* function, void**) { return launched(function, how->gridDim, how->blockDim); }

API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 64;
  found->binaryVersion = found->ptxVersion = capability();
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) { *blocks = 2; return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) { *blocks = 2; return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) { *clusters = 16; return cudaSuccess; }
