// Eight elements of a cache row as f16, type by type. Loads and conversions are apart, so that a thread may
// have several pieces under way. Rows are not written by the kernels that read them so.
#pragma once
#include "kv_types.cuh"
#include "mma.cuh"
#include "unpack/core.cuh"

namespace ikpy::cuda {

__device__ __forceinline__ unsigned pack_f16(float a, float b) {
#if defined(__CUDACC__)
    const __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<const unsigned*>(&h);
#else
    return f32_to_f16(a) | static_cast<unsigned>(f32_to_f16(b)) << 16;
#endif
}

__device__ __forceinline__ void put8(uint16_t* to, const float* v) {
    *reinterpret_cast<uint4*>(to) =
        uint4{pack_f16(v[0], v[1]), pack_f16(v[2], v[3]), pack_f16(v[4], v[5]), pack_f16(v[6], v[7])};
}

// Where eight elements of a cell are, from e on, a multiple of 8; `to` numbers their place in a tile.
struct CellPiece {
    const uint8_t* row;
    int e, to;
    bool valid;
};

// Two signed bytes of q, the lower or the upper ones, times d plus m, as f16. On devices without conversions
// of integers, which run at a quarter of the speed: 0x6400 and a byte above it are the f16 1024 + byte.
template <bool Upper, bool Offset>
__device__ __forceinline__ unsigned scaled_pair(unsigned q, uint16_t d, uint16_t m) {
    const unsigned bits = __byte_perm(q ^ 0x80808080u, 0x64646464u, Upper ? 0x4342 : 0x4140);
#if defined(__CUDACC__)
    const __half2 level = __hsub2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(1152.0f));
    const __half2 factor = __half2half2(__ushort_as_half(d));
    const __half2 pair =
        Offset ? __hfma2(level, factor, __half2half2(__ushort_as_half(m))) : __hmul2(level, factor);
    return *reinterpret_cast<const unsigned*>(&pair);
#else
    const auto scaled = [d, m](unsigned level) {
        const float product = f16_to_f32(d) * (f16_to_f32(level & 0xffff) - 1152.0f);
        return Offset ? product + f16_to_f32(m) : product;
    };
    return pack_f16(scaled(bits), scaled(bits >> 16));
#endif
}

// An f16 factor of levels of magnitudes up to Largest: at most what keeps them in the range of f16, where
// their largest is then the largest f16. Infinities and NaN stay, so that they are not taken for numbers.
template <int Largest>
__device__ __forceinline__ uint16_t limited_factor(uint16_t d) {
    constexpr int kLimit = Largest == 127 ? 0x6007 : Largest == 32 ? 0x67ff : Largest == 16 ? 0x6bff : 0x6fff;
    const int magnitude = d & 0x7fff;
    return static_cast<uint16_t>(magnitude > kLimit && magnitude < 0x7c00 ? (d & 0x8000) | kLimit : d);
}

// Stores levels (signed bytes) times d plus m.
template <bool Offset>
__device__ __forceinline__ void store_levels(const unsigned* q, uint16_t d, uint16_t m, uint16_t* to) {
    *reinterpret_cast<uint4*>(to) =
        uint4{scaled_pair<false, Offset>(q[0], d, m), scaled_pair<true, Offset>(q[0], d, m),
              scaled_pair<false, Offset>(q[1], d, m), scaled_pair<true, Offset>(q[1], d, m)};
}

struct PieceBF16 {
    uint4 bits;

    PieceBF16() = default;
    __device__ __forceinline__ PieceBF16(int, const CellPiece& piece)
        : bits(piece.valid ? __ldg(reinterpret_cast<const uint4*>(piece.row + 2 * piece.e))
                           : uint4{0, 0, 0, 0}) {}
    __device__ __forceinline__ static unsigned converted(unsigned pair) {
        return pack_f16(to_f16_range(bf16_to_f32(static_cast<uint16_t>(pair))),
                        to_f16_range(bf16_to_f32(static_cast<uint16_t>(pair >> 16))));
    }
    __device__ __forceinline__ void store(int, uint16_t* to) const {
        *reinterpret_cast<uint4*>(to) =
            uint4{converted(bits.x), converted(bits.y), converted(bits.z), converted(bits.w)};
    }
};

struct PieceQ8_0 {
    unsigned q[2];
    uint16_t d;

    PieceQ8_0() = default;
    __device__ __forceinline__ PieceQ8_0(int, const CellPiece& piece) {
        const uint8_t* block = piece.row + piece.e / 32 * 34;
        load_words<2, 2>(block + 2 + piece.e % 32, q);
        d = piece.valid ? static_cast<uint16_t>(load2<2>(block)) : 0;
    }
    __device__ __forceinline__ void store(int, uint16_t* to) const {
        store_levels<false>(q, limited_factor<127>(d), 0, to);
    }
};

// The factor of a row is an f32, which as f16 would be coarse or nothing.
struct PieceQ8_KV {
    unsigned q[2];
    float d;

    PieceQ8_KV() = default;
    __device__ __forceinline__ PieceQ8_KV(int, const CellPiece& piece) {
        load_words<8, 2>(piece.row + 8 + piece.e, q);
        d = piece.valid ? __ldg(reinterpret_cast<const float*>(piece.row)) : 0.0f;
    }
    __device__ __forceinline__ void store(int, uint16_t* to) const {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            // A byte below 0x4b000000 is the float 2^23 + byte.
            const unsigned bits = __byte_perm(q[i / 4] ^ 0x80808080u, 0x4b000000u, 0x7440 | i % 4);
            v[i] = to_f16_range(d * (__uint_as_float(bits) - 8388736.0f));
        }
        put8(to, v);
    }
};

// Types whose blocks end with 16 bytes of nibbles: q4_0, q4_1, q5_0, q5_1, q6_0, iq4_nl.
struct PieceNibbles {
    unsigned low[2],
        high[2];  // nibbles, already moved to the lower four bits of bytes; the bits above them, likewise
    uint16_t d, m;

    __device__ __forceinline__ static bool has_offset(int type) { return type == kQ4_1 || type == kQ5_1; }
    __device__ __forceinline__ static bool has_fives(int type) { return type == kQ5_0 || type == kQ5_1; }

    PieceNibbles() = default;
    __device__ __forceinline__ PieceNibbles(int type, const CellPiece& piece) {
        const int bytes = kv_block_bytes(type), j = piece.e % 32;
        const uint8_t* block = piece.row + piece.e / 32 * bytes;
        const uint8_t* nibbles = block + bytes - 16;
        load_words<2, 2>(nibbles + j % 16, low);
        high[0] = high[1] = 0;
        if (has_fives(type)) {
            const unsigned bits = __ldg(nibbles - 4 + j / 8);
            high[0] = spread_bits(bits), high[1] = spread_bits(bits >> 4);
        } else if (type == kQ6_0) {
            load_words<2, 2>(nibbles - 8, high);
        }
        const int shift = j / 16 * 4, pairs = j / 8 % 2 * 4 + j / 16 * 2;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            low[i] = low[i] >> shift & kNibbles;
            if (type == kQ6_0) high[i] = high[i] >> pairs & kPairs;
        }
        d = piece.valid ? static_cast<uint16_t>(load2<2>(block)) : 0;
        m = piece.valid && has_offset(type) ? static_cast<uint16_t>(load2<2>(block + 2)) : 0;
    }
    __device__ __forceinline__ void store(int type, uint16_t* to) const {
        unsigned q[2] = {low[0] | high[0] << 4, low[1] | high[1] << 4};
        if (has_offset(type)) return store_levels<true>(q, d, m, to);
        if (type == kIQ4_NL) {
            unsigned table[4];
            choose_table<16, TableIq4k>(false, table);
            look_up<16>(table, q[0], q[1]);
        } else {
            const int middle = type == kQ4_0 ? 8 : type == kQ5_0 ? 16 : 32;
            q[0] = sub_bytes(q[0], middle), q[1] = sub_bytes(q[1], middle);
        }
        const uint16_t limited = type == kIQ4_NL ? limited_factor<127>(d)
                                 : type == kQ6_0 ? limited_factor<32>(d)
                                 : type == kQ5_0 ? limited_factor<16>(d)
                                                 : limited_factor<8>(d);
        store_levels<false>(q, limited, 0, to);
    }
};

// Calls f with a piece of the kind that rows of a type are read by; false if they are read otherwise.
template <class F>
__device__ __forceinline__ bool with_piece_kind(int type, const F& f) {
    switch (type) {
        case kBF16:
            f(PieceBF16());
            return true;
        case kQ8_0:
            f(PieceQ8_0());
            return true;
        case kQ8_KV:
            f(PieceQ8_KV());
            return true;
        case kF32:
        case kF16:
            return false;
        default:
            f(PieceNibbles());
            return true;
    }
}

// The eight elements of a piece as f16 to shared memory. f16 rows are copied asynchronously.
__device__ __forceinline__ void copy8(int type, const CellPiece& piece, uint16_t* to) {
    if (type == kF16) return copy16_async(to, piece.row + 2 * piece.e, piece.valid);
    const bool stored =
        with_piece_kind(type, [&](auto kind) { decltype(kind)(type, piece).store(type, to); });
    if (stored) return;
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
        v[i] = piece.valid ? to_f16_range(reinterpret_cast<const float*>(piece.row)[piece.e + i]) : 0.0f;
    put8(to, v);
}

}  // namespace ikpy::cuda
