// Latent attention on F16 and BF16 caches: products of bf16 halves, hi hi + hi lo + lo hi (BF16 caches have
// no low half).
#include <algorithm>

#include "kernels/bf16_halves.hpp"
#include "kernels/flash_latent.hpp"
#include "kernels/flash_pack.hpp"

namespace ikpy {
namespace latent {

#if defined(__AVX512F__) && defined(__linux__)

namespace {

// Tiles of one operand; where there are low halves, those of each tile lie behind it.
struct Tiles {
    const uint8_t* at;
    int64_t stride;  // bytes between rows of a tile
    int64_t outer;   // between tiles of different rows or columns of the result
    int64_t step;    // between tiles of consecutive depths
};

constexpr int64_t kDepthSteps = kCells / kTileDepth;  // of the outputs
constexpr int64_t kTwo = 2 * kTileBytes;
constexpr int64_t kColumns = 64;  // of V at a time

// Operands are made a piece at a time, so that they stay in the first-level cache: K for some tiles of its
// depth, V for kColumns elements.
template <bool kSplit>
constexpr int64_t kChunk = kSplit ? 3 : 6;

struct Work {
    uint8_t* q;  // [rows / 16][dk / 32][hi, lo] tiles
    uint8_t* k;  // [kCells / 16][kChunk][hi, lo], F16 only
    uint8_t* v;  // [kColumns / 16][kDepthSteps][hi, lo]
    uint8_t* p;  // [rows / 16][kDepthSteps][hi, lo]
    uint8_t* end;
};

Work work_at(const Shape& shape, uint8_t* at) {
    Work w;
    w.q = at;
    w.k = w.q + shape.rows / 16 * (shape.dk() / kTileDepth) * kTwo;
    w.v = w.k + kCells / 16 * kChunk<true> * kTwo;
    w.p = w.v + kColumns / 16 * kDepthSteps * kTwo;
    w.end = w.p + shape.rows / 16 * kDepthSteps * kTwo;
    return w;
}

size_t work_bytes(const Shape& shape) {
    return size_t(work_at(shape, nullptr).end - static_cast<uint8_t*>(nullptr));
}

// ---- products ----

IKPY_AMX inline void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// Four left tiles, in the first-level cache, times one right tile and its low halves, which are loaded once.
// kLow: the left ones have low halves too.
template <bool kLow>
IKPY_AMX void four_left(const Tiles& a, const Tiles& b, int64_t n_steps, float* c, int64_t ld, bool add,
                        Background& next) {
    float *const c1 = c + 16 * ld, *const c2 = c1 + 16 * ld, *const c3 = c2 + 16 * ld;
    if (add) {
        _tile_loadd(0, c, ld * 4);
        _tile_loadd(1, c1, ld * 4);
        _tile_loadd(2, c2, ld * 4);
        _tile_loadd(3, c3, ld * 4);
    } else {
        clear_sums();
    }
    for (int64_t k = 0; k < n_steps; ++k) {
        const uint8_t *left = a.at + k * a.step, *right = b.at + k * b.step;
        _tile_loadd(6, right, b.stride);
        _tile_loadd(7, right + kTileBytes, b.stride);
        _tile_loadd(4, left, a.stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(0, 4, 7);
        if (kLow) {
            _tile_loadd(5, left + kTileBytes, a.stride);
            _tile_dpbf16ps(0, 5, 6);
        }
        next.tick();
        left += a.outer;
        _tile_loadd(4, left, a.stride);
        _tile_dpbf16ps(1, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (kLow) {
            _tile_loadd(5, left + kTileBytes, a.stride);
            _tile_dpbf16ps(1, 5, 6);
        }
        next.tick();
        left += a.outer;
        _tile_loadd(4, left, a.stride);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(2, 4, 7);
        if (kLow) {
            _tile_loadd(5, left + kTileBytes, a.stride);
            _tile_dpbf16ps(2, 5, 6);
        }
        next.tick();
        left += a.outer;
        _tile_loadd(4, left, a.stride);
        _tile_dpbf16ps(3, 4, 6);
        _tile_dpbf16ps(3, 4, 7);
        if (kLow) {
            _tile_loadd(5, left + kTileBytes, a.stride);
            _tile_dpbf16ps(3, 5, 6);
        }
        next.tick();
    }
    _tile_stored(0, c, ld * 4);
    _tile_stored(1, c1, ld * 4);
    _tile_stored(2, c2, ld * 4);
    _tile_stored(3, c3, ld * 4);
}

// The same with one left tile and four right ones; adds to c.
template <bool kLow>
IKPY_AMX void four_right(const Tiles& a, const Tiles& b, int64_t n_steps, float* c, int64_t ld,
                         Background& next) {
    _tile_loadd(0, c, ld * 4);
    _tile_loadd(1, c + 16, ld * 4);
    _tile_loadd(2, c + 32, ld * 4);
    _tile_loadd(3, c + 48, ld * 4);
    for (int64_t k = 0; k < n_steps; ++k) {
        const uint8_t *left = a.at + k * a.step, *right = b.at + k * b.step;
        _tile_loadd(4, left, a.stride);
        _tile_loadd(5, left + kTileBytes, a.stride);
        _tile_loadd(6, right, b.stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(0, 5, 6);
        if (kLow) {
            _tile_loadd(7, right + kTileBytes, b.stride);
            _tile_dpbf16ps(0, 4, 7);
        }
        next.tick();
        right += b.outer;
        _tile_loadd(6, right, b.stride);
        _tile_dpbf16ps(1, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (kLow) {
            _tile_loadd(7, right + kTileBytes, b.stride);
            _tile_dpbf16ps(1, 4, 7);
        }
        next.tick();
        right += b.outer;
        _tile_loadd(6, right, b.stride);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if (kLow) {
            _tile_loadd(7, right + kTileBytes, b.stride);
            _tile_dpbf16ps(2, 4, 7);
        }
        next.tick();
        right += b.outer;
        _tile_loadd(6, right, b.stride);
        _tile_dpbf16ps(3, 4, 6);
        _tile_dpbf16ps(3, 5, 6);
        if (kLow) {
            _tile_loadd(7, right + kTileBytes, b.stride);
            _tile_dpbf16ps(3, 4, 7);
        }
        next.tick();
    }
    _tile_stored(0, c, ld * 4);
    _tile_stored(1, c + 16, ld * 4);
    _tile_stored(2, c + 32, ld * 4);
    _tile_stored(3, c + 48, ld * 4);
}

// ---- operands ----

inline void store(uint8_t* to, __m512i x) { _mm512_storeu_si512(to, x); }

inline __m512i pair_of_upper(__m512i low, __m512i high) {
    return _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(low, 16), high);
}

// Columns pair as those of K tiles do: 2 i and 2 i + 1 where rows are multiplied in place, else i and i + 16.
template <bool kSplit>
void pack(const Shape& shape, const float* q, uint8_t* work) {
    const Work w = work_at(shape, work);
    const int64_t depth = shape.dk() / kTileDepth;
    for (int64_t m = 0; m < shape.rows / 16; ++m)
        for (int64_t k = 0; k < depth; ++k) {
            uint8_t* to = w.q + (m * depth + k) * 2 * kTileBytes;
            for (int64_t i = 0; i < 16; ++i, to += 64) {
                const float* first = q + (k * 32 + (kSplit ? i : 2 * i)) * shape.rows + m * 16;
                const FloatHalves a = split_rounded(_mm512_loadu_ps(first));
                const FloatHalves b = split_rounded(_mm512_loadu_ps(first + (kSplit ? 16 : 1) * shape.rows));
                store(to, bf16_pairs(a.hi, b.hi));
                store(to + kTileBytes, bf16_pairs(a.lo, b.lo));
            }
        }
    load_tile_config(kTileHeight);
}

// 16 f16 values as floats and as exact halves: the upper 8 of the 11 significant bits, and the others.
struct Expanded {
    __m512i hi, lo;  // bf16 in the upper halves of dwords, with more below in hi
    explicit Expanded(const uint8_t* p) {
        const __m512 x = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        hi = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
        const __m512i upper = _mm512_and_si512(hi, _mm512_set1_epi32(int(0xFFFF0000)));
        lo = _mm512_castps_si512(_mm512_sub_ps(x, _mm512_castsi512_ps(upper)));
    }
};

inline void store_halves(uint8_t* to, const Expanded& low, const Expanded& high) {
    store(to, pair_of_upper(low.hi, high.hi));
    store(to + kTileBytes, pair_of_upper(low.lo, high.lo));
}

// kTileDepth columns of 16 F16 rows as a left tile and its low halves.
void split_keys(const uint8_t* k, int64_t stride, uint8_t* to, Background& next) {
    for (int64_t i = 0; i < 16; ++i, k += stride, to += 64) {
        if (i % 4 == 0) next.tick();
        store_halves(to, Expanded(k), Expanded(k + 32));
    }
}

// 32 columns of the cells i and i + 16 as two right tiles. The elements of BF16 rows stay in their 128
// bits, see reorder_pairs.
template <bool kSplit>
void pair_values(const uint8_t* v, int64_t stride, uint8_t* to, Background& next) {
    constexpr int64_t outer = kDepthSteps * kTwo;
    const uint8_t* other = v + 16 * stride;
    for (int64_t i = 0; i < 16; ++i, v += stride, other += stride, to += 64) {
        if (i % 4 == 0) next.tick();
        if constexpr (kSplit) {
            store_halves(to, Expanded(v), Expanded(other));
            store_halves(to + outer, Expanded(v + 32), Expanded(other + 32));
        } else {
            const __m512i x = _mm512_loadu_si512(v), y = _mm512_loadu_si512(other);
            store(to, _mm512_unpacklo_epi16(x, y));
            store(to + outer, _mm512_unpackhi_epi16(x, y));
        }
    }
}

void reorder_pairs(const Shape& shape, float* o) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int64_t r = 0; r < shape.rows; ++r)
        for (int64_t d = 0; d < shape.dv; d += 32) {
            float* at = o + r * shape.ldo() + d;
            const __m512 x = _mm512_loadu_ps(at), y = _mm512_loadu_ps(at + 16);
            _mm512_storeu_ps(at, _mm512_permutex2var_ps(x, low, y));
            _mm512_storeu_ps(at + 16, _mm512_permutex2var_ps(x, high, y));
        }
}

// The tiles [k0, k0 + n) of the depth.
template <bool kSplit>
Tiles keys(const uint8_t* cells, int64_t stride, int64_t k0, int64_t n, const Work& w, Background& next) {
    cells += k0 * 64;
    if constexpr (!kSplit) return {cells, stride, 16 * stride, 64};
    constexpr int64_t outer = kChunk<kSplit> * kTwo;
    for (int64_t i = 0; i < kCells / 16; ++i)
        for (int64_t k = 0; k < n; ++k)
            split_keys(cells + i * 16 * stride + k * 64, stride, w.k + i * outer + k * kTwo, next);
    return {w.k, 64, outer, kTwo};
}

template <bool kSplit>
void scores(const Shape& shape, const Cells& cells, float* s, uint8_t* work, Background& next) {
    const Work w = work_at(shape, work);
    const int64_t depth = shape.dk() / kTileDepth;
    for (int64_t k = 0; k < depth; k += kChunk<kSplit>) {
        const int64_t n = std::min(kChunk<kSplit>, depth - k);
        const Tiles left = keys<kSplit>(cells.rows[0], cells.stride[0], k, n, w, next);
        asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
        for (int64_t m = 0; m < shape.rows / 16; ++m)
            four_left<kSplit>(left, {w.q + (m * depth + k) * kTwo, 64, 0, kTwo}, n, s + m * 16, shape.rows,
                              k > 0, next);
    }
    asm volatile("" ::: "memory");
}

// Weights of 16 rows as left tiles; cells pair as those of V tiles do.
inline void weigh(const float* s, int64_t rows, const __m512 top, float* sum, uint8_t* to) {
    __m512 total = _mm512_loadu_ps(sum);
    for (int64_t c = 0; c < kCells; c += 32, to += 2 * kTileBytes) {
        __m512 hi[16], lo[16];
        for (int64_t i = 0; i < 16; ++i) {
            const float* at = s + (c + i) * rows;
            const __m512 x = simd::exp2(_mm512_sub_ps(_mm512_loadu_ps(at), top));
            const __m512 y = simd::exp2(_mm512_sub_ps(_mm512_loadu_ps(at + 16 * rows), top));
            total = _mm512_add_ps(total, _mm512_add_ps(x, y));
            const FloatHalves a = split_rounded(x), b = split_rounded(y);
            hi[i] = _mm512_castsi512_ps(bf16_pairs(a.hi, b.hi));
            lo[i] = _mm512_castsi512_ps(bf16_pairs(a.lo, b.lo));
        }
        flash::transpose16(hi);
        flash::transpose16(lo);
        for (int64_t i = 0; i < 16; ++i) {
            store(to + 64 * i, _mm512_castps_si512(hi[i]));
            store(to + 64 * i + kTileBytes, _mm512_castps_si512(lo[i]));
        }
    }
    _mm512_storeu_ps(sum, total);
}

template <bool kSplit>
void outputs(const Shape& shape, const Cells& cells, const float* s, const Softmax& softmax, float* o,
             uint8_t* work, Background& next) {
    const Work w = work_at(shape, work);
    const int64_t stride = cells.stride[0], outer = kDepthSteps * kTwo;
    for (int64_t m = 0; m < shape.rows; m += 16)
        weigh(s + m, shape.rows, _mm512_loadu_ps(softmax.top + m), softmax.sum + m, w.p + m / 16 * outer);
    for (int64_t d = 0; d < shape.dv; d += kColumns) {
        const uint8_t* v = cells.rows[0] + 2 * (shape.column + d);
        for (int64_t i = 0; i < kColumns / 32; ++i)
            for (int64_t c = 0; c < kCells; c += 32)
                pair_values<kSplit>(v + c * stride + 64 * i, stride, w.v + 2 * i * outer + c / 32 * kTwo,
                                    next);
        asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
        for (int64_t m = 0; m < shape.rows / 16; ++m)
            four_right<kSplit>({w.p + m * outer, 64, 0, kTwo}, {w.v, 64, outer, kTwo}, kDepthSteps,
                               o + m * 16 * shape.ldo() + d, shape.ldo(), next);
    }
    asm volatile("" ::: "memory");
}

template <bool kSplit>
int64_t ticks(const Shape& shape) {
    const int64_t products = shape.dk() / kTileDepth + shape.dv / kColumns * kDepthSteps;
    const int64_t operands = (kSplit ? shape.dk() / 32 * kCells : 0) + shape.dv / 32 * kCells / 2;
    return products * 4 * (shape.rows / 16) + operands / 4;
}

}  // namespace

const Products* half_products(int type) {
    static const Products split = {
        64, 1, work_bytes, ticks<true>, pack<true>, scores<true>, outputs<true>, nullptr};
    static const Products whole = {
        64, 1, work_bytes, ticks<false>, pack<false>, scores<false>, outputs<false>, reorder_pairs};
    if (!has_amx()) return nullptr;
    return type == kF16 ? &split : type == kBF16 ? &whole : nullptr;
}

#else

const Products* half_products(int) { return nullptr; }

#endif

}  // namespace latent
}  // namespace ikpy
