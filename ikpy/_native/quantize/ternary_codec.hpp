// Codec of the ternary grid (IQ1_S, IQ1_M and their R4 forms) for ScaledCodebookSearch.
#pragma once

#include "grid_codec.hpp"

namespace ikpy::quantize {

// The grid: eight-element points of -1, 0, 1, and the number of each of the 3^8 vectors in it.
class TernaryGrid {
  public:
    TernaryGrid(const int8_t* points, int count) : points_(points), count_(count), number_(VECTORS, -1) {
        for (int p = 0; p < count; p++) {
            int code = 0;
            for (int j = 0; j < 8; j++) code += PLACE[j] * (points[8 * p + j] + 1);
            number_[code] = p;
        }
    }

    static constexpr int PLACE[8] = {1, 3, 9, 27, 81, 243, 729, 2187};

    int count() const { return count_; }
    const int8_t* point(int p) const { return points_ + 8 * p; }
    // Numbers of the points with these codes, -1 where the grid lacks them.
    IntVector find(IntVector code) const { return gather(number_.data(), code); }

  private:
    static constexpr int VECTORS = 6561;

    const int8_t* points_;
    int count_;
    std::vector<int32_t> number_;
};

// Nearest grid points to a group of eight, one (scale, offset) per lane. All elements are rounded first;
// where the grid lacks the result, one or two of them take their second choice, and the cheapest such change
// counts. Every third vector is in the grid, so of the 37 tried some practically always are.
class TernaryMatch {
  public:
    TernaryMatch(const TernaryGrid& grid, const float* x, const float* w, FloatVector dl, FloatVector offset)
        : grid_(grid) {
        const FloatVector inverse = 1.0f / dl;
        FloatVector code{};
        for (int j = 0; j < 8; j++) {
            const FloatVector u = x[j] * inverse - offset;
            const FloatVector t = round_nearest(clamp(u, -1.0f, 1.0f));
            const FloatVector outwards = select(u > 0.0f, broadcast(1.0f), broadcast(-1.0f));
            const FloatVector step = select(t == 0.0f, outwards, -t);
            const FloatVector rest = u - t;
            // (rest - step)^2 - rest^2
            loss_[j] = w[j] * (1.0f - 2.0f * step * rest);
            const float place = TernaryGrid::PLACE[j];
            code += place * (t + 1.0f);
            step_[j] = __builtin_convertvector(place * step, IntVector);
        }
        try_code(__builtin_convertvector(code, IntVector), FloatVector{});
        const IntVector rounded = __builtin_convertvector(code, IntVector);
        for (int i = 0; i < 8; i++) try_code(rounded + step_[i], loss_[i]);
        for (int i = 1; i < 8; i++) {
            for (int k = 0; k < i; k++) try_code(rounded + step_[i] + step_[k], loss_[i] + loss_[k]);
        }
    }

    // Numbers of the points, -1 where nothing was found.
    IntVector points() const { return point_; }

  private:
    void try_code(IntVector code, FloatVector loss) {
        const IntVector found = grid_.find(code);
        const IntVector better = (loss < least_) & (found >= 0);
        least_ = select(better, loss, least_);
        point_ = better ? found : point_;
    }

    const TernaryGrid& grid_;
    FloatVector loss_[8];
    IntVector step_[8];
    FloatVector least_ = broadcast(INFINITY);
    IntVector point_ = IntVector{} - 1;
};

// Point of the ternary grid and sign of the offset (1 = negative) of one group of eight.
struct TernaryCode {
    uint16_t index;
    uint8_t negative;
};

// Codec of ternary points plus an offset of +0.125 or -0.125: one offset per sub-block (two tables) or per
// group.
template <int BLOCK, bool OFFSET_PER_GROUP>
class TernaryGridCodec {
  public:
    static constexpr int TABLES = OFFSET_PER_GROUP ? 1 : 2, SIZE = BLOCK;
    static constexpr bool SIGNED = false, SEARCHES_AGAIN = false;
    using Output = TernaryCode;
    static constexpr int OUTPUTS = SIZE / 8;

    explicit TernaryGridCodec(const TernaryGrid& grid) : grid_(grid) {}

    float extent(int, bool) const { return 1.0f; }

    void prepare(int b, const float* x, const float* w) {
        if (groups_.size() < static_cast<size_t>((b + 1) * OUTPUTS))
            groups_.resize(static_cast<size_t>((b + 1) * OUTPUTS));
        float dl[LANES];
        spread_scales<LANES / 2>(std::max(largest_of(x, SIZE), 1e-16f), 0.25f, 1.2f, dl);
        std::copy_n(dl, LANES / 2, dl + LANES / 2);
        for (int g = 0; g < OUTPUTS; g++) find_candidates(x + 8 * g, w + 8 * g, dl, groups_[b * OUTPUTS + g]);
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
            const auto& list = groups_[b * OUTPUTS + g].list[table];
            const int i = list.index[list.best(dl)], n = grid_.count();
            if constexpr (OFFSET_PER_GROUP)
                out[g] = {static_cast<uint16_t>(i % n), static_cast<uint8_t>(i / n)};
            else
                out[g] = {static_cast<uint16_t>(i), static_cast<uint8_t>(table)};
        }
    }

  private:
    struct Group {
        Candidates<LANES / TABLES> list[TABLES];
        float weighted_square;
    };

    // Winners of either offset at all scales dl: half of the lanes each.
    void find_candidates(const float* x, const float* w, const float* dl, Group& group) const {
        int points[LANES];
        for (int k = 0; k < PARTS; k++) {
            FloatVector offset;
            for (int l = 0; l < VECTOR; l++) offset[l] = offset_of(k * VECTOR + l >= LANES / 2);
            const IntVector found = TernaryMatch(grid_, x, w, load(dl + k * VECTOR), offset).points();
            std::memcpy(points + k * VECTOR, &found, sizeof found);
        }
        group.weighted_square = 0;
        for (int j = 0; j < 8; j++) group.weighted_square += w[j] * x[j] * x[j];
        for (auto& list : group.list) list.count = 0;
        for (int l = 0; l < LANES; l++) {
            const int negative = l >= LANES / 2, point = points[l];
            if (point < 0 || (l % (LANES / 2) && point == points[l - 1])) continue;
            add(x, w, point, negative, group);
        }
    }

    static float offset_of(int negative) { return negative ? -0.125f : 0.125f; }

    void add(const float* x, const float* w, int point, int negative, Group& group) const {
        float p = 0, q = 0;
        for (int j = 0; j < 8; j++) {
            const float v = grid_.point(point)[j] + offset_of(negative), wv = w[j] * v;
            p += x[j] * wv;
            q += v * wv;
        }
        const int table = OFFSET_PER_GROUP ? 0 : negative;
        group.list[table].add(point + (OFFSET_PER_GROUP ? negative * grid_.count() : 0), p, q);
    }

    const TernaryGrid& grid_;
    std::vector<Group> groups_;
};

}  // namespace ikpy::quantize
