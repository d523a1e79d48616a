// Host meaning of sm_90's asynchronous operations: barriers that count bytes, bulk copies, products of four
// warps.
//
// Copies and products happen at once, or as late as the kernel lets them (is_late). Between the start of a
// product and the wait for it the sums are NaN, in every order, and whoever touches them is found out.
// Whatever the PTX manual leaves undefined and can be seen here ends the launch with an error; ordinary
// accesses to operands are only seen in checked builds (note_access).
#include <cstdio>
#include <map>
#include <vector>

#include "machine.hpp"

namespace {

using namespace ikpy::shim;

constexpr unsigned kSharedBase = 1024 + 128;  // device address of dynamic shared memory
constexpr size_t kGranule = 16, kGranules = kMaxShared / kGranule;
constexpr int kWarpsPerGroup = 4, kColumns = 16;
// As f32 a signaling NaN: calculating with it changes its bits. As s32 no sum of a product.
constexpr unsigned kNotNumber = 0x7f8ead01u;

// state of a block

// An mbarrier. pending and bytes belong to the present phase.
struct Barrier {
    unsigned arrivals, pending;
    long long bytes = 0;
    uint32_t phase = 0;
    // Who made it, when, and how many proxy fences it had passed.
    int maker;
    uint32_t epoch, fences;
    // Phases that a thread has seen ending; those that some thread saw before the last block barrier.
    std::vector<uint32_t> seen;
    uint32_t seen_epoch = 0, seen_now = 0, seen_before = 0;
};

struct Copy {
    uint8_t* to;
    const uint8_t* from;
    unsigned bytes;
    void* barrier;
    uint32_t phase;
    bool done;
};

// 16 bytes of shared memory. copy: 1 + the last copy that writes them. readers: warps with products under way
// that read them. The last ordinary write: its thread, interval, and the proxy fences of the thread before
// it.
struct Granule {
    int copy = 0, readers = 0, writer = -1;
    uint32_t epoch = 0, fences = 0;
};

// Sums, f32 or s32, are kept as their bits. With s8 the rows of a came in registers.
struct Product {
    uint32_t* sums;
    int n;
    uint64_t a, b;
    bool accumulate, s8;
    int group;
    RowPair rows = {};
};

// Registers of a thread that products add to. shown: what the thread finds there.
struct Sums {
    std::vector<uint32_t> value, shown;
    int under_way = 0;
};

struct Thread {
    std::vector<Product> products;
    std::map<uint32_t*, Sums> sums;
    int group = 0;
    uint32_t fences = 0;  // of the proxy
    bool fenced = false;  // by wgmma.fence, ever
};

// The products that the warps of a group have asked for, which must be the same.
struct WarpGroup {
    std::vector<Product> issued;
    size_t count[kWarpsPerGroup] = {};
};

struct Async {
    std::map<const void*, Barrier> barriers;
    std::vector<Copy> copies;
    std::vector<Granule> granules;
    std::vector<Thread> threads;
    std::vector<WarpGroup> groups;
    bool used = false;
};

Async the_state;
Async& async() { return the_state; }

Thread& self() { return async().threads[access_state().thread]; }

// barriers

Barrier& barrier_at(const void* place) {
    const auto found = async().barriers.find(place);
    if (found == async().barriers.end()) fail("a barrier that was not initialized");
    Barrier& b = found->second;
    const AccessState now = access_state();
    if (b.maker != now.thread && b.epoch == now.epoch)
        fail(
            "a barrier is used by a thread that need not know of it: no block barrier after its "
            "initialization");
    return b;
}

void end_phase_if_complete(Barrier& b) {
    if (b.pending || b.bytes) return;
    ++b.phase;
    b.pending = b.arrivals;
}

void note_seen(Barrier& b, const AccessState& now) {
    if (b.seen_epoch != now.epoch) {
        b.seen_before = b.seen_now;
        b.seen_epoch = now.epoch;
    }
    b.seen[now.thread] = b.phase;
    b.seen_now = b.phase;
}

// Whether the end of a phase happened before what the thread does now.
bool has_seen(const Barrier& b, uint32_t phase, const AccessState& now) {
    if ((b.seen_epoch == now.epoch ? b.seen_before : b.seen_now) > phase) return true;
    const int warp = now.thread / kWarp * kWarp;
    for (int l = 0; l < kWarp; ++l)
        if (b.seen[warp + l] > phase) return true;
    return false;
}

// shared memory

size_t dynamic_offset(const void* p, size_t bytes, const char* error) {
    const auto start = reinterpret_cast<uintptr_t>(present.dynamic), at = reinterpret_cast<uintptr_t>(p);
    if (at < start || at + bytes > start + present.dynamic_bytes) fail(error);
    return at - start;
}

// Checks that the contents have arrived as far as the running thread can know.
void check_arrived(const Granule& g, const AccessState& now) {
    if (!g.copy) return;
    const Copy& copy = async().copies[g.copy - 1];
    if (!copy.done || !has_seen(async().barriers.at(copy.barrier), copy.phase, now))
        fail("shared memory is used without waiting for the copy to it");
}

// Checks that the async proxy sees, or may replace, what ordinary instructions wrote.
void check_written(const Granule& g, const AccessState& now) {
    if (g.writer < 0) return;
    if (g.epoch == now.epoch && g.writer != now.thread)
        fail("operands in shared memory were written without a barrier since");
    if (async().threads[g.writer].fences == g.fences)
        fail("operands in shared memory were written without a proxy fence (fence_async) since");
}

void end_copy(Copy& copy) {
    std::memcpy(copy.to, copy.from, copy.bytes);
    note_filled(copy.to, copy.bytes);
    copy.done = true;
    Barrier& b = async().barriers.at(copy.barrier);
    b.bytes -= copy.bytes;
    end_phase_if_complete(b);
}

// products

// Rows of an operand: pieces of 32 bytes in rows of 128, swizzled.
struct Operand {
    unsigned start, eight_rows;

    explicit Operand(uint64_t descriptor)
        : start((descriptor & 0x3fff) << 4), eight_rows((descriptor >> 32 & 0x3fff) << 4) {
        if (descriptor >> 62 != 1) fail("a matrix descriptor without 128-byte swizzle");
        if (descriptor >> 49 & 7) fail("a matrix descriptor with a base offset");
        if (start % 1024 >= 128) fail("a matrix does not start at a multiple of 1024 bytes");
        if (start % 128 + 2 * kColumns > 128) fail("columns of a matrix reach beyond its rows of 128 bytes");
        if (eight_rows % 1024) fail("the stride of a matrix is no multiple of 1024 bytes");
    }
    // Offset in dynamic shared memory of byte b of row r.
    size_t at(int r, int b) const {
        unsigned address = start + r / 8 * eight_rows + r % 8 * 128 + b;
        address ^= (address >> 7 & 7) << 4;
        if (address < kSharedBase || address >= kSharedBase + present.dynamic_bytes)
            fail("a matrix outside of shared memory");
        return address - kSharedBase;
    }
    void load(int r, float* out) const {
        for (int c = 0; c < kColumns; ++c) {
            uint16_t bits;
            std::memcpy(&bits, present.dynamic + at(r, 2 * c), 2);
            out[c] = __uint_as_float(static_cast<unsigned>(bits) << 16);
        }
    }
    void load(int r, int8_t* out) const {
        for (int half = 0; half < 2; ++half)
            std::memcpy(out + 16 * half, present.dynamic + at(r, 16 * half), 16);
    }
};

template <class F>
void for_granules(const Product& p, F f) {
    const auto rows_of = [&f](const Operand& matrix, int n) {
        for (int r = 0; r < n; ++r)
            for (int half = 0; half < 2; ++half) f(async().granules[matrix.at(r, 16 * half) / kGranule]);
    };
    if (!p.s8) rows_of(Operand(p.a), 64);
    rows_of(Operand(p.b), p.n);
}

// Adds to a thread's sums the products of its two rows of a with its columns.
template <class Sum, int K, class Element>
void add_products(const Product& p, const Element (&rows)[2][K], int lane, uint32_t* sums) {
    const Operand b(p.b);
    Element column[K];
    for (int i = 0; i < p.n / 2; i += 4)
        for (int c = 0; c < 2; ++c) {
            b.load(2 * i + 2 * (lane % 4) + c, column);
            for (int upper = 0; upper < 2; ++upper) {
                uint32_t& bits = sums[i + 2 * upper + c];
                Sum sum = 0;
                if (p.accumulate) std::memcpy(&sum, &bits, sizeof sum);
                for (int k = 0; k < K; ++k) sum += rows[upper][k] * column[k];
                std::memcpy(&bits, &sum, sizeof sum);
            }
        }
}

void execute(const Product& p, int thread, uint32_t* sums) {
    const int lane = thread % kWarp;
    if (p.s8) return add_products<int>(p, p.rows.q, lane, sums);
    const Operand a(p.a);
    const int first = thread / kWarp % kWarpsPerGroup * 16 + lane / 4;
    float rows[2][kColumns];
    a.load(first, rows[0]);
    a.load(first + 8, rows[1]);
    add_products<float>(p, rows, lane, sums);
}

bool is_shown(const uint32_t* sums, const Sums& s) {
    return std::memcmp(sums, s.shown.data(), s.shown.size() * sizeof(uint32_t)) == 0;
}

void show(uint32_t* sums, Sums& s, const std::vector<uint32_t>& values) {
    s.shown = values;
    std::memcpy(sums, values.data(), values.size() * sizeof(uint32_t));
}

void check_in_flight(const uint32_t* sums, const Sums& s) {
    if (s.under_way && !is_shown(sums, s))
        fail("sums were written while products that add to them are under way");
}

// Once per warp: its products must be those of the other warps of its group.
void check_group(const Product& p, int thread) {
    WarpGroup& group = async().groups[thread / (kWarp * kWarpsPerGroup)];
    const size_t index = group.count[thread / kWarp % kWarpsPerGroup]++;
    if (index == group.issued.size()) {
        group.issued.push_back(p);
    } else {
        const Product& other = group.issued[index];
        if (p.a != other.a || p.b != other.b || p.n != other.n || p.accumulate != other.accumulate ||
            p.s8 != other.s8)
            fail("the warps of a group ask for different products");
    }
}

void start_product(Product p) {
    const AccessState now = access_state();
    Thread& thread = self();
    async().used = true;
    p.group = thread.group;
    uint32_t* c = p.sums;
    const int n = p.n;
    if (now.thread / (kWarp * kWarpsPerGroup) * kWarp * kWarpsPerGroup + kWarp * kWarpsPerGroup >
        static_cast<int>(async().threads.size()))
        fail("a product by fewer than four warps");
    if (!thread.fenced) fail("a product without wgmma_fence before it");
    const auto [found, is_new] = thread.sums.try_emplace(c);
    Sums& s = found->second;
    if (is_new) s.value.assign(c, c + n / 2);
    if (s.value.size() != static_cast<size_t>(n / 2))
        fail("products of different shapes add to the same sums");
    if (!is_new && !s.under_way && !is_shown(c, s)) fail("sums were written and no wgmma_fence follows");
    check_in_flight(c, s);
    if (now.thread % kWarp == 0) {
        check_group(p, now.thread);
        for_granules(p, [&now](Granule& g) {
            check_arrived(g, now);
            check_written(g, now);
            ++g.readers;
        });
    }
    if (!s.under_way) show(c, s, std::vector<uint32_t>(n / 2, kNotNumber));
    ++s.under_way;
    if (!is_late()) execute(p, now.thread, s.value.data());
    thread.products.push_back(p);
    warp_meet([](WarpSlots&, const void*) {}, nullptr);
}

}  // namespace

namespace ikpy::shim {

void begin_async(int n_threads) {
    Async& a = async();
    if (a.used || a.threads.size() != static_cast<size_t>(n_threads)) {
        a.granules.assign(kGranules, {});
        a.barriers.clear();
        a.copies.clear();
        a.threads.assign(n_threads, {});
        a.groups.assign((n_threads + kWarp * kWarpsPerGroup - 1) / (kWarp * kWarpsPerGroup), {});
    }
    a.used = false;
}

bool complete_copy() {
    std::vector<Copy*> waiting;
    for (Copy& copy : async().copies)
        if (!copy.done) waiting.push_back(&copy);
    if (waiting.empty()) return false;
    end_copy(*waiting[pick(waiting.size())]);
    return true;
}

const char* end_async() {
    for (const Copy& copy : async().copies)
        if (!copy.done) return "a block ends while a copy to its shared memory is under way";
    for (const Thread& thread : async().threads)
        if (!thread.products.empty()) return "a thread ends while its products are under way";
    for (const WarpGroup& group : async().groups)
        for (const size_t count : group.count)
            if (count != group.issued.size())
                return "some warps of a group did not take part in its products";
    return nullptr;
}

void note_access(size_t byte, size_t size, bool write) {
    Async& a = async();
    const AccessState& now = access_state();
    for (size_t i = byte / kGranule; i <= (byte + size - 1) / kGranule; ++i) {
        Granule& g = a.granules[i];
        check_arrived(g, now);
        if (!write) continue;
        if (g.readers) fail("operands are overwritten while products that read them are under way");
        a.used = true;
        g = {0, 0, now.thread, now.epoch, a.threads[now.thread].fences};
    }
}

unsigned shared_address(const void* p) {
    return kSharedBase + static_cast<unsigned>(dynamic_offset(p, 0, "no place in dynamic shared memory"));
}

void barrier_init(void* barrier, unsigned arrivals) {
    Async& a = async();
    a.used = true;
    if (reinterpret_cast<uintptr_t>(barrier) % 8) fail("a misaligned barrier");
    if (a.barriers.count(barrier)) fail("a barrier is initialized twice");
    if (arrivals == 0 || arrivals >= 1u << 20) fail("the number of arrivals at a barrier is out of range");
    const AccessState now = access_state();
    Barrier b{arrivals, arrivals};
    b.maker = now.thread;
    b.epoch = now.epoch;
    b.fences = self().fences;
    b.seen.assign(a.threads.size(), 0);
    a.barriers.emplace(barrier, b);
}

void barrier_arrive(void* barrier, unsigned bytes) {
    Barrier& b = barrier_at(barrier);
    if (b.pending == 0) fail("more arrivals at a barrier than its phase has");
    b.bytes += bytes;
    if (b.bytes >= 1 << 20) fail("more bytes are announced to a barrier than it can count");
    --b.pending;
    end_phase_if_complete(b);
}

void barrier_wait(void* barrier, unsigned parity) {
    struct Wait {
        const Barrier* barrier;
        unsigned parity;
    } wait{&barrier_at(barrier), parity};
    wait_until(
        [](const void* context) {
            const Wait& w = *static_cast<const Wait*>(context);
            return (w.barrier->phase & 1) != w.parity;
        },
        &wait);
    note_seen(barrier_at(barrier), access_state());
}

void fence_async() { ++self().fences; }

void copy_bulk(void* to, const void* from, unsigned bytes, void* barrier) {
    Async& a = async();
    const AccessState now = access_state();
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16 || bytes == 0)
        fail("a bulk copy of misaligned places or sizes");
    Barrier& b = barrier_at(barrier);
    if (a.threads[b.maker].fences == b.fences)
        fail("a barrier is used by the async proxy without a proxy fence after its initialization");
    const size_t start = dynamic_offset(to, bytes, "a bulk copy to a place outside of dynamic shared memory");
    for (size_t i = start / kGranule; i < (start + bytes) / kGranule; ++i) {
        Granule& g = a.granules[i];
        if (g.readers) fail("operands are overwritten while products that read them are under way");
        if (g.copy && !a.copies[g.copy - 1].done) fail("two copies to one place are under way");
        check_written(g, now);
        g = {static_cast<int>(a.copies.size()) + 1};
    }
    a.copies.push_back(
        {static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), bytes, barrier, b.phase, false});
    if (!is_late()) end_copy(a.copies.back());
}

void wgmma_fence() {
    Thread& thread = self();
    thread.fenced = async().used = true;
    for (auto& [place, s] : thread.sums) {
        check_in_flight(place, s);
        if (!s.under_way) {
            s.value.assign(place, place + s.value.size());
            s.shown = s.value;
        }
    }
    warp_meet([](WarpSlots&, const void*) {}, nullptr);
}

void wgmma_commit() {
    ++self().group;
    warp_meet([](WarpSlots&, const void*) {}, nullptr);
}

void wgmma_bf16(float* c, int n, uint64_t a, uint64_t b, bool accumulate) {
    start_product({reinterpret_cast<uint32_t*>(c), n, a, b, accumulate, false, 0});
}

void wgmma_s8(int* c, int n, const RowPair& rows, uint64_t b, bool accumulate) {
    start_product({reinterpret_cast<uint32_t*>(c), n, 0, b, accumulate, true, 0, rows});
}

void wgmma_wait(int groups_left) {
    const AccessState now = access_state();
    Thread& thread = self();
    size_t kept = 0;
    for (const Product& p : thread.products) {
        Sums& s = thread.sums[p.sums];
        if (p.group >= thread.group - groups_left) {
            thread.products[kept++] = p;
            continue;
        }
        check_in_flight(p.sums, s);
        if (is_late()) execute(p, now.thread, s.value.data());
        if (now.thread % kWarp == 0) for_granules(p, [](Granule& g) { --g.readers; });
        if (--s.under_way == 0) show(p.sums, s, s.value);
    }
    thread.products.resize(kept);
    warp_meet([](WarpSlots&, const void*) {}, nullptr);
}

}  // namespace ikpy::shim
