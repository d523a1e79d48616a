// Queries and tiles of cells of any cache type as f16 in shared memory.
#pragma once
#include "flash_rows.cuh"
#include "mma.cuh"

namespace ikpy::cuda {

__device__ __forceinline__ unsigned pack_f16(float a, float b) {
#if defined(__CUDACC__)
    const __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<const unsigned*>(&h);
#else
    return f32_to_f16(a) | static_cast<unsigned>(f32_to_f16(b)) << 16;
#endif
}

// Elements e .. e + 7 of a cache row as f16 to shared memory; e is a multiple of 8. f16 rows are copied
// asynchronously.
__device__ __forceinline__ void copy8(int type, const uint8_t* row, int e, uint16_t* to, bool valid) {
    if (type == kF16) return copy16_async(to, row + 2 * e, valid);
    float v[8];
    if (!valid) {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = 0.0f;
    } else if (type == kQ8_0) {
        const uint8_t* block = row + e / 32 * 34;
        const float d = load_f16(block);
        const unsigned q[2] = {load4<2>(block + 2 + e % 32), load4<2>(block + 6 + e % 32)};
#pragma unroll
        for (int i = 0; i < 8; ++i)
            v[i] = d * static_cast<float>(static_cast<int8_t>(q[i / 4] >> 8 * (i % 4)));
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = to_f16_range(kv_element(type, row, e + i));
    }
    *reinterpret_cast<uint4*>(to) =
        uint4{pack_f16(v[0], v[1]), pack_f16(v[2], v[3]), pack_f16(v[4], v[5]), pack_f16(v[6], v[7])};
}

// Two signed bytes of q, the lower or the upper ones, times d, as f16. On devices without conversions of
// integers, which run at a quarter of the speed: 0x6400 and a byte above it are the f16 1024 + byte.
template <bool Upper>
__device__ __forceinline__ unsigned scaled_pair(unsigned q, uint16_t d) {
    const unsigned bits = __byte_perm(q ^ 0x80808080u, 0x64646464u, Upper ? 0x4342 : 0x4140);
#if defined(__CUDACC__)
    const __half2 level = __hsub2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(1152.0f));
    const __half2 product = __hmul2(level, __half2half2(__ushort_as_half(d)));
    return *reinterpret_cast<const unsigned*>(&product);
#else
    const auto scaled = [d](unsigned level) {
        return f16_to_f32(d) * (f16_to_f32(level & 0xffff) - 1152.0f);
    };
    return pack_f16(scaled(bits), scaled(bits >> 16));
#endif
}

// Where eight elements of a tile of cells are: numbered by row, zeros from cell `last` on.
struct CellPiece {
    const uint8_t* row;
    int e, to;
    bool valid;
};
struct CellRows {
    const View& v;
    int head, c0, last, per_row, stride;

    __device__ __forceinline__ CellPiece piece(int i) const {
        const int c = i / per_row, e = i % per_row * 8;
        return {v.row<const uint8_t>(head, min(c0 + c, last - 1)), e, c * stride + e, c0 + c < last};
    }
};

// Eight elements of q8_0: the levels and the factor of their block.
struct PieceQ8_0 {
    unsigned q[2];
    uint16_t d;

    __device__ __forceinline__ explicit PieceQ8_0(const CellPiece& piece) {
        const uint8_t* block = piece.row + piece.e / 32 * 34;
        load_words<2, 2>(block + 2 + piece.e % 32, q);
        d = piece.valid ? static_cast<uint16_t>(load2<2>(block)) : 0;
    }
    __device__ PieceQ8_0() {}
    __device__ __forceinline__ void store(uint16_t* to) const {
        *reinterpret_cast<uint4*>(to) = uint4{scaled_pair<false>(q[0], d), scaled_pair<true>(q[0], d),
                                              scaled_pair<false>(q[1], d), scaled_pair<true>(q[1], d)};
    }
};

// Rows of q8_0. All loads of a batch are asked for before one is waited for: a piece at a time, a
// multiprocessor would have a few KiB under way, a fifth of what the memory of large devices wants.
template <class F>
__device__ __forceinline__ void load_cells_q8_0(const CellRows& rows, uint16_t* to) {
    const int n = F::kCells * rows.per_row;
#pragma unroll 1
    for (int i0 = threadIdx.x; i0 < n; i0 += F::kLoads * F::kThreads) {
        PieceQ8_0 pieces[F::kLoads];
        int place[F::kLoads];
#pragma unroll
        for (int b = 0; b < F::kLoads; ++b) {
            const int i = i0 + b * F::kThreads;
            const CellPiece piece = rows.piece(min(i, n - 1));
            pieces[b] = PieceQ8_0(piece);
            place[b] = i < n ? piece.to : -1;
        }
#pragma unroll
        for (int b = 0; b < F::kLoads; ++b)
            if (place[b] >= 0) pieces[b].store(to + place[b]);
    }
}

// Elements of a tile of cells from c0 on to rows of `to`; zeros from cell `last` on.
template <class F>
__device__ __forceinline__ void load_cells(const View& v, int type, int head, int c0, int last, int length,
                                           uint16_t* to, int stride) {
    const int per_row = length / 8;
    if (F::kLoads > 1 && type == kQ8_0)
        return load_cells_q8_0<F>(CellRows{v, head, c0, last, per_row, stride}, to);
    for (int i = threadIdx.x; i < F::kCells * per_row; i += F::kThreads) {
        const int c = i / per_row, e = i % per_row * 8;
        copy8(type, v.row<const uint8_t>(head, min(c0 + c, last - 1)), e, to + c * stride + e, c0 + c < last);
    }
}

// Cache heads that belong to the key head of a block.
struct FlashHeads {
    int k, k1, v;
};

__device__ __forceinline__ FlashHeads flash_heads(const Attention& a, int kv_head) {
    return {kv_head, a.k1.data ? kv_head * a.k1.ne[1] / a.k.ne[1] : 0, kv_head * a.v.ne[1] / a.k.ne[1]};
}

// Queries times the factor of the scores, as f16; zeros beyond the last row and the head size.
template <class F>
__device__ __forceinline__ void load_queries(const Attention& a, const FlashRows& rows, uint16_t* q) {
    const float factor = a.softcap != 0.0f ? a.scale / a.softcap : a.scale * kLog2e;
    for (int i = threadIdx.x; i < F::kRows * F::kDk / 2; i += F::kThreads) {
        const int r = i / (F::kDk / 2), e = i % (F::kDk / 2) * 2, row = rows.row0 + r;
        unsigned pair = 0;
        if (row < rows.n_rows && e < F::kHeadK) {
            const float* x = a.q.row<const float>(rows.head(row), rows.token(row)) + e;
            pair = pack_f16(to_f16_range(factor * x[0]), to_f16_range(factor * x[1]));
        }
        *reinterpret_cast<unsigned*>(q + r * F::kStrideK + e) = pair;
    }
}

// Columns of the keys' tile behind the head size, which no copy writes.
template <class F>
__device__ __forceinline__ void clear_padding(uint16_t* k) {
    constexpr int kPadding = F::kDk - F::kHeadK;
    if constexpr (kPadding > 0) {
        for (int i = threadIdx.x; i < F::kCells * kPadding; i += F::kThreads)
            k[i / kPadding * F::kStrideK + F::kHeadK + i % kPadding] = 0;
    }
}

// Starts to copy a tile of keys, of both segments.
template <class F>
__device__ __forceinline__ void load_keys(const Attention& a, const FlashHeads& heads, int tile, int last,
                                          uint16_t* k) {
    const int d0 = a.k.ne[0], c0 = tile * F::kCells;
    load_cells<F>(a.k, a.k_type, heads.k, c0, last, d0, k, F::kStrideK);
    if (a.k1.data) load_cells<F>(a.k1, a.k1_type, heads.k1, c0, last, F::kHeadK - d0, k + d0, F::kStrideK);
    commit_copies();
}

}  // namespace ikpy::cuda
