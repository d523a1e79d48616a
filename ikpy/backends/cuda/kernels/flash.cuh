// Flash attention on tensor cores: tiles of query rows that share a key head against tiles of cells, with a
// running maximum. Rows of a key head are ordered by token, then head of the group, so one pass over the
// cache serves all heads of a token.
//
// WM warps side by side take 16 rows each. With WN = 1 a warp keeps its scores in registers; with WN > 1 (few
// rows, or heads too long for the registers of one warp) WN warps share rows: each takes a part of the cells
// for the scores and a part of the columns for the sums, and probabilities go through shared memory.
#pragma once
#include "attention.cuh"
#include "mma.cuh"

namespace ikpy::cuda {

constexpr float kNoMaximum = -1e30f;  // below any score, and finite

template <int Dk, int Dv, int Wm, int Wn, int Cells, bool VInK>
struct Flash {
    static constexpr int kHeadK = Dk, kHeadV = Dv, kWn = Wn, kCells = Cells;
    static constexpr bool kVInK = VInK;
    static constexpr int kDk = (Dk + 31) / 32 * 32, kRows = 16 * Wm, kThreads = 32 * Wm * Wn;
    // Rows of 16-bit elements; 8 more than the length keep ldmatrix free of bank conflicts.
    static constexpr int kStrideK = kDk + 8, kStrideV = Dv + 8, kStrideP = Cells + 8;
    static constexpr int kBytesQ = kRows * kStrideK * 2, kBytesK = Cells * kStrideK * 2;
    static constexpr int kBytesV = VInK ? 0 : Cells * kStrideV * 2,
                         kBytesP = Wn > 1 ? kRows * kStrideP * 2 : 0;
    static constexpr int kBytes = kBytesQ + kBytesK + kBytesV + kBytesP;
    // Pieces of q8_0 rows that a thread has under way: few rows wait for memory, many have no registers left.
    static constexpr int kLoads = Wm == 1 ? 6 : 1;
    static constexpr int kScoreTiles = Cells / 8 / Wn;        // of 8 cells, per warp
    static constexpr int kSumTiles = (Dv / 8 + Wn - 1) / Wn;  // of 8 columns, per warp
    static_assert(Cells / 8 % Wn == 0 && Dv % 8 == 0 && Cells % 32 == 0, "tiles");
};

__device__ __forceinline__ unsigned pack_f16(float a, float b) {
#if defined(__CUDACC__)
    const __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<const unsigned*>(&h);
#else
    return f32_to_f16(a) | static_cast<unsigned>(f32_to_f16(b)) << 16;
#endif
}

// Elements e .. e + 7 of a cache row as f16 to shared memory; e is a multiple of 8. f16 rows are copied
// asynchronously.
__device__ __forceinline__ void copy8(int type, const uint8_t* row, int e, uint16_t* to, bool valid) {
    if (type == kF16) return copy16_async(to, row + 2 * e, valid);
    float v[8];
    if (!valid) {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = 0.0f;
    } else if (type == kQ8_0) {
        const uint8_t* block = row + e / 32 * 34;
        const float d = load_f16(block);
        const unsigned q[2] = {load4<2>(block + 2 + e % 32), load4<2>(block + 6 + e % 32)};
#pragma unroll
        for (int i = 0; i < 8; ++i)
            v[i] = d * static_cast<float>(static_cast<int8_t>(q[i / 4] >> 8 * (i % 4)));
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = to_f16_range(kv_element(type, row, e + i));
    }
    *reinterpret_cast<uint4*>(to) =
        uint4{pack_f16(v[0], v[1]), pack_f16(v[2], v[3]), pack_f16(v[4], v[5]), pack_f16(v[6], v[7])};
}

// Two signed bytes of q, the lower or the upper ones, times d, as f16. On devices without conversions of
// integers, which run at a quarter of the speed: 0x6400 and a byte above it are the f16 1024 + byte.
template <bool Upper>
__device__ __forceinline__ unsigned scaled_pair(unsigned q, uint16_t d) {
    const unsigned bits = __byte_perm(q ^ 0x80808080u, 0x64646464u, Upper ? 0x4342 : 0x4140);
#if defined(__CUDACC__)
    const __half2 level = __hsub2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(1152.0f));
    const __half2 product = __hmul2(level, __half2half2(__ushort_as_half(d)));
    return *reinterpret_cast<const unsigned*>(&product);
#else
    const auto scaled = [d](unsigned level) {
        return f16_to_f32(d) * (f16_to_f32(level & 0xffff) - 1152.0f);
    };
    return pack_f16(scaled(bits), scaled(bits >> 16));
#endif
}

struct FlashRows {
    int heads, tokens, per_kv, kv_head, row0, n_rows;
    __device__ int head(int r) const { return kv_head * per_kv + r % per_kv; }
    __device__ int token(int r) const { return r / per_kv; }
};

template <class F>
__device__ __forceinline__ FlashRows flash_rows(const Attention& a) {
    FlashRows rows;
    rows.heads = a.q.ne[1];
    rows.tokens = a.q.ne[2];
    rows.per_kv = rows.heads / a.k.ne[1];
    rows.kv_head = blockIdx.y;
    rows.row0 = blockIdx.x * F::kRows;
    rows.n_rows = rows.per_kv * rows.tokens;
    return rows;
}

// Cells that any row of the tile may see, given to all threads.
__device__ __forceinline__ void tile_range(const Attention& a, const FlashRows& rows, int tile_rows,
                                           int* first, int* last) {
    const int t0 = rows.token(rows.row0), t1 = rows.token(min(rows.row0 + tile_rows, rows.n_rows) - 1);
    const int n = n_cells(a);
    float low = 0.0f, high = 0.0f;  // cell numbers are exact in f32
    for (int t = t0 + threadIdx.x; t <= t1; t += blockDim.x) {
        int f, l;
        cell_range(a, t, &f, &l);
        if (f < l) {
            low = fmaxf(low, static_cast<float>(n - f));
            high = fmaxf(high, static_cast<float>(l));
        }
    }
    *first = n - static_cast<int>(block_max(low));
    *last = static_cast<int>(block_max(high));
}

// Where eight elements of a tile of cells are: numbered by row, zeros from cell `last` on.
struct CellPiece {
    const uint8_t* row;
    int e, to;
    bool valid;
};
struct CellRows {
    const View& v;
    int head, c0, last, per_row, stride;

    __device__ __forceinline__ CellPiece piece(int i) const {
        const int c = i / per_row, e = i % per_row * 8;
        return {v.row<const uint8_t>(head, min(c0 + c, last - 1)), e, c * stride + e, c0 + c < last};
    }
};

// Eight elements of q8_0: the levels and the factor of their block.
struct PieceQ8_0 {
    unsigned q[2];
    uint16_t d;

    __device__ __forceinline__ explicit PieceQ8_0(const CellPiece& piece) {
        const uint8_t* block = piece.row + piece.e / 32 * 34;
        load_words<2, 2>(block + 2 + piece.e % 32, q);
        d = piece.valid ? static_cast<uint16_t>(load2<2>(block)) : 0;
    }
    __device__ PieceQ8_0() {}
    __device__ __forceinline__ void store(uint16_t* to) const {
        *reinterpret_cast<uint4*>(to) = uint4{scaled_pair<false>(q[0], d), scaled_pair<true>(q[0], d),
                                              scaled_pair<false>(q[1], d), scaled_pair<true>(q[1], d)};
    }
};

// Rows of q8_0. All loads of a batch are asked for before one is waited for: a piece at a time, a
// multiprocessor would have a few KiB under way, a fifth of what the memory of large devices wants.
template <class F>
__device__ __forceinline__ void load_cells_q8_0(const CellRows& rows, uint16_t* to) {
    const int n = F::kCells * rows.per_row;
#pragma unroll 1
    for (int i0 = threadIdx.x; i0 < n; i0 += F::kLoads * F::kThreads) {
        PieceQ8_0 pieces[F::kLoads];
        int place[F::kLoads];
#pragma unroll
        for (int b = 0; b < F::kLoads; ++b) {
            const int i = i0 + b * F::kThreads;
            const CellPiece piece = rows.piece(min(i, n - 1));
            pieces[b] = PieceQ8_0(piece);
            place[b] = i < n ? piece.to : -1;
        }
#pragma unroll
        for (int b = 0; b < F::kLoads; ++b)
            if (place[b] >= 0) pieces[b].store(to + place[b]);
    }
}

// Elements of a tile of cells from c0 on to rows of `to`; zeros from cell `last` on.
template <class F>
__device__ __forceinline__ void load_cells(const View& v, int type, int head, int c0, int last, int length,
                                           uint16_t* to, int stride) {
    const int per_row = length / 8;
    if (F::kLoads > 1 && type == kQ8_0)
        return load_cells_q8_0<F>(CellRows{v, head, c0, last, per_row, stride}, to);
    for (int i = threadIdx.x; i < F::kCells * per_row; i += F::kThreads) {
        const int c = i / per_row, e = i % per_row * 8;
        copy8(type, v.row<const uint8_t>(head, min(c0 + c, last - 1)), e, to + c * stride + e, c0 + c < last);
    }
}

// Cache heads that belong to the key head of a block.
struct FlashHeads {
    int k, k1, v;
};

// Queries times the factor of the scores, as f16; zeros beyond the last row and the head size.
template <class F>
__device__ __forceinline__ void load_queries(const Attention& a, const FlashRows& rows, uint16_t* q) {
    const float factor = a.softcap != 0.0f ? a.scale / a.softcap : a.scale * kLog2e;
    for (int i = threadIdx.x; i < F::kRows * F::kDk / 2; i += F::kThreads) {
        const int r = i / (F::kDk / 2), e = i % (F::kDk / 2) * 2, row = rows.row0 + r;
        unsigned pair = 0;
        if (row < rows.n_rows && e < F::kHeadK) {
            const float* x = a.q.row<const float>(rows.head(row), rows.token(row)) + e;
            pair = pack_f16(to_f16_range(factor * x[0]), to_f16_range(factor * x[1]));
        }
        *reinterpret_cast<unsigned*>(q + r * F::kStrideK + e) = pair;
    }
}

// Columns of the keys' tile behind the head size, which no copy writes.
template <class F>
__device__ __forceinline__ void clear_padding(uint16_t* k) {
    constexpr int kPadding = F::kDk - F::kHeadK;
    if constexpr (kPadding > 0) {
        for (int i = threadIdx.x; i < F::kCells * kPadding; i += F::kThreads)
            k[i / kPadding * F::kStrideK + F::kHeadK + i % kPadding] = 0;
    }
}

template <class F>
__device__ __forceinline__ void load_keys(const Attention& a, const FlashHeads& heads, int tile, int last,
                                          uint16_t* k) {
    const int d0 = a.k.ne[0], c0 = tile * F::kCells;
    load_cells<F>(a.k, a.k_type, heads.k, c0, last, d0, k, F::kStrideK);
    if (a.k1.data) load_cells<F>(a.k1, a.k1_type, heads.k1, c0, last, F::kHeadK - d0, k + d0, F::kStrideK);
    commit_copies();
}

// What a thread keeps of the rows 16 wm + lane / 4 and 8 more; all cells and columns that its warp wn takes.
template <class F>
struct FlashThread {
    int lane, wm, wn;
    int first[2], last[2];  // visible cells of each row
    const uint16_t* mask[2];
    float maximum[2], denominator[2];
    float sums[F::kSumTiles][4];

    __device__ __forceinline__ int row(int h) const { return 16 * wm + lane / 4 + 8 * h; }
    __device__ __forceinline__ int score_tile(int j) const { return 8 * (wn * F::kScoreTiles + j); }
    __device__ __forceinline__ int column(int t) const { return 8 * (wn + F::kWn * t); }
};

template <class F>
__device__ __forceinline__ void begin_rows(const Attention& a, const FlashRows& rows, FlashThread<F>& own) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = min(rows.row0 + own.row(h), rows.n_rows - 1), token = rows.token(row);
        cell_range(a, token, &own.first[h], &own.last[h]);
        own.mask[h] = mask_row(a, token);
        own.maximum[h] = kNoMaximum;
        own.denominator[h] = 0.0f;
    }
#pragma unroll
    for (int t = 0; t < F::kSumTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) own.sums[t][i] = 0.0f;
}

// Scores of a warp's rows and cells.
template <class F>
struct FlashScores {
    float s[F::kScoreTiles][4];
};

template <class F>
__device__ __forceinline__ void multiply_keys(const FlashThread<F>& own, const uint16_t* q, const uint16_t* k,
                                              FlashScores<F>& scores) {
#pragma unroll
    for (int j = 0; j < F::kScoreTiles; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores.s[j][i] = 0.0f;
#pragma unroll 2
    for (int d = 0; d < F::kDk; d += 32) {
        unsigned x[2][4];
        const uint16_t* query = q + (16 * own.wm + own.lane % 16) * F::kStrideK + d + 8 * (own.lane / 16);
        load_matrix4(x[0], query);
        load_matrix4(x[1], query + 16);
#pragma unroll
        for (int j = 0; j < F::kScoreTiles; ++j) {
            unsigned y[4];
            load_matrix4(y, k + (own.score_tile(j) + own.lane % 8) * F::kStrideK + d + 8 * (own.lane / 8));
            mma_f16(scores.s[j], x[0], y);
            mma_f16(scores.s[j], x[1], y + 2);
        }
    }
}

// Soft caps and masks scores of the cells from c0 on; top: the largest of each row that this thread has met.
template <class F>
__device__ __forceinline__ void mask_scores(const Attention& a, const FlashThread<F>& own, int c0, int last,
                                            FlashScores<F>& scores, float* top) {
#pragma unroll
    for (int j = 0; j < F::kScoreTiles; ++j) {
        const int cell = c0 + own.score_tile(j) + 2 * (own.lane % 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            unsigned open = 0;
            if (own.mask[h] && cell < last) open = *reinterpret_cast<const unsigned*>(own.mask[h] + cell);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& s = scores.s[j][2 * h + i];
                if (a.softcap != 0.0f) s = a.softcap * kLog2e * tanhf(s);
                const bool hidden = open >> (16 * i + 15) & 1;
                if (hidden || cell + i < own.first[h] || cell + i >= own.last[h]) s = -INFINITY;
                top[h] = fmaxf(top[h], s);
            }
        }
    }
}

// One value of each row from every warp that shares it, in shared memory; the same for the lanes of a row.
template <class F>
__device__ __forceinline__ void share_stat(const FlashThread<F>& own, const float* value,
                                           float (*stat)[F::kRows]) {
    if (own.lane % 4 == 0) {
        stat[own.wn][own.row(0)] = value[0];
        stat[own.wn][own.row(1)] = value[1];
    }
    __syncthreads();
}

// Makes top the largest score of whole rows.
template <class F>
__device__ __forceinline__ void join_maximum(const FlashThread<F>& own, float* top, float (*stat)[F::kRows]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        top[h] = fmaxf(top[h], __shfl_xor_sync(kAllLanes, top[h], 1));
        top[h] = fmaxf(top[h], __shfl_xor_sync(kAllLanes, top[h], 2));
    }
    if (F::kWn > 1) {
        share_stat(own, top, stat);
#pragma unroll
        for (int w = 0; w < F::kWn; ++w) {
            top[0] = fmaxf(top[0], stat[w][own.row(0)]);
            top[1] = fmaxf(top[1], stat[w][own.row(1)]);
        }
    }
}

// Turns scores into probabilities relative to the new maximum, to which all sums are brought down.
template <class F>
__device__ __forceinline__ void weigh(FlashThread<F>& own, const float* top, FlashScores<F>& scores) {
    const float decay[2] = {exp2f(own.maximum[0] - top[0]), exp2f(own.maximum[1] - top[1])};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        own.maximum[h] = top[h];
        own.denominator[h] *= decay[h];
    }
#pragma unroll
    for (int j = 0; j < F::kScoreTiles; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            scores.s[j][i] = exp2f(scores.s[j][i] - top[i / 2]);
            own.denominator[i / 2] += scores.s[j][i];
        }
#pragma unroll
    for (int t = 0; t < F::kSumTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) own.sums[t][i] *= decay[i / 2];
}

template <class F>
__device__ __forceinline__ void store_probabilities(const FlashThread<F>& own, const FlashScores<F>& scores,
                                                    uint16_t* probabilities) {
#pragma unroll
    for (int j = 0; j < F::kScoreTiles; ++j) {
        uint16_t* p = probabilities + own.row(0) * F::kStrideP + own.score_tile(j) + 2 * (own.lane % 4);
        *reinterpret_cast<unsigned*>(p) = pack_f16(scores.s[j][0], scores.s[j][1]);
        *reinterpret_cast<unsigned*>(p + 8 * F::kStrideP) = pack_f16(scores.s[j][2], scores.s[j][3]);
    }
}

// Probabilities of 32 cells from c on, as two fragments: those of all warps, or of the own scores, where two
// tiles of 8 columns are one fragment of 16 cells.
template <class F>
__device__ __forceinline__ void probability_fragments(const FlashThread<F>& own, const FlashScores<F>& scores,
                                                      const uint16_t* probabilities, int c,
                                                      unsigned (*x)[4]) {
    if constexpr (F::kWn > 1) {
        const uint16_t* p =
            probabilities + (16 * own.wm + own.lane % 16) * F::kStrideP + c + 8 * (own.lane / 16);
        load_matrix4(x[0], p);
        load_matrix4(x[1], p + 16);
    } else {
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = &scores.s[(c / 8 + 2 * s + i / 2) % F::kScoreTiles][2 * (i % 2)];
                x[s][i] = pack_f16(pair[0], pair[1]);
            }
    }
}

template <class F>
__device__ __forceinline__ void add_values(FlashThread<F>& own, const FlashScores<F>& scores,
                                           const uint16_t* probabilities, const uint16_t* v) {
    constexpr int kStride = F::kVInK ? F::kStrideK : F::kStrideV;
#pragma unroll
    for (int c = 0; c < F::kCells; c += 32) {
        unsigned x[2][4];
        probability_fragments(own, scores, probabilities, c, x);
#pragma unroll
        for (int t = 0; t < F::kSumTiles; ++t) {
            if (own.column(t) >= F::kHeadV) break;
            unsigned y[4];
            load_matrix4_transposed(y, v + (c + own.lane) * kStride + own.column(t));
            mma_f16(own.sums[t], x[0], y);
            mma_f16(own.sums[t], x[1], y + 2);
        }
    }
}

// Makes the denominators those of whole rows.
template <class F>
__device__ __forceinline__ void join_denominators(FlashThread<F>& own, float (*stat)[F::kRows]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        own.denominator[h] += __shfl_xor_sync(kAllLanes, own.denominator[h], 1);
        own.denominator[h] += __shfl_xor_sync(kAllLanes, own.denominator[h], 2);
    }
    if (F::kWn > 1) {
        __syncthreads();
        share_stat(own, own.denominator, stat);
        own.denominator[0] = own.denominator[1] = 0.0f;
#pragma unroll
        for (int w = 0; w < F::kWn; ++w) {
            own.denominator[0] += stat[w][own.row(0)];
            own.denominator[1] += stat[w][own.row(1)];
        }
    }
}

// The attention of each row, or what a part of the cells gives to it.
template <class F>
__device__ __forceinline__ void store_rows(const Attention& a, const FlashRows& rows,
                                           const FlashThread<F>& own) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = rows.row0 + own.row(h);
        if (row >= rows.n_rows) continue;
        const int head = rows.head(row), token = rows.token(row);
        float *out, norm = 1.0f;
        if (a.n_parts > 1) {
            const long long place =
                (static_cast<long long>(blockIdx.z) * rows.tokens + token) * rows.heads + head;
            out = a.partials + place * (F::kHeadV + 2);
            if (own.lane % 4 == 0 && own.wn == 0) {
                out[F::kHeadV] = own.maximum[h];
                out[F::kHeadV + 1] = own.denominator[h];
            }
        } else {
            out = a.dst.row<float>(head, token);
            norm = normalizer(a, head, own.maximum[h], own.denominator[h]);
        }
#pragma unroll
        for (int t = 0; t < F::kSumTiles; ++t) {
            if (own.column(t) + 2 * (own.lane % 4) >= F::kHeadV) break;
            *reinterpret_cast<float2*>(out + own.column(t) + 2 * (own.lane % 4)) =
                float2{norm * own.sums[t][2 * h], norm * own.sums[t][2 * h + 1]};
        }
    }
}

// grid (row tiles, key heads, parts). Dynamic shared memory: Flash::kBytes.
template <int Dk, int Dv, int Wm, int Wn, int Cells, bool VInK>
__device__ __forceinline__ void flash_body(const Attention& a, int v_column) {
    using F = Flash<Dk, Dv, Wm, Wn, Cells, VInK>;
    IKPY_DYNAMIC_SHARED(memory);
    __shared__ float stat[Wn][F::kRows];
    auto* q = reinterpret_cast<uint16_t*>(memory);
    uint16_t* k = q + F::kBytesQ / 2;
    uint16_t* v = VInK ? k + v_column : k + F::kBytesK / 2;
    uint16_t* probabilities = k + (F::kBytesK + F::kBytesV) / 2;
    FlashThread<F> own;
    own.lane = lane_id();
    own.wm = warp_id() % Wm;
    own.wn = warp_id() / Wm;

    const FlashRows rows = flash_rows<F>(a);
    const int kv_head = rows.kv_head;
    const FlashHeads heads{kv_head, a.k1.data ? kv_head * a.k1.ne[1] / a.k.ne[1] : 0,
                           kv_head * a.v.ne[1] / a.k.ne[1]};
    load_queries<F>(a, rows, q);
    clear_padding<F>(k);

    int first, last;
    tile_range(a, rows, F::kRows, &first, &last);
    // This part's share of the tiles of cells.
    const int tile0 = first / Cells, n_tiles = last > first ? (last + Cells - 1) / Cells - tile0 : 0;
    const int share = (n_tiles + a.n_parts - 1) / a.n_parts;
    const int begin = tile0 + blockIdx.z * share, end = min(tile0 + n_tiles, begin + share);
    begin_rows(a, rows, own);

    // Values arrive while scores are computed, the next keys while values are summed. Values that are a part
    // of the keys allow no such overlap; blocks then overlap each other.
    if (!VInK && begin < end) load_keys<F>(a, heads, begin, last, k);
    for (int tile = begin; tile < end; ++tile) {
        const int c0 = tile * Cells;
        if (VInK) {
            __syncthreads();
            load_keys<F>(a, heads, tile, last, k);
        }
        wait_copies<0>();
        __syncthreads();
        if (!VInK) {
            load_cells<F>(a.v, a.v_type, heads.v, c0, last, Dv, v, F::kStrideV);
            commit_copies();
        }
        FlashScores<F> scores;
        multiply_keys(own, q, k, scores);
        float top[2] = {own.maximum[0], own.maximum[1]};
        mask_scores(a, own, c0, last, scores, top);
        join_maximum(own, top, stat);
        weigh(own, top, scores);
        if (Wn > 1) {
            store_probabilities(own, scores, probabilities);
            if (VInK) __syncthreads();
        }
        if (!VInK) {
            wait_copies<0>();
            __syncthreads();
            if (tile + 1 < end) load_keys<F>(a, heads, tile + 1, last, k);
        }
        add_values(own, scores, probabilities, v);
    }
    join_denominators(own, stat);
    store_rows(a, rows, own);
}

}  // namespace ikpy::cuda

// Blocks: how many shall fit a multiprocessor; without it the compiler may save registers by spilling.
#define IKPY_FLASH(name, Dk, Dv, Wm, Wn, Cells, VInK, Blocks)                                         \
    IKPY_KERNEL __launch_bounds__(32 * Wm * Wn, Blocks) name(ikpy::cuda::Attention a, int v_column) { \
        ikpy::cuda::flash_body<Dk, Dv, Wm, Wn, Cells, VInK>(a, v_column);                             \
    }                                                                                                 \
    IKPY_EXPORT(name)
