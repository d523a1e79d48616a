// Codebooks of 4- or 8-element grid points for ScaledCodebookSearch.
//
// For a group with weights w and a point g, the error at scale dl is sum w*x*x - 2*dl*P + dl*dl*Q with P = sum w*x*g and
// Q = sum w*g*g, which do not depend on dl. Only points on the upper hull of (Q, P) can be best for any dl, so every
// group keeps the winners of LANES scales as its candidates and the search never looks at the whole grid again.
#pragma once

#include "search.hpp"

namespace ikpy::quantize {

// Grid points as floats, component by component: value(j)[point].
class Grid {
public:
    Grid(const int8_t* points, int dim, int count, float unit) : count_(count) {
        for (int j = 0; j < dim; j++) {
            values_[j].resize(static_cast<size_t>(count));
            for (int p = 0; p < count; p++) values_[j][p] = unit * points[p * dim + j];
        }
    }
    int count() const { return count_; }
    const float* value(int j) const { return values_[j].data(); }

private:
    int count_;
    std::vector<float> values_[8];
};

// Candidate points of one group, with their sums.
struct Candidates {
    alignas(64) float p[LANES];
    alignas(64) float q[LANES];
    uint16_t index[LANES];
    int count = 0;

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

// Fills the candidates from the sums of all points; dl are LANES positive scales that cover the useful range.
inline void keep_winners(const float* p, const float* q, int count, const float* dl, Candidates& out) {
    FloatVector scale[PARTS], best[PARTS];
    IntVector index[PARTS];
    for (int k = 0; k < PARTS; k++) {
        scale[k] = load(dl + k * VECTOR);
        best[k] = broadcast(INFINITY);
        index[k] = IntVector{};
    }
    for (int i = 0; i < count; i++) {
        const float two_p = 2.0f * p[i];
        for (int k = 0; k < PARTS; k++) {
            const FloatVector cost = scale[k] * q[i] - two_p;
            const IntVector better = cost < best[k];
            best[k] = select(better, cost, best[k]);
            index[k] = better ? IntVector{} + i : index[k];
        }
    }
    out.count = 0;
    for (int l = 0; l < LANES; l++) {
        const int i = index[l / VECTOR][l % VECTOR];
        if (out.count && out.index[out.count - 1] == i) continue;
        out.p[out.count] = p[i];
        out.q[out.count] = q[i];
        out.index[out.count++] = static_cast<uint16_t>(i);
    }
}

// LANES scales between low and high times unit, in geometric progression.
inline void spread_scales(float unit, float low, float high, float* dl) {
    const float ratio = std::pow(high / low, 1.0f / (LANES - 1));
    float v = unit * low;
    for (int l = 0; l < LANES; l++, v *= ratio) dl[l] = v;
}

inline float largest_of(const float* x, int n) {
    float m = 0;
    for (int j = 0; j < n; j++) m = std::max(m, std::fabs(x[j]));
    return m;
}

// Index of the best point of each four- or eight-element group of eight elements, and their signs (1 = negative).
struct GridCode {
    uint16_t index[2];
    uint8_t signs;
};

// Codec of magnitudes from a grid with separate signs. DIM 8 or 4. With PARITY the number of negative signs of every
// eight elements is even: where it is odd, the flip that costs least is part of the choice, point by point.
template <int DIM, int BLOCK, bool PARITY>
class SignedGridCodec {
public:
    static constexpr int TABLES = 1, SIZE = BLOCK;
    static constexpr bool SIGNED = false;
    using Output = GridCode;
    static constexpr int OUTPUTS = SIZE / 8;

    SignedGridCodec(const Grid& grid, float extent) : grid_(grid), extent_(extent) {
        const size_t n = static_cast<size_t>(grid.count());
        p_.resize(n);
        q_.resize(n);
        flipped_.resize(n);
        smallest_.resize(n);
    }

    float extent(int, bool) const { return extent_; }

    void prepare(int b, const float* x, const float* w) {
        if (groups_.size() < static_cast<size_t>((b + 1) * OUTPUTS)) groups_.resize(static_cast<size_t>((b + 1) * OUTPUTS));
        alignas(64) float dl[LANES];
        spread_scales(largest_of(x, SIZE) / extent_, LOWEST, HIGHEST, dl);
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
                sums(x + at, w + at, group.odd);
                if (!group.odd || LISTS > 1) keep_winners(p_.data(), q_.data(), grid_.count(), dl, group.same[part]);
                if (group.odd) keep_winners(flipped_.data(), q_.data(), grid_.count(), dl, group.flip[part]);
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
                const Candidates& list = part == flipped_part ? group.flip[part] : group.same[part];
                out[g].index[part] = list.index[list.best(dl)];
                if (part == flipped_part) {
                    const int at = 8 * g + DIM * part;
                    out[g].signs ^= static_cast<uint8_t>(1 << (DIM * part + cheapest_flip(x + at, w + at, out[g].index[part])));
                }
            }
        }
    }

private:
    static constexpr int LISTS = 8 / DIM;
    static constexpr float LOWEST = 0.25f, HIGHEST = 1.6f;

    struct Group {
        Candidates same[LISTS], flip[LISTS];
        float weighted_square;
        uint8_t signs;
        bool odd;
    };

    // P and Q of all points, and P after the cheapest flip of one sign.
    void sums(const float* x, const float* w, bool odd) {
        const int n = grid_.count();
        float* p = p_.data();
        float* q = q_.data();
        float* smallest = smallest_.data();
        for (int j = 0; j < DIM; j++) {
            const float a = w[j] * std::fabs(x[j]), wj = w[j];
            const float* v = grid_.value(j);
            if (j == 0) {
                for (int i = 0; i < n; i++) {
                    p[i] = smallest[i] = a * v[i];
                    q[i] = wj * v[i] * v[i];
                }
            } else {
                for (int i = 0; i < n; i++) {
                    const float term = a * v[i];
                    p[i] += term;
                    q[i] += wj * v[i] * v[i];
                    smallest[i] = term < smallest[i] ? term : smallest[i];
                }
            }
        }
        if (odd) {
            for (int i = 0; i < n; i++) flipped_[i] = p[i] - 2.0f * smallest[i];
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
            const auto cost = [dl](const Candidates& list) {
                const int i = list.best(dl);
                return dl * list.q[i] - 2.0f * list.p[i];
            };
            return cost(group.same[0]) + cost(group.flip[1]) < cost(group.flip[0]) + cost(group.same[1]) ? 1 : 0;
        }
    }

    const Grid& grid_;
    const float extent_;
    std::vector<float> p_, q_, flipped_, smallest_;
    std::vector<Group> groups_;
};

// Point of the ternary grid and sign of the offset (1 = negative) of one group of eight.
struct TernaryCode {
    uint16_t index;
    uint8_t negative;
};

// Codec of ternary points plus an offset of +0.125 or -0.125: one offset per sub-block (two tables) or per group.
template <int BLOCK, bool OFFSET_PER_GROUP>
class TernaryGridCodec {
public:
    static constexpr int TABLES = OFFSET_PER_GROUP ? 1 : 2, SIZE = BLOCK;
    static constexpr bool SIGNED = false;
    using Output = TernaryCode;
    static constexpr int OUTPUTS = SIZE / 8;

    explicit TernaryGridCodec(const Grid& grid) : grid_(grid) {
        const size_t n = static_cast<size_t>(grid.count());
        for (auto* sums : {&xg_, &gg_, &g_}) sums->resize(n);
        p_.resize(2 * n);
        q_.resize(2 * n);
    }

    float extent(int, bool) const { return 1.0f; }

    void prepare(int b, const float* x, const float* w) {
        if (groups_.size() < static_cast<size_t>((b + 1) * OUTPUTS)) groups_.resize(static_cast<size_t>((b + 1) * OUTPUTS));
        alignas(64) float dl[LANES];
        spread_scales(largest_of(x, SIZE), 0.2f, 1.3f, dl);
        const int n = grid_.count();
        for (int g = 0; g < OUTPUTS; g++) {
            Group& group = groups_[b * OUTPUTS + g];
            sums(x + 8 * g, w + 8 * g, group.weighted_square);
            if constexpr (OFFSET_PER_GROUP) {
                keep_winners(p_.data(), q_.data(), 2 * n, dl, group.list[0]);
            } else {
                for (int t = 0; t < 2; t++) keep_winners(p_.data() + t * n, q_.data() + t * n, n, dl, group.list[t]);
            }
        }
    }

    void scan(int b, const float*, const float*, int table, const float* dl, Scan& s) const {
        for (int k = 0; k < PARTS; k++) {
            const FloatVector scale = load(dl + k * VECTOR);
            FloatVector square{}, xt{}, tt{};
            for (int g = 0; g < OUTPUTS; g++) {
                const Group& group = groups_[b * OUTPUTS + g];
                FloatVector p, q;
                group.list[table].best(scale, p, q);
                square += group.weighted_square;
                xt += p;
                tt += q;
            }
            store(s.error + k * VECTOR, square + scale * (scale * tt - 2.0f * xt));
            store(s.xt + k * VECTOR, xt);
            store(s.tt + k * VECTOR, tt);
        }
    }

    void assign(int b, const float*, const float*, int table, float dl, TernaryCode* out) const {
        for (int g = 0; g < OUTPUTS; g++) {
            const Candidates& list = groups_[b * OUTPUTS + g].list[table];
            const int i = list.index[list.best(dl)], n = grid_.count();
            if constexpr (OFFSET_PER_GROUP) out[g] = {static_cast<uint16_t>(i % n), static_cast<uint8_t>(i / n)};
            else out[g] = {static_cast<uint16_t>(i), static_cast<uint8_t>(table)};
        }
    }

private:
    struct Group {
        Candidates list[TABLES];
        float weighted_square;
    };

    // P and Q of all points with offset +0.125, then with -0.125.
    void sums(const float* x, const float* w, float& weighted_square) {
        const int n = grid_.count();
        float* xg = xg_.data();
        float* gg = gg_.data();
        float* g1 = g_.data();
        float sum_w = 0, sum_wx = 0;
        weighted_square = 0;
        for (int j = 0; j < 8; j++) {
            const float wj = w[j], wx = w[j] * x[j];
            const float* v = grid_.value(j);
            sum_w += wj;
            sum_wx += wx;
            weighted_square += wx * x[j];
            for (int i = 0; i < n; i++) {
                const float wv = wj * v[i];
                xg[i] = (j ? xg[i] : 0.0f) + wx * v[i];
                g1[i] = (j ? g1[i] : 0.0f) + wv;
                gg[i] = (j ? gg[i] : 0.0f) + wv * v[i];
            }
        }
        for (int t = 0; t < 2; t++) {
            const float offset = t ? -0.125f : 0.125f, p0 = offset * sum_wx, q0 = offset * offset * sum_w;
            float* p = p_.data() + t * n;
            float* q = q_.data() + t * n;
            for (int i = 0; i < n; i++) {
                p[i] = xg[i] + p0;
                q[i] = gg[i] + 2.0f * offset * g1[i] + q0;
            }
        }
    }

    const Grid& grid_;
    std::vector<float> xg_, gg_, g_, p_, q_;
    std::vector<Group> groups_;
};

}  // namespace ikpy::quantize
