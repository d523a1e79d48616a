// Runs kernels of the host build: blocks in a loop, threads as fibers with a scheduler that knows barriers.
#include <sys/mman.h>

#include <cstdio>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "fiber_context.hpp"
#include "machine.hpp"

dim3 threadIdx, blockIdx, blockDim, gridDim;

ikpy::shim::AccessState ikpy::shim::present;

namespace {

using ikpy::shim::Context;
using ikpy::shim::kWarp;
using ikpy::shim::present;

enum class State : uint8_t { kReady, kBarrier, kWarp, kCondition, kDone };

// A copy under way, and the number of its group. from: null for zeros.
struct Copy {
    void* to;
    const void* from;
    int group;
};

struct Fiber {
    Context context;
    std::vector<Copy> copies;
    int group = 0;
    dim3 index;
    State state = State::kDone;
    // What a thread in kCondition waits for.
    bool (*condition)(const void*) = nullptr;
    const void* condition_context = nullptr;
};

struct Warp {
    ikpy::shim::WarpSlots slots;
    // What the lanes that have arrived wait for.
    void (*operation)(ikpy::shim::WarpSlots&, const void*) = nullptr;
    int arrived = 0;
    uint32_t epoch = 0;
};

// No power of two: the tops of all stacks would share a few sets of the caches, which takes 1.35 times as
// long.
constexpr size_t kStackBytes = 64 * 1024 + 17 * 64;
constexpr int kMaxThreads = 1024;
// Stacks, and behind them what the lanes of warps exchange.
constexpr size_t kPrivateBytes = kStackBytes * kMaxThreads + sizeof(Warp) * kMaxThreads / kWarp;
using ikpy::shim::kMaxShared;

// A round of turns of n: whose turn it is, and who follows.
struct Turn {
    int n, now;
    bool up;

    void pass() { now = up ? (now + 1 == n ? 0 : now + 1) : (now ? now : n) - 1; }
};

struct Machine {
    Context scheduler;
    std::vector<Fiber> fibers;
    Warp* warps = nullptr;
    uint8_t* stacks = nullptr;
    std::vector<uint8_t> shared;
    ikpy::shim::Invoke invoke = nullptr;
    void** arguments = nullptr;
    int n_threads = 0, current = 0, at_barrier = 0, finished = 0;
    // The lanes that have not had their turn in this round of a warp.
    Turn lane = {};
    int warp = 0, lanes_left = 0;
    bool reverse = false;
    uint32_t random = 0;  // state of the generator; 0: threads take turns in one direction
    std::string error;
};

Machine the_machine;
Machine& machine() { return the_machine; }

struct Kernel {
    ikpy::shim::Invoke invoke;
    const ikpy::shim::Parameter* parameters;
};

std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> table;
    return table;
}

bool may_run(const Fiber& f) {
    return f.state == State::kReady || (f.state == State::kCondition && f.condition(f.condition_context));
}

// Gives the next lane of the round that can run its turn; false if there is none.
bool resume_next(Context& from) {
    Machine& m = machine();
    while (m.lanes_left > 0) {
        const int i = m.warp * kWarp + m.lane.now;
        m.lane.pass();
        --m.lanes_left;
        if (!may_run(m.fibers[i])) continue;
        m.current = i;
        threadIdx = m.fibers[i].index;
        present.thread = static_cast<uint16_t>(i);
        present.warp_epoch = m.warps[m.warp].epoch;
        switch_context(from, m.fibers[i].context);
        return true;
    }
    return false;
}

void yield(State state) {
    Machine& m = machine();
    Fiber& self = m.fibers[m.current];
    self.state = state;
    if (!resume_next(self.context)) switch_context(self.context, m.scheduler);
}

void fiber_main() {
    Machine& m = machine();
    m.invoke(m.arguments);
    ++m.finished;
    yield(State::kDone);
}

Turn first_turn(int n) {
    Machine& m = machine();
    if (m.random == 0) return {n, m.reverse ? n - 1 : 0, !m.reverse};
    m.random = m.random * 1664525u + 1013904223u;
    return {n, static_cast<int>((m.random >> 8) % n), (m.random >> 31) != 0};
}

// Runs the threads of a warp until all of them wait for the block or are done; false if none could run. A
// round ends when its last lane yields.
bool run_warp(int w) {
    Machine& m = machine();
    bool any = false, progress = true;
    m.warp = w;
    while (progress) {
        m.lane = first_turn(kWarp);
        m.lanes_left = kWarp;
        progress = resume_next(m.scheduler);
        any |= progress;
    }
    return any;
}

std::string stuck() {
    const Machine& m = machine();
    int in_warp = 0, at_condition = 0;
    for (int i = 0; i < m.n_threads; ++i) {
        in_warp += m.fibers[i].state == State::kWarp;
        at_condition += m.fibers[i].state == State::kCondition;
    }
    std::string text = std::to_string(m.at_barrier) + " threads wait at a block barrier, " +
                       std::to_string(in_warp) + " in a warp operation, ";
    if (at_condition) text += std::to_string(at_condition) + " for a phase of a barrier that does not end, ";
    return text + std::to_string(m.finished) + " of " + std::to_string(m.n_threads) + " have ended";
}

bool run_block() {
    Machine& m = machine();
    ikpy::shim::begin_async(m.n_threads);
    m.at_barrier = m.finished = 0;
    present.first_epoch = ++present.epoch;
    for (int i = 0; i < m.n_threads; ++i) {
        Fiber& f = m.fibers[i];
        const unsigned t = i;
        f.index = {t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
        f.state = State::kReady;
        f.copies.clear();
        f.group = 0;
        prepare_context(f.context, m.stacks + i * kStackBytes, kStackBytes, fiber_main);
    }
    const int n_warps = m.n_threads / kWarp;
    for (int w = 0; w < n_warps; ++w) m.warps[w].arrived = 0;
    for (;;) {
        bool any = false;
        Turn warp = first_turn(n_warps);
        for (int w = 0; w < n_warps; ++w, warp.pass()) any |= run_warp(warp.now);
        if (!m.error.empty()) return false;
        if (m.finished == m.n_threads) {
            if (const char* error = ikpy::shim::end_async()) m.error = error;
            return m.error.empty();
        }
        if (m.at_barrier == m.n_threads) {
            m.at_barrier = 0;
            ++present.epoch;
            for (int i = 0; i < m.n_threads; ++i) m.fibers[i].state = State::kReady;
        } else if (!any && !ikpy::shim::complete_copy()) {
            m.error = stuck();
            return false;
        }
    }
}

bool prepare(const unsigned* grid, const unsigned* block, size_t shared_bytes) {
    Machine& m = machine();
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    const uint64_t threads = uint64_t(block[0]) * block[1] * block[2];
    if (threads == 0 || threads > kMaxThreads || threads % kWarp) {
        m.error = std::to_string(threads) + " threads per block: must be a multiple of 32 up to 1024";
        return false;
    }
    if (grid[1] > 65535 || grid[2] > 65535 || uint64_t(grid[0]) * grid[1] * grid[2] == 0) {
        m.error = "grid " + std::to_string(grid[0]) + " x " + std::to_string(grid[1]) + " x " +
                  std::to_string(grid[2]) + " is empty or too large";
        return false;
    }
    if (shared_bytes > kMaxShared) {
        m.error = std::to_string(shared_bytes) + " bytes of dynamic shared memory: at most 232448";
        return false;
    }
    m.n_threads = static_cast<int>(threads);
    present.dynamic_bytes = shared_bytes;
    if (!m.stacks) {
        m.fibers.resize(kMaxThreads);
        m.shared.resize(kMaxShared + 128);
        m.stacks = static_cast<uint8_t*>(mmap(nullptr, kPrivateBytes, PROT_READ | PROT_WRITE,
                                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        m.warps = new (m.stacks + kStackBytes * kMaxThreads) Warp[kMaxThreads / kWarp];
        present.private_begin = reinterpret_cast<uintptr_t>(m.stacks);
        present.private_end = present.private_begin + kPrivateBytes;
        present.dynamic = m.shared.data() + (-reinterpret_cast<uintptr_t>(m.shared.data()) & 127);
    }
    return true;
}

}  // namespace

namespace ikpy::shim {

WarpPlace warp_place() { return {machine().warps[machine().warp].slots, machine().current % kWarp}; }

void block_barrier() {
    ++machine().at_barrier;
    yield(State::kBarrier);
}

void warp_meet(void (*combine)(WarpSlots&, const void*), const void* context) {
    Machine& m = machine();
    const int w = m.current / kWarp;
    Warp& warp = m.warps[w];
    if (warp.arrived > 0 && warp.operation != combine) fail("lanes of a warp meet in different operations");
    warp.operation = combine;
    if (++warp.arrived < kWarp) return yield(State::kWarp);
    warp.arrived = 0;
    combine(warp.slots, context);
    for (int l = 0; l < kWarp; ++l) m.fibers[w * kWarp + l].state = State::kReady;
}

void warp_barrier() {
    warp_meet([](WarpSlots&,
                 const void*) { present.warp_epoch = ++machine().warps[machine().current / kWarp].epoch; },
              nullptr);
}

void wait_until(bool (*condition)(const void*), const void* context) {
    Machine& m = machine();
    if (condition(context) && !m.reverse) return;
    Fiber& self = m.fibers[m.current];
    self.condition = condition;
    self.condition_context = context;
    yield(State::kCondition);
}

bool is_late() { return machine().reverse; }

unsigned pick(unsigned n) {
    Machine& m = machine();
    if (m.random == 0) return n - 1;
    m.random = m.random * 1664525u + 1013904223u;
    return (m.random >> 8) % n;
}

uint8_t* dynamic_shared() { return present.dynamic; }

// The end of a copy, which is a write of the thread that asked for it.
static void land(const Copy& copy) {
    const size_t offset = static_cast<uint8_t*>(copy.to) - present.dynamic;
    if (offset < kMaxShared) {
        if (offset + 16 > present.dynamic_bytes)
            fail("a copy beyond the dynamic shared memory of the launch");
        note_access(offset, 16, true);
    }
    if (copy.from) {
        std::memcpy(copy.to, copy.from, 16);
    } else {
        std::memset(copy.to, 0, 16);
    }
    note_copy(copy.to, copy.from, 16);
}

void copy16(void* to, const void* from, bool valid) {
    Machine& m = machine();
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16) fail("misaligned copy");
    Fiber& f = m.fibers[m.current];
    const Copy copy{to, valid ? from : nullptr, f.group};
    if (m.reverse) {
        f.copies.push_back(copy);
    } else {
        land(copy);
    }
}

void commit_copies() { ++machine().fibers[machine().current].group; }

void wait_copies(int groups_left) {
    Fiber& f = machine().fibers[machine().current];
    size_t kept = 0;
    for (const Copy& copy : f.copies) {
        if (copy.group < f.group - groups_left) {
            land(copy);
        } else {
            f.copies[kept++] = copy;
        }
    }
    f.copies.resize(kept);
}

void fail(const char* reason) {
    machine().error = reason;
    for (;;) yield(State::kDone);
}

void register_kernel(const char* name, Invoke invoke, const Parameter* parameters) {
    kernels()[name] = {invoke, parameters};
}

}  // namespace ikpy::shim

#pragma GCC visibility push(default)
extern "C" {

// 0, or -1 with the reason in ikpy_emulator_error(). The contents of shared memory are undefined at the
// start.
int ikpy_emulator_launch(const char* name, const unsigned* grid, const unsigned* block, size_t shared_bytes,
                         void** arguments) {
    Machine& m = machine();
    const auto kernel = kernels().find(name);
    if (kernel == kernels().end()) {
        m.error = std::string("no kernel of this name: ") + name;
        return -1;
    }
    if (!prepare(grid, block, shared_bytes)) return -1;
    m.error.clear();
    m.invoke = kernel->second.invoke;
    m.arguments = arguments;
    std::memset(present.dynamic, 0xA5, shared_bytes);
    ++present.launch;
    const uint64_t n_blocks = uint64_t(grid[0]) * grid[1] * grid[2];
    for (uint64_t n = 0; n < n_blocks; ++n) {
        const uint64_t block_number = m.reverse ? n_blocks - 1 - n : n;
        blockIdx = {static_cast<unsigned>(block_number % grid[0]),
                    static_cast<unsigned>(block_number / grid[0] % grid[1]),
                    static_cast<unsigned>(block_number / grid[0] / grid[1])};
        present.block = static_cast<uint32_t>(block_number);
        present.running = true;
        const bool done = run_block();
        present.running = false;
        if (!done) {
            m.error = "block (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " +
                      std::to_string(blockIdx.z) + "): " + m.error;
            return -1;
        }
    }
    return 0;
}

const char* ikpy_emulator_error() { return machine().error.c_str(); }

// The order in which blocks, warps and threads take their turns. 0: ascending. 1: descending, and
// asynchronous copies arrive as late as they may. Else the seed of an order that changes from turn to turn,
// copies arriving late.
void ikpy_emulator_set_order(unsigned order) {
    machine().reverse = order != 0;
    machine().random = order > 1 ? order : 0;
}

// Bytes and alignment of a kernel's i-th parameter; 0 bytes: it has none, or there is no such kernel.
void ikpy_emulator_parameter(const char* name, int i, size_t* bytes, size_t* alignment) {
    *bytes = 0;
    const auto kernel = kernels().find(name);
    if (kernel == kernels().end()) return;
    const ikpy::shim::Parameter* p = kernel->second.parameters;
    while (i-- > 0 && p->bytes) ++p;
    *bytes = p->bytes;
    *alignment = p->alignment;
}

int ikpy_emulator_kernel_count() { return static_cast<int>(kernels().size()); }

const char* ikpy_emulator_kernel_name(int index) {
    for (const auto& entry : kernels())
        if (index-- == 0) return entry.first.c_str();
    return "";
}
}
#pragma GCC visibility pop
