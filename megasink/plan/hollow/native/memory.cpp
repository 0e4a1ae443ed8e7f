// Device memory is address space without pages: a model of 80 GB fits on a laptop. The host reads
// again what it wrote (flags on which ranks agree) as long as no kernel was launched in between; a
// kernel might have written anything, so afterwards everything reads as 0.
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "hollow.h"

namespace {

// Never destroyed: libraries still free when the process ends.
std::mutex& lock() { static auto* it = new std::mutex; return *it; }
using Ranges = std::map<char*, size_t>;
Ranges& on_device() { static auto* it = new Ranges; return *it; }
Ranges& pinned() { static auto* it = new Ranges; return *it; }
std::atomic<size_t> used{0};

struct Written { const char* start; size_t bytes; };
std::vector<Written>& written() { static auto* it = new std::vector<Written>; return *it; }
long written_at = 0;

bool inside(Ranges& ranges, const void* pointer) {
  std::lock_guard<std::mutex> held(lock());
  auto next = ranges.upper_bound((char*)pointer);
  if (next == ranges.begin()) return false;
  --next;
  return (char*)pointer < next->first + next->second;
}

size_t whole_pages(size_t bytes) { return bytes ? (bytes + 4095) & ~size_t{4095} : 4096; }

cudaError_t allocate(void** pointer, size_t bytes) {
  *pointer = nullptr;
  if (used + bytes > device_bytes()) return cudaErrorMemoryAllocation;
  void* found = mmap(nullptr, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return cudaErrorMemoryAllocation;
  {
    std::lock_guard<std::mutex> held(lock());
    on_device()[(char*)found] = bytes;
  }
  used += bytes;
  *pointer = found;
  report(Kind::allocate, "cudaMalloc", bytes);
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  size_t bytes;
  {
    std::lock_guard<std::mutex> held(lock());
    auto found = on_device().find((char*)pointer);
    if (found == on_device().end()) return cudaSuccess;
    bytes = found->second;
    on_device().erase(found);
  }
  munmap(pointer, whole_pages(bytes));
  used -= bytes;
  report(Kind::free, "cudaFree", bytes);
  return cudaSuccess;
}

cudaError_t copy(void* to, const void* from, size_t bytes) {
  bool to_device = inside(on_device(), to), from_device = inside(on_device(), from);
  const char* name = "host to host";
  if (to_device && from_device) name = "on device";
  else if (to_device) name = inside(pinned(), from) ? "to device" : "to device, pageable";
  else if (from_device) name = inside(pinned(), to) ? "to host" : "to host, pageable";
  report(Kind::copy, name, bytes);
  if (!from_device || known(from, bytes)) {
    memmove(to, from, bytes);
    if (to_device) now_known(to, bytes);
  } else if (!to_device) {
    memset(to, 0, bytes);
  }
  return cudaSuccess;
}

}  // namespace

bool known(const void* pointer, size_t bytes) {
  std::lock_guard<std::mutex> held(lock());
  if (written_at != kernels()) return false;
  for (const Written& range : written())
    if (range.start <= pointer && static_cast<const char*>(pointer) + bytes <= range.start + range.bytes) return true;
  return false;
}

void now_known(void* pointer, size_t bytes) {
  std::lock_guard<std::mutex> held(lock());
  if (written_at != kernels()) written().clear();
  written_at = kernels();
  written().push_back({static_cast<const char*>(pointer), bytes});
}

API cudaError_t cudaMalloc(void** pointer, size_t bytes) { return allocate(pointer, bytes); }
API cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return allocate(pointer, bytes); }
API cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned) { return allocate(pointer, bytes); }
API cudaError_t cudaFree(void* pointer) { return release(pointer); }
API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return release(pointer); }
API cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  *total = device_bytes();
  *available = *total - used;
  return cudaSuccess;
}

API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  if (posix_memalign(pointer, 4096, bytes ? bytes : 1)) return cudaErrorMemoryAllocation;
  memset(*pointer, 0, bytes);
  std::lock_guard<std::mutex> held(lock());
  pinned()[(char*)*pointer] = bytes;
  return cudaSuccess;
}
API cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
API cudaError_t cudaFreeHost(void* pointer) {
  {
    std::lock_guard<std::mutex> held(lock());
    pinned().erase((char*)pointer);
  }
  free(pointer);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> held(lock());
  pinned()[(char*)pointer] = bytes;
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* pointer) {
  std::lock_guard<std::mutex> held(lock());
  pinned().erase((char*)pointer);
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  memset(found, 0, sizeof *found);
  bool device = inside(on_device(), pointer), host = inside(pinned(), pointer);
  found->type = device ? cudaMemoryTypeDevice : host ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  found->devicePointer = found->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  report(Kind::sync, "cudaMemcpy");
  return copy(to, from, bytes);
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) { return copy(to, from, bytes); }
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) { return copy(to, from, bytes); }
// A variable of the device has a place on the host too: the one that its name stands for.
API cudaError_t cudaGetSymbolAddress(void** pointer, const void* symbol) { *pointer = const_cast<void*>(symbol); return cudaSuccess; }
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t bytes, size_t, cudaMemcpyKind) {
  report(Kind::sync, "cudaMemcpy");
  report(Kind::copy, "to device, pageable", bytes);
  return cudaSuccess;
}
static cudaError_t fill(void* pointer, int value, size_t bytes) {
  report(Kind::fill, "cudaMemset", bytes);
  // Zeros need no pages of their own; a long fill with anything else would.
  if (bytes <= 4096) {
    memset(pointer, value, bytes);
    now_known(pointer, bytes);
  }
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* pointer, int value, size_t bytes) { return fill(pointer, value, bytes); }
API cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t) { return fill(pointer, value, bytes); }

// For NCCL's buffers (collectives.cpp).
API int hollow_allocate(void** pointer, size_t bytes) { return allocate(pointer, bytes); }
