// Race and alignment checks: the hooks that the compiler calls at every memory access of the kernels when
// they are built with -fsanitize=thread (the sanitizer's own library is not linked).
//
// Two accesses of a byte of which one writes are a race unless the same thread makes both, a block barrier
// lies between them, or both threads are of one warp and __syncwarp lies between. Blocks of a launch are
// never ordered. Shuffles and votes order nothing, as CUDA says. Of memory that blocks share only accesses
// behind a write are seen; blocks also run in descending order, which turns the other half into that one.
#include <link.h>

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

constexpr size_t kPages = 1 << 16;

struct Shadow {
    Statics statics;
    // Zeros, which the system provides when they are first touched.
    Cell* cells;
    Cell* dynamic;
    std::unordered_map<uintptr_t, Written> written;
    std::vector<bool> written_pages = std::vector<bool>(kPages);
    uint32_t launch = 0;

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

void check_shared(Cell& cell, const AccessState& now, bool write, const void* code) {
    if (!ordered(cell.write, now))
        race("shared", "written", cell.write.thread, write ? "written" : "read", now.thread, code);
    if (!write) return note_read(cell.read, now);
    if (!ordered(cell.read, now)) race("shared", "read", cell.read.thread, "written", now.thread, code);
    cell.write = {now.epoch, now.warp_epoch, now.thread, false, false};
}

void check_global(uintptr_t address, const AccessState& now, bool write, const void* code) {
    Shadow& s = shadow();
    auto page = s.written_pages[address / 4096 % kPages];
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

void access(const void* p, size_t size, bool write, const void* code) {
    if (is_private(p)) return;
    const AccessState now = ikpy::shim::access_state();
    const auto address = reinterpret_cast<uintptr_t>(p);
    Shadow& s = shadow();
    if (s.launch != now.launch) {
        s.written.clear();
        s.written_pages.assign(kPages, false);
        s.launch = now.launch;
    }
    const auto dynamic = reinterpret_cast<uintptr_t>(ikpy::shim::dynamic_shared());
    for (size_t i = 0; i < size; ++i) {
        const uintptr_t byte = address + i;
        if (byte >= s.statics.begin && byte < s.statics.end) {
            check_shared(s.cells[byte - s.statics.begin], now, write, code);
        } else if (byte >= dynamic && byte < dynamic + ikpy::shim::kMaxShared) {
            check_shared(s.dynamic[byte - dynamic], now, write, code);
            ikpy::shim::note_access(byte - dynamic, write);
        } else {
            check_global(byte, now, write, code);
        }
    }
}

}  // namespace

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
void __tsan_init() {}
void __ubsan_handle_type_mismatch_v1(void*, void* p) {
    if (!is_private(p)) ikpy::shim::fail("misaligned access");
}
}
