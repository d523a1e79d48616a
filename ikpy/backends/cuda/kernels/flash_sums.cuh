// Sums of values weighted by probabilities, and what becomes of them behind the last tile of cells.
#pragma once
#include "flash_scores.cuh"

namespace ikpy::cuda {

// Gives the probabilities of a warp's cells to the warps that share its rows.
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

// Adds the values of a tile of cells, times their probabilities.
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

}  // namespace ikpy::cuda
