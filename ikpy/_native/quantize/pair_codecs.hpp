// Codecs whose levels depend on each other: IQ4_KSS (four levels with even parity) and IQ2_KL (pairs).
#pragma once

#include "grid_codec.hpp"
#include "scaled_codebook.hpp"
#include "tables.hpp"

namespace ikpy::quantize {

// Levels of the IQ4_K tables; the 16 bits of each four levels (elements 2n, 2n+16, 2n+1, 2n+17) hold an even
// number of ones. Every element knows its best level of even and of odd bit count; if four best levels have
// odd parity, the element that loses least takes the other kind.
class EvenParityCodec {
  public:
    static constexpr int TABLES = 2, SIZE = 32, OUTPUTS = 32;
    static constexpr bool SIGNED = true, SEARCHES_AGAIN = false;
    using Output = uint8_t;

    EvenParityCodec() : tables_{make(0, 0), make(0, 1), make(1, 0), make(1, 1)} {}

    void prepare(int, const float*, const float*) {}

    float extent(int table, bool positive) const {
        const LevelTable& even = tables_[2 * table];
        const LevelTable& odd = tables_[2 * table + 1];
        return positive ? std::max(even.last(), odd.last()) : -std::min(even.first(), odd.first());
    }

    void scan(int, const float* x, const float* w, int table, const float* dl, Scan& s) const {
        const LevelTable& even_levels = tables_[2 * table];
        const LevelTable& odd_levels = tables_[2 * table + 1];
        for (int p = 0; p < PARTS; p++) {
            const FloatVector scale = load(dl + p * VECTOR);
            const IntVector zero = scale == 0.0f;
            const FloatVector inverse =
                select(zero, FloatVector{}, 1.0f / select(zero, broadcast(1.0f), scale));
            FloatVector error{}, xt{}, tt{};
            for (int n = 0; n < 8; n++) {
                FloatVector best[4], other[4], loss[4];
                IntVector parity{};
                for (int i = 0; i < 4; i++) {
                    const int j = element(n, i);
                    const FloatVector even = even_levels.nearest<8>(x[j] * inverse);
                    const FloatVector odd = odd_levels.nearest<8>(x[j] * inverse);
                    const FloatVector even_off = x[j] - scale * even, odd_off = x[j] - scale * odd;
                    const FloatVector even_error = w[j] * even_off * even_off,
                                      odd_error = w[j] * odd_off * odd_off;
                    const IntVector take_odd = odd_error < even_error;
                    parity ^= take_odd;
                    best[i] = select(take_odd, odd, even);
                    other[i] = select(take_odd, even, odd);
                    loss[i] = select(take_odd, even_error - odd_error, odd_error - even_error);
                    error += select(take_odd, odd_error, even_error);
                }
                IntVector least = parity;  // still to be repaired
                const FloatVector smallest = smaller(smaller(loss[0], loss[1]), smaller(loss[2], loss[3]));
                error += select(parity, smallest, FloatVector{});
                for (int i = 0; i < 4; i++) {
                    const IntVector repair = least & (loss[i] == smallest);
                    least &= ~repair;
                    const FloatVector t = select(repair, other[i], best[i]);
                    const int j = element(n, i);
                    xt += w[j] * x[j] * t;
                    tt += w[j] * t * t;
                }
            }
            store(s.error + p * VECTOR, error);
            store(s.xt + p * VECTOR, xt);
            store(s.tt + p * VECTOR, tt);
        }
    }

    void assign(int, const float* x, const float* w, int table, float dl, uint8_t* out) const {
        const float inverse = dl != 0 ? 1.0f / dl : 0.0f;
        for (int n = 0; n < 8; n++) {
            int odd_count = 0, cheapest = 0;
            float losses[4];
            uint8_t others[4];
            for (int i = 0; i < 4; i++) {
                const int j = element(n, i);
                float errors[2];
                uint8_t levels[2];
                for (int odd = 0; odd < 2; odd++) {
                    const LevelTable& t = tables_[2 * table + odd];
                    const int k = t.index(x[j] * inverse);
                    const float off = x[j] - dl * t.value(k);
                    errors[odd] = w[j] * off * off;
                    levels[odd] = LEVELS[odd][k];
                }
                const int odd = errors[1] < errors[0];
                odd_count += odd;
                out[j] = levels[odd];
                others[i] = levels[1 - odd];
                losses[i] = errors[1 - odd] - errors[odd];
                if (losses[i] < losses[cheapest]) cheapest = i;
            }
            if (odd_count & 1) out[element(n, cheapest)] = others[cheapest];
        }
    }

    static int element(int n, int i) { return 2 * n + (i >> 1) + 16 * (i & 1); }

  private:
    // Levels with an even, and with an odd, number of one bits.
    static constexpr uint8_t LEVELS[2][8] = {{0, 3, 5, 6, 9, 10, 12, 15}, {1, 2, 4, 7, 8, 11, 13, 14}};

    static LevelTable make(int shifted, int odd) {
        int8_t values[8];
        for (int i = 0; i < 8; i++) values[i] = tables::iq4k_values[16 * shifted + LEVELS[odd][i]];
        return LevelTable(values, 8);
    }

    LevelTable tables_[4];
};

// Adjacent elements take one of 32 pairs of levels. Every pair of elements keeps the best of them for LANES
// scales of either sign as its candidates (see grid_codec.hpp).
class PairCodec {
  public:
    static constexpr int TABLES = 1, SIZE = 32, OUTPUTS = 16;
    static constexpr bool SIGNED = true, SEARCHES_AGAIN = false;
    using Output = uint8_t;

    float extent(int, bool positive) const { return positive ? MOST : -LEAST; }

    void prepare(int b, const float* x, const float* w) {
        const size_t needed = static_cast<size_t>((b + 1) * OUTPUTS);
        if (pairs_.size() < needed) pairs_.resize(needed);
        alignas(64) float dl[LANES];
        spread_scales<LANES>(largest_of(x, SIZE) / -LEAST, LOWEST, HIGHEST, dl);
        for (int j = 0; j < OUTPUTS; j++) find_candidates(x + 2 * j, w + 2 * j, dl, pairs_[b * OUTPUTS + j]);
    }

    void scan(int b, const float*, const float*, int, const float* dl, Scan& s) const {
        const Pair* pairs = pairs_.data() + b * OUTPUTS;
        for (int k = 0; k < PARTS; k++) {
            const FloatVector scale = load(dl + k * VECTOR);
            const IntVector negative = scale < 0.0f;
            FloatVector square{}, xt{}, tt{};
            if (!any(negative)) {
                add_best<0>(pairs, scale, square, xt, tt);
            } else if (!any(~negative)) {
                add_best<1>(pairs, scale, square, xt, tt);
            } else {
                FloatVector negative_square{}, negative_xt{}, negative_tt{};
                add_best<0>(pairs, select(negative, -scale, scale), square, xt, tt);
                add_best<1>(pairs, select(negative, scale, -scale), negative_square, negative_xt,
                            negative_tt);
                xt = select(negative, negative_xt, xt);
                tt = select(negative, negative_tt, tt);
            }
            store(s.error + k * VECTOR, square + scale * (scale * tt - 2.0f * xt));
            store(s.xt + k * VECTOR, xt);
            store(s.tt + k * VECTOR, tt);
        }
    }

    void assign(int b, const float*, const float*, int, float dl, uint8_t* out) const {
        for (int j = 0; j < OUTPUTS; j++) {
            const List& list = pairs_[b * OUTPUTS + j].list[dl < 0];
            out[j] = static_cast<uint8_t>(list.index[list.best(std::fabs(dl))]);
        }
    }

  private:
    static constexpr int COUNT = 32;
    static constexpr float LEAST = -47.0f, MOST = 63.0f, LOWEST = 0.3f, HIGHEST = 1.6f;
    using List = Candidates<LANES>;

    struct Pair {
        List list[2];  // for positive scales, and for -x and the magnitudes of negative ones
        float weighted_square;
    };

    // Adds the sums of the best candidates at scales of one sign.
    template <int NEGATIVE>
    static void add_best(const Pair* pairs, FloatVector scale, FloatVector& square, FloatVector& xt,
                         FloatVector& tt) {
        for (int j = 0; j < OUTPUTS; j++) {
            FloatVector p, q;
            pairs[j].list[NEGATIVE].best(NEGATIVE ? -scale : scale, p, q);
            square += pairs[j].weighted_square;
            xt += NEGATIVE ? -p : p;
            tt += q;
        }
    }

    static void find_candidates(const float* x, const float* w, const float* dl, Pair& pair) {
        const float a0 = w[0] * x[0], a1 = w[1] * x[1];
        pair.weighted_square = a0 * x[0] + a1 * x[1];
        float p[COUNT], q[COUNT];
        for (int i = 0; i < COUNT; i++) {
            const float v0 = tables::iq2kl_pairs[2 * i], v1 = tables::iq2kl_pairs[2 * i + 1];
            p[i] = a0 * v0 + a1 * v1;
            q[i] = w[0] * v0 * v0 + w[1] * v1 * v1;
        }
        for (int negative = 0; negative < 2; negative++) {
            int32_t index[LANES];
            for (int k = 0; k < LANES; k += VECTOR) {
                const FloatVector scale = negative ? -load(dl + k) : load(dl + k);
                FloatVector best = broadcast(INFINITY);
                for (int i = 0; i < COUNT; i++)
                    best = smaller(best, with_low_bits(scale * (scale * q[i] - 2.0f * p[i]), COUNT - 1, i));
                const IntVector at = (IntVector)best & (COUNT - 1);
                std::memcpy(index + k, &at, sizeof at);
            }
            List& list = pair.list[negative];
            list.count = 0;
            uint32_t seen = 0;
            for (int i : index) {  // without branches, as which candidates come again cannot be foreseen
                list.set(list.count, i, negative ? -p[i] : p[i], q[i]);
                list.count += !(seen >> i & 1);
                seen |= 1u << i;
            }
        }
    }

    std::vector<Pair> pairs_;
};

}  // namespace ikpy::quantize
