// Weights of few levels as bf16: every level of a group is scaled instead of every weight.
//
// Vector units have two ports, and all that moves bytes between lanes goes to one of them, so levels are
// looked up by bytes, in one step where lookups of words take two, and the tables are put together by shifts.
#pragma once
#include "kernels/matmul/bf16_stored_row.hpp"

#if defined(__AVX512VNNI__) && defined(__linux__)

namespace ikpy::bf16_rows {

// What is added to scaled levels: the minima, or the step of groups that use the second table.
template <class U>
constexpr bool kHasOffsets = U::kZero == 0 || StepOf<U>::kStep > 0;

// Types whose codes are numbers of levels, or can be had as such: up to 16 levels, or 32 per group of 32.
template <class U, class = void>
struct LevelsOf {
    static constexpr int kHigh = CodeRange<U>::kHigh;
    static constexpr int kCount = kHigh < 4                       ? 4
                                  : kHigh < 8 && U::kGroup == 16  ? 8
                                  : kHigh < 16                    ? 16
                                  : kHigh < 32 && U::kGroup == 32 ? 32
                                                                  : 0;
    static constexpr int kPlace = 0;
    static constexpr float level(int i) { return static_cast<float>(i - U::kZero); }
    static Codes512 whole(const uint8_t* p, int k) { return unpack_full<U>(p, k); }
    static Codes512 tail(const uint8_t* p, int k, int64_t n) { return unpack_tail<U>(p, k, n); }
    static __m512 offsets(const Codes512& c) { return c.m; }
};
template <class U>
struct LevelsOf<U, std::void_t<decltype(U::kLevels)>> {
    static constexpr int kCount = U::kLevelCount == 8 && U::kGroup == 32 ? 16 : U::kLevelCount;
    static constexpr int kPlace = U::kLevelCount == 16 ? 2 : 0;
    static constexpr float level(int i) {
        return static_cast<float>(U::kLevels[i % U::kLevelCount] - U::kZero);
    }
    static Codes512 numbers(const uint8_t* p) {
        if constexpr (kPlace > 0) {
            return U::template level_numbers<kPlace>(p);
        } else {
            return U::level_numbers(p);
        }
    }
    static Codes512 whole(const uint8_t* p, int) { return numbers(p); }
    static Codes512 tail(const uint8_t* p, int, int64_t n) { return unpack_short<U>(numbers, p, n); }
    static __m512 offsets(const Codes512& c) {
        return U::kZero == 0 ? c.m : _mm512_maskz_mul_ps(c.shifted, c.d, _mm512_set1_ps(StepOf<U>::kStep));
    }
};

struct Floats16 {
    alignas(64) float at[16];
    template <class F>
    constexpr explicit Floats16(F f) : at() {
        for (int i = 0; i < 16; ++i) at[i] = f(i);
    }
    __m512 load() const { return _mm512_load_ps(at); }
};

template <class U>
inline __m512 scaled(__m512 levels, __m512 d, __m512 m) {
    return kHasOffsets<U> ? _mm512_fmadd_ps(levels, d, m) : _mm512_mul_ps(levels, d);
}

// Tables of 64 bytes for every 32 columns. The number of a level, moved to the bits of kMask, and the flag of
// the column's group tell where the two bytes of a value are.
template <class U, int Count = LevelsOf<U>::kCount>
struct Tables;

// Levels of two groups in turn.
template <class U>
struct Tables<U, 16> {
    static constexpr int kMask = 4 * 15;
    static constexpr int kShared = U::kGroup == 32 ? 2 : 1;  // steps of a table
    static constexpr Floats16 kLevels{[](int i) { return LevelsOf<U>::level(i); }};
    static constexpr int flag(int group) { return 2 * (group & 1); }

    const GroupScales s;
    __m512i table;

    explicit Tables(const GroupScales& row) : s(row) {}
    __m512 levels(int g) const {
        return scaled<U>(kLevels.load(), _mm512_set1_ps(s.d[g]), _mm512_set1_ps(s.m[g]));
    }
    __m512i of(int step) {
        const int g = step * 32 / U::kGroup;
        if (step % kShared == 0) table = bf16_pairs(levels(g), levels(g + 1));
        return table;
    }
};

// Even and odd levels of a group of 32.
template <class U>
struct Tables<U, 32> {
    static constexpr int kMask = 2 * 31;
    static constexpr Floats16 kEven{[](int i) { return LevelsOf<U>::level(2 * i); }};
    static constexpr Floats16 kOdd{[](int i) { return LevelsOf<U>::level(2 * i + 1); }};
    static constexpr int flag(int) { return 0; }

    const GroupScales s;

    explicit Tables(const GroupScales& row) : s(row) {}
    __m512i of(int g) const {
        const __m512 d = _mm512_set1_ps(s.d[g]), m = _mm512_set1_ps(s.m[g]);
        return bf16_pairs(scaled<U>(kEven.load(), d, m), scaled<U>(kOdd.load(), d, m));
    }
};

// Two levels of all groups, in the dwords of the groups.
template <class U>
inline __m512i level_pairs(int i, __m512 d, __m512 m) {
    return bf16_pairs(scaled<U>(_mm512_set1_ps(LevelsOf<U>::level(i)), d, m),
                      scaled<U>(_mm512_set1_ps(LevelsOf<U>::level(i + 1)), d, m));
}

// The levels of a group are a quadword; groups 0, 1, 4, 5 ... are in the first table, the others in the
// second.
template <class U>
struct Tables<U, 4> {
    static constexpr int kMask = 2 * 3;
    static constexpr int flag(int group) { return 8 * (group / 4 * 2 + group % 2); }

    __m512i tables[2];

    explicit Tables(const GroupScales& s) {
        const __m512i a = level_pairs<U>(0, s.scales(), s.offsets());
        const __m512i b = level_pairs<U>(2, s.scales(), s.offsets());
        tables[0] = _mm512_unpacklo_epi32(a, b);
        tables[1] = _mm512_unpackhi_epi32(a, b);
    }
    __m512i of(int step) const { return tables[step * 32 / U::kGroup / 2 % 2]; }
};

// The levels of a group of 16 are 16 bytes; every fourth group is in the same table.
template <class U>
struct Tables<U, 8> {
    static constexpr int kMask = 2 * 7;
    static constexpr int flag(int group) { return 16 * (group % 4); }

    __m512i tables[4];

    explicit Tables(const GroupScales& s) {
        // Group 4 * table + lane of the table to where the transposition takes it from.
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const __m512 d = _mm512_permutexvar_ps(order, s.scales());
        const __m512 m = kHasOffsets<U> ? _mm512_permutexvar_ps(order, s.offsets()) : d;
        __m512i v[4], t[4];
        for (int i = 0; i < 4; ++i) v[i] = level_pairs<U>(2 * i, d, m);
        for (int i = 0; i < 2; ++i) {
            t[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
            t[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
        }
        for (int i = 0; i < 2; ++i) {
            tables[2 * i] = _mm512_unpacklo_epi64(t[i], t[2 + i]);
            tables[2 * i + 1] = _mm512_unpackhi_epi64(t[i], t[2 + i]);
        }
    }
    __m512i of(int step) const { return tables[step / 2]; }
};

// The flags of the columns of a step, for both bytes of a value.
template <class U, int Step>
inline constexpr Bytes64 kFlags{
    [](int i) { return Tables<U>::flag((32 * Step + i / 2) / U::kGroup) + i % 2; }};

template <class U, int Step, class Row>
IKPY_VBMI_INLINE void look_up_step(const Row& row, Tables<U>& tables, uint16_t* out) {
    const __m512i bytes = row.template twice<Step>();
    // bytes & mask | flags
    const __m512i index =
        _mm512_ternarylogic_epi32(bytes, _mm512_set1_epi8(Tables<U>::kMask), kFlags<U, Step>.load(), 0xEA);
    store(_mm512_permutexvar_epi8(index, tables.of(Step)), Step, out);
}

template <class U, class Row, size_t... Steps>
IKPY_VBMI_INLINE void look_up_levels(const Row& row, Tables<U>& tables, uint16_t* out,
                                     std::index_sequence<Steps...>) {
    (look_up_step<U, Steps>(row, tables, out), ...);
}

// Numbers of levels where lookups want them: from this bit on.
template <class U>
constexpr int kNumberPlace = LevelsOf<U>::kCount == 16 ? 2
                             : LevelsOf<U>::kCount > 0 ? 1
                                                       : 0;

template <class U>
inline __m512i placed_numbers(__m512i q) {
    if (LevelsOf<U>::kPlace > 0) return q;
    return kNumberPlace<U> == 2 ? _mm512_slli_epi16(q, 2) : _mm512_add_epi8(q, q);
}

}  // namespace ikpy::bf16_rows

#endif
