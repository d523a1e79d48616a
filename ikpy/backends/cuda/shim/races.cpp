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

#include <algorithm>
#include <bitset>
#include <cstdio>
#include <cstdlib>
#include <memory>
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
// The last write of a byte of memory that blocks share; interval 0: none.
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

// Writes by page.
class WrittenBytes {
  public:
    // The page of an address, null if nothing in it was written.
    Written* page(uintptr_t address) {
        if (!may_be_[address / kPageBytes % kPages]) return nullptr;
        const auto found = pages_.find(address / kPageBytes);
        return found == pages_.end() ? nullptr : found->second.get();
    }
    Written* make_page(uintptr_t address) {
        if (Written* known = page(address)) return known;
        may_be_[address / kPageBytes % kPages] = true;
        auto& made = pages_[address / kPageBytes];
        made.reset(new Written[kPageBytes]());
        return made.get();
    }
    bool holds(uintptr_t address) {
        const Written* written = page(address);
        return written && written[address % kPageBytes].epoch;
    }
    void clear() {
        for (const auto& page : pages_) may_be_[page.first % kPages] = false;
        pages_.clear();
    }

  private:
    std::vector<bool> may_be_ = std::vector<bool>(kPages);
    std::unordered_map<uintptr_t, std::unique_ptr<Written[]>> pages_;
};

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
    WrittenBytes written;
    PageSet read_only;
    uint32_t launch = 0;

    Shadow() {
        dl_iterate_phdr(find_statics, &statics);
        cells = static_cast<Cell*>(std::calloc(statics.end - statics.begin, sizeof(Cell)));
        dynamic = static_cast<Cell*>(std::calloc(ikpy::shim::kMaxShared, sizeof(Cell)));
    }
};
Shadow shadow;
// Whether kernels call the hooks; known before shadow is.
bool checked;

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
    if (cell.filled >= now.first_epoch || is_index(byte)) return;
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

// A byte of memory that blocks share.
void check_byte(Written& w, uintptr_t address, const AccessState& now, bool write, const void* code) {
    if (w.epoch) {
        const bool here = w.block == now.block;
        const Access before{w.epoch, w.warp_epoch, w.thread, false, false};
        if (!here || !ordered(before, now))
            race(here ? "global" : "global (two blocks)", "written", w.thread, write ? "written" : "read",
                 now.thread, code);
    }
    if (!write) return;
    if (shadow.read_only.holds(address))
        ikpy::shim::fail("memory is written that the launch reads as memory that stays as it is (__ldg)");
    w = {now.epoch, now.warp_epoch, now.block, now.thread};
}

void check_global(uintptr_t address, size_t size, const AccessState& now, bool write, const void* code) {
    for (size_t i = 0; i < size;) {
        const size_t in_page = (address + i) % kPageBytes, n = std::min(size - i, kPageBytes - in_page);
        Written* page = write ? shadow.written.make_page(address + i) : shadow.written.page(address + i);
        for (size_t j = 0; page && j < n; ++j)
            check_byte(page[in_page + j], address + i + j, now, write, code);
        i += n;
    }
}

// Local variables of threads, which are registers on a device, and whatever the host does between launches.
bool is_private(const void* p, const AccessState& now) {
    const auto address = reinterpret_cast<uintptr_t>(p);
    return !now.running || (address >= now.private_begin && address < now.private_end);
}

// What is known of bytes of shared memory from this one on, null for other memory.
Cell* shared_cells(uintptr_t byte, const AccessState& now) {
    const uintptr_t in_dynamic = byte - reinterpret_cast<uintptr_t>(now.dynamic);
    if (in_dynamic < ikpy::shim::kMaxShared) return &shadow.dynamic[in_dynamic];
    const uintptr_t in_statics = byte - shadow.statics.begin;
    return in_statics < shadow.statics.end - shadow.statics.begin ? &shadow.cells[in_statics] : nullptr;
}

// Every launch begins without accesses.
void begin_launch(const AccessState& now) {
    if (shadow.launch == now.launch) return;
    shadow.written.clear();
    shadow.read_only.clear();
    shadow.launch = now.launch;
}

void access(const void* p, size_t size, bool write, const void* code) {
    const AccessState& now = ikpy::shim::access_state();
    if (is_private(p, now)) return;
    begin_launch(now);
    const auto address = reinterpret_cast<uintptr_t>(p);
    Cell* cells = shared_cells(address, now);
    if (!cells) return check_global(address, size, now, write, code);
    const uintptr_t in_dynamic = address - reinterpret_cast<uintptr_t>(now.dynamic);
    const bool is_dynamic = in_dynamic < ikpy::shim::kMaxShared;
    if (is_dynamic && in_dynamic + size > now.dynamic_bytes)
        ikpy::shim::fail("an access beyond the dynamic shared memory of the launch");
    for (size_t i = 0; i < size; ++i) {
        if (!write) check_filled(cells[i], address + i, now, code);
        check_shared(cells[i], now, write, code);
    }
    if (is_dynamic) ikpy::shim::note_access(in_dynamic, size, write);
}

}  // namespace

namespace ikpy::shim {

void note_read_only(const void* p, size_t bytes) {
    const AccessState& now = access_state();
    const auto address = reinterpret_cast<uintptr_t>(p);
    if (!now.running) return;
    if (is_private(p, now) || shared_cells(address, now))
        fail("a load (__ldg) from memory that is not global");
    begin_launch(now);
    for (size_t i = 0; i < bytes; ++i)
        if (shadow.written.holds(address + i))
            fail("a load of memory that stays as it is (__ldg) from what the launch has written");
    shadow.read_only.add(address, bytes);
}

void note_copy(const void* to, size_t bytes) {
    const AccessState& now = access_state();
    Cell* cells = checked ? shared_cells(reinterpret_cast<uintptr_t>(to), now) : nullptr;
    for (size_t i = 0; cells && i < bytes; ++i) check_shared(cells[i], now, true, nullptr);
}

void note_filled(const void* to, size_t bytes) {
    const AccessState& now = access_state();
    Cell* cells = checked ? shared_cells(reinterpret_cast<uintptr_t>(to), now) : nullptr;
    for (size_t i = 0; cells && i < bytes; ++i) cells[i].filled = now.epoch;
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
void __tsan_init() { checked = true; }
void __ubsan_handle_type_mismatch_v1(void*, void* p) {
    if (!is_private(p, ikpy::shim::access_state())) ikpy::shim::fail("misaligned access");
}
}
