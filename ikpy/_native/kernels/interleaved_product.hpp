// Products of row-interleaved types. Their bytes already hold four columns of four rows next to each other,
// as the panels of the microkernel do: nothing is transposed, and panels serve single tokens too.
//
// An unpacker is a struct with kType, kRows, kGroup, kBlock, kBlockBytes (of the whole group), kZero,
// optional header members as in unpacked.hpp, and
//   static void codes(const Quads<kRows>& q, const PanelRows& out)    the codes of one block; symmetric codes
//   around 128, so kZero is 128 or 0
//   static void scales(const uint8_t* block, int quad, float* d, float* m)
//       scales of rows 4 * quad .. + 3 of a group; those of scale group g at d + g * kHalfRows
#pragma once
#include <algorithm>

#include "kernels/quant_product.hpp"

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

constexpr int kGroupPrefetchBytes = 1024;

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
        return reinterpret_cast<Lanes>(
            _mm256_inserti128_si256(_mm256_castsi128_si256(at(0, offset)), at(1, offset), 1));
#else
        return load_unaligned<Lanes>(block[0] + offset + 16 * place[0]);
#endif
    }

    // One byte per row, four times each. Fields of all rows of the group start at `offset`.
    Lanes rows(int offset) const {
        uint32_t row[kQuads];
        for (int q = 0; q < kQuads; ++q) row[q] = load_unaligned<uint32_t>(block[q] + offset + 4 * place[q]);
#if defined(__AVX512VNNI__)
        const __m512i order = _mm512_add_epi8(
            _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x01010101, 0x02020202, 0x03030303)),
            _mm512_setr_epi64(0, 0, 0x0404040404040404, 0x0404040404040404, 0x0808080808080808,
                              0x0808080808080808, 0x0C0C0C0C0C0C0C0C, 0x0C0C0C0C0C0C0C0C));
        const __m128i all = _mm_setr_epi32(static_cast<int>(row[0]), static_cast<int>(row[1]),
                                           static_cast<int>(row[2]), static_cast<int>(row[3]));
        return reinterpret_cast<Lanes>(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(all), order));
#else
        Lanes v;
        for (int i = 0; i < 16 * kQuads; ++i) v[i] = static_cast<uint8_t>(row[i >> 4] >> (8 * (i >> 2 & 3)));
        return v;
#endif
    }

#if defined(__AVX2__)
  private:
    __m128i at(int q, int offset) const {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(block[q] + offset + 16 * place[q]));
    }
#endif
};

// The rows of the quads inside a panel half; `column` is a multiple of 4.
struct PanelRows {
    uint8_t* codes;
    void put(int column, Lanes v) const { std::memcpy(codes + column * kHalfRows, &v, sizeof v); }
    PanelRows from(int column) const { return {codes + column * kHalfRows}; }
};

// Raises single tokens of types with small blocks from 12 to 15 GB/s per core; whole 256-column blocks are
// bursts that slow them down instead.
template <class U>
inline void prefetch_groups([[maybe_unused]] const uint8_t* const* groups, [[maybe_unused]] int64_t offset) {
#if defined(__AVX2__)
    for (int i = 0; i < kHalfRows / U::kRows; ++i)
        for (int b = 0; b < U::kBlockBytes; b += 64)
            _mm_prefetch(reinterpret_cast<const char*>(groups[i] + offset + kGroupPrefetchBytes + b),
                         _MM_HINT_T0);
#endif
}

// Unpacks up to 256 columns of a half; groups beyond n get zero scales.
template <class U>
void pack_interleaved(const uint8_t* const* groups, int64_t n, uint8_t* codes, float* d, float* m) {
    constexpr int R = U::kRows, kGroups = U::kBlock / U::kGroup;
    const int n_blocks = static_cast<int>(std::min<int64_t>(n, kChunk) / U::kBlock);
    for (int b = 0; b < n_blocks; ++b) {
        if constexpr (U::kBlock < kChunk) prefetch_groups<U>(groups, b * U::kBlockBytes);
        for (int q0 = 0; q0 < kHalfRows / 4; q0 += kQuads) {
            Quads<R> quads;
            for (int q = 0; q < kQuads; ++q) {
                quads.block[q] = groups[4 * (q0 + q) / R] + b * U::kBlockBytes;
                quads.place[q] = (q0 + q) % (R / 4);
                const int64_t at = b * kGroups * kHalfRows + 4 * (q0 + q);
                U::scales(quads.block[q], quads.place[q], d + at, m + at);
            }
            U::codes(quads, PanelRows{codes + b * U::kBlock * kHalfRows + 16 * q0});
        }
    }
    for (int64_t i = n_blocks * kGroups * kHalfRows; i < kChunk / U::kGroup * kHalfRows; ++i) {
        d[i] = 0.0f;
        if (U::kZero == 0) m[i] = 0.0f;
    }
}

// Packs `columns` columns from k0 of the halves from h0 to h1 into a panel at `work`.
template <class U>
Int8Panel interleaved_panel(const RowBlock& rows, int h0, int h1, int64_t k0, int64_t columns,
                            uint8_t* work) {
    Int8Panel p;
    p.n = columns;
    p.codes = work;
    p.d = reinterpret_cast<float*>(work + p.n * kBlockRows);
    p.m = p.d + 2 * p.half_scales(U::kGroup);
    for (int64_t k = 0; k < p.n; k += kChunk) {
        for (int h = h0; h < h1; ++h) {
            const uint8_t* groups[kHalfRows / U::kRows];
            for (int i = 0; i < kHalfRows / U::kRows; ++i)
                groups[i] = rows.group(h, i * U::kRows, U::kRows) + RowHeader<U>::kBytes +
                            (k0 + k) / U::kBlock * U::kBlockBytes;
            const int64_t scales = (h - h0) * p.half_scales(U::kGroup) + k / U::kGroup * kHalfRows;
            pack_interleaved<U>(groups, rows.n_in - k0 - k,
                                p.codes + (h - h0) * p.half_codes() + k * kHalfRows, p.d + scales,
                                p.m + scales);
        }
    }
    return p;
}

template <class U>
void interleaved_gemm(const RowBlock& rows, const uint8_t* const* x, int n_tokens, float* out,
                      uint8_t* work) {
    const ActQ8Layout layout(rows.n_in);
    const int n_halves = rows.n[1] > 0 ? 2 : 1;
    const Int8GemmFn multiply = int8_gemm(U::kGroup, U::kZero > 0);
    for (int64_t k0 = 0; k0 < layout.n; k0 += kPanelColumns) {
        const int64_t n = std::min(kPanelColumns, layout.n - k0);
        multiply(interleaved_panel<U>(rows, 0, n_halves, k0, n, work), n_halves, x, n_tokens, layout, k0, out,
                 k0 > 0);
    }
    apply_row_scales<U>(rows, n_halves, n_tokens, out);
}

// Small panels, so that reading memory and multiplying overlap.
template <class U>
void interleaved_gemv(const RowBlock& rows, const uint8_t* const* x, int n_tokens, float* out,
                      uint8_t* work) {
    const ActQ8Layout layout(rows.n_in);
    const int n_halves = rows.n[1] > 0 ? 2 : 1;
    const Int8GemmFn multiply = int8_gemm(U::kGroup, U::kZero > 0);
    for (int h = 0; h < n_halves; ++h)
        for (int64_t k0 = 0; k0 < layout.n; k0 += kChunk)
            multiply(interleaved_panel<U>(rows, h, h + 1, k0, kChunk, work), 1, x, n_tokens, layout, k0,
                     out + h * kHalfRows, k0 > 0);
    apply_row_scales<U>(rows, n_halves, n_tokens, out);
}

template <class U>
void interleaved_tile_panel(const RowBlock& rows, int64_t k0, int64_t n, uint16_t* panel, uint8_t* work) {
    const int n_halves = rows.n[1] > 0 ? 2 : 1;
    const Int8Panel p = interleaved_panel<U>(rows, 0, n_halves, k0, round_up(n, kChunk), work);
    decode_panel(p, n_halves, U::kGroup, U::kZero > 0, panel);
}

template <class U>
constexpr WeightKernels interleaved_kernels() {
    return {U::kType,
            kActQ8,
            4,
            interleaved_gemv<U>,
            interleaved_gemm<U>,
            int8_panel_bytes,
            {quant_tiles<U, interleaved_tile_panel<U>>, kActBf16}};
}

}  // namespace ikpy
