// Building blocks of the AVX-512 unpackers: bytes to 64 codes in natural order, fields to scale vectors.
#pragma once
#include "kernels/matmul/unpacked.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace wide {

inline __m512i bytes(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }

// 32 bytes in both halves.
inline __m512i twice(const uint8_t* p) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// The two 32-byte halves shifted right by different bit counts; bits of neighbouring bytes come in above.
inline __m512i shift_halves(__m512i v, int low, int high) {
    return _mm512_srlv_epi16(v, _mm512_inserti64x4(_mm512_set1_epi16(static_cast<short>(low)),
                                                   _mm256_set1_epi16(static_cast<short>(high)), 1));
}

// Selects a different bit in each half.
inline __mmask64 test_halves(__m512i v, int low, int high) {
    return _mm512_test_epi8_mask(
        v, _mm512_inserti64x4(bytes(1 << low), _mm256_set1_epi8(static_cast<char>(1 << high)), 1));
}

// Low nibbles of all bytes of some 16-byte lanes and high nibbles of the others, at bit Place of their byte;
// other bits are undefined if that is not 0. High: a bit for each of these.
template <int Place, int High>
inline __m512i nibbles_of(__m512i lanes) {
    static_assert(Place < 4);
    const auto count = [](int lane) {
        const int64_t turn = (Place + 28 * (High >> lane & 1)) % 32;
        return turn | turn << 32;
    };
    const __m512i turned = _mm512_rolv_epi32(
        lanes,
        _mm512_setr_epi64(count(0), count(0), count(1), count(1), count(2), count(2), count(3), count(3)));
    return Place > 0 ? turned : _mm512_and_si512(turned, bytes(15));
}

// 32 bytes to 64 nibbles: low nibbles of all bytes, then high nibbles.
template <int Place = 0>
inline __m512i nibbles32(const uint8_t* p) {
    return nibbles_of<Place, 12>(twice(p));
}

// 2 x 16 bytes as four 16-byte lanes a a b b; low nibbles of each come before its high nibbles.
template <int Place = 0>
inline __m512i nibbles16(__m512i lanes) {
    return nibbles_of<Place, 10>(lanes);
}

inline __m512i lanes_aabb(const uint8_t* a, const uint8_t* b) {
    const __m512i first = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a)));
    return _mm512_mask_broadcast_i32x4(first, 0xFF00, _mm_loadu_si128(reinterpret_cast<const __m128i*>(b)));
}

inline __m512i lanes_aabb(const uint8_t* p) {
    const __m512i v = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), v);
}

// 2-bit fields of the i-th 64 elements: bytes 32 * b128 .. + 31, two bits per 32 elements.
inline __m512i two_bit_fields(const uint8_t* qs, int i) {
    return _mm512_and_si512(shift_halves(twice(qs + 32 * (i >> 1)), 4 * (i & 1), 4 * (i & 1) + 2), bytes(3));
}

// Four times 16 bytes.
inline __m512i lanes_abcd(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) {
    const auto load = [](const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); };
    __m512i v = _mm512_broadcast_i32x4(load(a));
    v = _mm512_mask_broadcast_i32x4(v, 0x00F0, load(b));
    v = _mm512_mask_broadcast_i32x4(v, 0x0F00, load(c));
    return _mm512_mask_broadcast_i32x4(v, 0xF000, load(d));
}

inline __m512i low_nibbles(__m512i v) { return _mm512_and_si512(v, bytes(15)); }
inline __m512i high_nibbles(__m512i v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), bytes(15)); }

// Nibbles of eight groups of 32 as halves: the low nibbles of the 16 bytes of a group come first.
// at(g): their address.
template <class At>
inline void nibble_halves(At at, __m512i* q) {
    for (int i = 0; i < 2; ++i) {
        const __m512i v = lanes_abcd(at(4 * i), at(4 * i + 1), at(4 * i + 2), at(4 * i + 3));
        q[2 * i] = low_nibbles(v);
        q[2 * i + 1] = high_nibbles(v);
    }
}

// The same for 128 bytes in a row.
inline void nibble_halves(const uint8_t* p, __m512i* q) {
    for (int i = 0; i < 2; ++i) {
        const __m512i v = _mm512_loadu_si512(p + 64 * i);
        q[2 * i] = low_nibbles(v);
        q[2 * i + 1] = high_nibbles(v);
    }
}

// The same for four times 32 bytes with the nibbles of two groups.
inline void alternating_nibble_halves(const uint8_t* p, __m512i* q) {
    const __m512i a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + 64);
    const __m512i first = _mm512_shuffle_i64x2(a, b, 0x88), last = _mm512_shuffle_i64x2(a, b, 0xDD);
    q[0] = low_nibbles(first);
    q[1] = low_nibbles(last);
    q[2] = high_nibbles(first);
    q[3] = high_nibbles(last);
}

// Bits g of the 32 bytes at p, for the codes of group g in vector i of alternating halves.
inline __mmask64 alternating_bits(const uint8_t* p, int i) {
    const __m512i half =
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * (i & 1))));
    const auto bit = [i](int g) { return 0x0101010101010101 << (g + (i >> 1)); };
    return _mm512_test_epi8_mask(
        half, _mm512_setr_epi64(bit(0), bit(0), bit(2), bit(2), bit(4), bit(4), bit(6), bit(6)));
}

inline void lookup_all(__m512i table, __m512i* q) {
    for (int i = 0; i < 4; ++i) q[i] = _mm512_shuffle_epi8(table, q[i]);
}

inline __m512i table16(const uint8_t* table) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}

inline __m512 f16_lanes(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_set1_epi16(load_unaligned<int16_t>(p)));
}

// f16 fields at the same place of 8 consecutive blocks of Size bytes, in lanes 0 .. 7. Never reads past the
// last block: the loads of later pairs of blocks move back where needed.
template <int Size, int Field>
inline __m512 block_fields(const uint8_t* p) {
    constexpr int kEnd = 8 * Size - 64;
    if constexpr (3 * Size + Field <= 62) {
        constexpr int kSecond = 4 * Size < kEnd ? 4 * Size : kEnd;
        alignas(64) static constexpr uint16_t kIndex[32] = {
            Field / 2,
            (Field + Size) / 2,
            (Field + 2 * Size) / 2,
            (Field + 3 * Size) / 2,
            32 + (Field + 4 * Size - kSecond) / 2,
            32 + (Field + 5 * Size - kSecond) / 2,
            32 + (Field + 6 * Size - kSecond) / 2,
            32 + (Field + 7 * Size - kSecond) / 2,
        };
        const __m512i words = _mm512_permutex2var_epi16(_mm512_loadu_si512(p), _mm512_load_si512(kIndex),
                                                        _mm512_loadu_si512(p + kSecond));
        return _mm512_cvtph_ps(_mm512_castsi512_si256(words));
    } else {
        constexpr int kLast = 6 * Size < kEnd ? 6 * Size : kEnd;
        alignas(64) static constexpr uint16_t kFirst[32] = {Field / 2, (Field + Size) / 2, 32 + Field / 2,
                                                            32 + (Field + Size) / 2};
        alignas(64) static constexpr uint16_t kRest[32] = {Field / 2, (Field + Size) / 2,
                                                           32 + (Field + 6 * Size - kLast) / 2,
                                                           32 + (Field + 7 * Size - kLast) / 2};
        const __m512i a = _mm512_permutex2var_epi16(_mm512_loadu_si512(p), _mm512_load_si512(kFirst),
                                                    _mm512_loadu_si512(p + 2 * Size));
        const __m512i b = _mm512_permutex2var_epi16(_mm512_loadu_si512(p + 4 * Size),
                                                    _mm512_load_si512(kRest), _mm512_loadu_si512(p + kLast));
        const __m128i words = _mm_unpacklo_epi64(_mm512_castsi512_si128(a), _mm512_castsi512_si128(b));
        return _mm512_castps256_ps512(_mm256_cvtph_ps(words));
    }
}

// 16 nibbles of 8 bytes, low nibble first, as i32 lanes.
inline __m512i nibble_lanes(const uint8_t* p) {
    const __m512i v = _mm512_mask_set1_epi32(_mm512_set1_epi32(load_unaligned<int32_t>(p)), 0xFF00,
                                             load_unaligned<int32_t>(p + 4));
    const __m512i counts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    return _mm512_and_si512(_mm512_srlv_epi32(v, counts), _mm512_set1_epi32(15));
}

// 16 two-bit fields of a dword as i32 lanes.
inline __m512i two_bit_lanes(uint32_t fields) {
    const __m512i counts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return _mm512_and_si512(_mm512_srlv_epi32(_mm512_set1_epi32(static_cast<int32_t>(fields)), counts),
                            _mm512_set1_epi32(3));
}

inline __m512 scaled(__m512 d, __m512i integers) { return _mm512_mul_ps(d, _mm512_cvtepi32_ps(integers)); }

// Nibbles of 8 blocks of Size bytes that end with 16 bytes of them.
template <int Size, int Place = 0>
inline Codes512 block_nibbles(const uint8_t* p) {
    Codes512 r;
    for (int i = 0; i < 4; ++i, p += 2 * Size)
        r.q[i] = nibbles16<Place>(lanes_aabb(p + Size - 16, p + 2 * Size - 16));
    return r;
}

// The same as nibble_halves() orders them.
template <int Size>
inline Codes512 block_nibble_halves(const uint8_t* p) {
    Codes512 r;
    nibble_halves([p](int g) { return p + Size * (g + 1) - 16; }, r.q);
    return r;
}

// Adds 16 where the 4 bytes before the nibbles of such blocks have a bit.
template <int Size>
inline Codes512 with_fifth_bits(Codes512 r, const uint8_t* p) {
    p += Size - 20;
    for (int i = 0; i < 4; ++i, p += 2 * Size) {
        const uint64_t high =
            load_unaligned<uint32_t>(p) | static_cast<uint64_t>(load_unaligned<uint32_t>(p + Size)) << 32;
        r.q[i] = _mm512_mask_add_epi8(r.q[i], high, r.q[i], bytes(16));
    }
    return r;
}

// Scales of 8 blocks of Size bytes that begin with one and, if WithMinimum, a minimum.
template <int Size, bool WithMinimum = false>
inline Codes512 with_block_scales(Codes512 r, const uint8_t* p) {
    r.d = block_fields<Size, 0>(p);
    if constexpr (WithMinimum) r.m = block_fields<Size, 2>(p);
    return r;
}

// Codes of the first table of a type with levels.
template <class U>
inline Codes512 levels_of(Codes512 numbers) {
    lookup_all(table16(U::kLevels), numbers.q);
    return numbers;
}

// Adds the step to the codes of the groups that lack it. No sum exceeds 255, so whole quadwords can be added.
template <class U>
inline Codes512 with_steps(Codes512 r) {
    const uint32_t quadwords =
        U::kGroup == 16 ? _pdep_u32(r.shifted, 0x55555555u) * 3u : _pdep_u32(r.shifted, 0x11111111u) * 15u;
    for (int i = 0; i < 4; ++i)
        r.q[i] = _mm512_mask_add_epi64(r.q[i], static_cast<__mmask8>(quadwords >> (8 * i)), r.q[i],
                                       bytes(U::kStep));
    return r;
}

}  // namespace wide
}  // namespace ikpy

#endif
