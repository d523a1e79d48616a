// Row-interleaved blocks as vectors: four columns of as many quads of rows as a vector has room for.
#pragma once
#include <cstdint>

#include "kernels/matmul/quant_product.hpp"

namespace ikpy {

// A quad is four rows; as many are handled at once as a vector has room for, 16 bytes each.
#if defined(__AVX512VNNI__)
constexpr int kQuads = 4;
#elif defined(__AVX2__)
constexpr int kQuads = 2;
#else
constexpr int kQuads = 1;
#endif

typedef uint8_t Lanes __attribute__((vector_size(16 * kQuads)));
typedef uint16_t LaneWords __attribute__((vector_size(16 * kQuads)));

// Where the quads find their bytes: the group block each belongs to and its place in the group.
template <int R>
struct Quads {
    const uint8_t* block[kQuads];
    int place[kQuads];

    // 16 bytes per quad: four bytes of each row. Fields of all rows of the group start at `offset`.
    Lanes bytes(int offset) const {
#if defined(__AVX512VNNI__)
        if constexpr (R == 16) return reinterpret_cast<Lanes>(_mm512_loadu_si512(block[0] + offset));
        if constexpr (R == 8) {
            const auto* a = reinterpret_cast<const __m256i*>(block[0] + offset);
            const auto* b = reinterpret_cast<const __m256i*>(block[2] + offset);
            return reinterpret_cast<Lanes>(
                _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(a)), _mm256_loadu_si256(b), 1));
        }
        __m512i v = _mm512_castsi128_si512(at(0, offset));
        v = _mm512_mask_broadcast_i32x4(v, 0x00F0, at(1, offset));
        v = _mm512_mask_broadcast_i32x4(v, 0x0F00, at(2, offset));
        return reinterpret_cast<Lanes>(_mm512_mask_broadcast_i32x4(v, 0xF000, at(3, offset)));
#elif defined(__AVX2__)
        if constexpr (R >= 8)
            return reinterpret_cast<Lanes>(
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block[0] + offset + 16 * place[0])));
        return reinterpret_cast<Lanes>(
            _mm256_inserti128_si256(_mm256_castsi128_si256(at(0, offset)), at(1, offset), 1));
#else
        return load_unaligned<Lanes>(block[0] + offset + 16 * place[0]);
#endif
    }

#if defined(__AVX512VNNI__)
    // One byte per row. Fields of all rows of the group start at `offset`.
    __m128i row_bytes(int offset) const {
        int32_t row[kQuads];
        for (int q = 0; q < kQuads; ++q) row[q] = load_unaligned<int32_t>(block[q] + offset + 4 * place[q]);
        return _mm_setr_epi32(row[0], row[1], row[2], row[3]);
    }
    // Numbers in half precision, one per row.
    __m512 halves(int offset) const {
        int64_t four[kQuads];
        for (int q = 0; q < kQuads; ++q) four[q] = load_unaligned<int64_t>(block[q] + offset + 8 * place[q]);
        return _mm512_cvtph_ps(_mm256_setr_epi64x(four[0], four[1], four[2], four[3]));
    }
#elif defined(__AVX2__)
    // Numbers in half precision, one per row.
    __m256 halves(int offset) const {
        const auto of = [&](int q) { return load_unaligned<int64_t>(block[q] + offset + 8 * place[q]); };
        if constexpr (R >= 8)
            return _mm256_cvtph_ps(
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(block[0] + offset + 8 * place[0])));
        return _mm256_cvtph_ps(_mm_set_epi64x(of(1), of(0)));
    }
#endif

    // One byte per row, four times each.
    Lanes rows(int offset) const {
#if defined(__AVX512VNNI__)
        const __m512i order = _mm512_add_epi8(
            _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x01010101, 0x02020202, 0x03030303)),
            _mm512_setr_epi64(0, 0, 0x0404040404040404, 0x0404040404040404, 0x0808080808080808,
                              0x0808080808080808, 0x0C0C0C0C0C0C0C0C, 0x0C0C0C0C0C0C0C0C));
        return reinterpret_cast<Lanes>(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(row_bytes(offset)), order));
#else
        uint32_t row[kQuads];
        for (int q = 0; q < kQuads; ++q) row[q] = load_unaligned<uint32_t>(block[q] + offset + 4 * place[q]);
#if defined(__AVX2__)
        const __m128i order = _mm_setr_epi32(0, 0x01010101, 0x02020202, 0x03030303);
        const __m256i both =
            _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_cvtsi32_si128(static_cast<int>(row[0]))),
                                    _mm_cvtsi32_si128(static_cast<int>(row[1])), 1);
        return reinterpret_cast<Lanes>(_mm256_shuffle_epi8(both, _mm256_broadcastsi128_si256(order)));
#else
        Lanes v;
        for (int i = 0; i < 16 * kQuads; ++i) v[i] = static_cast<uint8_t>(row[i >> 4] >> (8 * (i >> 2 & 3)));
        return v;
#endif
#endif
    }

#if defined(__AVX2__)
  private:
    __m128i at(int q, int offset) const {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(block[q] + offset + 16 * place[q]));
    }
#endif
};

}  // namespace ikpy
