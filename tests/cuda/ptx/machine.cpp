#include "machine.hpp"

#include <algorithm>
#include <numeric>

namespace ptx {
namespace {

std::string hexadecimal(uint64_t x) {
    char text[20];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(x));
    return text;
}

}  // namespace

// warps

void Warp::set_lanes(uint32_t some) {
    lanes = some;
    for (int l = 0; l < kLanes; ++l) mask[l] = some >> l & 1 ? ~0u : 0;
}

void Warp::leave(int at, uint32_t some, State state) {
    others.push_back({at, some, state});
    if (state == kReady) next_pc = std::min(next_pc, at);
}

void Warp::hold() {
    const uint32_t some = active & block->random();
    if (!some || some == active) return;
    leave(pc, some, kHeld);
    active &= ~some;
    set_lanes(active);
}

void Warp::release() {
    for (Group& group : others)
        if (group.state == kHeld) {
            group.state = kReady;
            next_pc = std::min(next_pc, group.pc);
        }
}

void Warp::choose() {
    if (active) leave(pc, active);
    active = 0;
    const auto ready = [](const Group& group) { return group.state == kReady; };
    if (std::none_of(others.begin(), others.end(), ready)) release();
    int lowest = -1;
    for (const Group& group : others)
        if (ready(group) && (lowest < 0 || group.pc < lowest)) lowest = group.pc;
    if (lowest < 0) {
        if (others.empty()) return;
        std::string text = "lanes are missing: ";
        for (const Group& group : others)
            text += "lanes " + hexadecimal(group.lanes) + " wait at #" + std::to_string(group.pc) + "; ";
        throw Fault(text + "of " + hexadecimal(live) + " that have not ended");
    }
    next_pc = static_cast<int>(program->code.size());
    std::vector<Group> rest;
    for (const Group& group : others) {
        if (ready(group) && group.pc == lowest) {
            active |= group.lanes;
        } else {
            rest.push_back(group);
            if (ready(group)) next_pc = std::min(next_pc, group.pc);
        }
    }
    others = rest;
    pc = lowest;
    set_lanes(active);
}

void Warp::end(uint32_t some) {
    live &= ~some;
    active &= ~some;
    set_lanes(active);
    if (!active) choose();
}

bool Warp::gather(uint32_t needed) {
    if ((lanes & needed) == needed) return true;
    const int here = pc - 1;
    if (program->code[here].guard >= 0 && lanes != active) throw Fault("lanes are missing by its predicate");
    std::erase_if(others, [&](const Group& group) {
        if (group.pc == here) active |= group.lanes;
        return group.pc == here;
    });
    set_lanes(active);
    if ((lanes & needed) == needed) return true;
    if (needed & ~live)
        throw Fault("lanes " + hexadecimal(needed & ~live) + " are missing, which have ended");
    leave(here, active, kWaiting);
    active = 0;
    choose();
    return false;
}

void Warp::start() {
    std::memset(static_cast<void*>(registers.data()), 0xff, registers.size() * sizeof(Register));
    std::memset(static_cast<void*>(wide_registers.data()), 0xff, wide_registers.size() * sizeof(Wide));
    std::fill(local.begin(), local.end(), 0xff);
    const uint32_t* size = block->launch.block;
    const uint32_t threads = size[0] * size[1] * size[2];
    live = 0;
    for (uint32_t l = 0; l < kLanes; ++l) {
        const uint32_t thread = 32 * index + l;
        if (thread < threads) live |= 1u << l;
        const uint32_t tid[3] = {thread % size[0], thread / size[0] % size[1], thread / size[0] / size[1]};
        for (int d = 0; d < 3; ++d) {
            registers[kTid + d][l] = tid[d];
            registers[kNtid + d][l] = size[d];
            registers[kCtaid + d][l] = block->position[d];
            registers[kNctaid + d][l] = block->launch.grid[d];
        }
        registers[kLaneid][l] = l;
        registers[kWarpid][l] = index;
        registers[kLanemaskEq][l] = 1u << l;
        registers[kLanemaskLt][l] = (1u << l) - 1;
    }
    active = live;
    pc = 0;
    next_pc = static_cast<int>(program->code.size());
    others.clear();
    barrier = -1;
    yields = spins = false;
    copies.clear();
    for (int l = 0; l < kLanes; ++l) copies.emplace_back(32 * index + l, block->launch.timing());
    products.clear();
    products.emplace_back(index % 4, &block->warp_groups[index / 4], block->launch.timing());
    set_lanes(active);
}

void Warp::run(uint64_t quantum) {
    const Instruction* code = program->code.data();
    const Handler* handlers = program->handlers.data();
    yields = spins = false;
    if (block->launch.order > 1 && barrier < 0) hold();
    for (; quantum && live && !yields && barrier < 0; --quantum) {
        if (pc >= next_pc) choose();
        const int at = pc++;
        const Instruction& i = code[at];
        uint32_t some = active;
        if (i.guard >= 0) {
            const Register& p = registers[i.guard];
            uint32_t bits = 0;
            for (int l = 0; l < kLanes; ++l) bits |= static_cast<uint32_t>(p[l] != 0) << l;
            some &= i.negated ? ~bits : bits;
            if (!some) continue;
        }
        if (some != lanes) set_lanes(some);
        try {
            if (i.accumulators)
                for (int k = 1; k <= program->operands[i.accumulators]; ++k)
                    products[0].touch(&registers[program->operands[i.accumulators + k]]);
            handlers[at](*this, i);
        } catch (const Fault& fault) {
            const uint32_t* b = block->position;
            throw Fault("#" + std::to_string(at) + " block (" + std::to_string(b[0]) + ", " +
                        std::to_string(b[1]) + ", " + std::to_string(b[2]) + ") warp " +
                        std::to_string(index) + " lanes " + hexadecimal(lanes) + ": " + fault.what());
        }
    }
}

// blocks

Block::Block(const Launch& launch)
    : launch(launch),
      random(launch.order),
      shared_storage(launch.shared_bytes + 1024),
      proxies(launch.shared_bytes, launch.block[0] * launch.block[1] * launch.block[2] + 32) {
    const auto start = reinterpret_cast<uintptr_t>(shared_storage.data());
    shared = {shared_storage.data() + (1024 - start % 1024) % 1024, launch.shared_bytes, &proxies};
    const uint32_t n = (launch.block[0] * launch.block[1] * launch.block[2] + 31) / 32;
    warps.resize(n);
    for (uint32_t k = 0; k < n; ++k) {
        Warp& w = warps[k];
        w.block = this, w.program = launch.program, w.index = static_cast<int>(k);
        w.registers.resize(launch.program->registers);
        w.wide_registers.resize(launch.program->wide_registers);
        w.local.resize(launch.local_bytes * kLanes);
    }
}

void Block::start(uint64_t number) {
    position[0] = static_cast<uint32_t>(number % launch.grid[0]);
    position[1] = static_cast<uint32_t>(number / launch.grid[0] % launch.grid[1]);
    position[2] = static_cast<uint32_t>(number / launch.grid[0] / launch.grid[1]);
    std::memset(shared.base, 0xff, shared.size);
    barriers.fill({});
    bulk_copies = BulkCopies(launch.timing());
    proxies = ProxyWrites(launch.shared_bytes, static_cast<int>(32 * warps.size()));
    warp_groups.clear();
    warp_groups.resize((warps.size() + 3) / 4);
    for (Warp& warp : warps) warp.start();
}

std::vector<int> Block::turns() {
    std::vector<int> order(warps.size());
    std::iota(order.begin(), order.end(), 0);
    if (launch.order == 1) std::reverse(order.begin(), order.end());
    if (launch.order > 1) std::shuffle(order.begin(), order.end(), random);
    return order;
}

// Whether something happened that is more than waiting.
bool Block::round() {
    const uint64_t before = events;
    bool busy = false;
    for (const int k : turns()) {
        Warp& w = warps[k];
        if (!w.live || w.barrier >= 0) continue;
        // Enough for a loop around mbarrier.try_wait, or a warp that only spins looks busy.
        w.run(launch.order > 1 ? 16 + random() % 400 : 2000);
        if (w.spins) w.release();
        busy = busy || !w.spins;
        if (!w.live) ++events;
        release_barriers();
        if (launch.order == 0) deliver(true);
    }
    return busy || events != before;
}

void Block::deliver(bool all) {
    while (bulk_copies.pending()) {
        bulk_copies.deliver(shared, launch.order > 1 ? random() % bulk_copies.pending() : 0);
        ++events;
        if (!all) return;
    }
}

void Block::run(uint64_t number) {
    start(number);
    int idle = 0;
    while (std::any_of(warps.begin(), warps.end(), [](const Warp& w) { return w.live != 0; })) {
        if (round()) {
            idle = 0;
            continue;
        }
        if (bulk_copies.pending()) {
            deliver(false);
        } else if (++idle > 1000) {
            std::string text = "nobody can go on:";
            for (const Warp& w : warps)
                if (w.live)
                    text += " warp " + std::to_string(w.index) +
                            (w.barrier >= 0 ? " waits at barrier " + std::to_string(w.barrier)
                                            : " waits for an mbarrier at #" + std::to_string(w.pc)) +
                            ";";
            throw Fault(text);
        }
    }
    finish();
}

void Block::finish() {
    if (bulk_copies.pending()) throw Fault("the block ends while bulk copies are under way");
    for (const Warp& w : warps) w.products[0].finish();
    for (const WarpGroup& group : warp_groups) group.finish();
}

void Block::arrive(Warp& warp, int barrier, uint32_t threads) {
    if (barrier < 0 || barrier >= 16) throw Fault("there are 16 barriers");
    if (threads % 32) throw Fault("the number of threads of a barrier is not a multiple of 32");
    BlockBarrier& b = barriers[barrier];
    if (b.arrived && b.threads != threads) throw Fault("warps disagree about the threads of a barrier");
    b.threads = threads;
    ++b.arrived;
    warp.barrier = barrier;
}

void Block::release_barriers() {
    const auto live = static_cast<uint32_t>(
        std::count_if(warps.begin(), warps.end(), [](const Warp& w) { return w.live != 0; }));
    for (int k = 0; k < 16; ++k) {
        BlockBarrier& b = barriers[k];
        if (!b.arrived || b.arrived < (b.threads ? b.threads / 32 : live)) continue;
        for (Warp& w : warps)
            if (w.barrier == k) w.barrier = -1;
        b = {};
        proxies.barrier();
        ++events;
    }
}

// memory

uint8_t* Block::global(uint64_t address, uint32_t bytes) {
    if (address < recent.start || address + bytes > recent.end || address + bytes < address) {
        const auto& memory = launch.memory;
        auto at = std::upper_bound(memory.begin(), memory.end(), address,
                                   [](uint64_t a, const Range& range) { return a < range.start; });
        if (at == memory.begin() || address + bytes > std::prev(at)->end || address + bytes < address)
            throw Fault(std::to_string(bytes) + " bytes at " + hexadecimal(address) +
                        " are not memory of the device");
        recent = *std::prev(at);
    }
    return reinterpret_cast<uint8_t*>(address);
}

void Block::translate(Warp& warp, Space space, const uint64_t* addresses, uint32_t bytes, uint8_t** out) {
    for (int l = 0; l < kLanes; ++l) {
        if (!warp.mask[l]) continue;
        uint64_t at = addresses[l];
        Space where = space;
        if (at % bytes)
            throw Fault("address " + hexadecimal(at) + " of lane " + std::to_string(l) +
                        " is not a multiple of " + std::to_string(bytes));
        if (where == kGeneric) {
            where = at & kSharedWindow ? kShared : at & kLocalWindow ? kLocal : kGlobal;
            if (where != kGlobal) at &= kWindowMask;
        }
        const auto inside = [&](uint64_t size, const char* what) {
            if (at + bytes > size || at + bytes < at)
                throw Fault(std::to_string(bytes) + " bytes at " + hexadecimal(at) + " of " + what +
                            " memory, which has " + std::to_string(size) + " (lane " + std::to_string(l) +
                            ")");
        };
        switch (where) {
            case kShared:
                inside(shared.size, "shared");
                out[l] = shared.base + at;
                break;
            case kLocal:
                inside(launch.local_bytes, "local");
                out[l] = warp.local.data() + l * launch.local_bytes + at;
                break;
            case kParam:
                inside(launch.parameter_bytes, "parameter");
                out[l] = const_cast<uint8_t*>(launch.parameters) + at;
                break;
            default:
                out[l] = global(at, bytes);
        }
    }
}

void Block::stored(const Warp& warp, int lane, const uint8_t* at, uint32_t bytes) {
    const auto offset = static_cast<uint64_t>(at - shared.base);
    if (offset < shared.size)
        proxies.generic_write(static_cast<uint32_t>(offset), bytes, 32 * warp.index + lane);
}

}  // namespace ptx
