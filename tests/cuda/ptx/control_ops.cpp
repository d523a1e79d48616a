// Branches, barriers, and instructions by which the lanes of a warp exchange values.
#include "machine.hpp"

namespace ptx {
namespace {

void branch(Warp& w, const Instruction& i) {
    const uint32_t stay = w.active & ~w.lanes;
    if (!stay) {
        w.pc = i.extra;
        return;
    }
    w.leave(w.pc, stay);
    w.active = w.lanes;
    w.pc = i.extra;
}

// The lanes named by a mask, which all have to come. Lanes that are not named must not execute it.
bool members(Warp& w, const Instruction& i, int mask_operand) {
    const uint32_t lane = std::countr_zero(w.lanes);
    const uint32_t named = w.in<uint32_t>(i, mask_operand)[lane];
    if (w.lanes & ~named) throw Fault("a lane executes it that its mask does not name");
    return w.gather(named);
}

// PTX ISA, "shfl.sync". extra: 0 up, 1 down, 2 bfly, 3 idx. Operands: d, p, a, b, c, mask. The value of a
// lane that does not take part is undefined: all ones.
void shuffle(Warp& w, const Instruction& i) {
    if (!members(w, i, 5)) return;
    const Register a = w.in<uint32_t>(i, 2), b = w.in<uint32_t>(i, 3), c = w.in<uint32_t>(i, 4);
    Register &d = w.out<uint32_t>(i, 0), &p = w.out<uint32_t>(i, 1);
    for (int l = 0; l < kLanes; ++l) {
        if (!w.mask[l]) continue;
        const int clamp = c[l] & 31, segment = c[l] >> 8 & 31, by = b[l] & 31;
        const int most = (l & segment) | (clamp & ~segment), least = l & segment;
        int from = l;
        bool inside = false;
        switch (i.extra) {
            case 0:
                from = l - by, inside = from >= most;
                break;
            case 1:
                from = l + by, inside = from <= most;
                break;
            case 2:
                from = l ^ by, inside = from <= most;
                break;
            default:
                from = least | (by & ~segment), inside = from <= most;
        }
        if (!inside) from = l;
        d[l] = w.lanes >> from & 1 ? a[from] : ~0u;
        p[l] = inside;
    }
}

// Operands: d, p, mask. extra: 0 ballot, 1 any, 2 all.
void vote(Warp& w, const Instruction& i) {
    if (!members(w, i, 2)) return;
    uint32_t found = 0;
    const Register& p = w.in<uint32_t>(i, 1);
    for (int l = 0; l < kLanes; ++l)
        if (w.mask[l] && p[l]) found |= 1u << l;
    Register& d = w.out<uint32_t>(i, 0);
    const uint32_t result = i.extra == 0 ? found : i.extra == 1 ? found != 0 : found == w.lanes;
    for (int l = 0; l < kLanes; ++l)
        if (w.mask[l]) d[l] = result;
}

// bar.sync is aligned: all threads of the warp execute it. Operands: barrier, threads (or 0 for all).
void block_barrier(Warp& w, const Instruction& i) {
    if (i.guard >= 0 && w.lanes != w.active) throw Fault("lanes of a warp disagree about an aligned barrier");
    if (!w.gather(w.live)) return;
    const uint32_t lane = std::countr_zero(w.lanes);
    w.block->arrive(w, w.in<uint32_t>(i, 0)[lane], w.in<uint32_t>(i, 1)[lane]);
}

}  // namespace

void add_control_forms() {
    add("bra", branch);
    add("exit", [](Warp& w, const Instruction&) { w.end(w.lanes); });
    add("nothing", [](Warp&, const Instruction&) {});
    add("shfl.sync", shuffle);
    add("vote.sync", vote);
    add("bar.warp.sync", [](Warp& w, const Instruction& i) { members(w, i, 0); });
    add("bar.sync", block_barrier);
}

}  // namespace ptx
