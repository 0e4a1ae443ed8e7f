// The device itself: what it is, its streams and events, and who listens to what happens on it.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "hollow.h"

typedef void (*Listener)(int kind, const char* name, long first, long second);
static std::atomic<Listener> listener{nullptr};
static std::atomic<unsigned> heard{0};

// `kinds`: bits of the kinds to report; a call into Python costs microseconds.
API void hollow_listen(Listener who, unsigned kinds) {
  heard = kinds;
  listener = who;
}

static std::atomic<long> started{0};
long kernels() { return started.load(); }

// Which devices have a context: any call that acts on the current one opens it, of any thread.
static thread_local int current = 0;
static std::atomic<unsigned> contexts{0};
static cudaError_t acted() { contexts |= 1u << current; return cudaSuccess; }
// Those opened since the last call, a bit each.
API unsigned hollow_contexts() { return contexts.exchange(0); }

void report(Kind kind, const char* name, long first, long second) {
  acted();
  if (kind == Kind::launch || kind == Kind::gemm) started++;
  Listener who = listener.load();
  if (who && (heard.load() >> static_cast<int>(kind) & 1)) who(static_cast<int>(kind), name, first, second);
}

API void hollow_report(int kind, const char* name, long first, long second) {
  report(static_cast<Kind>(kind), name, first, second);
}

static long setting(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text ? atol(text) : otherwise;
}

int capability() { return static_cast<int>(setting("HOLLOW_CAPABILITY", 80)); }
size_t device_bytes() { return static_cast<size_t>(setting("HOLLOW_GIB", 80)) << 30; }

void* new_handle() {
  static std::atomic<long> last{0x10000};
  return reinterpret_cast<void*>(last += 0x40);
}

// ---- what the device is

static bool hopper() { return capability() >= 90; }

// The one table of its properties: cudart's attributes and the driver's have the same numbers.
API int hollow_attribute(int attribute) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMultiProcessorCount: return hopper() ? 132 : 108;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrL2CacheSize: return (hopper() ? 50 : 40) << 20;
    case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrTextureAlignment: return 512;
    case cudaDevAttrComputeCapabilityMajor: return capability() / 10;
    case cudaDevAttrComputeCapabilityMinor: return capability() % 10;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return hopper() ? 233472 : 167936;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return hopper() ? 232448 : 166912;
    default: return 1;
  }
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = hollow_attribute(attribute);
  return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {
  memset(found, 0, sizeof *found);
  snprintf(found->name, sizeof found->name, "hollow GPU, compute capability %d.%d", capability() / 10, capability() % 10);
  found->major = capability() / 10;
  found->minor = capability() % 10;
  found->totalGlobalMem = device_bytes();
  found->multiProcessorCount = hollow_attribute(cudaDevAttrMultiProcessorCount);
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxBlocksPerMultiProcessor = 32;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = hollow_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  found->sharedMemPerMultiprocessor = hollow_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->l2CacheSize = hollow_attribute(cudaDevAttrL2CacheSize);
  found->memoryBusWidth = 5120;
  found->unifiedAddressing = found->concurrentKernels = 1;
  found->asyncEngineCount = 3;
  found->textureAlignment = 512;
  found->memPitch = 2147483647;
  return cudaSuccess;
}

API cudaError_t cudaGetDeviceCount(int* count) {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  *count = visible && !*visible ? 0 : setting("HOLLOW_GPUS", 1);
  return *count ? cudaSuccess : cudaErrorNoDevice;
}
API cudaError_t cudaGetDevice(int* device) { *device = current; return cudaSuccess; }
API cudaError_t cudaSetDevice(int device) { current = device; return acted(); }
API cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) { snprintf(text, size, "0000:%02x:00.0", device); return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* low, int* high) { if (low) *low = 0; if (high) *high = -5; return cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return cudaSuccess; }
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() { report(Kind::sync, "cudaDeviceSynchronize"); return cudaSuccess; }
API const char* cudaGetErrorString(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "out of memory (hollow GPU)" : error ? "error (hollow GPU)" : "no error"; }
API const char* cudaGetErrorName(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : error ? "cudaErrorUnknown" : "cudaSuccess"; }
API cudaError_t cudaGetLastError() { return cudaSuccess; }
API cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

static int no_driver_function() { return 0; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_LAZY);
  *found = driver ? dlsym(driver, name) : nullptr;
  if (!*found) *found = reinterpret_cast<void*>(no_driver_function);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ---- streams and events: nothing runs, so everything is done already

static cudaError_t made(void* handle) { *static_cast<void**>(handle) = new_handle(); return acted(); }
API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return made(stream); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return made(stream); }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return made(stream); }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return cudaSuccess; }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamQuery(cudaStream_t) { return acted(); }
API cudaError_t cudaStreamSynchronize(cudaStream_t) { report(Kind::sync, "cudaStreamSynchronize"); return cudaSuccess; }
API cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return acted(); }
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) { *status = cudaStreamCaptureStatusNone; return cudaSuccess; }
#if CUDART_VERSION >= 13000
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t* count) {
#else
API cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**, size_t* count) {
#endif
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (count) *count = 0;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return made(event); }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return made(event); }
API cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return acted(); }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned) { return acted(); }
API cudaError_t cudaEventQuery(cudaEvent_t) { return acted(); }
API cudaError_t cudaEventSynchronize(cudaEvent_t) { report(Kind::sync, "cudaEventSynchronize"); return cudaSuccess; }
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) { *milliseconds = 1.0f; return cudaSuccess; }
