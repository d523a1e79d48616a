// What the parts of the emulator know of each other: the scheduler (emulator.cpp), the checks of ordinary
// accesses (races.cpp) and asynchronous copies and products (async_proxy.cpp).
#pragma once
#include "cuda_shim.hpp"

namespace ikpy::shim {

// scheduler

// Where the running thread is: itself and how far it has come. Memory of threads alone lies between
// private_begin and private_end.
struct AccessState {
    bool running;
    uint16_t thread;
    uint32_t launch, block, epoch, warp_epoch;
    // Interval between barriers (epoch) in which the block began.
    uint32_t first_epoch;
    uintptr_t private_begin, private_end;
    // Dynamic shared memory, and what the launch asked for of it.
    uint8_t* dynamic;
    size_t dynamic_bytes;
};
extern AccessState present;
inline const AccessState& access_state() { return present; }

// Lets others run until the condition holds.
void wait_until(bool (*condition)(const void*), const void* context);
// Whether asynchronous operations happen as late as they may; else at once.
bool is_late();
// Which of n things under way happens next.
unsigned pick(unsigned n);

// what ordinary accesses are checked against (checked builds)

enum class AccessKind { kRead, kWrite, kAtomic };
// Bytes of shared memory that an asynchronous copy of the running thread brings now. from: where they are
// read now, or null.
void note_copy(const void* to, const void* from, size_t bytes);
// Bytes of shared memory that have contents from now on, whoever brought them.
void note_filled(const void* to, size_t bytes);

// asynchronous operations

void begin_async(int n_threads);
// Ends one copy that is under way; false if there is none.
bool complete_copy();
// Why a block must not end so, or null.
const char* end_async();
// An ordinary access of the running thread to bytes of dynamic shared memory (checked builds).
void note_access(size_t byte, size_t size, bool write);

}  // namespace ikpy::shim
