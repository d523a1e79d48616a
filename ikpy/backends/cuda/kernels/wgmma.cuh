// Asynchronous copies and tensor-core products of sm_90 (compiled as sm_90a), each with a host meaning
// (shim/async_proxy.cpp).
//
// Both go through the async proxy of memory: writes of ordinary instructions to shared memory need
// fence_async() by the writing thread and a barrier before they are seen there.
#pragma once
#include "mma.cuh"

namespace ikpy::cuda {

// barriers that count threads and bytes (mbarrier)

struct alignas(8) Barrier {
    unsigned long long state;
};

// A phase ends when `arrivals` threads have arrived and all bytes that were announced are there. By one
// thread; fence_async() and a block barrier make it known to all.
__device__ __forceinline__ void barrier_init(Barrier* barrier, unsigned arrivals) {
#if defined(__CUDACC__)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
                 : "memory");
#else
    shim::barrier_init(barrier, arrivals);
#endif
}
__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
#if defined(__CUDACC__)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#else
    shim::barrier_arrive(barrier, 0);
#endif
}
// Arrives, and announces bytes that asynchronous copies will bring in this phase.
__device__ __forceinline__ void barrier_expect(Barrier* barrier, unsigned bytes) {
#if defined(__CUDACC__)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
#else
    shim::barrier_arrive(barrier, bytes);
#endif
}
// Waits for the end of the phase that has this parity (0 for the first one).
__device__ __forceinline__ void barrier_wait(Barrier* barrier, unsigned parity) {
#if defined(__CUDACC__)
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
#else
    shim::barrier_wait(barrier, parity);
#endif
}

// async proxy

// Makes this thread's ordinary writes to shared memory, and barriers it initialized, known to the async
// proxy.
__device__ __forceinline__ void fence_async() {
#if defined(__CUDACC__)
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
    shim::fence_async();
#endif
}

// Bytes from global to shared memory; both places and the size multiples of 16. Ends a part of a phase of the
// barrier, to which the bytes were announced. By one thread.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, unsigned bytes, Barrier* barrier) {
#if defined(__CUDACC__)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
#else
    shim::copy_bulk(to, from, bytes, barrier);
#endif
}

// products of four warps (wgmma)

// Between other accesses of the sums (in registers) and products.
__device__ __forceinline__ void wgmma_fence() {
#if defined(__CUDACC__)
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
    shim::wgmma_fence();
#endif
}
// The same behind the calculation of operands in registers, which the compiler could put off until later.
template <int N>
__device__ __forceinline__ void wgmma_fence([[maybe_unused]] unsigned (&operands)[N]) {
#if defined(__CUDACC__)
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(operands[i])::"memory");
#endif
    wgmma_fence();
}
__device__ __forceinline__ void wgmma_commit() {
#if defined(__CUDACC__)
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
    shim::wgmma_commit();
#endif
}
// Waits until at most N committed groups of products are under way.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
#if defined(__CUDACC__)
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#else
    shim::wgmma_wait(N);
#endif
}

// As wgmma_wait<Left>, and keeps the compiler from using N sums of products that are done then before.
template <int Left = 0, int N>
__device__ __forceinline__ void wgmma_finish([[maybe_unused]] float (&sums)[N]) {
    wgmma_wait<Left>();
#if defined(__CUDACC__)
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sums[i])::"memory");
#endif
}
template <int Left = 0, int N>
__device__ __forceinline__ void wgmma_finish([[maybe_unused]] int (&sums)[N]) {
    wgmma_wait<Left>();
#if defined(__CUDACC__)
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(sums[i])::"memory");
#endif
}

// Describes a matrix in shared memory for wgmma (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions",
// "Shared Memory Matrix Layout" and "Matrix Descriptor Format"): bits 0-13 its start / 16, 16-29 the leading
// byte offset / 16, which swizzled layouts do not use, 32-45 the stride byte offset / 16, from eight rows to
// the next eight, 49-51 the base offset, 0 as groups of eight rows lie at multiples of 1024, 62-63 the
// swizzle, 1 for 128 bytes.
//
// Rows have 128 bytes, and their pieces of 16 bytes stand at their number xor the row's number modulo 8
// (tiles.cuh). Adding kNextK to a descriptor moves on by 32 bytes, 16 columns of 16 bits or 32 of 8: the
// hardware applies the swizzle to bits of the address, so the start need not be that of a row.
constexpr unsigned long long kNextK = 32 >> 4;
__device__ __forceinline__ unsigned long long matrix_descriptor(const void* rows) {
    constexpr unsigned long long kEightRows = 1024 >> 4, kUnused = 1, kSwizzle128 = 1;
    return (shared_address(rows) & 0x3ffff) >> 4 | kUnused << 16 | kEightRows << 32 | kSwizzle128 << 62;
}

// sums (+)= a b^T: a 64 rows, b 128 rows, 16 columns of bf16 each. Sum i of a thread belongs to row
// 16 warp + lane / 4 + 8 (i / 2 % 2) of a and row 8 (i / 4) + 2 (lane % 4) + i % 2 of b.
__device__ __forceinline__ void wgmma_bf16_n128(float* c, unsigned long long a, unsigned long long b,
                                                bool accumulate) {
#if defined(__CUDACC__)
#define IKPY_SUMS8(i)                                                                           \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
        "+f"(c[i + 6]), "+f"(c[i + 7])
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, add, 1, 1, 0, 0;\n"
        "}"
        : IKPY_SUMS8(0), IKPY_SUMS8(8), IKPY_SUMS8(16), IKPY_SUMS8(24), IKPY_SUMS8(32), IKPY_SUMS8(40),
          IKPY_SUMS8(48), IKPY_SUMS8(56)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
#undef IKPY_SUMS8
#else
    shim::wgmma_bf16(c, 128, a, b, accumulate);
#endif
}

// The fragments of a of wgmma have the layout of those of mma.sync, four registers for 16 rows by 32 columns
// of 8 bits (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk32").
#if !defined(__CUDACC__)
namespace host {
// Rows lane / 4 and lane / 4 + 8 of the fragments of a warp.
inline shim::RowPair row_pair(const unsigned (&a)[4]) {
    return shim::warp_operation<shim::RowPair>(uint4{a[0], a[1], a[2], a[3]}, [](const uint4* all, int l) {
        shim::RowPair rows;
        for (int t = 0; t < 4; ++t) {
            const uint4& v = all[l / 4 * 4 + t];
            const unsigned words[2][2] = {{v.x, v.z}, {v.y, v.w}};
            for (int upper = 0; upper < 2; ++upper)
                for (int half = 0; half < 2; ++half)
                    std::memcpy(&rows.q[upper][16 * half + 4 * t], &words[upper][half], 4);
        }
        return rows;
    });
}
}  // namespace host
#endif

// sums = a b^T: a 64 rows in registers, 16 per warp, b 64 rows, 32 columns of s8 each. Sums as those of
// wgmma_bf16_n128. Registers of a must stay as they are until the product was waited for.
__device__ __forceinline__ void wgmma_s8_n64(int (&c)[32], const unsigned (&a)[4], unsigned long long b) {
#if defined(__CUDACC__)
#define IKPY_SUMS8(i)                                                                           \
    "=r"(c[i]), "=r"(c[i + 1]), "=r"(c[i + 2]), "=r"(c[i + 3]), "=r"(c[i + 4]), "=r"(c[i + 5]), \
        "=r"(c[i + 6]), "=r"(c[i + 7])
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, add;\n"
        "}"
        : IKPY_SUMS8(0), IKPY_SUMS8(8), IKPY_SUMS8(16), IKPY_SUMS8(24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#undef IKPY_SUMS8
#else
    shim::wgmma_s8(c, 64, host::row_pair(a), b, false);
#endif
}

}  // namespace ikpy::cuda
