// Codecs whose levels depend on each other: IQ4_KSS (four levels with even parity) and IQ2_KL (pairs).
#pragma once

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
                const FloatVector first = select(loss[0] < loss[1], loss[0], loss[1]);
                const FloatVector second = select(loss[2] < loss[3], loss[2], loss[3]);
                const FloatVector smallest = select(first < second, first, second);
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
                    const int k = t.scalar_index(x[j] * inverse);
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

// Adjacent elements take one of 32 pairs of levels; all pairs are tried.
class PairCodec {
  public:
    static constexpr int TABLES = 1, SIZE = 32, OUTPUTS = 16;
    static constexpr bool SIGNED = true, SEARCHES_AGAIN = false;
    using Output = uint8_t;

    void prepare(int, const float*, const float*) {}

    float extent(int, bool positive) const { return positive ? 47.0f : 63.0f; }

    void scan(int, const float* x, const float* w, int, const float* dl, Scan& s) const {
        FloatVector scale[PARTS], error[PARTS], xt[PARTS], tt[PARTS];
        for (int k = 0; k < PARTS; k++) {
            scale[k] = load(dl + k * VECTOR);
            error[k] = xt[k] = tt[k] = FloatVector{};
        }
        for (int j = 0; j < 32; j += 2) {
            float p[32], q[32];
            sums(x + j, w + j, p, q);
            const float square = w[j] * x[j] * x[j] + w[j + 1] * x[j + 1] * x[j + 1];
            for (int k = 0; k < PARTS; k++) {
                FloatVector best_p = broadcast(p[0]), best_q = broadcast(q[0]);
                FloatVector best = scale[k] * (scale[k] * q[0] - 2.0f * p[0]);
                for (int i = 1; i < 32; i++) {
                    const FloatVector cost = scale[k] * (scale[k] * q[i] - 2.0f * p[i]);
                    const IntVector better = cost < best;
                    best = select(better, cost, best);
                    best_p = select(better, broadcast(p[i]), best_p);
                    best_q = select(better, broadcast(q[i]), best_q);
                }
                error[k] += square + best;
                xt[k] += best_p;
                tt[k] += best_q;
            }
        }
        for (int k = 0; k < PARTS; k++) {
            store(s.error + k * VECTOR, error[k]);
            store(s.xt + k * VECTOR, xt[k]);
            store(s.tt + k * VECTOR, tt[k]);
        }
    }

    void assign(int, const float* x, const float* w, int, float dl, uint8_t* out) const {
        for (int j = 0; j < 32; j += 2) {
            float p[32], q[32];
            sums(x + j, w + j, p, q);
            int best = 0;
            for (int i = 1; i < 32; i++) {
                if (dl * (dl * q[i] - 2.0f * p[i]) < dl * (dl * q[best] - 2.0f * p[best])) best = i;
            }
            out[j / 2] = static_cast<uint8_t>(best);
        }
    }

  private:
    static void sums(const float* x, const float* w, float* p, float* q) {
        const float a0 = w[0] * x[0], a1 = w[1] * x[1];
        for (int i = 0; i < 32; i++) {
            const float v0 = tables::iq2kl_pairs[2 * i], v1 = tables::iq2kl_pairs[2 * i + 1];
            p[i] = a0 * v0 + a1 * v1;
            q[i] = w[0] * v0 * v0 + w[1] * v1 * v1;
        }
    }
};

}  // namespace ikpy::quantize
