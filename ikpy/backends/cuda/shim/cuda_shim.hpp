// Host meaning of the CUDA dialect that the kernels are written in, so that the same sources run on the CPU.
//
// Blocks run one after the other; the threads of a block are fibers. A barrier, a shuffle or a vote yields
// until all threads concerned have arrived. Whatever would hang or be undefined on a device (a barrier that
// some threads never reach, a warp operation with missing lanes) ends the launch with an error.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __constant__ const
#define __shared__ static
#if !defined(__launch_bounds__)  // else somebody looks for them (emulator.py)
#define __launch_bounds__(...)
#endif
#define __align__(n) alignas(n)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace ikpy::shim {

constexpr int kWarp = 32;
constexpr size_t kSlotBytes = 64;
constexpr size_t kMaxShared = 228 * 1024;

// Operands and results of one warp operation, one slot per lane.
struct WarpSlots {
    alignas(16) uint8_t in[kWarp][kSlotBytes];
    alignas(16) uint8_t out[kWarp][kSlotBytes];
};

// Those of the running thread, and its lane.
struct WarpPlace {
    WarpSlots& slots;
    int lane;
};
WarpPlace warp_place();
void block_barrier();
void warp_barrier();
// Waits for all lanes of the warp; the last one to arrive calls combine(slots).
void warp_meet(void (*combine)(WarpSlots&, const void*), const void* context);
uint8_t* dynamic_shared();
// Asynchronous copies of 16 bytes: done at once, or, with threads in descending order, as late as allowed.
void copy16(void* to, const void* from, bool valid);
void commit_copies();
void wait_copies(int groups_left);

// barriers in shared memory, bulk copies and products of four warps: async_proxy.cpp

// Address as devices number shared memory; dynamic memory starts at a multiple of 128 that is none of 1024.
unsigned shared_address(const void* p);
void barrier_init(void* barrier, unsigned arrivals);
// With bytes that copies are to bring.
void barrier_arrive(void* barrier, unsigned bytes);
void barrier_wait(void* barrier, unsigned parity);
void fence_async();
void copy_bulk(void* to, const void* from, unsigned bytes, void* barrier);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int groups_left);
// The calling thread's part of c (+)= a b^T: a 64 rows, b n rows, 16 columns of bf16.
void wgmma_bf16(float* c, int n, uint64_t a, uint64_t b, bool accumulate);
// Two rows of 32 columns of s8.
struct RowPair {
    int8_t q[2][32];
};
// As wgmma_bf16 with 32 columns of s8, and a from registers: the thread's rows (first, first + 8).
void wgmma_s8(int* c, int n, const RowPair& rows, uint64_t b, bool accumulate);

// Ends the launch with an error, as a misaligned access does on a device.
[[noreturn]] void fail(const char* reason);
// A load through the cache for memory that stays as it is while the kernel runs (checked builds).
void note_read_only(const void* p, size_t bytes);
// An atomic operation (checked builds).
void note_atomic(const void* p, size_t bytes);

// An integral float as conversions of devices give it.
inline int saturated(float x) {
    if (!(std::fabs(x) < 2147483648.0f)) return std::isnan(x) ? 0 : x < 0 ? -2147483647 - 1 : 2147483647;
    return static_cast<int>(x);
}

// Not seen by the checks of races.cpp.
#if defined(__SANITIZE_THREAD__)
#define IKPY_UNCHECKED __attribute__((no_sanitize_thread, noinline))
#else
#define IKPY_UNCHECKED
#endif

// Kernels ask all lanes, as their blocks are multiples of 32.
inline void check_mask(unsigned mask) {
    if (mask != 0xffffffffu) fail("a warp operation that is not for all lanes");
}

template <class T, class F>
IKPY_UNCHECKED inline T atomically(T* p, F f) {
#if defined(__SANITIZE_THREAD__)
    note_atomic(p, sizeof(T));
#endif
    const T old = *p;
    *p = f(old);
    return old;
}
template <class T>
IKPY_UNCHECKED inline T load_read_only(const T* p) {
#if defined(__SANITIZE_THREAD__)
    note_read_only(p, sizeof(T));
#endif
    return *p;
}

// f(inputs of all lanes, outputs of all lanes)
template <class Out, class In, class F>
inline Out whole_warp_operation(const In& in, F f) {
    static_assert(sizeof(In) <= kSlotBytes && sizeof(Out) <= kSlotBytes);
    const auto [slots, self] = warp_place();
    std::memcpy(slots.in[self], &in, sizeof in);
    warp_meet(
        [](WarpSlots& s, const void* context) {
            In all[kWarp];
            Out out[kWarp];
            for (int l = 0; l < kWarp; ++l) std::memcpy(&all[l], s.in[l], sizeof(In));
            (*static_cast<const F*>(context))(all, out);
            for (int l = 0; l < kWarp; ++l) std::memcpy(s.out[l], &out[l], sizeof(Out));
        },
        &f);
    Out out;
    std::memcpy(&out, slots.out[self], sizeof out);
    return out;
}

// out of every lane = f(inputs of all lanes, lane)
template <class Out, class In, class F>
inline Out warp_operation(const In& in, F f) {
    return whole_warp_operation<Out>(in, [f](const In* all, Out* out) {
        for (int l = 0; l < kWarp; ++l) out[l] = f(all, l);
    });
}

// kernels by name

using Invoke = void (*)(void** arguments);
struct Parameter {
    size_t bytes, alignment;
};
// parameters: those of the kernel, in order, and one of zero bytes.
void register_kernel(const char* name, Invoke invoke, const Parameter* parameters);

template <auto Kernel>
struct Invoker;
template <class... Args, void (*Kernel)(Args...)>
struct Invoker<Kernel> {
    static constexpr Parameter kParameters[] = {{sizeof(Args), alignof(Args)}..., {0, 1}};
    template <size_t... I>
    static void call(void** arguments, std::index_sequence<I...>) {
        Kernel(*static_cast<std::remove_cv_t<Args>*>(arguments[I])...);
    }
    static void invoke(void** arguments) { call(arguments, std::index_sequence_for<Args...>{}); }
};

struct Registration {
    Registration(const char* name, Invoke invoke, const Parameter* parameters) {
        register_kernel(name, invoke, parameters);
    }
};

}  // namespace ikpy::shim

#define IKPY_EXPORT(kernel)                                                                        \
    static const ::ikpy::shim::Registration ikpy_registration_##kernel {                           \
        #kernel, ::ikpy::shim::Invoker<kernel>::invoke, ::ikpy::shim::Invoker<kernel>::kParameters \
    }

inline void __syncthreads() { ikpy::shim::block_barrier(); }
inline void __syncwarp() { ikpy::shim::warp_barrier(); }

template <class T>
inline T __shfl_xor_sync(unsigned lanes, T value, int mask) {
    ikpy::shim::check_mask(lanes);
    return ikpy::shim::warp_operation<T>(value, [mask](const T* all, int l) { return all[l ^ mask]; });
}
template <class T>
inline T __shfl_sync(unsigned lanes, T value, int source) {
    ikpy::shim::check_mask(lanes);
    struct Operand {
        T value;
        int source;
    };
    return ikpy::shim::warp_operation<T>(
        Operand{value, source}, [](const Operand* all, int l) { return all[all[l].source & 31].value; });
}
template <class T>
inline T __shfl_up_sync(unsigned lanes, T value, int delta) {
    ikpy::shim::check_mask(lanes);
    return ikpy::shim::warp_operation<T>(
        value, [delta](const T* all, int l) { return l >= delta ? all[l - delta] : all[l]; });
}
inline unsigned __ballot_sync(unsigned lanes, int predicate) {
    ikpy::shim::check_mask(lanes);
    return ikpy::shim::warp_operation<unsigned>(predicate, [](const int* all, int) {
        unsigned bits = 0;
        for (int l = 0; l < ikpy::shim::kWarp; ++l) bits |= unsigned(all[l] != 0) << l;
        return bits;
    });
}

// Fibers never run at the same time, so plain operations are atomic.
template <class T>
inline T atomicAdd(T* p, T value) {
    return ikpy::shim::atomically(p, [value](T old) { return old + value; });
}
inline unsigned atomicOr(unsigned* p, unsigned value) {
    return ikpy::shim::atomically(p, [value](unsigned old) { return old | value; });
}
inline unsigned atomicMax(unsigned* p, unsigned value) {
    return ikpy::shim::atomically(p, [value](unsigned old) { return old > value ? old : value; });
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned s = selector >> (4 * i) & 15;
        unsigned byte = bytes >> (8 * (s & 7)) & 255;
        if (s & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << (8 * i);
    }
    return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i)
        c += static_cast<int8_t>(static_cast<unsigned>(a) >> (8 * i)) *
             static_cast<int8_t>(static_cast<unsigned>(b) >> (8 * i));
    return c;
}
inline float __int_as_float(int x) {
    float y;
    std::memcpy(&y, &x, 4);
    return y;
}
inline int __float_as_int(float x) {
    int y;
    std::memcpy(&y, &x, 4);
    return y;
}
inline unsigned __float_as_uint(float x) { return static_cast<unsigned>(__float_as_int(x)); }
inline float __uint_as_float(unsigned x) { return __int_as_float(static_cast<int>(x)); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
template <class T>
inline T __ldg(const T* p) {
    if (reinterpret_cast<uintptr_t>(p) % sizeof(T)) ikpy::shim::fail("misaligned read");
    return ikpy::shim::load_read_only(p);
}

using std::fabs;
using std::fmax;
using std::fmin;
template <class T>
inline T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
inline T max(T a, T b) {
    return a < b ? b : a;
}
