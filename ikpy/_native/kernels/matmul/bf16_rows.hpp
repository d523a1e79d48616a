// Quantized rows as bf16, in natural order: left operands of tile products. CPUs with tiles have VBMI.
#pragma once
#include "kernels/matmul/bf16_levels.hpp"
#include "kernels/matmul/bf16_trellis.hpp"
#include "kernels/matmul/gemm_ahead_amx.hpp"
#include "kernels/simd/prefetch_chunk.hpp"

namespace ikpy {

#if defined(__AVX512VNNI__) && defined(__linux__)

namespace bf16_rows {

// The even and the odd bytes of half of a vector as top bytes of dwords.
inline constexpr Bytes64 kTops[2][2] = {
    {Bytes64([](int i) { return i / 4 * 2; }), Bytes64([](int i) { return i / 4 * 2 + 1; })},
    {Bytes64([](int i) { return 32 + i / 4 * 2; }), Bytes64([](int i) { return 32 + i / 4 * 2 + 1; })}};

// The numbers of the groups of 32 columns, in the lanes of their pairs.
template <int Group>
inline __m512 spread(const float* x, int step) {
    const __m512 first = _mm512_set1_ps(x[32 * step / Group]);
    return Group == 32 ? first : _mm512_mask_blend_ps(0xFF00, first, _mm512_set1_ps(x[2 * step + 1]));
}

// Any codes: to f32 and times the scale.
template <class U, class Row>
IKPY_VBMI_INLINE void convert_codes(const Row& row, uint16_t* out) {
    const GroupScales s = row.groups();
#pragma GCC unroll 8
    for (int i = 0; i < kSteps; ++i) {
        const __m512i q = row.step(i);
        const __m512 d = spread<U::kGroup>(s.d, i);
        __m512 f[2];
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            const __m512i top =
                _mm512_maskz_permutexvar_epi8(0x8888888888888888, kTops[Row::half(i)][j].load(), q);
            f[j] = _mm512_cvtepi32_ps(top);
            f[j] =
                U::kZero == 0 ? _mm512_fmadd_ps(f[j], d, spread<U::kGroup>(s.m, i)) : _mm512_mul_ps(f[j], d);
        }
        store(bf16_pairs(f[0], f[1]), i, out);
    }
}

// What a row is made of, and what is kept of it until its values are written.
template <class U>
struct RowParts {
    static constexpr bool kSeeds = SeedsOf<U>::kValues > 0, kLevels = LevelsOf<U>::kCount > 0;
    static constexpr float kUnit = kSeeds || kLevels ? 1.0f : 0x1p-24f;  // of codes as top bytes

    static Codes512 whole(const uint8_t* p, [[maybe_unused]] int k) {
        if constexpr (kSeeds) {
            return U::seeds(p);
        } else {
            return LevelsOf<U>::whole(p, k);
        }
    }
    static Codes512 tail(const uint8_t* p, [[maybe_unused]] int k, int64_t n) {
        if constexpr (kSeeds) {
            return unpack_short<U>(U::seeds, p, n);
        } else {
            return LevelsOf<U>::tail(p, k, n);
        }
    }
    static __m512i stored_codes(__m512i q) {
        if (kSeeds) return q;
        if (kLevels) return placed_numbers<U>(q);
        if (U::kZero == 128) return _mm512_xor_si512(q, _mm512_set1_epi8(static_cast<char>(0x80)));
        return _mm512_sub_epi8(q, _mm512_set1_epi8(static_cast<char>(U::kZero)));
    }
    static void keep(const Codes512& c, StoredRow* row) {
        for (int i = 0; i < 4; ++i) _mm512_store_si512(row->q + 64 * i, stored_codes(c.q[i]));
        _mm512_store_ps(row->d, kUnit == 1.0f ? c.d : _mm512_mul_ps(c.d, _mm512_set1_ps(kUnit)));
        if (kSeeds) {
            _mm512_store_ps(row->m, _mm512_mul_ps(c.d, _mm512_set1_ps(-kBias)));
        } else if (kHasOffsets<U>) {
            _mm512_store_ps(row->m, LevelsOf<U>::offsets(c));
        }
    }
};

template <class U, class Row>
IKPY_VBMI_INLINE void write(const Row& row, uint16_t* out) {
    if constexpr (RowParts<U>::kSeeds) {
        generate<U>(row, out, AllSteps());
    } else if constexpr (RowParts<U>::kLevels) {
        Tables<U> tables(row.groups());
        look_up_levels<U>(row, tables, out, AllSteps());
    } else {
        convert_codes<U>(row, out);
    }
}

template <class U>
[[gnu::noinline]] void keep_tail(const uint8_t* p, int k, int64_t n, StoredRow* row) {
    RowParts<U>::keep(RowParts<U>::tail(p, k, n), row);
}

}  // namespace bf16_rows

// AheadFn of a type.
template <class U>
IKPY_VBMI void fill_bf16_rows(const RowBlock& rows, int h, int first, int64_t k0, uint16_t* tiles) {
    using namespace bf16_rows;
    // Scales take long to decode, and what waits for them fills the CPU's scheduler: those of all rows first.
    StoredRow row[kAheadRows];
    const uint8_t* p[kAheadRows];
    for (int r = 0; r < kAheadRows; ++r) {
        p[r] = rows.group(h, first + r, RowsOf<U>::kCount) + RowHeader<U>::kBytes +
               k0 / U::kBlock * U::kBlockBytes;
        if ((first + r) % RowsOf<U>::kCount == 0) prefetch_chunk<U>(p[r], rows.to_next_block());
    }
    if (rows.n_in - k0 >= kChunk) {
#pragma GCC unroll 4
        for (int r = 0; r < kAheadRows; ++r)
            RowParts<U>::keep(RowParts<U>::whole(p[r], (first + r) % RowsOf<U>::kCount), &row[r]);
    } else {
        for (int r = 0; r < kAheadRows; ++r)
            keep_tail<U>(p[r], (first + r) % RowsOf<U>::kCount, rows.n_in - k0, &row[r]);
    }
    // From registers the compiler would spread scales by permutations, of which one is done per cycle.
    asm volatile("" : "+m"(row));
    tiles += (h * kHalfRows + first) * 32;
#pragma GCC unroll 4
    for (int r = 0; r < kAheadRows; ++r) write<U>(row[r], tiles + r * 32);
}

#else

template <class U>
void fill_bf16_rows(const RowBlock&, int, int, int64_t, uint16_t*) {}

#endif

}  // namespace ikpy
