// Codebooks of 4- or 8-element grid points for ScaledCodebookSearch.
//
// For a group with weights w and a point g, the error at scale dl is sum w*x*x - 2*dl*P + dl*dl*Q with P =
// sum w*x*g and Q = sum w*g*g, which do not depend on dl. Only points on the upper hull of (Q, P) can be best
// for any dl, so every group keeps the winners of a few scales as its candidates and the search never looks
// at the whole grid again.
#pragma once

#include "search.hpp"

namespace ikpy::quantize {

// Grid points as floats, component by component: value(j)[point].
class Grid {
  public:
    Grid(const int8_t* points, int dim, int count, float unit) : dim_(dim), count_(count) {
        for (int j = 0; j < dim; j++) {
            values_[j].resize(static_cast<size_t>(count));
            for (int p = 0; p < count; p++) values_[j][p] = unit * points[p * dim + j];
        }
    }
    int count() const { return count_; }
    const float* value(int j) const { return values_[j].data(); }

    // Q = sum w*g*g of every point.
    void weighted_squares(const float* w, float* q) const {
        for (int p = 0; p < count_; p += VECTOR) {
            FloatVector sum{};
            for (int j = 0; j < dim_; j++) {
                const FloatVector v = load(value(j) + p);
                sum += w[j] * v * v;
            }
            store(q + p, sum);
        }
    }

  private:
    int dim_, count_;
    std::vector<float> values_[8];
};

// At most MOST candidate points of one group, with their sums.
template <int MOST>
struct Candidates {
    float p[MOST];
    float q[MOST];
    uint16_t index[MOST];
    int count = 0;

    void add(int point, float point_p, float point_q) {
        for (int i = 0; i < count; i++) {
            if (index[i] == point) return;
        }
        set(count++, point, point_p, point_q);
    }

    void set(int i, int point, float point_p, float point_q) {
        index[i] = static_cast<uint16_t>(point);
        p[i] = point_p;
        q[i] = point_q;
    }

    // Best candidate per lane for positive scales dl: reduces the error by dl*(2p - dl*q).
    void best(FloatVector dl, FloatVector& best_p, FloatVector& best_q) const {
        best_p = broadcast(p[0]);
        best_q = broadcast(q[0]);
        FloatVector best_cost = dl * best_q - 2.0f * best_p;
        for (int i = 1; i < count; i++) {
            const FloatVector cost = dl * q[i] - 2.0f * p[i];
            const IntVector better = cost < best_cost;
            best_cost = select(better, cost, best_cost);
            best_p = select(better, broadcast(p[i]), best_p);
            best_q = select(better, broadcast(q[i]), best_q);
        }
    }

    int best(float dl) const {
        int winner = 0;
        for (int i = 1; i < count; i++) {
            if (dl * q[i] - 2.0f * p[i] < dl * q[winner] - 2.0f * p[winner]) winner = i;
        }
        return winner;
    }
};

// v with the bits of mask replaced by those of number.
inline FloatVector with_low_bits(FloatVector v, int mask, int number) {
#if defined(__AVX512F__)
    constexpr int REPLACE = 0xEA;  // (a & b) | c
    return (FloatVector)_mm512_ternarylogic_epi32((__m512i)v, _mm512_set1_epi32(~mask),
                                                  _mm512_set1_epi32(number), REPLACE);
#else
    return (FloatVector)(((IntVector)v & ~mask) | number);
#endif
}

// Points with the lowest cost dl*q - 2*p for each of COUNT positive scales. sums(i, p, q) gives the sums of
// points i .. i + VECTOR - 1; one vector lane per point. n_points is a power of two up to 256 * VECTOR.
//
// The number of the vector takes the place of the lowest bits of a cost: so a minimum finds both. Points
// whose costs are that close together are equally good.
template <int COUNT, class Sums>
void winners(int n_points, const float* dl, const Sums& sums, int* index) {
    const int low_bits = n_points / VECTOR - 1;
    FloatVector best[COUNT];
    for (int c = 0; c < COUNT; c++) best[c] = broadcast(INFINITY);
    for (int step = 0; step <= low_bits; step++) {
        FloatVector p, q;
        sums(step * VECTOR, p, q);
        const FloatVector two_p = p + p;
#pragma GCC unroll 16
        for (int c = 0; c < COUNT; c++) {
            best[c] = smaller(best[c], with_low_bits(dl[c] * q - two_p, low_bits, step));
        }
    }
    for (int c = 0; c < COUNT; c++) {
        const int lane = lane_of_least(best[c]);
        index[c] = (((IntVector)best[c])[lane] & low_bits) * VECTOR + lane;
    }
}

// COUNT scales between low and high times unit, in geometric progression.
template <int COUNT>
void spread_scales(float unit, float low, float high, float* dl) {
    const float ratio = std::pow(high / low, 1.0f / (COUNT - 1));
    float v = unit * low;
    for (int l = 0; l < COUNT; l++, v *= ratio) dl[l] = v;
}

inline float largest_of(const float* x, int n) {
    float m = 0;
    for (int j = 0; j < n; j++) m = std::max(m, std::fabs(x[j]));
    return m;
}

// Index of the best point of each four- or eight-element group of eight elements, and their signs (1 =
// negative).
struct GridCode {
    uint16_t index[2];
    uint8_t signs;
};

// Codec of magnitudes from a grid with separate signs. DIM 8 or 4. With PARITY the number of negative signs
// of every eight elements is even: where it is odd, the flip that costs least is part of the choice, point by
// point.
template <int DIM, int BLOCK, bool PARITY>
class SignedGridCodec {
  public:
    static constexpr int TABLES = 1, SIZE = BLOCK;
    static constexpr bool SIGNED = false, SEARCHES_AGAIN = false;
    using Output = GridCode;
    static constexpr int OUTPUTS = SIZE / 8;

    SignedGridCodec(const Grid& grid, float extent) : grid_(grid), extent_(extent) {}

    float extent(int, bool) const { return extent_; }

    void prepare(int b, const float* x, const float* w) {
        if (groups_.size() < static_cast<size_t>((b + 1) * OUTPUTS))
            groups_.resize(static_cast<size_t>((b + 1) * OUTPUTS));
        if (squares_.size() <= static_cast<size_t>(b)) squares_.resize(static_cast<size_t>(b + 1));
        squares_[b].set(grid_, w);
        float dl[SCALES];
        spread_scales<SCALES>(largest_of(x, SIZE) / extent_, LOWEST, HIGHEST, dl);
        for (int g = 0; g < OUTPUTS; g++) {
            Group& group = groups_[b * OUTPUTS + g];
            group.signs = 0;
            group.weighted_square = 0;
            for (int j = 0; j < 8; j++) {
                const float v = x[8 * g + j];
                group.weighted_square += w[8 * g + j] * v * v;
                group.signs |= static_cast<uint8_t>(v < 0) << j;
            }
            group.odd = PARITY && (__builtin_popcount(group.signs) & 1);
            for (int part = 0; part < LISTS; part++) {
                const int at = 8 * g + DIM * part;
                const float* q = squares_[b].of(LISTS * g + part);
                if (!group.odd || LISTS > 1) find_candidates<false>(x + at, w + at, dl, q, group.same[part]);
                if (group.odd) find_candidates<true>(x + at, w + at, dl, q, group.flip[part]);
            }
        }
    }

    void scan(int b, const float*, const float*, int, const float* dl, Scan& s) const {
        for (int k = 0; k < PARTS; k++) {
            const FloatVector scale = load(dl + k * VECTOR);
            FloatVector square{}, xt{}, tt{};
            for (int g = 0; g < OUTPUTS; g++) {
                FloatVector p, q;
                best_of_group(groups_[b * OUTPUTS + g], scale, p, q);
                square += groups_[b * OUTPUTS + g].weighted_square;
                xt += p;
                tt += q;
            }
            store(s.error + k * VECTOR, square + scale * (scale * tt - 2.0f * xt));
            store(s.xt + k * VECTOR, xt);
            store(s.tt + k * VECTOR, tt);
        }
    }

    void assign(int b, const float* x, const float* w, int, float dl, GridCode* out) const {
        for (int g = 0; g < OUTPUTS; g++) {
            const Group& group = groups_[b * OUTPUTS + g];
            out[g] = {{0, 0}, group.signs};
            const int flipped_part = group.odd ? flipped_part_of(group, dl) : -1;
            for (int part = 0; part < LISTS; part++) {
                const List& list = part == flipped_part ? group.flip[part] : group.same[part];
                out[g].index[part] = list.index[list.best(dl)];
                if (part == flipped_part) {
                    const int at = 8 * g + DIM * part;
                    out[g].signs ^= static_cast<uint8_t>(
                        1 << (DIM * part + cheapest_flip(x + at, w + at, out[g].index[part])));
                }
            }
        }
    }

  private:
    static constexpr int LISTS = 8 / DIM, SCALES = 8;
    using List = Candidates<SCALES>;
    static constexpr float LOWEST = 0.25f, HIGHEST = 1.6f;

    struct Group {
        List same[LISTS], flip[LISTS];
        float weighted_square;
        uint8_t signs;
        bool odd;
    };

    // Q of all points for the groups of a sub-block. They do not depend on the values, so they are kept as
    // long as rows with the same weights follow each other.
    class Squares {
      public:
        void set(const Grid& grid, const float* w) {
            if (w == w_) return;
            w_ = w;
            count_ = grid.count();
            q_.resize(static_cast<size_t>(SIZE / DIM * count_));
            for (int i = 0; i < SIZE / DIM; i++) grid.weighted_squares(w + DIM * i, q_.data() + i * count_);
        }
        const float* of(int group) const { return q_.data() + group * count_; }

      private:
        const float* w_ = nullptr;
        int count_ = 0;
        std::vector<float> q_;
    };

    // squares are the points' sums w*g*g. With FLIP the sums are those after the cheapest change of one sign.
    template <bool FLIP>
    void find_candidates(const float* x, const float* w, const float* dl, const float* squares,
                         List& out) const {
        float a[DIM];
        for (int j = 0; j < DIM; j++) a[j] = w[j] * std::fabs(x[j]);
        int index[SCALES];
        winners<SCALES>(
            grid_.count(), dl,
            [&](int i, FloatVector& p, FloatVector& q) {
                p = FloatVector{};
                q = load(squares + i);
                FloatVector smallest = broadcast(INFINITY);
#pragma GCC unroll 8
                for (int j = 0; j < DIM; j++) {
                    const FloatVector term = a[j] * load(grid_.value(j) + i);
                    p += term;
                    if constexpr (FLIP) smallest = smaller(term, smallest);
                }
                if constexpr (FLIP) p -= 2.0f * smallest;
            },
            index);
        out.count = 0;
        for (int c = 0; c < SCALES; c++) {
            if (c > 0 && index[c] == index[c - 1]) continue;
            float p = 0, smallest = INFINITY;
            for (int j = 0; j < DIM; j++) {
                const float term = a[j] * grid_.value(j)[index[c]];
                p += term;
                smallest = std::min(smallest, term);
            }
            out.add(index[c], FLIP ? p - 2.0f * smallest : p, squares[index[c]]);
        }
    }

    int cheapest_flip(const float* x, const float* w, int point) const {
        int best = 0;
        float least = INFINITY;
        for (int j = 0; j < DIM; j++) {
            const float cost = w[j] * std::fabs(x[j]) * grid_.value(j)[point];
            if (cost < least) {
                least = cost;
                best = j;
            }
        }
        return best;
    }

    static void best_of_group(const Group& group, FloatVector scale, FloatVector& p, FloatVector& q) {
        if constexpr (LISTS == 1) {
            (group.odd ? group.flip : group.same)[0].best(scale, p, q);
        } else {
            FloatVector p0, q0, p1, q1;
            group.same[0].best(scale, p0, q0);
            group.same[1].best(scale, p1, q1);
            p = p0 + p1;
            q = q0 + q1;
            if (!group.odd) return;
            FloatVector f0, r0, f1, r1;
            group.flip[0].best(scale, f0, r0);
            group.flip[1].best(scale, f1, r1);
            const FloatVector first_p = f0 + p1, first_q = r0 + q1, second_p = p0 + f1, second_q = q0 + r1;
            const IntVector second = scale * second_q - 2.0f * second_p < scale * first_q - 2.0f * first_p;
            p = select(second, second_p, first_p);
            q = select(second, second_q, first_q);
        }
    }

    static int flipped_part_of(const Group& group, float dl) {
        if constexpr (LISTS == 1) {
            return 0;
        } else {
            const auto cost = [dl](const List& list) {
                const int i = list.best(dl);
                return dl * list.q[i] - 2.0f * list.p[i];
            };
            return cost(group.same[0]) + cost(group.flip[1]) < cost(group.flip[0]) + cost(group.same[1]) ? 1
                                                                                                         : 0;
        }
    }

    const Grid& grid_;
    const float extent_;
    std::vector<Group> groups_;
    std::vector<Squares> squares_;
};

}  // namespace ikpy::quantize
