// The instructions of warp_ops.hpp with their operands in registers.
#include "machine.hpp"

namespace ptx {
namespace {

constexpr uint32_t kAllLanes = ~0u;

// For .sync.aligned instructions, which all lanes execute.
bool whole_warp(Warp& w, const Instruction& i) {
    if (i.guard >= 0 && w.lanes != w.active)
        throw Fault("lanes of a warp disagree about an aligned instruction");
    return w.gather(kAllLanes);
}

// extra: the kind. Operands: d, a, b, c.
void multiply(Warp& w, const Instruction& i) {
    if (!whole_warp(w, i)) return;
    const MmaRegisters n = mma_registers(i.extra);
    Register a[8], b[8], c[8], d[8];
    int k = n.d;
    for (int r = 0; r < n.a; ++r) a[r] = w.in<uint32_t>(i, k++);
    for (int r = 0; r < n.b; ++r) b[r] = w.in<uint32_t>(i, k++);
    for (int r = 0; r < n.c; ++r) c[r] = w.in<uint32_t>(i, k++);
    mma_sync(i.extra, a, b, c, d);
    for (int r = 0; r < n.d; ++r) w.out<uint32_t>(i, r) = d[r];
}

Register shared_addresses(Warp& w, const Instruction& i, int k) {
    Register at;
    for (int l = 0; l < kLanes; ++l) {
        const uint64_t base = w.operand(i, k + 1) ? w.in<uint64_t>(i, k)[l] : w.in<uint32_t>(i, k)[l];
        at[l] = static_cast<uint32_t>(base) + w.operand(i, k + 2);
    }
    return at;
}

template <class Addresses>
void count(Warp& w, const Instruction& i, Space space, const Addresses& at, uint32_t bytes, uint32_t some) {
    uint64_t addresses[kLanes];
    for (int l = 0; l < kLanes; ++l) addresses[l] = at[l];
    w.count(i, space, addresses, bytes, some);
}

// Operands: address (register, 0, offset), registers. extra: transposed; more: how many.
void load_matrices(Warp& w, const Instruction& i) {
    if (!whole_warp(w, i)) return;
    Register out[4];
    const Register at = shared_addresses(w, i, 0);
    ldmatrix(w.block->shared, at, i.more, i.extra, out, w.block->launch.every_lane);
    count(w, i, kShared, at, 16, kAllLanes >> (kLanes - 8 * i.more));
    for (int r = 0; r < i.more; ++r) w.out<uint32_t>(i, 3 + r) = out[r];
}

template <class F>
void each(Warp& w, F f) {
    for (int l = 0; l < kLanes; ++l)
        if (w.mask[l]) f(l);
}

// Operands: to (3), from (3), bytes that are valid. extra: bytes.
void copy_async(Warp& w, const Instruction& i) {
    const Register to = shared_addresses(w, i, 0);
    const Wide& from = w.in<uint64_t>(i, 3);
    const Register& valid = w.in<uint32_t>(i, 6);
    Wide sources;
    uint32_t reading = 0;
    each(w, [&](int l) {
        const uint32_t size = i.extra, n = std::min(valid[l], size);
        const uint64_t source = from[l] + w.operand(i, 5);
        if (source % size) throw Fault("a copy's source is not aligned");
        w.copies[l].copy(w.block->shared, to[l], n ? w.block->global(source, n) : nullptr, size, n);
        sources[l] = source;
        if (n) reading |= 1u << l;
    });
    count(w, i, kShared, to, i.extra, w.lanes);
    if (reading) count(w, i, kGlobal, sources, i.extra, reading);
}

uint64_t* barrier_at(Warp& w, uint32_t address) {
    return reinterpret_cast<uint64_t*>(w.block->shared.at(address, 8, 8, "mbarrier"));
}

// Operands: to (3), from (3), bytes, barrier (3).
void copy_bulk(Warp& w, const Instruction& i) {
    const Register to = shared_addresses(w, i, 0), barrier = shared_addresses(w, i, 7);
    const Wide& from = w.in<uint64_t>(i, 3);
    const Register& bytes = w.in<uint32_t>(i, 6);
    each(w, [&](int l) {
        const uint8_t* source = w.block->global(from[l] + w.operand(i, 5), bytes[l]);
        w.block->bulk_copies.copy(w.block->shared, to[l], source, bytes[l], barrier[l]);
    });
    ++w.block->events;
    w.yields = true;
}

void add_barriers() {
    add("mbarrier.init", [](Warp& w, const Instruction& i) {
        const Register at = shared_addresses(w, i, 0);
        each(w, [&](int l) {
            mbarrier_init(barrier_at(w, at[l]), w.in<uint32_t>(i, 3)[l]);
            w.block->proxies.generic_write(at[l], 8, 32 * w.index + l);
        });
    });
    // Operands: barrier (3), count or bytes.
    add("mbarrier.arrive", [](Warp& w, const Instruction& i) {
        const Register at = shared_addresses(w, i, 0);
        each(w, [&](int l) { mbarrier_arrive(barrier_at(w, at[l]), w.in<uint32_t>(i, 3)[l]); });
        ++w.block->events;
    });
    add("mbarrier.arrive.expect_tx", [](Warp& w, const Instruction& i) {
        const Register at = shared_addresses(w, i, 0);
        each(w, [&](int l) { mbarrier_arrive_expect_tx(barrier_at(w, at[l]), w.in<uint32_t>(i, 3)[l]); });
        ++w.block->events;
    });
    // Operands: barrier (3), parity, predicate. It may give up at any time: here at once, and others take
    // turns.
    add("mbarrier.try_wait", [](Warp& w, const Instruction& i) {
        const Register at = shared_addresses(w, i, 0), parity = w.in<uint32_t>(i, 3);
        each(w, [&](int l) {
            const bool done = mbarrier_test(barrier_at(w, at[l]), parity[l]);
            w.out<uint32_t>(i, 4)[l] = done;
            if (done)
                w.block->proxies.barrier();
            else
                w.yields = w.spins = true;
        });
    });
    add("fence.proxy.async", [](Warp& w, const Instruction&) {
        each(w, [&](int l) { w.block->proxies.fence(32 * w.index + l); });
    });
}

// extra: the kind. Operands: d, a descriptor (or registers of a), b descriptor, accumulate, then numbers.
void multiply_async(Warp& w, const Instruction& i) {
    if (!whole_warp(w, i)) return;
    const WgmmaRegisters n = wgmma_registers(i.extra);
    std::vector<Register*> d(n.d), a(i.more);
    for (int r = 0; r < n.d; ++r) d[r] = &w.out<uint32_t>(i, r);
    int k = n.d;
    WgmmaCall call{.kind = i.extra};
    if (i.more) {
        for (auto& r : a) r = &w.out<uint32_t>(i, k++);
        call.a = a.data();
    } else {
        call.a_descriptor = w.in<uint64_t>(i, k++)[0];
    }
    call.b_descriptor = w.in<uint64_t>(i, k++)[0];
    call.accumulate = w.in<uint32_t>(i, k++)[0];
    const auto number = [&] { return static_cast<int>(w.in<uint32_t>(i, k++)[0]); };
    if (n.scaled) call.scale_a = number(), call.scale_b = number();
    if (n.half) {
        if (!i.more) call.transpose_a = number();
        call.transpose_b = number();
    }
    w.products[0].issue(w.block->shared, call, d.data());
}

}  // namespace

void add_tensor_forms() {
    add("mma.sync", multiply);
    add("ldmatrix", load_matrices);
    add("cp.async", copy_async);
    add("cp.async.commit_group",
        [](Warp& w, const Instruction&) { each(w, [&](int l) { w.copies[l].commit(); }); });
    add("cp.async.wait_group",
        [](Warp& w, const Instruction& i) { each(w, [&](int l) { w.copies[l].wait(i.extra); }); });
    add("cp.async.wait_all",
        [](Warp& w, const Instruction&) { each(w, [&](int l) { w.copies[l].wait_all(); }); });
    add("cp.async.bulk", copy_bulk);
    add_barriers();
    add("wgmma.mma_async", multiply_async);
    add("wgmma.fence", [](Warp& w, const Instruction& i) {
        if (whole_warp(w, i)) w.products[0].fence();
    });
    add("wgmma.commit_group", [](Warp& w, const Instruction& i) {
        if (whole_warp(w, i)) w.products[0].commit();
    });
    add("wgmma.wait_group", [](Warp& w, const Instruction& i) {
        if (whole_warp(w, i)) w.products[0].wait(i.extra);
    });
}

}  // namespace ptx
