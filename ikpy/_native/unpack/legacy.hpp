// Unpackers of the 32-element types: Q4_0, Q4_1, Q5_0, Q5_1, Q6_0, Q8_0. Layouts:
// quant-formats.md#blocks-with-one-scale.
#pragma once
#include "kernels/matmul/unpacked.hpp"
#include "unpack/codes32.hpp"
#include "unpack/level_tables.hpp"
#include "unpack/wide.hpp"

namespace ikpy {

struct UnpackQ4_0 {
    static constexpr int kType = 2, kGroup = 32, kBlock = 32, kBlockBytes = 18, kZero = 8;
    static constexpr int kLow = 0, kHigh = 15;
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float*) {
        c32::store(codes, c32::nibbles(p + 2));
        *d = load_f16(p);
    }
#if defined(__AVX512VNNI__)
    static constexpr const uint8_t* kLevels = kPlainLevels;
    static constexpr int kLevelCount = 16;
    static Codes512 wide(const uint8_t* p) { return level_numbers(p); }
    template <int Place = 0>
    static Codes512 level_numbers(const uint8_t* p) {
        return wide::with_block_scales<kBlockBytes>(wide::block_nibbles<kBlockBytes, Place>(p), p);
    }
    static constexpr Pairs kPairs = Pairs::kConsecutive;
    static Codes512 halves(const uint8_t* p) {
        return wide::with_block_scales<kBlockBytes>(wide::block_nibble_halves<kBlockBytes>(p), p);
    }
#endif
};

struct UnpackQ4_1 {
    static constexpr int kType = 3, kGroup = 32, kBlock = 32, kBlockBytes = 20, kZero = 0;
    static constexpr int kLow = 0, kHigh = 15;
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float* m) {
        c32::store(codes, c32::nibbles(p + 4));
        *d = load_f16(p);
        *m = load_f16(p + 2);
    }
#if defined(__AVX512VNNI__)
    static constexpr const uint8_t* kLevels = kPlainLevels;
    static constexpr int kLevelCount = 16;
    static Codes512 wide(const uint8_t* p) { return level_numbers(p); }
    template <int Place = 0>
    static Codes512 level_numbers(const uint8_t* p) {
        return wide::with_block_scales<kBlockBytes, true>(wide::block_nibbles<kBlockBytes, Place>(p), p);
    }
    static constexpr Pairs kPairs = Pairs::kConsecutive;
    static Codes512 halves(const uint8_t* p) {
        return wide::with_block_scales<kBlockBytes, true>(wide::block_nibble_halves<kBlockBytes>(p), p);
    }
#endif
};

struct UnpackQ5_0 {
    static constexpr int kType = 6, kGroup = 32, kBlock = 32, kBlockBytes = 22, kZero = 16;
    static constexpr int kLow = 0, kHigh = 31;
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float*) {
        c32::store(codes, c32::nibbles(p + 6) | (c32::bits(load_unaligned<uint32_t>(p + 2)) & 16));
        *d = load_f16(p);
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        const Codes512 low = wide::block_nibbles<kBlockBytes>(p);
        return wide::with_block_scales<kBlockBytes>(wide::with_fifth_bits<kBlockBytes>(low, p), p);
    }
#endif
};

struct UnpackQ5_1 {
    static constexpr int kType = 7, kGroup = 32, kBlock = 32, kBlockBytes = 24, kZero = 0;
    static constexpr int kLow = 0, kHigh = 31;
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float* m) {
        c32::store(codes, c32::nibbles(p + 8) | (c32::bits(load_unaligned<uint32_t>(p + 4)) & 16));
        *d = load_f16(p);
        *m = load_f16(p + 2);
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        const Codes512 low = wide::block_nibbles<kBlockBytes>(p);
        return wide::with_block_scales<kBlockBytes, true>(wide::with_fifth_bits<kBlockBytes>(low, p), p);
    }
#endif
};

struct UnpackQ6_0 {
    static constexpr int kType = 133, kGroup = 32, kBlock = 32, kBlockBytes = 26, kZero = 32;
    static constexpr int kLow = 0, kHigh = 63;
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float*) {
        // Byte j of qh holds bits 4..5 of elements j, j + 16, j + 8, j + 24.
        c32::store(codes, c32::nibbles(p + 10) | (high_bits(load_unaligned<uint64_t>(p + 2)) & 0x30));
        *d = load_f16(p);
    }
    static c32::Codes32 high_bits(uint64_t qh) {
#if defined(__AVX2__)
        const __m256i v = _mm256_set1_epi64x(static_cast<int64_t>(qh));
        const __m256i left = _mm256_sllv_epi64(v, _mm256_setr_epi64x(4, 0, 2, 64));
        return reinterpret_cast<c32::Codes32>(
            _mm256_or_si256(left, _mm256_srlv_epi64(v, _mm256_setr_epi64x(64, 64, 64, 2))));
#else
        typedef uint64_t Quads __attribute__((vector_size(32)));
        return reinterpret_cast<c32::Codes32>(Quads{qh << 4, qh, qh << 2, qh >> 2});
#endif
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        // Byte j of qh holds bits 4..5 of elements j, j + 16, j + 8, j + 24: quadwords rotate into place.
        const __m512i turns = _mm512_setr_epi64(4, 0, 2, 62, 4, 0, 2, 62);
        Codes512 r = wide::with_block_scales<kBlockBytes>(wide::block_nibbles<kBlockBytes>(p), p);
        for (int i = 0; i < 4; ++i) {
            const uint8_t* a = p + 52 * i;
            const __m512i high = _mm512_mask_set1_epi64(_mm512_set1_epi64(load_unaligned<int64_t>(a + 2)),
                                                        0xF0, load_unaligned<int64_t>(a + 28));
            r.q[i] =
                _mm512_or_si512(r.q[i], _mm512_and_si512(_mm512_rolv_epi64(high, turns), wide::bytes(0x30)));
        }
        return r;
    }
#endif
};

struct UnpackQ8_0 {
    static constexpr int kType = 8, kGroup = 32, kBlock = 32, kBlockBytes = 34, kZero = 128;
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float*) {
        c32::store(codes, c32::load(p + 2) ^ 0x80);
        *d = load_f16(p);
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        Codes512 r;
        for (int i = 0; i < 4; ++i) {
            const auto* a = reinterpret_cast<const __m256i*>(p + 68 * i + 2);
            const auto* b = reinterpret_cast<const __m256i*>(p + 68 * i + 36);
            const __m512i v =
                _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(a)), _mm256_loadu_si256(b), 1);
            r.q[i] = _mm512_xor_si512(v, wide::bytes(0x80));
        }
        r.d = wide::block_fields<34, 0>(p);
        return r;
    }
#endif
};

}  // namespace ikpy
