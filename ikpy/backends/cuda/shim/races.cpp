// Race, alignment and initialization checks: the hooks that the compiler calls at every memory access of the
// kernels when they are built with -fsanitize=thread (the sanitizer's own library is not linked).
//
// Two accesses of a byte of which one writes are a race unless the same thread makes both, a block barrier
// lies between them, or both threads are of one warp and __syncwarp lies between. Blocks of a launch are
// never ordered. Shuffles and votes order nothing, as CUDA says. Of memory that blocks share only accesses
// behind a write are seen; blocks also run in descending order, which turns the other half into that one.
// Asynchronous copies of 16 bytes are writes of the thread that asked for them. Shared memory has no contents
// when a block begins, and of dynamic memory there is what the launch asked for. What is read as memory that
// stays as it is (__ldg) may not be written by the same launch, before or after.
#include <link.h>

#include <bitset>
#include <cstdio>
#include <cstdlib>
#include <unordered_map>
#include <vector>

#include "machine.hpp"

namespace {

using ikpy::shim::AccessState;

// Accesses of one kind in one barrier interval; intervals are numbered through all blocks and launches,
// from 1.
struct Access {
    uint32_t epoch, warp_epoch;
    uint16_t thread;
    bool other_lanes, other_warps;
};
struct Cell {
    Access write, read;
    uint32_t filled;  // interval of the last write of any kind
};
struct Written {
    uint32_t epoch, warp_epoch, block;
    uint16_t thread;
};

// Writable memory of this library: __shared__ variables are static there.
struct Statics {
    uintptr_t begin = 0, end = 0;
};
int find_statics(dl_phdr_info* info, size_t, void* found) {
    const auto own = reinterpret_cast<uintptr_t>(&find_statics);
    auto& statics = *static_cast<Statics*>(found);
    bool mine = false;
    Statics writable;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& segment = info->dlpi_phdr[i];
        if (segment.p_type != PT_LOAD) continue;
        const uintptr_t begin = info->dlpi_addr + segment.p_vaddr, end = begin + segment.p_memsz;
        mine |= begin <= own && own < end;
        if (segment.p_flags & PF_W) writable = {begin, end};
    }
    if (mine) statics = writable;
    return mine;
}

constexpr size_t kPages = 1 << 16, kPageBytes = 4096;

// Bytes of memory, by page. Of most pages a bit tells that they hold none; accesses added lie within a page.
struct PageSet {
    std::vector<bool> may_be = std::vector<bool>(kPages);
    std::unordered_map<uintptr_t, std::bitset<kPageBytes>> bytes;

    bool holds(uintptr_t address) const {
        if (!may_be[address / kPageBytes % kPages]) return false;
        const auto found = bytes.find(address / kPageBytes);
        return found != bytes.end() && found->second[address % kPageBytes];
    }
    void add(uintptr_t begin, size_t n) {
        may_be[begin / kPageBytes % kPages] = true;
        auto& page = bytes[begin / kPageBytes];
        for (size_t i = 0; i < n; ++i) page[begin % kPageBytes + i] = true;
    }
    void clear() {
        for (const auto& page : bytes) may_be[page.first % kPages] = false;
        bytes.clear();
    }
};

struct Shadow {
    Statics statics;
    // Zeros, which the system provides when they are first touched.
    Cell* cells;
    Cell* dynamic;
    std::unordered_map<uintptr_t, Written> written;
    std::vector<bool> written_pages = std::vector<bool>(kPages);
    PageSet read_only;
    uint32_t launch = 0;
    // Whether kernels call the hooks.
    bool checked = false;

    Shadow() {
        dl_iterate_phdr(find_statics, &statics);
        cells = static_cast<Cell*>(std::calloc(statics.end - statics.begin, sizeof(Cell)));
        dynamic = static_cast<Cell*>(std::calloc(ikpy::shim::kMaxShared, sizeof(Cell)));
    }
};
Shadow& shadow() {
    static Shadow s;
    return s;
}

char message[160];

void race(const char* memory, const char* before, int first, const char* now, int second, const void* code) {
    std::snprintf(message, sizeof message, "race in %s memory: %s by thread %d, %s by thread %d (code %p)",
                  memory, before, first, now, second, code);
    ikpy::shim::fail(message);
}

bool ordered(const Access& before, const AccessState& now) {
    if (before.epoch != now.epoch) return true;
    if (before.other_warps || before.thread / 32 != now.thread / 32) return false;
    return before.warp_epoch != now.warp_epoch || (before.thread == now.thread && !before.other_lanes);
}

void note_read(Access& read, const AccessState& now) {
    const bool other_warp = read.thread / 32 != now.thread / 32;
    if (read.epoch != now.epoch) {
        read = {now.epoch, now.warp_epoch, now.thread, false, false};
    } else if (other_warp || read.warp_epoch != now.warp_epoch) {
        read = {now.epoch, now.warp_epoch, now.thread, false, read.other_warps || other_warp};
    } else {
        read.other_lanes |= read.thread != now.thread;
    }
}

// Index of a thread, which the kernels read where they read shared memory.
bool is_index(uintptr_t byte) {
    for (const dim3* index : {&threadIdx, &blockIdx, &blockDim, &gridDim})
        if (byte - reinterpret_cast<uintptr_t>(index) < sizeof *index) return true;
    return false;
}

void check_filled(const Cell& cell, uintptr_t byte, const AccessState& now, const void* code) {
    if (cell.filled >= ikpy::shim::first_epoch() || is_index(byte)) return;
    std::snprintf(message, sizeof message, "shared memory that nobody wrote is read by thread %d (code %p)",
                  now.thread, code);
    ikpy::shim::fail(message);
}

void check_shared(Cell& cell, const AccessState& now, bool write, const void* code) {
    if (write) cell.filled = now.epoch;
    if (!ordered(cell.write, now))
        race("shared", "written", cell.write.thread, write ? "written" : "read", now.thread, code);
    if (!write) return note_read(cell.read, now);
    if (!ordered(cell.read, now)) race("shared", "read", cell.read.thread, "written", now.thread, code);
    cell.write = {now.epoch, now.warp_epoch, now.thread, false, false};
}

void check_global(uintptr_t address, const AccessState& now, bool write, const void* code) {
    Shadow& s = shadow();
    auto page = s.written_pages[address / kPageBytes % kPages];
    if (!write && !page) return;
    const auto found = s.written.find(address);
    if (found != s.written.end()) {
        const Written& w = found->second;
        const bool here = w.block == now.block;
        const Access before{w.epoch, w.warp_epoch, w.thread, false, false};
        if (!here || !ordered(before, now))
            race(here ? "global" : "global (two blocks)", "written", w.thread, write ? "written" : "read",
                 now.thread, code);
    }
    if (write) {
        if (s.read_only.holds(address))
            ikpy::shim::fail("memory is written that the launch reads as memory that stays as it is (__ldg)");
        s.written[address] = {now.epoch, now.warp_epoch, now.block, now.thread};
        page = true;
    }
}

// Local variables of threads, which are registers on a device, and whatever the host does between launches.
bool is_private(const void* p) {
    const AccessState now = ikpy::shim::access_state();
    const auto address = reinterpret_cast<uintptr_t>(p);
    return !now.running || (address >= now.private_begin && address < now.private_end);
}

// What is known of a byte of shared memory, null for other memory.
Cell* shared_cell(uintptr_t byte) {
    Shadow& s = shadow();
    const uintptr_t in_dynamic = byte - reinterpret_cast<uintptr_t>(ikpy::shim::dynamic_shared());
    if (byte - s.statics.begin < s.statics.end - s.statics.begin) return &s.cells[byte - s.statics.begin];
    return in_dynamic < ikpy::shim::kMaxShared ? &s.dynamic[in_dynamic] : nullptr;
}

// The shadow of a launch, which begins without accesses.
Shadow& shadow_of(const AccessState& now) {
    Shadow& s = shadow();
    if (s.launch != now.launch) {
        s.written.clear();
        s.written_pages.assign(kPages, false);
        s.read_only.clear();
        s.launch = now.launch;
    }
    return s;
}

void access(const void* p, size_t size, bool write, const void* code) {
    if (is_private(p)) return;
    const AccessState now = ikpy::shim::access_state();
    const auto address = reinterpret_cast<uintptr_t>(p);
    shadow_of(now);
    const auto dynamic = reinterpret_cast<uintptr_t>(ikpy::shim::dynamic_shared());
    for (size_t i = 0; i < size; ++i) {
        const uintptr_t byte = address + i;
        if (Cell* cell = shared_cell(byte)) {
            if (byte - dynamic < ikpy::shim::kMaxShared && byte - dynamic >= ikpy::shim::dynamic_bytes())
                ikpy::shim::fail("an access beyond the dynamic shared memory of the launch");
            if (!write) check_filled(*cell, byte, now, code);
            check_shared(*cell, now, write, code);
            if (byte - dynamic < ikpy::shim::kMaxShared) ikpy::shim::note_access(byte - dynamic, write);
        } else {
            check_global(byte, now, write, code);
        }
    }
}

}  // namespace

namespace ikpy::shim {

void note_read_only(const void* p, size_t bytes) {
    const AccessState now = access_state();
    const auto address = reinterpret_cast<uintptr_t>(p);
    if (!now.running) return;
    if (is_private(p) || shared_cell(address)) fail("a load (__ldg) from memory that is not global");
    Shadow& s = shadow_of(now);
    for (size_t i = 0; i < bytes; ++i)
        if (s.written_pages[(address + i) / kPageBytes % kPages] && s.written.count(address + i))
            fail("a load of memory that stays as it is (__ldg) from what the launch has written");
    s.read_only.add(address, bytes);
}

void note_copy(const void* to, size_t bytes) {
    if (!shadow().checked) return;
    const AccessState now = access_state();
    for (size_t i = 0; i < bytes; ++i)
        if (Cell* cell = shared_cell(reinterpret_cast<uintptr_t>(to) + i))
            check_shared(*cell, now, true, nullptr);
}

void note_filled(const void* to, size_t bytes) {
    if (!shadow().checked) return;
    for (size_t i = 0; i < bytes; ++i)
        if (Cell* cell = shared_cell(reinterpret_cast<uintptr_t>(to) + i))
            cell->filled = access_state().epoch;
}

}  // namespace ikpy::shim

#define IKPY_CODE __builtin_return_address(0)
#define IKPY_HOOKS(n)                                                          \
    void __tsan_read##n(void* p) { access(p, n, false, IKPY_CODE); }           \
    void __tsan_write##n(void* p) { access(p, n, true, IKPY_CODE); }           \
    void __tsan_unaligned_read##n(void* p) { access(p, n, false, IKPY_CODE); } \
    void __tsan_unaligned_write##n(void* p) { access(p, n, true, IKPY_CODE); }

extern "C" {
IKPY_HOOKS(1)
IKPY_HOOKS(2)
IKPY_HOOKS(4)
IKPY_HOOKS(8)
IKPY_HOOKS(16)
void __tsan_read_range(void* p, size_t size) { access(p, size, false, IKPY_CODE); }
void __tsan_write_range(void* p, size_t size) { access(p, size, true, IKPY_CODE); }
void __tsan_vptr_update(void*, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() { shadow().checked = true; }
void __ubsan_handle_type_mismatch_v1(void*, void* p) {
    if (!is_private(p)) ikpy::shim::fail("misaligned access");
}
}
