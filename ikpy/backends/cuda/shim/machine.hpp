// What the parts of the emulator know of each other: the scheduler (emulator.cpp), the checks of ordinary
// accesses (races.cpp) and asynchronous copies and products (async_proxy.cpp).
#pragma once
#include "cuda_shim.hpp"

namespace ikpy::shim {

// scheduler

// Lets others run until the condition holds.
void wait_until(bool (*condition)(const void*), const void* context);
// Whether asynchronous operations happen as late as they may; else at once.
bool is_late();
// Which of n things under way happens next.
unsigned pick(unsigned n);
// Interval between barriers (AccessState::epoch) in which the running block began.
uint32_t first_epoch();
// Dynamic shared memory that the launch asked for.
size_t dynamic_bytes();

// what ordinary accesses are checked against (checked builds)

// Bytes of shared memory that an asynchronous copy of the running thread brings now.
void note_copy(const void* to, size_t bytes);
// Bytes of shared memory that have contents from now on, whoever brought them.
void note_filled(const void* to, size_t bytes);

// asynchronous operations

void begin_async(int n_threads);
// Ends one copy that is under way; false if there is none.
bool complete_copy();
// Why a block must not end so, or null.
const char* end_async();
// An ordinary access of the running thread to a byte of dynamic shared memory (checked builds).
void note_access(size_t byte, bool write);

}  // namespace ikpy::shim
