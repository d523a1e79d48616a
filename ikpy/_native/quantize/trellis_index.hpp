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

    // What the error at the scale dl is above sum w*x*x, of every lane.
    void costs(float dl, float* cost) const {
        for (int k = 0; k < LANES; k += VECTOR) store(cost + k, dl * (dl * load(q + k) - 2.0f * load(p + k)));
    }

    // Lane of the least error at the scale dl.
    int best(float dl) const {
        alignas(64) float cost[LANES];
        costs(dl, cost);
        return index_of_least(cost);
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
        int32_t blocks[MOST_BLOCKS];
        int n_blocks = 0;
        for (int cell : cells) add_blocks(cell, blocks, n_blocks);
        scan(blocks, n_blocks, w, linear, best, at);
        for (int k = 0; k < PARTS; k++) sum_up(k, at[k] + lane_numbers(k), size, w, found);
    }

  private:
    static constexpr int WORDS = DIM / 4;
    static constexpr int MOST_BLOCKS = 1
                                       << 13;  // 65,536 vectors in 256 cells are little more than half of it
    // What a step along a component adds to the number of a cell.
    struct Places {
        int of[BINNED];
        constexpr Places() : of() {
            for (int j = BINNED - 1, place = 1; j >= 0; j--, place *= BINS) of[j] = place;
        }
    };
    static constexpr Places PLACES{};
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
            for (int e = 0; e < BINS - 1; e++) edges_[e][j] = values[values.size() * (e + 1) / BINS] - 0.5f;
        }
    }

    int bin_of(int j, float v) const {
        int bin = 0;
        for (int e = 0; e < BINS - 1; e++) bin += v > edges_[e][j];
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
            widest_ = std::max(widest_, static_cast<int>(list.size()) / LANES);
        }
        values_.resize(number_.size() * DIM);
        words_.resize(number_.size() * WORDS);
        for (size_t i = 0; i < number_.size(); i++) {
            const auto& v = vectors[number_[i]];
            for (int j = 0; j < DIM; j++) values_[i / LANES * LANES * DIM + j * LANES + i % LANES] = v[j];
            std::memcpy(&words_[i * WORDS], v.data(), DIM);
        }
    }

    // Sums and numbers of the vectors `at` of part k of the lanes.
    void sum_up(int k, IntVector at, const float* size, const float* w, TrellisMatches& found) const {
        FloatVector p{}, q{};
        for (int word = 0; word < WORDS; word++) {
            const IntVector bytes = gather(words_.data(), at * WORDS + word);
            for (int b = 0; b < 4; b++) {
                const int j = 4 * word + b;
                const FloatVector v = __builtin_convertvector(bytes << (24 - 8 * b) >> 24, FloatVector);
                const FloatVector wv = w[j] * v;
                p += size[j] * wv;
                q += v * wv;
            }
        }
        store(found.p + k * VECTOR, p);
        store(found.q + k * VECTOR, q);
        const IntVector number = gather(number_.data(), at);
        std::memcpy(found.index + k * VECTOR, &number, sizeof number);
    }

    // The loops have no branches: which side of an edge a value is on cannot be foreseen.
    template <int PROBED>
    void choose_cells(const float* u, const float* w, int* cells) const {
        float distance[BINNED];
        int step[BINNED], cell = 0;
        for (int j = 0; j < BINNED; j++) {
            int bin = 0;
            float below = INFINITY, above = INFINITY;
            for (int e = 0; e < BINS - 1; e++) {
                const float over = u[j] - edges_[e][j];
                bin += u[j] > edges_[e][j];
                below = std::min(below, over > 0 ? over : INFINITY);
                above = std::min(above, over > 0 ? INFINITY : -over);
            }
            const int place = PLACES.of[j];
            // Of values that are no numbers too, the neighbour must exist and be taken once.
            const bool up = (bin == 0) | (above < below);
            step[j] = up ? place : -place;
            const float nearest = up ? above : below, weighted = w[j] * nearest * nearest;
            distance[j] = weighted < FLT_MAX ? weighted : FLT_MAX;
            cell += bin * place;
        }
        int order[BINNED];
        for (int j = 0; j < BINNED; j++) {
            int rank = 0;
            for (int i = 0; i < BINNED; i++)
                rank += (distance[i] < distance[j]) | ((distance[i] == distance[j]) & (i < j));
            order[rank] = step[j];
        }
        cells[0] = cell;
        for (int k = 0; k < PROBED; k++) {
            for (int c = 0; c < 1 << k; c++) cells[(1 << k) + c] = cells[c] + order[k];
        }
    }

    // Adds where the blocks of LANES vectors of a cell begin. All blocks are scanned in one loop: ends of
    // loops over single cells are not foreseen by a processor.
    void add_blocks(int cell, int32_t* blocks, int& n_blocks) const {
        for (int i = 0; i < widest_; i += VECTOR) {
            const IntVector begins = start_[cell] + (lane_numbers() + i) * LANES;
            std::memcpy(blocks + n_blocks + i, &begins, sizeof begins);
        }
        n_blocks += (start_[cell + 1] - start_[cell]) / LANES;
    }

    static FloatVector load_bytes(const int8_t* p) {
#if defined(__AVX512F__)
        return (FloatVector)_mm512_maskz_cvtepi32_ps(
            0xFFFF, _mm512_maskz_cvtepi8_epi32(0xFFFF, load_unaligned<__m128i>(p)));
#elif defined(__AVX2__)
        return (FloatVector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
        typedef int8_t Bytes __attribute__((vector_size(VECTOR)));
        Bytes bytes;
        std::memcpy(&bytes, p, sizeof bytes);
        return __builtin_convertvector(bytes, FloatVector);
#endif
    }

    void scan(const int32_t* blocks, int n_blocks, const float* w, const float* linear, FloatVector* best,
              IntVector* at) const {
        for (int block = 0; block < n_blocks; block++) {
            const int32_t i = blocks[block];
            const int8_t* values = values_.data() + static_cast<size_t>(i) * DIM;
            for (int k = 0; k < PARTS; k++) {
                FloatVector cost{};
#pragma GCC unroll 8
                for (int j = 0; j < DIM; j++) {
                    const FloatVector v = load_bytes(values + j * LANES + k * VECTOR);
                    cost += (w[j] * v + linear[j]) * v;
                }
                at[k] = cost < best[k] ? IntVector{} + i : at[k];
                best[k] = smaller(cost, best[k]);  // does not wait for the comparison
            }
        }
    }

    const bool absolute_;
    float edges_[BINS][BINNED];
    int widest_ = 0;  // blocks of the largest cell
    std::vector<int> number_, start_;
    std::vector<int8_t> values_;  // LANES vectors after the other, component by component
    std::vector<int32_t> words_;  // vector by vector, four components each
};

}  // namespace ikpy::quantize
