// Codes of quantized cache rows as signed bytes, for products on int8 tiles. Codes*:
//   kBytes, kHeader   bytes of a block of 32, bytes before the first block of a row
//   kRowScale         one f32 scale in front of the row instead of an f16 scale in front of each block
//   kOffset           unsigned codes are by this larger than signed ones
//   pair(b)           the 64 signed codes of the block at b and the one behind it, in their order
//   four<kSigned>(b, out)
//       the codes of the blocks at b[0..3]: byte 4 i + c of out[h] = code 16 h + i of block c
//   unsigned_four(b, out)
//       the same of unsigned codes, of four blocks as far from each other
//   sixteen(b, stride, out)
//       unsigned codes of 16 blocks: byte 4 c + i of out[g] = code 4 g + i of the block at b + c * stride
//   kTileUnit
//       what tile_four and tile_sixteen give: signed codes times this, in the same orders
#pragma once
#include "kernels/cache/kv_rows.hpp"
#include "kernels/cache/kv_types.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace kv {

// Byte i of the result of a permutation: byte `step` * (i % 4) + i / 4 % span.
struct Interleaving {
    uint8_t from[64];
    constexpr Interleaving(int step, int span) : from() {
        for (int i = 0; i < 64; ++i) from[i] = uint8_t(step * (i % 4) + i / 4 % span);
    }
    IKPY_CODES __m512i of(__m512i x) const { return _mm512_permutexvar_epi8(_mm512_loadu_si512(from), x); }
};
inline constexpr Interleaving kSixteens(16, 16), kEights(8, 8);

// Byte 4 i + c of half h: byte 16 h + i of 32 bytes c.
struct Halves {
    uint8_t from[2][64];
    constexpr Halves() : from() {
        for (int i = 0; i < 128; ++i) from[i / 64][i % 64] = uint8_t(32 * (i % 4) + i / 4);
    }
};
inline constexpr Halves kHalves;

// Bytes `at` .. at + 15 of four blocks, interleaved.
IKPY_CODES __m512i interleave16(const uint8_t* const* b, int at) {
    __m512i x = _mm512_castsi128_si512(load_levels(b[0] + at));
    x = _mm512_inserti32x4(x, load_levels(b[1] + at), 1);
    x = _mm512_inserti32x4(x, load_levels(b[2] + at), 2);
    x = _mm512_inserti32x4(x, load_levels(b[3] + at), 3);
    return kSixteens.of(x);
}

template <int Bytes, int Header, int At>
struct CodesOfBytes {
    static constexpr int kBytes = Bytes, kHeader = Header;
    static constexpr bool kRowScale = Header > 0;
    static constexpr int kOffset = 128, kTileUnit = 1;
    static IKPY_CODES __m512i without_sign(__m512i x) { return _mm512_xor_si512(x, _mm512_set1_epi8(-128)); }
    static IKPY_CODES void tile_four(const uint8_t* const* b, __m512i* out) { four<true>(b, out); }
    static IKPY_CODES void tile_sixteen(const uint8_t* b, int64_t stride, __m512i* out) {
        transpose32(b + At, stride, out);
    }
    static IKPY_CODES __m512i pair(const uint8_t* b) {
        const auto* p = reinterpret_cast<const __m256i*>(b + At);
        const auto* q = reinterpret_cast<const __m256i*>(b + At + Bytes);
        return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(p)), _mm256_loadu_si256(q), 1);
    }
    template <bool kSigned>
    static IKPY_CODES void four(const uint8_t* const* b, __m512i* out) {
        for (int i = 0; i < 2; ++i) {
            out[i] = interleave16(b, At + 16 * i);
            if (!kSigned) out[i] = without_sign(out[i]);
        }
    }
    static IKPY_CODES void unsigned_four(const RowsOfFour& b, __m512i* out) {
        const __m512i x = of_two(b.at(0) + At, b.at(1) + At), y = of_two(b.at(2) + At, b.at(3) + At);
        for (int i = 0; i < 2; ++i)
            out[i] = without_sign(_mm512_permutex2var_epi8(x, _mm512_loadu_si512(kHalves.from[i]), y));
    }
    static IKPY_CODES void sixteen(const uint8_t* b, int64_t stride, __m512i* out) {
        tile_sixteen(b, stride, out);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) out[i] = without_sign(out[i]);
    }
};
using CodesQ8_0 = CodesOfBytes<34, 0, 2>;
using CodesQ8_KV = CodesOfBytes<32, 8, 0>;

IKPY_CODES __m512i low_nibbles(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }

// Nibbles of two blocks, 16 bytes at p and 16 at q, one per byte.
IKPY_CODES __m512i nibbles_of_pair(const uint8_t* p, const uint8_t* q) {
    const __m512i both =
        _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(load_levels(p)), 0xff00, load_levels(q));
    return low_nibbles(_mm512_srlv_epi64(both, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4)));
}

// What a nibble stands for, and the same made unsigned.
struct ValuesQ4_0 {
    static constexpr int kOffset = 8, kTileUnit = 16;
    // A nibble less 8, times 16, is the nibble in the upper half of a byte with its highest bit changed.
    static IKPY_CODES void tile_codes(__m512i bytes, __m512i* low, __m512i* high) {
        const __m512i half = _mm512_set1_epi8(char(0xf0)), sign = _mm512_set1_epi8(-128);
        *low = _mm512_ternarylogic_epi32(_mm512_slli_epi16(bytes, 4), half, sign, kKeepAndChange);
        *high = _mm512_ternarylogic_epi32(bytes, half, sign, kKeepAndChange);
    }
    static constexpr int kKeepAndChange = 0x6a;  // (a & b) ^ c
    static IKPY_CODES __m512i without_sign(__m512i nibbles) { return nibbles; }
    static constexpr int8_t kAll[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
};
struct ValuesIQ4_NL {
    static constexpr int kOffset = 128, kTileUnit = 1;
    static IKPY_CODES void tile_codes(__m512i bytes, __m512i* low, __m512i* high) {
        const __m512i all = _mm512_broadcast_i32x4(load_levels(reinterpret_cast<const uint8_t*>(kAll)));
        *low = _mm512_shuffle_epi8(all, low_nibbles(bytes));
        *high = _mm512_shuffle_epi8(all, low_nibbles(_mm512_srli_epi16(bytes, 4)));
    }
    static IKPY_CODES __m512i without_sign(__m512i nibbles) {
        const __m128i all =
            _mm_xor_si128(load_levels(reinterpret_cast<const uint8_t*>(kAll)), _mm_set1_epi8(-128));
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(all), nibbles);
    }
    static constexpr const int8_t (&kAll)[16] = kIq4NlValues;
};

template <class Values, int Bytes>
struct CodesOfNibbles {
    static constexpr int kBytes = Bytes, kHeader = 0, kOffset = Values::kOffset;
    static constexpr int kAt = Bytes - 16, kTileUnit = Values::kTileUnit;
    static constexpr bool kRowScale = false;
    static IKPY_CODES void tile_four(const uint8_t* const* b, __m512i* out) {
        Values::tile_codes(interleave16(b, kAt), out, out + 1);
    }
    static IKPY_CODES void tile_sixteen(const uint8_t* b, int64_t stride, __m512i* out) {
        __m512i x[4];
        transpose16(b + kAt, stride, x);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) Values::tile_codes(x[i], out + i, out + 4 + i);
    }
    static IKPY_CODES __m512i values(__m512i nibbles) {
        const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(Values::kAll));
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(all), nibbles);
    }
    static IKPY_CODES __m512i pair(const uint8_t* b) {
        return values(nibbles_of_pair(b + kAt, b + kAt + kBytes));
    }
    template <bool kSigned>
    static IKPY_CODES void four(const uint8_t* const* b, __m512i* out) {
        const __m512i x = interleave16(b, kAt);
        out[0] = low_nibbles(x);
        out[1] = low_nibbles(_mm512_srli_epi16(x, 4));
        for (int i = 0; i < 2; ++i) out[i] = kSigned ? values(out[i]) : Values::without_sign(out[i]);
    }
    static IKPY_CODES void unsigned_four(const RowsOfFour& b, __m512i* out) {
        const uint8_t* blocks[4] = {b.at(0), b.at(1), b.at(2), b.at(3)};
        four<false>(blocks, out);
    }
    static IKPY_CODES void sixteen(const uint8_t* b, int64_t stride, __m512i* out) {
        transpose16(b + kAt, stride, out);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            out[4 + i] = Values::without_sign(low_nibbles(_mm512_srli_epi16(out[i], 4)));
            out[i] = Values::without_sign(low_nibbles(out[i]));
        }
    }
};
using CodesQ4_0 = CodesOfNibbles<ValuesQ4_0, 18>;
using CodesQ4_1 = CodesOfNibbles<ValuesQ4_0, 20>;
using CodesIQ4_NL = CodesOfNibbles<ValuesIQ4_NL, 18>;

// Byte 4 i + c: of 16 bytes, four of each block, the one with the fifth bit of code i of block c.
struct FifthBits {
    uint8_t from[64], bit[64];
    constexpr FifthBits() : from(), bit() {
        for (int i = 0; i < 64; ++i) {
            from[i] = uint8_t(4 * (i % 4) + i / 32);
            bit[i] = uint8_t(1 << i / 4 % 8);
        }
    }
};
inline constexpr FifthBits kFifthBits;

template <int Bytes>
struct CodesOfFives {
    static constexpr int kBytes = Bytes, kHeader = 0, kOffset = 16, kTileUnit = 1;
    static constexpr bool kRowScale = false;
    static IKPY_CODES void tile_four(const uint8_t* const* b, __m512i* out) { four<true>(b, out); }
    static IKPY_CODES void tile_sixteen(const uint8_t* b, int64_t stride, __m512i* out) {
        sixteen(b, stride, out);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) out[i] = _mm512_sub_epi8(out[i], _mm512_set1_epi8(kOffset));
    }
    static constexpr int kAt = Bytes - 16, kBits = Bytes - 20;
    static IKPY_CODES __m512i add_bits(__m512i nibbles, __mmask64 set) {
        return _mm512_mask_add_epi8(nibbles, set, nibbles, _mm512_set1_epi8(16));
    }
    static IKPY_CODES __m512i with_sign(__m512i nibbles, __mmask64 set) {
        return _mm512_mask_add_epi8(nibbles, ~set, nibbles, _mm512_set1_epi8(-16));
    }
    static IKPY_CODES __m512i pair(const uint8_t* b) {
        const uint64_t set = load_unaligned<uint32_t>(b + kBits) |
                             uint64_t(load_unaligned<uint32_t>(b + kBytes + kBits)) << 32;
        return with_sign(nibbles_of_pair(b + kAt, b + kAt + kBytes), set);
    }
    template <bool kSigned>
    static IKPY_CODES void four(const uint8_t* const* b, __m512i* out) {
        __m128i words = _mm_cvtsi32_si128(load_unaligned<int32_t>(b[0] + kBits));
        words = _mm_insert_epi32(words, load_unaligned<int32_t>(b[1] + kBits), 1);
        words = _mm_insert_epi32(words, load_unaligned<int32_t>(b[2] + kBits), 2);
        words = _mm_insert_epi32(words, load_unaligned<int32_t>(b[3] + kBits), 3);
        const __m512i all = _mm512_broadcast_i32x4(words), bit = _mm512_loadu_si512(kFifthBits.bit);
        const __m512i from = _mm512_loadu_si512(kFifthBits.from);
        const __m512i x = interleave16(b, kAt);
        const __m512i nibbles[2] = {low_nibbles(x), low_nibbles(_mm512_srli_epi16(x, 4))};
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            const __m512i bytes =
                _mm512_shuffle_epi8(all, _mm512_add_epi8(from, _mm512_set1_epi8(char(2 * i))));
            const __mmask64 set = _mm512_test_epi8_mask(bytes, bit);
            out[i] = kSigned ? with_sign(nibbles[i], set) : add_bits(nibbles[i], set);
        }
    }
    static IKPY_CODES void unsigned_four(const RowsOfFour& b, __m512i* out) {
        const uint8_t* blocks[4] = {b.at(0), b.at(1), b.at(2), b.at(3)};
        four<false>(blocks, out);
    }
    static IKPY_CODES void sixteen(const uint8_t* b, int64_t stride, __m512i* out) {
        __m512i words;
        first_of_sixteen(b + kBits, stride, &words, 1);
        transpose16(b + kAt, stride, out);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            out[4 + i] = low_nibbles(_mm512_srli_epi16(out[i], 4));
            out[i] = low_nibbles(out[i]);
        }
        const __m512i first = _mm512_set1_epi32(0x08040201);  // bits of the codes of a dword
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            const __m512i from = _mm512_add_epi8(
                _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12)),
                _mm512_set1_epi8(char(i / 2)));
            const __m512i bit = i % 2 ? _mm512_slli_epi32(first, 4) : first;
            out[i] = add_bits(out[i], _mm512_test_epi8_mask(_mm512_shuffle_epi8(words, from), bit));
        }
    }
};
using CodesQ5_0 = CodesOfFives<22>;
using CodesQ5_1 = CodesOfFives<24>;

struct CodesQ6_0 {
    static constexpr int kBytes = 26, kHeader = 0, kOffset = 32, kTileUnit = 1;
    static constexpr bool kRowScale = false;
    static IKPY_CODES void tile_four(const uint8_t* const* b, __m512i* out) { four<true>(b, out); }
    static IKPY_CODES void tile_sixteen(const uint8_t* b, int64_t stride, __m512i* out) {
        sixteen(b, stride, out);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) out[i] = with_sign(out[i]);
    }
    // Nibbles and the two bits above them, moved to bits 4 and 5 of their bytes by rotating quadwords.
    static IKPY_CODES __m512i join(__m512i nibbles, __m512i top, __m512i rotation) {
        const __m512i bits = _mm512_and_si512(_mm512_rolv_epi64(top, rotation), _mm512_set1_epi8(0x30));
        return _mm512_or_si512(nibbles, bits);
    }
    static IKPY_CODES __m512i with_sign(__m512i x) { return _mm512_sub_epi8(x, _mm512_set1_epi8(kOffset)); }
    static IKPY_CODES __m128i top_bits(const uint8_t* b) {
        return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b + 2));
    }
    static IKPY_CODES __m512i pair(const uint8_t* b) {
        const __m512i top =
            _mm512_mask_broadcastq_epi64(_mm512_broadcastq_epi64(top_bits(b)), 0xf0, top_bits(b + kBytes));
        return with_sign(
            join(nibbles_of_pair(b + 10, b + 10 + kBytes), top, _mm512_setr_epi64(4, 0, 2, 62, 4, 0, 2, 62)));
    }
    template <bool kSigned>
    static IKPY_CODES void four(const uint8_t* const* b, __m512i* out) {
        const __m128i low = _mm_unpacklo_epi64(top_bits(b[0]), top_bits(b[1]));
        const __m128i high = _mm_unpacklo_epi64(top_bits(b[2]), top_bits(b[3]));
        const __m512i top = kEights.of(_mm512_inserti32x4(_mm512_castsi128_si512(low), high, 1));
        const __m512i x = interleave16(b, 10);
        out[0] = join(low_nibbles(x), top, _mm512_setr_epi64(4, 4, 4, 4, 0, 0, 0, 0));
        out[1] =
            join(low_nibbles(_mm512_srli_epi16(x, 4)), top, _mm512_setr_epi64(2, 2, 2, 2, 62, 62, 62, 62));
        for (int i = 0; i < 2 && kSigned; ++i) out[i] = with_sign(out[i]);
    }
    static IKPY_CODES void unsigned_four(const RowsOfFour& b, __m512i* out) {
        const uint8_t* blocks[4] = {b.at(0), b.at(1), b.at(2), b.at(3)};
        four<false>(blocks, out);
    }
    // Byte j of the upper bits has those of the elements j, j + 16, j + 8 and j + 24, lowest first.
    static IKPY_CODES void sixteen(const uint8_t* b, int64_t stride, __m512i* out) {
        __m512i top[2];
        first_of_sixteen(b + 2, stride, top, 2);
        transpose16(b + 10, stride, out);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const __m512i rotation = _mm512_set1_epi64(i < 2 ? 4 : 0);
            const __m512i rotation_of_high = _mm512_set1_epi64(i < 2 ? 2 : 62);
            out[4 + i] = join(low_nibbles(_mm512_srli_epi16(out[i], 4)), top[i % 2], rotation_of_high);
            out[i] = join(low_nibbles(out[i]), top[i % 2], rotation);
        }
    }
};

// What make returns for the codes of a type; nothing (a null pointer) for other types.
template <class F>
auto with_codes(int type, F make) -> decltype(make(CodesQ8_0())) {
    switch (type) {
        case kQ8_0:
            return make(CodesQ8_0());
        case kTypeQ8_KV:
            return make(CodesQ8_KV());
        case kTypeQ6_0:
            return make(CodesQ6_0());
        case kTypeQ4_0:
            return make(CodesQ4_0());
        case kTypeQ4_1:
            return make(CodesQ4_1());
        case kTypeQ5_0:
            return make(CodesQ5_0());
        case kTypeQ5_1:
            return make(CodesQ5_1());
        case kTypeIQ4_NL:
            return make(CodesIQ4_NL());
        default:
            return nullptr;
    }
}

}  // namespace kv
}  // namespace ikpy

#endif
