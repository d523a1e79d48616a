// Unpackers of the interleaved 32-column, 8-bit and ternary types. Layouts:
// quant-formats.md#interleaved-small-blocks, quant-formats.md#interleaved-bytes-and-bf16.
#pragma once
#include "unpack/interleaved.hpp"
#include "unpack/small_blocks.hpp"

namespace ikpy {

// Byte 32 * l + 4 * k + i: columns 4 * l + i (low nibble) and 16 columns further (high nibble).
template <int R, class F>
inline void nibbles_of_rows(const Quads<R>& q, int offset, F f) {
#pragma GCC unroll 4
    for (int l = 0; l < 4; ++l) {
        const Lanes v = q.bytes(offset + 4 * R * l);
        f(4 * l, interleaved::low_nibbles(v));
        f(4 * l + 16, interleaved::high_nibbles(v));
    }
}

// Of blocks that begin with the halves of their rows.
struct RowHalves : VectorScales {
#if defined(__AVX2__)
    template <int R>
    static simd::V lane_scales(const Quads<R>& q) {
        return q.halves(0);
    }
#endif
};

// Of rows with a scale for all columns.
struct NoBlockScales : VectorScales {
#if defined(__AVX2__)
    template <int R>
    static simd::V lane_scales(const Quads<R>&) {
        return simd::set1(1.0f);
    }
#endif
};

struct UnpackQ4_0_R8 : RowHalves {
    static constexpr int kType = 202, kRows = 8, kGroup = 32, kBlock = 32, kBlockBytes = 144, kZero = 128;
    static constexpr int kLow = 120, kHigh = 135;
    template <class Out>
    static void codes(const Quads<8>& q, int, Out& out) {
        nibbles_of_rows(q, 16, [&](int column, Lanes v) { out.put(column, v + 120); });
    }
    static void scales(const uint8_t* p, int quad, float* d, float*) {
        interleaved::put(d, interleaved::halves(p + 8 * quad));
    }
};

// Nibbles are signed: the top bit is inverted.
struct UnpackQ4_0_4x4 : RowHalves {
    static constexpr int kType = 31, kRows = 4, kGroup = 32, kBlock = 32, kBlockBytes = 72, kZero = 128;
    static constexpr int kLow = 120, kHigh = 135;
    template <class Out>
    static void codes(const Quads<4>& q, int, Out& out) {
        nibbles_of_rows(q, 8, [&](int column, Lanes v) { out.put(column, (v ^ 8) + 120); });
    }
    static void scales(const uint8_t* p, int, float* d, float*) {
        interleaved::put(d, interleaved::halves(p));
    }
};

struct UnpackMXFP4_R8 : VectorScales {
    static constexpr int kType = 353, kRows = 8, kGroup = 32, kBlock = 32, kBlockBytes = 136, kZero = 128;
    static constexpr int kLow = 116, kHigh = 140;
    static constexpr bool kLookedUp = true;
    template <class Out>
    static void codes(const Quads<8>& q, int, Out& out) {
        nibbles_of_rows(q, 8, [&](int column, Lanes v) {
            out.put(column,
                    interleaved::lookup(kMxfp4Codes, v) + static_cast<uint8_t>(128 - UnpackMXFP4::kZero));
        });
    }
    static void scales(const uint8_t* p, int quad, float* d, float*) {
        for (int k = 0; k < 4; ++k) d[k] = half_power(p[4 * quad + k]);
    }
#if defined(__AVX512VNNI__)
    static __m512 lane_scales(const Quads<8>& q) {
        return UnpackMXFP4::half_powers(_mm512_cvtepu8_epi32(q.row_bytes(0)));
    }
#elif defined(__AVX2__)
    static simd::V lane_scales(const Quads<8>& q) {
        const auto* rows = reinterpret_cast<const __m128i*>(q.block[0]);
        return UnpackMXFP4::half_powers(_mm256_cvtepu8_epi32(_mm_loadl_epi64(rows)));
    }
#endif
};

struct UnpackIQ4_NL_R4 : RowHalves {
    static constexpr int kType = 220, kRows = 4, kGroup = 32, kBlock = 32, kBlockBytes = 72, kZero = 128;
    template <class Out>
    static void codes(const Quads<4>& q, int, Out& out) {
        interleaved::n4(q, 8,
                        [&](int column, Lanes v) { out.put(column, interleaved::lookup(kIq4Codes, v)); });
    }
    static void scales(const uint8_t* p, int, float* d, float*) {
        interleaved::put(d, interleaved::halves(p));
    }
};

struct UnpackQ5_0_R4 : RowHalves {
    static constexpr int kType = 206, kRows = 4, kGroup = 32, kBlock = 32, kBlockBytes = 88, kZero = 128;
    static constexpr int kLow = 112, kHigh = 143;
    template <class Out>
    static void codes(const Quads<4>& q, int, Out& out) {
        const Lanes high = q.bytes(8);
        interleaved::n4(q, 24, [&](int column, Lanes v) {
            const int bit = interleaved::kQ5_0Bits.of[column / 4];
            out.put(column, (v | interleaved::moved(high, bit, 4, 16)) + 112);
        });
    }
    static void scales(const uint8_t* p, int, float* d, float*) {
        interleaved::put(d, interleaved::halves(p));
    }
};

struct UnpackQ6_0_R4 : RowHalves {
    static constexpr int kType = 233, kRows = 4, kGroup = 32, kBlock = 32, kBlockBytes = 104, kZero = 128;
    static constexpr int kLow = 96, kHigh = 159;
    template <class Out>
    static void codes(const Quads<4>& q, int, Out& out) {
        const Lanes high[2] = {q.bytes(8), q.bytes(24)};
        interleaved::n4(q, 40, [&](int column, Lanes v) {
            const int bit = 2 * (column / 4 & 3);
            out.put(column, (v | interleaved::moved(high[column / 16], bit, 4, 0x30)) + 96);
        });
    }
    static void scales(const uint8_t* p, int, float* d, float*) {
        interleaved::put(d, interleaved::halves(p));
    }
};

// Q8x: signed bytes, four columns of each row at a time.
template <int R, class Out>
inline void signed_bytes(const Quads<R>& q, int offset, Out& out) {
    for (int column = 0; column < 32; column += 4) out.put(column, q.bytes(offset + R * column) ^ 0x80);
}

struct UnpackQ8_0_R8 : RowHalves {
    static constexpr int kType = 208, kRows = 8, kGroup = 32, kBlock = 32, kBlockBytes = 272, kZero = 128;
    static constexpr int kCodesAt = 16;
    template <class Out>
    static void codes(const Quads<8>& q, int, Out& out) {
        signed_bytes(q, kCodesAt, out);
    }
    static void scales(const uint8_t* p, int quad, float* d, float*) {
        interleaved::put(d, interleaved::halves(p + 8 * quad));
    }
};

struct UnpackQ8_K_R8 : RowHalves {
    static constexpr int kType = 399, kRows = 8, kGroup = 32, kBlock = 256, kBlockBytes = 2064, kZero = 128;
    static constexpr int kCodesAt = 16;
    template <class Out>
    static void codes(const Quads<8>& q, int ib, Out& out) {
        signed_bytes(q, kCodesAt + 256 * ib, out);
    }
    static void scales(const uint8_t* p, int quad, float* d, float*) {
        interleaved::constant_scales(interleaved::halves(p + 8 * quad), 8, d);
    }
};

// Stored bytes are codes already.
struct UnpackQ8_K_R16 : RowHalves {
    static constexpr int kType = 397, kRows = 16, kGroup = 32, kBlock = 256, kBlockBytes = 4128, kZero = 128;
    template <class Out>
    static void codes(const Quads<16>& q, int ib, Out& out) {
        for (int column = 0; column < 32; column += 4) out.put(column, q.bytes(32 + 512 * ib + 16 * column));
    }
    static void scales(const uint8_t* p, int quad, float* d, float*) {
        interleaved::constant_scales(interleaved::halves(p + 8 * quad), 8, d);
    }
};

struct UnpackQ8_KV_R8 : NoBlockScales {
    static constexpr int kType = 398, kRows = 8, kGroup = 32, kBlock = 32, kBlockBytes = 256, kZero = 128;
    static constexpr int kCodesAt = 0;
    static constexpr int kHeaderBytes = 4;
    static float row_scale(const uint8_t* group, int k) { return load_unaligned<float>(group + 4 * k); }
    template <class Out>
    static void codes(const Quads<8>& q, int, Out& out) {
        signed_bytes(q, kCodesAt, out);
    }
    static void scales(const uint8_t*, int, float* d, float*) {
        interleaved::put(d, interleaved::Four{1, 1, 1, 1});
    }
};

struct UnpackIQ2_BN_R4 : NoBlockScales {
    static constexpr int kType = 335, kRows = 4, kGroup = 32, kBlock = 64, kBlockBytes = 64, kZero = 128;
    static constexpr int kLow = 127, kHigh = 130;
    static constexpr int kHeaderBytes = 4;
    static float row_scale(const uint8_t* group, int k) { return load_unaligned<float>(group + 4 * k); }
    template <class Out>
    static void codes(const Quads<4>& q, int ib, Out& out) {
        interleaved::p4(q, 32 * ib, [&](int column, Lanes v) { out.put(column, v + 127); });
    }
    static void scales(const uint8_t*, int, float* d, float*) {
        interleaved::constant_scales(interleaved::Four{1, 1, 1, 1}, 2, d);
    }
};

}  // namespace ikpy
