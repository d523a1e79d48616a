// Scores of a tile of cells in registers, and the running maximum and denominator of rows.
#pragma once
#include "flash_operands.cuh"

namespace ikpy::cuda {

// What a thread knows of its two rows where scores have biases.
template <Biases Kind>
struct FlashBiases {
    __device__ __forceinline__ void begin(const Attention&, int, int, int) {}
};
template <>
struct FlashBiases<Biases::kLinear> {
    float slope[2];
    int pos[2];
    __device__ __forceinline__ void begin(const Attention& a, int h, int head, int token) {
        slope[h] = bias_slope(a, head);
        pos[h] = a.pos[token];
    }
    __device__ __forceinline__ float of(const Attention&, int h, int cell_pos) const {
        return -slope[h] * distance(pos[h], cell_pos);
    }
};
template <>
struct FlashBiases<Biases::kTable> {
    int middle[2];  // numbers of the table's elements for distance 0
    int pos[2];
    __device__ __forceinline__ void begin(const Attention& a, int h, int head, int token) {
        middle[h] = bias_middle(a, head);
        pos[h] = a.pos[token];
    }
    __device__ __forceinline__ float of(const Attention& a, int h, int cell_pos) const {
        return bias_at(a, middle[h], cell_pos - pos[h]);
    }
};

// What a thread keeps of the rows 16 wm + lane / 4 and 8 more; all cells and columns that its warp wn takes.
template <class F>
struct FlashThread {
    int lane, wm, wn;
    int first[2], last[2];  // visible cells of each row
    const uint16_t* mask[2];
    float maximum[2], denominator[2];
    float sums[F::kSumTiles][4];
    FlashBiases<F::kBiases> biases;

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
        own.biases.begin(a, h, rows.head(row), token);
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

// Soft caps, biases and masks scores of the cells from c0 on; top: the largest of each row that this thread
// has met.
template <class F>
__device__ __forceinline__ void mask_scores(const Attention& a, const FlashThread<F>& own, int c0, int last,
                                            FlashScores<F>& scores, float* top) {
#pragma unroll
    for (int j = 0; j < F::kScoreTiles; ++j) {
        const int cell = c0 + own.score_tile(j) + 2 * (own.lane % 4);
        [[maybe_unused]] int place[2];
#pragma unroll
        for (int i = 0; F::kBiases != Biases::kNone && i < 2; ++i)
            place[i] = __ldg(&a.cell_pos[min(cell + i, last - 1)]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            unsigned open = 0;
            if (own.mask[h] && cell < last) open = *reinterpret_cast<const unsigned*>(own.mask[h] + cell);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& s = scores.s[j][2 * h + i];
                if (a.softcap != 0.0f) s = a.softcap * kLog2e * tanhf(s);
                if constexpr (F::kBiases != Biases::kNone) s += own.biases.of(a, h, place[i]);
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

}  // namespace ikpy::cuda
