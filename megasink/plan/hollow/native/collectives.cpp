// NCCL: a communicator of any number of ranks whose other ranks never answer. A collective is
// reported; the result is what this rank sends, in the place of every other's part too.
#include <cstdint>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "hollow.h"

API int hollow_allocate(void** pointer, size_t bytes);

namespace {

struct Group { int ranks, rank; };
std::mutex& lock() { static auto* it = new std::mutex; return *it; }
std::unordered_map<void*, Group>& groups() { static auto* it = new std::unordered_map<void*, Group>; return *it; }
int ranks_of_split = 1;

int create(void** group, int ranks, int rank, const char* name) {
  *group = new_handle();
  {
    std::lock_guard<std::mutex> held(lock());
    groups()[*group] = {ranks, rank};
  }
  report(Kind::collective, name, 0, ranks);
  return 0;
}

Group of(void* group) {
  std::lock_guard<std::mutex> held(lock());
  return groups()[group];
}

size_t bytes_of(int type) {
  static const int bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // by ncclDataType_t
  return type >= 0 && type < 12 ? bytes[type] : 1;
}

int moved(const char* name, const void* from, void* to, size_t count, int type, void* group, int times = 1) {
  size_t bytes = count * bytes_of(type);
  report(Kind::collective, name, bytes * times, of(group).ranks);
  if (known(from, bytes)) {
    for (int i = 0; i < times; i++) memmove(static_cast<char*>(to) + i * bytes, from, bytes);
    now_known(to, bytes * times);
  }
  return 0;
}

}  // namespace

// torch splits a communicator without telling how many ranks have the same color.
API void hollow_split_into(int ranks) { ranks_of_split = ranks; }

API int ncclAllReduce(const void* from, void* to, size_t count, int type, int, void* group, void*) { return moved("ncclAllReduce", from, to, count, type, group); }
API int ncclReduce(const void* from, void* to, size_t count, int type, int, int, void* group, void*) { return moved("ncclReduce", from, to, count, type, group); }
API int ncclReduceScatter(const void* from, void* to, size_t count, int type, int, void* group, void*) { return moved("ncclReduceScatter", from, to, count, type, group); }
API int ncclBroadcast(const void* from, void* to, size_t count, int type, int, void* group, void*) { return moved("ncclBroadcast", from, to, count, type, group); }
API int ncclBcast(void* buffer, size_t count, int type, int, void* group, void*) { return moved("ncclBroadcast", buffer, buffer, count, type, group); }
API int ncclAllGather(const void* from, void* to, size_t count, int type, void* group, void*) { return moved("ncclAllGather", from, to, count, type, group, of(group).ranks); }
API int ncclGather(const void* from, void* to, size_t count, int type, int, void* group, void*) { return moved("ncclGather", from, to, count, type, group, of(group).ranks); }
API int ncclAlltoAll(const void* from, void* to, size_t count, int type, void* group, void*) { return moved("ncclAlltoAll", from, to, count * of(group).ranks, type, group); }
API int ncclSend(const void*, size_t count, int type, int, void* group, void*) { report(Kind::collective, "ncclSend", count * bytes_of(type), of(group).ranks); return 0; }
API int ncclRecv(void*, size_t count, int type, int, void* group, void*) { report(Kind::collective, "ncclRecv", count * bytes_of(type), of(group).ranks); return 0; }

struct Id { char bytes[128]; };
API int ncclGetUniqueId(Id* id) { memset(id, 7, sizeof *id); return 0; }
API int ncclCommGetUniqueId(void*, Id* id) { return ncclGetUniqueId(id); }
API int ncclCommInitRank(void** group, int ranks, Id, int rank) { return create(group, ranks, rank, "ncclCommInit"); }
API int ncclCommInitRankConfig(void** group, int ranks, Id, int rank, void*) { return create(group, ranks, rank, "ncclCommInit"); }
API int ncclCommInitRankScalable(void** group, int ranks, int rank, int, Id*, void*) { return create(group, ranks, rank, "ncclCommInit"); }
API int ncclCommSplit(void*, int, int rank, void** group, void*) { return create(group, ranks_of_split, rank, "ncclCommSplit"); }
API int ncclCommCount(void* group, int* ranks) { *ranks = of(group).ranks; return 0; }
API int ncclCommUserRank(void* group, int* rank) { *rank = of(group).rank; return 0; }
API int ncclCommCuDevice(void*, int* device) { *device = 0; return 0; }
API int ncclCommMemStats(void*, int, uint64_t* value) { *value = 0; return 0; }
API int ncclCommGetAsyncError(void*, int* error) { *error = 0; return 0; }
API int ncclCommWindowRegister(void*, void*, size_t, void** window, int) { *window = new_handle(); return 0; }
API int ncclRedOpCreatePreMulSum(int* operation, ...) { *operation = 5; return 0; }
API int ncclMemAlloc(void** pointer, size_t bytes) { return hollow_allocate(pointer, bytes); }
API int ncclGetVersion(int* version) { *version = 23007; return 0; }
API const char* ncclGetErrorString(int) { return "error (hollow GPU)"; }
API const char* ncclGetLastError(void*) { return ""; }

#define NOTHING(f) API int f() { return 0; }
NOTHING(ncclGroupStart) NOTHING(ncclGroupEnd) NOTHING(ncclGroupSimulateEnd)
NOTHING(ncclCommAbort) NOTHING(ncclCommDestroy) NOTHING(ncclCommFinalize)
NOTHING(ncclCommRegister) NOTHING(ncclCommDeregister) NOTHING(ncclCommWindowDeregister)
NOTHING(ncclCommRevoke) NOTHING(ncclCommSuspend) NOTHING(ncclCommResume)
NOTHING(ncclMemFree) NOTHING(ncclRedOpDestroy)
