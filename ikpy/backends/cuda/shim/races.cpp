// Race and initialization checks: the hooks that the compiler calls at every memory access of the kernels
// when they are built with -fsanitize=thread (the sanitizer's own library is not linked).
//
// Two accesses of a byte of which one writes are a race unless both are atomic, the same thread makes both, a
// block barrier lies between them, or both threads are of one warp and __syncwarp lies between. Blocks of a
// launch are never ordered. Shuffles and votes order nothing, as CUDA says. Asynchronous copies of 16 bytes
// are reads and writes of the thread that asked for them. Shared memory has no contents when a block begins,
// and of dynamic memory there is what the launch asked for. What is read as memory that stays as it is
// (__ldg) may not be written by the same launch, before or after.
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

using ikpy::shim::AccessKind;
using ikpy::shim::AccessState;

// Accesses of one kind in one barrier interval; intervals are numbered through all blocks and launches,
// from 1. other_blocks: of the same launch, at any time.
struct Access {
    uint32_t epoch, warp_epoch;
    uint16_t thread;
    bool other_lanes : 1, other_warps : 1, other_blocks : 1;
};
// A byte of memory.
struct Cell {
    Access write, read, atomic;
};
// And of shared memory. filled: interval of the last write of any kind.
struct SharedCell : Cell {
    uint32_t filled;
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

// Cells of memory that blocks share, by page. Those of earlier launches are told by their intervals.
class GlobalCells {
  public:
    Cell* page(uintptr_t address) {
        const uintptr_t number = address / kPageBytes;
        if (number == last_) return last_cells_;
        auto& made = pages_[number];
        if (!made) made.reset(new Cell[kPageBytes]());
        last_ = number;
        return last_cells_ = made.get();
    }
    // That of an address and those behind it in the page; null if nothing in the page was accessed.
    const Cell* known(uintptr_t address) const {
        const auto found = pages_.find(address / kPageBytes);
        return found == pages_.end() ? nullptr : &found->second[address % kPageBytes];
    }
    // Forgets them if they are many.
    void trim() {
        if (pages_.size() < kMostPages) return;
        pages_.clear();
        last_ = 0;
    }

  private:
    static constexpr size_t kMostPages = 256;
    std::unordered_map<uintptr_t, std::unique_ptr<Cell[]>> pages_;
    uintptr_t last_ = 0;
    Cell* last_cells_ = nullptr;
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
    SharedCell* cells;
    SharedCell* dynamic;
    GlobalCells global;
    PageSet read_only;
    // The launch, and the interval in which it began.
    uint32_t launch = 0, first_epoch = 0;

    Shadow() {
        dl_iterate_phdr(find_statics, &statics);
        cells = static_cast<SharedCell*>(std::calloc(statics.end - statics.begin, sizeof(SharedCell)));
        dynamic = static_cast<SharedCell*>(std::calloc(ikpy::shim::kMaxShared, sizeof(SharedCell)));
    }
};
Shadow shadow;
// Whether kernels call the hooks; known before shadow is.
bool checked;

char message[160];

const char* name_of(AccessKind kind) {
    return kind == AccessKind::kRead ? "read" : kind == AccessKind::kWrite ? "written" : "changed atomically";
}

// A kind of memory. since: the interval in which its present use began, by the launch or the block.
struct Memory {
    const char* name;
    uint32_t since;
};

// Of accesses that count.
bool ordered(const Access& before, const AccessState& now) {
    if (before.other_blocks || before.epoch < now.first_epoch) return false;
    if (before.epoch != now.epoch) return true;
    if (before.other_warps || before.thread / 32 != now.thread / 32) return false;
    return before.warp_epoch != now.warp_epoch || (before.thread == now.thread && !before.other_lanes);
}

// Adds an access to those of its kind.
void note(Access& known, const AccessState& now, const Memory& memory) {
    const bool other_warp = known.thread / 32 != now.thread / 32;
    const bool counts = known.epoch >= memory.since;
    const bool other_blocks = counts && (known.other_blocks || known.epoch < now.first_epoch);
    if (known.epoch != now.epoch) {
        known = {now.epoch, now.warp_epoch, now.thread, false, false, other_blocks};
    } else if (other_warp || known.warp_epoch != now.warp_epoch) {
        known = {now.epoch, now.warp_epoch, now.thread, false, known.other_warps || other_warp, other_blocks};
    } else {
        known.other_lanes |= known.thread != now.thread;
    }
}

void race(const Memory& memory, const Access& before, AccessKind first, const AccessState& now,
          AccessKind second, const void* code) {
    const bool here = !before.other_blocks && before.epoch >= now.first_epoch;
    std::snprintf(message, sizeof message, "race in %s%s memory: %s by thread %d, %s by thread %d (code %p)",
                  memory.name, here ? "" : " (two blocks)", name_of(first), before.thread, name_of(second),
                  now.thread, code);
    ikpy::shim::fail(message);
}

// Compares an access with all before it that it must be ordered behind, and adds it to them.
void check_races(const Memory& memory, Cell& cell, const AccessState& now, AccessKind kind,
                 const void* code) {
    // Most are by a thread that has made the same one just before, of what nobody writes.
    if (kind == AccessKind::kRead && std::max(cell.write.epoch, cell.atomic.epoch) < memory.since &&
        cell.read.epoch == now.epoch && cell.read.warp_epoch == now.warp_epoch &&
        cell.read.thread == now.thread)
        return;
    const auto behind = [&](const Access& before, AccessKind first) {
        if (before.epoch >= memory.since && !ordered(before, now))
            race(memory, before, first, now, kind, code);
    };
    behind(cell.write, AccessKind::kWrite);
    if (kind != AccessKind::kAtomic) behind(cell.atomic, AccessKind::kAtomic);
    if (kind == AccessKind::kRead) return note(cell.read, now, memory);
    behind(cell.read, AccessKind::kRead);
    note(kind == AccessKind::kWrite ? cell.write : cell.atomic, now, memory);
}

// Checks every byte of an access. Bytes that had the same accesses so far, as most have, get the same one.
template <class AnyCell, class Check>
void for_bytes(AnyCell* cells, size_t n, Check check) {
    if (n == 0) return;
    const AnyCell before = cells[0];
    check(0);
    for (size_t i = 1; i < n; ++i) {
        if (std::memcmp(&cells[i], &before, sizeof before) == 0) {
            cells[i] = cells[0];
        } else {
            check(i);
        }
    }
}

// Index of a thread, which the kernels read where they read shared memory.
bool is_index(uintptr_t byte) {
    for (const dim3* index : {&threadIdx, &blockIdx, &blockDim, &gridDim})
        if (byte - reinterpret_cast<uintptr_t>(index) < sizeof *index) return true;
    return false;
}

void check_filled(const SharedCell& cell, uintptr_t byte, const AccessState& now, const void* code) {
    if (cell.filled >= now.first_epoch || is_index(byte)) return;
    std::snprintf(message, sizeof message, "shared memory that nobody wrote is read by thread %d (code %p)",
                  now.thread, code);
    ikpy::shim::fail(message);
}

void check_shared(SharedCell& cell, uintptr_t byte, const AccessState& now, AccessKind kind,
                  const void* code) {
    if (kind != AccessKind::kWrite) check_filled(cell, byte, now, code);
    if (kind != AccessKind::kRead) cell.filled = now.epoch;
    check_races({"shared", now.first_epoch}, cell, now, kind, code);
}

// Bytes of memory that blocks share.
void check_global(uintptr_t address, size_t size, const AccessState& now, AccessKind kind, const void* code) {
    for (size_t i = 0; i < size;) {
        const size_t in_page = (address + i) % kPageBytes, n = std::min(size - i, kPageBytes - in_page);
        Cell* cells = shadow.global.page(address + i) + in_page;
        for_bytes(cells, n,
                  [&](size_t j) { check_races({"global", shadow.first_epoch}, cells[j], now, kind, code); });
        for (size_t j = 0; kind != AccessKind::kRead && j < n; ++j)
            if (shadow.read_only.holds(address + i + j))
                ikpy::shim::fail(
                    "memory is written that the launch reads as memory that stays as it is (__ldg)");
        i += n;
    }
}

// Local variables of threads, which are registers on a device, and whatever the host does between launches.
bool is_private(const void* p, const AccessState& now) {
    const auto address = reinterpret_cast<uintptr_t>(p);
    return !now.running || (address >= now.private_begin && address < now.private_end);
}

// What is known of bytes of shared memory from this one on, null for other memory.
SharedCell* shared_cells(uintptr_t byte, const AccessState& now) {
    const uintptr_t in_dynamic = byte - reinterpret_cast<uintptr_t>(now.dynamic);
    if (in_dynamic < ikpy::shim::kMaxShared) return &shadow.dynamic[in_dynamic];
    const uintptr_t in_statics = byte - shadow.statics.begin;
    return in_statics < shadow.statics.end - shadow.statics.begin ? &shadow.cells[in_statics] : nullptr;
}

// Every launch begins without accesses.
void begin_launch(const AccessState& now) {
    if (shadow.launch == now.launch) return;
    shadow.global.trim();
    shadow.read_only.clear();
    shadow.launch = now.launch;
    shadow.first_epoch = now.first_epoch;
}

void access(const void* p, size_t size, AccessKind kind, const void* code) {
    const AccessState& now = ikpy::shim::access_state();
    if (is_private(p, now)) return;
    begin_launch(now);
    const auto address = reinterpret_cast<uintptr_t>(p);
    SharedCell* cells = shared_cells(address, now);
    if (!cells) return check_global(address, size, now, kind, code);
    const uintptr_t in_dynamic = address - reinterpret_cast<uintptr_t>(now.dynamic);
    const bool is_dynamic = in_dynamic < ikpy::shim::kMaxShared;
    if (is_dynamic && in_dynamic + size > now.dynamic_bytes)
        ikpy::shim::fail("an access beyond the dynamic shared memory of the launch");
    for_bytes(cells, size, [&](size_t i) { check_shared(cells[i], address + i, now, kind, code); });
    if (is_dynamic) ikpy::shim::note_access(in_dynamic, size, kind != AccessKind::kRead);
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
    const Cell* cells = shadow.global.known(address);
    for (size_t i = 0; cells && i < bytes; ++i)
        if (std::max(cells[i].write.epoch, cells[i].atomic.epoch) >= shadow.first_epoch)
            fail("a load of memory that stays as it is (__ldg) from what the launch has written");
    shadow.read_only.add(address, bytes);
}

void note_atomic(const void* p, size_t bytes) {
    access(p, bytes, AccessKind::kAtomic, __builtin_return_address(0));
}

void note_copy(const void* to, const void* from, size_t bytes) {
    if (!checked) return;
    const AccessState& now = access_state();
    const auto address = reinterpret_cast<uintptr_t>(to);
    if (from) access(from, bytes, AccessKind::kRead, nullptr);
    SharedCell* cells = shared_cells(address, now);
    for (size_t i = 0; cells && i < bytes; ++i)
        check_shared(cells[i], address + i, now, AccessKind::kWrite, nullptr);
}

void note_filled(const void* to, size_t bytes) {
    const AccessState& now = access_state();
    SharedCell* cells = checked ? shared_cells(reinterpret_cast<uintptr_t>(to), now) : nullptr;
    for (size_t i = 0; cells && i < bytes; ++i) cells[i].filled = now.epoch;
}

}  // namespace ikpy::shim

#define IKPY_CODE __builtin_return_address(0)
#define IKPY_HOOKS(n)                                                                      \
    void __tsan_read##n(void* p) { access(p, n, AccessKind::kRead, IKPY_CODE); }           \
    void __tsan_write##n(void* p) { access(p, n, AccessKind::kWrite, IKPY_CODE); }         \
    void __tsan_unaligned_read##n(void* p) { access(p, n, AccessKind::kRead, IKPY_CODE); } \
    void __tsan_unaligned_write##n(void* p) { access(p, n, AccessKind::kWrite, IKPY_CODE); }

extern "C" {
IKPY_HOOKS(1)
IKPY_HOOKS(2)
IKPY_HOOKS(4)
IKPY_HOOKS(8)
IKPY_HOOKS(16)
void __tsan_read_range(void* p, size_t size) { access(p, size, AccessKind::kRead, IKPY_CODE); }
void __tsan_write_range(void* p, size_t size) { access(p, size, AccessKind::kWrite, IKPY_CODE); }
void __tsan_vptr_update(void*, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() { checked = true; }
}
