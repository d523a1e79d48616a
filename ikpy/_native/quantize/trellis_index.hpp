// The generator's vectors (quant-formats.md#generator) sorted into cells, and the search for the one nearest
// to a group.
#pragma once

#include <array>
#include <cfloat>

#include "search.hpp"
#include "trellis.hpp"

namespace ikpy::quantize {

// Vectors near to a group, the best of each of LANES lanes, so that the choice does not depend on the width
// of the machine's vectors: number, P = sum w*x*v and Q = sum w*v*v.
struct TrellisMatches {
    alignas(64) int32_t index[LANES];
    alignas(64) float p[LANES];
    alignas(64) float q[LANES];

    int best(float dl) const {
        int winner = 0;
        float least = INFINITY;
        for (int l = 0; l < LANES; l++) {
            const float cost = dl * (dl * q[l] - 2.0f * p[l]);
            winner = cost < least ? l : winner;
            least = std::min(cost, least);
        }
        return winner;
    }
};

// Cells are boxes: every binned component lies in one of BINS intervals of equal population. A query looks at
// its own cell and at those on the other side of the 'PROBED' intervals' edges that are nearest in weighted
// distance.
template <int DIM, int BINNED, int BINS>
class TrellisIndex {
  public:
    // count seeds from `offset` on; absolute: the vectors of absolute values.
    TrellisIndex(int count, uint32_t offset, bool absolute) : absolute_(absolute) {
        std::vector<std::array<int8_t, DIM>> vectors(static_cast<size_t>(count));
        for (int i = 0; i < count; i++) vectors[i] = generate(static_cast<uint32_t>(i) + offset, absolute);
        set_edges(vectors);
        sort_into_cells(vectors);
    }

    // Vectors near to x/dl in the metric w, looking into 2^PROBED cells. dl != 0.
    template <int PROBED>
    void nearest(const float* x, const float* w, float dl, TrellisMatches& found) const {
        float u[DIM], linear[DIM], size[DIM];
        const float inverse = 1.0f / dl;
        for (int j = 0; j < DIM; j++) {
            const float v = absolute_ ? std::fabs(x[j]) : x[j];
            u[j] = v * inverse;
            linear[j] = -2.0f * w[j] * u[j];
            size[j] = v;
        }
        int cells[1 << PROBED];
        choose_cells<PROBED>(u, w, cells);
        FloatVector best[PARTS];
        IntVector at[PARTS]{};
        for (FloatVector& part : best) part = broadcast(INFINITY);
        for (int cell : cells) scan_cell(cell, w, linear, best, at);
        for (int l = 0; l < LANES; l++) {
            const int first = at[l / VECTOR][l % VECTOR];
            const int8_t* v = values_.data() + first * DIM + l;
            float p = 0, q = 0;
            for (int j = 0; j < DIM; j++) {
                const float value = v[j * LANES], wv = w[j] * value;
                p += size[j] * wv;
                q += value * wv;
            }
            found.p[l] = p;
            found.q[l] = q;
            found.index[l] = number_[first + l];
        }
    }

  private:
    static constexpr int CELLS = BINS == 4 ? 1 << 2 * BINNED : 1 << BINNED;

    static std::array<int8_t, DIM> generate(uint32_t seed, bool absolute) {
        int values[DIM];
        formats::trellis_values<DIM>(seed, values);
        std::array<int8_t, DIM> v;
        for (int j = 0; j < DIM; j++) v[j] = static_cast<int8_t>(absolute ? std::abs(values[j]) : values[j]);
        return v;
    }

    void set_edges(const std::vector<std::array<int8_t, DIM>>& vectors) {
        std::vector<int8_t> values(vectors.size());
        for (int j = 0; j < BINNED; j++) {
            for (size_t i = 0; i < vectors.size(); i++) values[i] = vectors[i][j];
            std::sort(values.begin(), values.end());
            for (int e = 0; e < BINS - 1; e++) edges_[j][e] = values[values.size() * (e + 1) / BINS] - 0.5f;
        }
    }

    int bin_of(int j, float v) const {
        int bin = 0;
        for (int e = 0; e < BINS - 1; e++) bin += v > edges_[j][e];
        return bin;
    }

    void sort_into_cells(const std::vector<std::array<int8_t, DIM>>& vectors) {
        std::vector<std::vector<int>> members(CELLS);
        for (size_t i = 0; i < vectors.size(); i++) {
            int cell = 0;
            for (int j = 0; j < BINNED; j++) cell = cell * BINS + bin_of(j, vectors[i][j]);
            members[cell].push_back(static_cast<int>(i));
        }
        start_.push_back(0);
        for (auto& list : members) {
            if (list.empty()) list.push_back(0);
            while (list.size() % LANES) list.push_back(list.back());
            for (int i : list) number_.push_back(i);
            start_.push_back(static_cast<int>(number_.size()));
        }
        values_.resize(number_.size() * DIM);
        for (size_t i = 0; i < number_.size(); i++) {
            for (int j = 0; j < DIM; j++)
                values_[i / LANES * LANES * DIM + j * LANES + i % LANES] = vectors[number_[i]][j];
        }
    }

    template <int PROBED>
    void choose_cells(const float* u, const float* w, int* cells) const {
        int cell = 0, step[BINNED], place = 1;
        float distance[BINNED];
        for (int j = BINNED - 1; j >= 0; j--, place *= BINS) {
            const int bin = bin_of(j, u[j]);
            const float below = bin > 0 ? u[j] - edges_[j][bin - 1] : INFINITY;
            const float above = bin < BINS - 1 ? edges_[j][bin] - u[j] : INFINITY;
            // Of values that are no numbers too, the neighbour must exist and be taken once.
            const bool up = bin == 0 || above < below;
            step[j] = up ? place : -place;
            const float nearest = up ? above : below, weighted = w[j] * nearest * nearest;
            distance[j] = weighted < FLT_MAX ? weighted : FLT_MAX;
            cell += bin * place;
        }
        cells[0] = cell;
        for (int k = 0; k < PROBED; k++) {
            const int j = static_cast<int>(std::min_element(distance, distance + BINNED) - distance);
            distance[j] = INFINITY;
            for (int c = 0; c < 1 << k; c++) cells[(1 << k) + c] = cells[c] + step[j];
        }
    }

    static FloatVector load_bytes(const int8_t* p) {
#if defined(__AVX512F__)
        return (FloatVector)_mm512_maskz_cvtepi32_ps(
            0xFFFF, _mm512_maskz_cvtepi8_epi32(0xFFFF, load_unaligned<__m128i>(p)));
#elif defined(__AVX2__)
        return (FloatVector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
        FloatVector v;
        for (int l = 0; l < VECTOR; l++) v[l] = p[l];
        return v;
#endif
    }

    void scan_cell(int cell, const float* w, const float* linear, FloatVector* best, IntVector* at) const {
        for (int i = start_[cell]; i < start_[cell + 1]; i += LANES) {
            for (int k = 0; k < PARTS; k++) {
                FloatVector cost{};
#pragma GCC unroll 8
                for (int j = 0; j < DIM; j++) {
                    const FloatVector v = load_bytes(values_.data() + i * DIM + j * LANES + k * VECTOR);
                    cost += (w[j] * v + linear[j]) * v;
                }
                const IntVector better = cost < best[k];
                best[k] = select(better, cost, best[k]);
                at[k] = better ? IntVector{} + i : at[k];
            }
        }
    }

    const bool absolute_;
    float edges_[BINNED][BINS];
    std::vector<int> number_, start_;
    std::vector<int8_t> values_;  // LANES vectors after the other, component by component
};

}  // namespace ikpy::quantize
