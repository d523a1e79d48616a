// Tensor-core products, their fragments, and asynchronous copies, each with a host meaning.
//
// Fragments are those of mma.sync: lane l holds of A rows l / 4 and l / 4 + 8, of B column l / 4, of C rows
// l / 4 and l / 4 + 8 and columns 2 (l % 4) and 2 (l % 4) + 1.
#pragma once
#include "common.cuh"

namespace ikpy::cuda {

// shared memory

#if defined(__CUDACC__)
__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
#else
inline unsigned shared_address(const void* p) { return shim::shared_address(p); }
#endif

// 16 bytes from global to shared memory; both aligned to 16. Zeros if not valid.
__device__ __forceinline__ void copy16_async(void* to, const void* from, bool valid) {
#if !defined(__CUDACC__)
    shim::copy16(to, from, valid);
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(valid ? 16 : 0));
#else
    *static_cast<uint4*>(to) = valid ? *static_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
#endif
}
__device__ __forceinline__ void commit_copies() {
#if !defined(__CUDACC__)
    shim::commit_copies();
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;");
#endif
}
// Waits until at most N committed groups are under way.
template <int N>
__device__ __forceinline__ void wait_copies() {
#if !defined(__CUDACC__)
    shim::wait_copies(N);
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N));
#endif
}

// Asks for the cache line of p in the L2 cache.
__device__ __forceinline__ void prefetch_l2([[maybe_unused]] const void* p) {
#if defined(__CUDACC__)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

#if !defined(__CUDACC__)
namespace host {
// Rows of matrices by the lanes that give their addresses.
inline const void* matrix_row(const void* row) {
    if (reinterpret_cast<uintptr_t>(row) % 16) shim::fail("a misaligned row of a matrix");
    return row;
}
}  // namespace host
#endif

// Four 8 x 16-byte matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrix4(unsigned* r, const void* row) {
#if defined(__CUDACC__)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
#else
    const uint4 v = shim::warp_operation<uint4>(host::matrix_row(row), [](const void* const* rows, int l) {
        unsigned out[4];
        for (int i = 0; i < 4; ++i) out[i] = static_cast<const unsigned*>(rows[8 * i + l / 4])[l % 4];
        return uint4{out[0], out[1], out[2], out[3]};
    });
    r[0] = v.x, r[1] = v.y, r[2] = v.z, r[3] = v.w;
#endif
}
// As load_matrix4 with every matrix of 16-bit elements transposed.
__device__ __forceinline__ void load_matrix4_transposed(unsigned* r, const void* row) {
#if defined(__CUDACC__)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
#else
    const uint4 v = shim::warp_operation<uint4>(host::matrix_row(row), [](const void* const* rows, int l) {
        unsigned out[4];
        for (int i = 0; i < 4; ++i) {
            const int first = 8 * i + 2 * (l % 4), column = l / 4;
            out[i] = static_cast<const uint16_t*>(rows[first])[column] |
                     static_cast<unsigned>(static_cast<const uint16_t*>(rows[first + 1])[column]) << 16;
        }
        return uint4{out[0], out[1], out[2], out[3]};
    });
    r[0] = v.x, r[1] = v.y, r[2] = v.z, r[3] = v.w;
#endif
}

#if !defined(__CUDACC__)
namespace host {
// Products of fragments whose rows have `Words` registers of elements in each of 4 lanes.
template <class Sum, int Words>
struct Operands {
    unsigned a[2 * Words], b[Words];
    Sum c[4];
};
template <class Sum>
struct Result {
    Sum c[4];
};
// a[2 w + h]: word w of row l / 4 + 8 h; b[w]: word w of column l / 4. element(word, e): the e-th of N
// elements of a word. Sums of int8 products are exact as floats, and start at 0 to stay so.
template <int N, class Sum, int Words, class Element>
inline void multiply(const Operands<Sum, Words>* all, Result<Sum>* out, Element element) {
    constexpr int kDepth = 4 * Words * N;
    float a[16][kDepth], b[kDepth][8];
    for (int l = 0; l < 32; ++l)
        for (int w = 0; w < Words; ++w)
            for (int e = 0; e < N; ++e) {
                const int k = (4 * w + l % 4) * N + e;
                for (int h = 0; h < 2; ++h) a[l / 4 + 8 * h][k] = element(all[l].a[2 * w + h], e);
                b[k][l / 4] = element(all[l].b[w], e);
            }
    for (int row = 0; row < 16; ++row) {
        constexpr bool is_float = std::is_same_v<Sum, float>;
        const auto place = [row](auto* lanes, int column) {
            return &lanes[4 * (row % 8) + column / 2].c[2 * (row / 8) + column % 2];
        };
        float sums[8];
        for (int c = 0; c < 8; ++c) sums[c] = is_float ? static_cast<float>(*place(all, c)) : 0.0f;
        for (int k = 0; k < kDepth; ++k)
            for (int c = 0; c < 8; ++c) sums[c] += a[row][k] * b[k][c];
        for (int c = 0; c < 8; ++c) {
            *place(out, c) = static_cast<Sum>(sums[c]);
            if constexpr (!is_float) *place(out, c) += *place(all, c);
        }
    }
}
// N elements per word.
template <int N, class Sum, int Words, class Element>
inline void product(Sum* c, const unsigned* a, const unsigned* b, Element element) {
    Operands<Sum, Words> in;
    std::memcpy(in.a, a, sizeof in.a);
    std::memcpy(in.b, b, sizeof in.b);
    std::memcpy(in.c, c, sizeof in.c);
    const auto out = shim::whole_warp_operation<Result<Sum>>(
        in, [element](const Operands<Sum, Words>* all, Result<Sum>* results) {
            multiply<N>(all, results, element);
        });
    std::memcpy(c, out.c, sizeof out.c);
}
inline float s8_element(unsigned word, int e) { return static_cast<int8_t>(word >> (8 * e)); }
}  // namespace host
#endif

// integer products

// What integer sums start at: the bits of the float 1.5 * 2^23, so that the bits of a sum (below 2^22) are
// those of that float and the sum. Conversions of integers take four times as long as additions on sm_75 and
// sm_80.
constexpr int kSumStart = 0x4B400000;
constexpr float kSumStartValue = 12582912.0f;

// The number that a sum is.
__device__ __forceinline__ float sum_value(int sum) { return __int_as_float(sum) - kSumStartValue; }

// c = start + a * b, int8, 16 x 8 x 32: a 4 registers, b 2.
__device__ __forceinline__ void mma_s8_k32(int* c, const unsigned* a, const unsigned* b, const int4& start) {
#if !defined(__CUDACC__)
    std::memcpy(c, &start, sizeof start);
    host::product<4, int, 2>(c, a, b, host::s8_element);
#elif __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(start.x), "r"(start.y),
          "r"(start.z), "r"(start.w));
#else
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%4,%5};"
                     : "=r"(c[2 * h]), "=r"(c[2 * h + 1])
                     : "r"(a[h]), "r"(b[0]), "r"(h ? start.z : start.x), "r"(h ? start.w : start.y));
        asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
                     : "+r"(c[2 * h]), "+r"(c[2 * h + 1])
                     : "r"(a[2 + h]), "r"(b[1]));
    }
#endif
}

// c = start + a * b, int8, 16 x 8 x 16: a 2 registers, b 1.
__device__ __forceinline__ void mma_s8_k16(int* c, const unsigned* a, unsigned b, const int4& start) {
#if !defined(__CUDACC__)
    std::memcpy(c, &start, sizeof start);
    host::product<4, int, 1>(c, a, &b, host::s8_element);
#elif __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b), "r"(start.x), "r"(start.y), "r"(start.z), "r"(start.w));
#else
#pragma unroll
    for (int h = 0; h < 2; ++h)
        asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%4,%5};"
                     : "=r"(c[2 * h]), "=r"(c[2 * h + 1])
                     : "r"(a[h]), "r"(b), "r"(h ? start.z : start.x), "r"(h ? start.w : start.y));
#endif
}

// c += a * b

// f16, 16 x 8 x 16, sums in f32: a 4 registers of two elements, b 2.
__device__ __forceinline__ void mma_f16(float* c, const unsigned* a, const unsigned* b) {
#if !defined(__CUDACC__)
    host::product<2, float, 2>(
        c, a, b, [](unsigned word, int e) { return f16_to_f32(static_cast<uint16_t>(word >> (16 * e))); });
#elif __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
    for (int w = 0; w < 2; ++w)
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[2 * w]), "r"(a[2 * w + 1]), "r"(b[w]));
#endif
}

// bf16, 16 x 8 x 16, sums in f32. Devices before sm_80 have no such product and exchange operands by
// shuffles.
__device__ __forceinline__ void mma_bf16(float* c, const unsigned* a, const unsigned* b) {
#if !defined(__CUDACC__)
    host::product<2, float, 2>(
        c, a, b, [](unsigned word, int e) { return bf16_to_f32(static_cast<uint16_t>(word >> (16 * e))); });
#elif __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    const int lane = lane_id(), row = lane & ~3, column = 2 * (lane & 3);
#pragma unroll
    for (int w = 0; w < 2; ++w) {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned y0 = __shfl_sync(kAllLanes, b[w], 4 * column + t);
            const unsigned y1 = __shfl_sync(kAllLanes, b[w], 4 * column + 4 + t);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const unsigned x = __shfl_sync(kAllLanes, a[2 * w + h], row + t);
                c[2 * h] += bf16_to_f32(x & 0xffff) * bf16_to_f32(y0 & 0xffff) +
                            bf16_to_f32(x >> 16) * bf16_to_f32(y0 >> 16);
                c[2 * h + 1] += bf16_to_f32(x & 0xffff) * bf16_to_f32(y1 & 0xffff) +
                                bf16_to_f32(x >> 16) * bf16_to_f32(y1 >> 16);
            }
        }
    }
#endif
}

}  // namespace ikpy::cuda
