// Asynchronous copies and tensor-core products of sm_90 (compiled as sm_90a), each with a host meaning
// (shim/async_proxy.cpp).
//
// Both go through the async proxy of memory: writes of ordinary instructions to shared memory need
// fence_async() by the writing thread and a barrier before they are seen there.
#pragma once
#include "mma.cuh"

namespace ikpy::cuda {

// ---- barriers that count threads and bytes (mbarrier) ----

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

// ---- async proxy ----

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

// ---- products of four warps (wgmma) ----

// Between other accesses of the sums (in registers) and products.
__device__ __forceinline__ void wgmma_fence() {
#if defined(__CUDACC__)
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
    shim::wgmma_fence();
#endif
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

// Waits for all products that add to N sums, and keeps the compiler from using the sums before.
template <int N>
__device__ __forceinline__ void wgmma_finish([[maybe_unused]] float (&sums)[N]) {
    wgmma_wait<0>();
#if defined(__CUDACC__)
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sums[i])::"memory");
#endif
}

// Describes rows of 128 bytes in shared memory whose pieces of 16 bytes are swizzled as in tiles.cuh; the
// first row lies at a multiple of 1024. Adding kNextK moves on by 16 columns of 16 bits.
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

}  // namespace ikpy::cuda
