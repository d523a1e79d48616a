// A multiprocessor that executes PTX: programs, warps of 32 lanes in plain loops, blocks.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "warp_ops.hpp"

namespace ptx {

// As encode.py writes it. op: index of the form; guard: register of the predicate or -1; first, count:
// operands; extra, more: numbers of the form (branch target, state space, length of a vector). accumulators:
// where the number and names of those operands stand that are registers of asynchronous products, 0 for none.
struct Instruction {
    int32_t op, guard, negated, first, count, extra, more, accumulators;
};

struct Warp;
using Handler = void (*)(Warp&, const Instruction&);

// Forms by name; add() is for the files that implement them.
void add(const std::string& name, Handler handler);
void add_scalar_forms();
void add_conversion_forms();
void add_memory_forms();
void add_control_forms();
void add_tensor_forms();

// What the accesses of an instruction moved (traffic.cpp). Of global memory: distinct bytes that lanes asked
// for, sectors of 32 bytes that a request touches, and lines of 128, by the parts of a warp that are served
// at once. Of shared memory: passes that a request takes at least, and those that it takes because words lie
// in one bank.
struct Traffic {
    uint64_t requests = 0, bytes = 0, sectors = 0, lines = 0, least_passes = 0, passes = 0;
};

struct Program {
    std::vector<Instruction> code;
    std::vector<int32_t> operands;
    std::vector<Register> constants;
    std::vector<Wide> wide_constants;
    int registers, wide_registers;
    std::vector<Handler> handlers;  // of code
    // Of code, or empty: not measured.
    mutable std::vector<Traffic> traffic;
};

enum Space { kGeneric, kGlobal, kShared, kLocal, kParam };
// Where generic addresses have the windows of shared and local memory; no host address is that high.
constexpr uint64_t kSharedWindow = 1ull << 60, kLocalWindow = 1ull << 61, kWindowMask = (1ull << 60) - 1;

// The registers that hold %tid.x and so on, first in every program (encode.py, SPECIAL).
enum Special {
    kTid,
    kNtid = 3,
    kCtaid = 6,
    kNctaid = 9,
    kLaneid = 12,
    kWarpid,
    kLanemaskEq,
    kLanemaskLt,
    kSpecials
};

struct Range {
    uint64_t start, end;
};

// order: 0 forward, 1 reverse, else the seed of a random order of blocks, warps and their turns.
struct Launch {
    const Program* program;
    uint32_t grid[3], block[3];
    uint32_t shared_bytes, local_bytes;
    const uint8_t* parameters;
    uint32_t parameter_bytes;
    std::vector<Range> memory;  // that may be accessed, by address
    uint32_t order;
    bool every_lane;  // ldmatrix reads the addresses of all lanes (sm_75)
    Timing timing() const { return order ? Timing::late : Timing::early; }
};

// Lanes of a warp at the same instruction. They may go on, wait for the other lanes of a warp-wide
// instruction, or are held back until the others cannot go on.
enum State { kReady, kWaiting, kHeld };
struct Group {
    int pc;
    uint32_t lanes;
    State state;
};

struct Block;

template <class T>
using Lanes = std::conditional_t<sizeof(T) == 8, Wide, Register>;

struct Warp {
    Block* block;
    const Program* program;
    std::vector<Register> registers;
    std::vector<Wide> wide_registers;
    std::vector<uint8_t> local;
    std::vector<AsyncCopies> copies;   // by lane
    std::vector<WgmmaQueue> products;  // one
    int index;
    uint32_t live;    // lanes that have not ended
    uint32_t active;  // lanes of the present group
    uint32_t lanes;   // lanes that execute the present instruction
    Register mask;    // all ones for each of lanes
    int pc, next_pc;  // next_pc: the lowest of other groups that can go on
    std::vector<Group> others;
    int barrier;  // that it waits at, or -1
    bool yields;  // ends its turn
    bool spins;   // waited in vain for an mbarrier in this turn

    void start();
    // Executes up to this many instructions.
    void run(uint64_t quantum);
    // Continues some lanes elsewhere later.
    void leave(int at, uint32_t some, State state = kReady);
    // Holds some of the present lanes back: nothing but warp-wide instructions keeps lanes together.
    void hold();
    void release();
    // Goes on with the group that stands lowest; none: all lanes have ended.
    void choose();
    void end(uint32_t some);
    // Whether all these lanes are at the present instruction; otherwise the warp goes on with others.
    bool gather(uint32_t needed);
    void set_lanes(uint32_t some);

    // Counts an access of some of the lanes to a state space, of `bytes` each.
    void count(const Instruction& i, Space space, const uint64_t* addresses, uint32_t bytes, uint32_t some);

    int operand(const Instruction& i, int k) const { return program->operands[i.first + k]; }
    template <class T>
    const Lanes<T>& in(const Instruction& i, int k) const {
        const int at = operand(i, k);
        if constexpr (sizeof(T) == 8) {
            return at >= 0 ? wide_registers[at] : program->wide_constants[~at];
        } else {
            return at >= 0 ? registers[at] : program->constants[~at];
        }
    }
    template <class T>
    Lanes<T>& out(const Instruction& i, int k) {
        if constexpr (sizeof(T) == 8)
            return wide_registers[operand(i, k)];
        else
            return registers[operand(i, k)];
    }
};

// Warps at one of the barriers of a block; threads: how many it waits for, 0 for all.
struct BlockBarrier {
    uint32_t arrived = 0, threads = 0;
};

struct Block {
    const Launch& launch;
    std::mt19937 random;
    std::vector<uint8_t> shared_storage;
    Shared shared;
    std::vector<Warp> warps;
    std::deque<WarpGroup> warp_groups;
    BulkCopies bulk_copies;
    ProxyWrites proxies;
    std::array<BlockBarrier, 16> barriers;
    uint64_t events = 0;  // things that may let waiting threads go on
    Range recent{0, 0};
    uint32_t position[3]{};

    explicit Block(const Launch& launch);
    void run(uint64_t number);
    void arrive(Warp& warp, int barrier, uint32_t threads);
    void release_barriers();
    // Lets asynchronous copies arrive.
    void deliver(bool all);
    // Host addresses of accesses to a state space by the present lanes of a warp. Faults if one is outside of
    // it.
    void translate(Warp& warp, Space space, const uint64_t* addresses, uint32_t bytes, uint8_t** out);
    uint8_t* global(uint64_t address, uint32_t bytes);
    // Is told of ordinary writes.
    void stored(const Warp& warp, int lane, const uint8_t* at, uint32_t bytes);

  private:
    void start(uint64_t number);
    std::vector<int> turns();
    bool round();
    void finish();
};

// lanes as values

template <class T>
inline T value(const Lanes<T>& r, int l) {
    if constexpr (std::is_floating_point_v<T>)
        return std::bit_cast<T>(r[l]);
    else
        return static_cast<T>(r[l]);
}
template <class T>
inline auto word(T v) {
    if constexpr (std::is_floating_point_v<T>) {
        return std::bit_cast<std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>>(v);
    } else if constexpr (sizeof(T) == 8) {
        return static_cast<uint64_t>(v);
    } else {
        return static_cast<uint32_t>(v);  // with the sign: registers may be wider than the type
    }
}

// A form whose destination of type D is f of sources of types S, lane by lane.
template <class D, class... S, class F>
void add_lanewise(const std::string& name, F) {
    add(name, [](Warp& w, const Instruction& i) {
        [&]<size_t... K>(std::index_sequence<K...>) {
            auto* d = w.out<D>(i, 0).data();
            const auto& mask = w.mask;
            std::tuple<const Lanes<S>&...> sources(w.in<S>(i, K + 1)...);
#pragma GCC ivdep
            for (int l = 0; l < kLanes; ++l) {
                const auto result = word<D>(F{}(value<S>(std::get<K>(sources), l)...));
                d[l] = mask[l] ? result : d[l];
            }
        }(std::index_sequence_for<S...>{});
    });
}

}  // namespace ptx
