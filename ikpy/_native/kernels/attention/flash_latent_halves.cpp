// Latent attention on F16 and BF16 caches: products of bf16 halves, hi hi + hi lo + lo hi (BF16 caches have
// no low half and are multiplied where they lie). On tile units that multiply halves (f16) F16 caches are
// multiplied where they lie, too, with queries and weights of two halves.
//
// 128 rows of BF16 take 34 tile products per cell, 51 of F16. A product of zeros takes 5.3 ns on a Xeon at
// 3.1 GHz, one of other numbers 6.5, and here 10 to 11 with what goes through the second-level cache (22
// bytes per cycle for tile loads, 18 for stores): queries and parts of the scores once per block of cells,
// sums of the outputs once per kBlocks. Tiles of sums are 1 KiB in a row for that, and the next ones are
// fetched.
#include <algorithm>

#include "kernels/attention/flash_amx.hpp"
#include "kernels/attention/flash_latent_half_operands.hpp"
#include "kernels/attention/flash_latent_half_products.hpp"
#include "kernels/simd/simd_f32.hpp"
#include "kernels/simd/transpose.hpp"

namespace ikpy {
namespace latent {

#if defined(__AVX512VNNI__) && defined(__linux__)

namespace {

constexpr int64_t kColumns = 64;                      // of V at a time
constexpr int64_t kBlockSteps = kCells / kTileDepth;  // depth of the outputs of a block, in tiles

// kSplit: F16 rows that are made tiles of bf16 halves. Others, BF16 or F16 ones, are multiplied where they
// lie.
template <TileFactors F>
struct Halves {
    static constexpr bool kSplit = F == TileFactors::kSplit;
    // The reference of weights is that much below the largest score: the precision of halves ends at 2^-24.
    static constexpr float kLift = F == TileFactors::kF16 ? 7.0f : 0.0f;
    // Tiles of the depth of a block of keys that stay in the first-level cache for all rows.
    static constexpr int64_t kChunk = kSplit ? 3 : 6;
    // Blocks of values, with kColumns of each, that stay there with the sums of 16 rows and the next 16.
    static constexpr int64_t kBlocks = kSplit ? 1 : 2;
    static constexpr int64_t kDepthSteps = kBlocks * kBlockSteps;
    static constexpr int64_t kValue = kValueTileBytes<F>;

    struct Work {
        uint8_t* q;      // [chunks][rows / 16][tiles of a chunk][hi, lo] tiles
        float* factors;  // [rows]: what a unit of q is worth, of halves only
        uint8_t* k;      // [hi, lo][kCells][kChunk] rows of tiles, F16 only
        uint8_t* p;      // [rows / 16][kDepthSteps][hi, lo] tiles
        uint8_t* v;      // [kDepthSteps][kColumns / 16][hi, lo] tiles
        uint8_t* end;
    };

    static Work work_at(const Shape& shape, uint8_t* at) {
        Work w;
        w.q = at;
        w.factors = reinterpret_cast<float*>(w.q + shape.rows / 16 * (shape.dk() / kTileDepth) * kPair);
        w.k = reinterpret_cast<uint8_t*>(w.factors + (F == TileFactors::kF16 ? shape.rows : 0));
        w.p = w.k + (kSplit ? 2 * kCells * kChunk * 64 : 0);
        w.v = w.p + shape.rows / 16 * kDepthSteps * kPair;
        w.end = w.v + kColumns / 16 * kDepthSteps * kValue;
        return w;
    }
    static size_t work_bytes(const Shape& shape) {
        return size_t(work_at(shape, nullptr).end - static_cast<uint8_t*>(nullptr));
    }

    static void pack(const Shape& shape, const float* q, uint8_t* work);
    static void scores(const Shape& shape, const Cells& cells, int64_t block, float* s, uint8_t* work,
                       Background& next);
    static void weigh(const Shape& shape, int64_t block, const float* s, const Softmax& softmax,
                      uint8_t* work);
    static void outputs(const Shape& shape, const Blocks& blocks, float* o, uint8_t* work, Background& next);
    static int64_t ticks(const Shape& shape);
};

template <TileFactors F>
void Halves<F>::pack(const Shape& shape, const float* q, uint8_t* work) {
    const Work w = work_at(shape, work);
    const int64_t depth = shape.dk() / kTileDepth, row_tiles = shape.rows / 16;
    for (int64_t m = 0; m < row_tiles; ++m) {
        __m512 scale = _mm512_set1_ps(1.0f);
        if constexpr (F == TileFactors::kF16) {
            scale = flash::half_scale(q + m * 16, shape.rows, shape.dk());
            _mm512_storeu_ps(w.factors + m * 16, _mm512_div_ps(_mm512_set1_ps(1.0f), scale));
        }
        for (int64_t k = 0; k < depth; ++k) {
            const int64_t begin = k / kChunk * kChunk, n = std::min(kChunk, depth - begin);
            uint8_t* to = w.q + (begin * row_tiles + m * n + k - begin) * kPair;
            for (int64_t i = 0; i < 16; ++i, to += 64) {
                const float* first = q + (k * 32 + (kSplit ? i : 2 * i)) * shape.rows + m * 16;
                const float* second = first + (kSplit ? 16 : 1) * shape.rows;
                const HalfPairs x = split_pair<F>(_mm512_mul_ps(scale, _mm512_loadu_ps(first)),
                                                  _mm512_mul_ps(scale, _mm512_loadu_ps(second)));
                store(to, x.hi);
                store(to + kTileBytes, x.lo);
            }
        }
    }
    load_tile_config(kTileHeight);
}

// Scores of 16 rows of queries, whose sums stay in tiles while the next keys are split.
IKPY_AMX void score_split_keys(const Shape& shape, const Cells& cells, const uint8_t* q, uint8_t* k, float* s,
                               Background& next) {
    constexpr int64_t bytes = 2 * kCells * 64;
    const int64_t depth = shape.dk() / kTileDepth, stride = cells.stride[0];
    SplitBeside beside{cells.rows[0], stride, k, next};
    KeyRows keys = beside.whole();
    zero_sums();
    for (int64_t i = 0; i < depth; ++i, q += kPair) {
        uint8_t* const to = k + (i + 1) % 2 * bytes;
        beside.row = cells.rows[0] + 64 * (i + 1);
        beside.to = i + 1 < depth ? to : nullptr;
        asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
        multiply_keys<TileFactors::kSplit>(keys, q, 1, beside);
        keys = {to, to + kCells * 64, 64};
    }
    store_sums(s);
    asm volatile("" ::: "memory");
}

// Scores of queries that were scaled.
void scale_scores(const Shape& shape, const float* factors, float* s) {
    for (int64_t m = 0; m < shape.rows; m += 16) {
        const __m512 factor = _mm512_loadu_ps(factors + m);
        for (int64_t c = 0; c < kCells; ++c, s += 16)
            _mm512_storeu_ps(s, _mm512_mul_ps(factor, _mm512_loadu_ps(s)));
    }
}

template <TileFactors F>
IKPY_AMX void Halves<F>::scores(const Shape& shape, const Cells& cells, int64_t, float* s, uint8_t* work,
                                Background& next) {
    const Work w = work_at(shape, work);
    const int64_t depth = shape.dk() / kTileDepth, row_tiles = shape.rows / 16;
    if (kSplit && row_tiles == 1) return score_split_keys(shape, cells, w.q, w.k, s, next);
    const uint8_t* q = w.q;
    for (int64_t k = 0; k < depth; k += kChunk) {
        const int64_t n = std::min(kChunk, depth - k);
        KeyRows keys{cells.rows[0] + 64 * k, nullptr, cells.stride[0]};
        if (kSplit) keys = split_keys(keys.hi, keys.stride, n, w.k, next);
        asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
        for (int64_t m = 0; m < row_tiles; ++m, q += n * kPair) {
            float* const sums = s + m * 16 * kCells;
            k > 0 ? load_sums(sums) : zero_sums();
            multiply_keys<F>(keys, q, n, next);
            store_sums(sums);
        }
    }
    asm volatile("" ::: "memory");
    if (F == TileFactors::kF16) scale_scores(shape, w.factors, s);
}

// Weights of 16 rows and 32 cells from scores [32][16] as a left tile and its low halves; cells pair as those
// of V tiles do. Returns their sums.
template <TileFactors F>
inline __m512 weigh_cells(const float* s, const __m512 top, __m512 total, uint8_t* to) {
    __m512i hi[16], lo[16];
    for (int64_t i = 0; i < 16; ++i) {
        const __m512 x = simd::exp2(_mm512_sub_ps(_mm512_loadu_ps(s + 16 * i), top));
        const __m512 y = simd::exp2(_mm512_sub_ps(_mm512_loadu_ps(s + 16 * (i + 16)), top));
        total = _mm512_add_ps(total, _mm512_add_ps(x, y));
        const HalfPairs pair = split_pair<F>(x, y);
        hi[i] = pair.hi;
        lo[i] = pair.lo;
    }
    transpose16(hi);
    transpose16(lo);
    for (int64_t i = 0; i < 16; ++i) {
        store(to + 64 * i, hi[i]);
        store(to + 64 * i + kTileBytes, lo[i]);
    }
    return total;
}

template <TileFactors F>
void Halves<F>::weigh(const Shape& shape, int64_t block, const float* s, const Softmax& softmax,
                      uint8_t* work) {
    uint8_t* to = work_at(shape, work).p + block * kBlockSteps * kPair;
    for (int64_t m = 0; m < shape.rows; m += 16, to += kDepthSteps * kPair) {
        const __m512 top = _mm512_loadu_ps(softmax.top + m);
        __m512 total = _mm512_loadu_ps(softmax.sum + m);
        for (int64_t k = 0; k < kBlockSteps; ++k, s += 32 * 16)
            total = weigh_cells<F>(s, top, total, to + k * kPair);
        _mm512_storeu_ps(softmax.sum + m, total);
    }
}

// Outputs of 16 rows: the next values are paired while these meet weights. v: of the first cell, tiles: two
// times those of 32 cells.
template <TileFactors F>
IKPY_AMX void add_values(const uint8_t* v, int64_t stride, int64_t dv, const uint8_t* p, int64_t steps,
                         uint8_t* tiles, float* o, Background& next) {
    constexpr int64_t bytes = kColumns / 16 * Halves<F>::kValue;
    const int64_t n = dv / kColumns * steps;
    const uint8_t* at = v;
    PairBeside<F> first{v, stride, tiles, next};
    for (int i = 0; i < 4; ++i) first.tick();
    for (int64_t i = 0, k = 0; i < n; ++i) {
        const bool more = k + 1 < steps;
        if (!more) v += 2 * kColumns;
        at = more ? at + (kTileDepth * stride) : v;
        PairBeside<F> beside{at, stride, i + 1 < n ? tiles + (i + 1) % 2 * bytes : nullptr, next};
        asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
        if (k == 0) load_sums(o);
        multiply_values<F>(p + k * kPair, tiles + i % 2 * bytes, 1, beside);
        k = more ? k + 1 : 0;
        if (more) continue;
        store_sums(o);
        o += kColumns * 16;
    }
    asm volatile("" ::: "memory");
}

template <TileFactors F>
IKPY_AMX void Halves<F>::outputs(const Shape& shape, const Blocks& blocks, float* o, uint8_t* work,
                                 Background& next) {
    const Work w = work_at(shape, work);
    const int64_t stride = blocks.cells.stride[0], steps = blocks.n * kBlockSteps;
    const uint8_t* v = blocks.cells.rows[0] + 2 * shape.column;
    const uint8_t* p = w.p + blocks.begin * kBlockSteps * kPair;
    const int64_t row_sums = shape.dv * 16, row_tiles = shape.rows / 16;
    if (row_tiles == 1) return add_values<F>(v, stride, shape.dv, p, steps, w.v, o, next);
    for (int64_t d = 0; d < shape.dv; d += kColumns) {
        for (int64_t k = 0; k < steps; ++k)
            pair_values<F>(v + 32 * k * stride + 2 * d, stride, w.v + k * 4 * kValue, next);
        asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
        for (int64_t m = 0; m < row_tiles; ++m) {
            float* c = o + m * row_sums + d * 16;
            const float* after = m + 1 < row_tiles ? c + row_sums : o + (d + kColumns) * 16;
            Ahead beside(after, 4 * steps, next);
            load_sums(c);
            multiply_values<F>(p + m * kDepthSteps * kPair, w.v, steps, beside);
            store_sums(c);
        }
    }
    asm volatile("" ::: "memory");
}

// Of kBlocks blocks.
template <TileFactors F>
int64_t Halves<F>::ticks(const Shape& shape) {
    const int64_t keys = kBlocks * (shape.dk() / kTileDepth), values = shape.dv / kColumns * kDepthSteps;
    if (shape.rows == 16) return (keys + values + (kSplit ? kBlocks : 0) + 1) * 4;
    const int64_t operands =
        (kSplit ? kBlocks * (shape.dk() / kTileDepth / kChunk) * kCells / 4 : 0) + 4 * values;
    return (keys + values) * 4 * (shape.rows / 16) + operands;
}

template <TileFactors F>
const Products* products_of() {
    using K = Halves<F>;
    static const Products products = {64,
                                      1,
                                      K::kBlocks,
                                      K::work_bytes,
                                      K::ticks,
                                      K::pack,
                                      K::scores,
                                      K::weigh,
                                      K::outputs,
                                      K::kSplit ? nullptr : reorder_pairs,
                                      flash::end_tiles,
                                      K::kLift};
    return &products;
}

}  // namespace

const Products* half_products(int type) {
    if (!has_amx()) return nullptr;
    if (type == kF16 && has_amx_halves()) return products_of<TileFactors::kF16>();
    if (type == kF16) return products_of<TileFactors::kSplit>();
    return type == kBF16 ? products_of<TileFactors::kBf16>() : nullptr;
}

#else

const Products* half_products(int) { return nullptr; }

#endif

}  // namespace latent
}  // namespace ikpy
