// What the parts of the hollow GPU share. See ../__init__.py.
#pragma once
#include <cstddef>

#define API extern "C" __attribute__((visibility("default")))

// The same order as KINDS in ../events.py.
enum class Kind : int { launch, gemm, copy, sync, collective, allocate, free, fill };

// Tells the listener, if there is one. The meaning of the numbers is in ../events.py.
void report(Kind kind, const char* name, long first = 0, long second = 0);

// Kernels that would have run so far: what the device's memory held before them is not known now.
long kernels();

// Whether bytes on the device are still those that a copy, a fill or a collective wrote last.
bool known(const void* pointer, size_t bytes);
void now_known(void* pointer, size_t bytes);

// The device, from HOLLOW_CAPABILITY (80, 90, 100), HOLLOW_GIB and HOLLOW_GPUS.
int capability();
size_t device_bytes();

// A handle that nothing else has; it points to nothing.
void* new_handle();
