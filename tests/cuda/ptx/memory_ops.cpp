// Loads, stores, atomic operations and addresses.
#include "machine.hpp"

namespace ptx {
namespace {

// Operands: the address register, 1 if that has 64 bits, an offset in bytes, then values. extra: space; more:
// how many values.
void addresses(Warp& w, const Instruction& i, uint32_t bytes, uint8_t** out) {
    uint64_t at[kLanes];
    const auto offset = static_cast<uint64_t>(static_cast<int64_t>(w.operand(i, 2)));
    if (w.operand(i, 1)) {
        const Wide& base = w.in<uint64_t>(i, 0);
        for (int l = 0; l < kLanes; ++l) at[l] = base[l] + offset;
    } else {
        const Register& base = w.in<uint32_t>(i, 0);
        for (int l = 0; l < kLanes; ++l) at[l] = base[l] + offset;
    }
    w.block->translate(w, static_cast<Space>(i.extra), at, bytes, out);
    w.count(i, static_cast<Space>(i.extra), at, bytes, w.lanes);
}

// T: as it lies in memory; D: the register, which may be wider.
template <class T, class D>
void add_load(const std::string& name) {
    add(name, [](Warp& w, const Instruction& i) {
        uint8_t* at[kLanes];
        addresses(w, i, sizeof(T) * i.more, at);
        for (int v = 0; v < i.more; ++v) {
            auto& d = w.out<D>(i, 3 + v);
            for (int l = 0; l < kLanes; ++l)
                if (w.mask[l]) {
                    T x;
                    std::memcpy(&x, at[l] + v * sizeof(T), sizeof(T));
                    d[l] = word<D>(static_cast<D>(x));
                }
        }
    });
}
template <class T, class S>
void add_store(const std::string& name) {
    add(name, [](Warp& w, const Instruction& i) {
        uint8_t* at[kLanes];
        addresses(w, i, sizeof(T) * i.more, at);
        for (int l = 0; l < kLanes; ++l)
            if (w.mask[l]) {
                for (int v = 0; v < i.more; ++v) {
                    const T x = static_cast<T>(w.in<S>(i, 3 + v)[l]);
                    std::memcpy(at[l] + v * sizeof(T), &x, sizeof(T));
                }
                w.block->stored(w, l, at[l], sizeof(T) * i.more);
            }
        ++w.block->events;
    });
}

// Operands: address as above, result, operand.
template <class T, class F>
void add_atomic(const std::string& name, F) {
    add(name, [](Warp& w, const Instruction& i) {
        uint8_t* at[kLanes];
        addresses(w, i, sizeof(T), at);
        auto& d = w.out<T>(i, 3);
        const auto operand = w.in<T>(i, 4);
        for (int l = 0; l < kLanes; ++l)
            if (w.mask[l]) {
                T old;
                std::memcpy(&old, at[l], sizeof(T));
                const T now = F{}(old, value<T>(operand, l));
                std::memcpy(at[l], &now, sizeof(T));
                w.block->stored(w, l, at[l], sizeof(T));
                d[l] = word<T>(old);
            }
        ++w.block->events;
    });
}
template <class T>
void add_atomics(const std::string& t) {
    add_atomic<T>("atom.add." + t, [](T a, T b) { return static_cast<T>(a + b); });
    add_atomic<T>("atom.min." + t, [](T a, T b) { return a < b ? a : b; });
    add_atomic<T>("atom.max." + t, [](T a, T b) { return a > b ? a : b; });
    add_atomic<T>("atom.exch." + t, [](T, T b) { return b; });
}

}  // namespace

void add_memory_forms() {
    add_load<uint8_t, uint32_t>("ld.u8.r32"), add_load<int8_t, int16_t>("ld.s8.r16");
    add_load<int8_t, int32_t>("ld.s8.r32"), add_load<uint8_t, uint64_t>("ld.u8.r64");
    add_load<int8_t, int64_t>("ld.s8.r64"), add_load<uint8_t, uint16_t>("ld.u8.r16");
    add_load<uint16_t, uint16_t>("ld.u16.r16"), add_load<int16_t, int16_t>("ld.s16.r16");
    add_load<uint16_t, uint32_t>("ld.u16.r32"), add_load<int16_t, int32_t>("ld.s16.r32");
    add_load<uint16_t, uint64_t>("ld.u16.r64"), add_load<int16_t, int64_t>("ld.s16.r64");
    add_load<uint32_t, uint32_t>("ld.u32.r32"), add_load<int32_t, int32_t>("ld.s32.r32");
    add_load<uint32_t, uint64_t>("ld.u32.r64"), add_load<int32_t, int64_t>("ld.s32.r64");
    add_load<uint64_t, uint64_t>("ld.u64.r64");
    add_store<uint8_t, uint32_t>("st.8.r32"), add_store<uint16_t, uint32_t>("st.16.r32");
    add_store<uint32_t, uint32_t>("st.32.r32"), add_store<uint64_t, uint64_t>("st.64.r64");
    add_store<uint8_t, uint64_t>("st.8.r64"), add_store<uint16_t, uint64_t>("st.16.r64");
    add_store<uint32_t, uint64_t>("st.32.r64");
    add_atomics<uint32_t>("u32"), add_atomics<int32_t>("s32"), add_atomics<uint64_t>("u64");
    add_atomic<uint32_t>("atom.or.u32", [](uint32_t a, uint32_t b) { return a | b; });
    add_atomic<float>("atom.add.f32", [](float a, float b) { return a + b; });
    // Addresses of state spaces and generic ones; global ones are the same.
    add_lanewise<uint64_t, uint64_t>("cvta.same", [](uint64_t a) { return a; });
    add_lanewise<uint64_t, uint64_t>("cvta.shared", [](uint64_t a) { return a | kSharedWindow; });
    add_lanewise<uint64_t, uint64_t>("cvta.local", [](uint64_t a) { return a | kLocalWindow; });
    add_lanewise<uint64_t, uint64_t>("cvta.to.window", [](uint64_t a) { return a & kWindowMask; });
}

}  // namespace ptx
