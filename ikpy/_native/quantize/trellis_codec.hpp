// Codebooks of generated vectors (IQ1_KT ... IQ4_KT, quant-formats.md#trellis-types) for
// ScaledCodebookSearch.
//
// A search through the codebook costs far more than anything else. Every group is searched at a few scales
// only; the best vectors of each lane are kept with their P = sum w*x*v and Q = sum w*v*v, and all
// later questions about other scales are answered from them: the error at scale dl is sum w*x*x + dl*(dl*Q -
// 2*P).
#pragma once

#include <iterator>

#include "grid_codec.hpp"
#include "trellis_index.hpp"

namespace ikpy::quantize {

// What a codec has found for one group at one scale.
struct TrellisChoice {
    int index = 0;
    float p = 0, q = 0;
};

// Format: DIM, TABLES, SIGNED, STARTS (scales of the first searches, relative to the guess), SEARCHES (per
// start),
//   KEPT (matches of a search), ROOT_MEAN_SQUARE of the codebook's values, index(table), PROBED, PROBED_LAST
//   (see TrellisIndex)
template <class Format>
class TrellisCodec {
  public:
    static constexpr int TABLES = Format::TABLES, SIZE = 32;
    static constexpr bool SIGNED = Format::SIGNED, SEARCHES_AGAIN = true;
    using Output = TrellisChoice;
    static constexpr int OUTPUTS = SIZE / Format::DIM;

    float extent(int, bool) const { return 100.0f; }

    void prepare(int b, const float* x, const float* w) {
        if (groups_.size() < static_cast<size_t>((b + 1) * TABLES * OUTPUTS)) {
            groups_.resize(static_cast<size_t>((b + 1) * TABLES * OUTPUTS));
            squares_.resize(static_cast<size_t>(b + 1));
        }
        float square = 0, largest = 0;
        for (int j = 0; j < SIZE; j++) {
            square += x[j] * x[j];
            largest = std::max(largest, std::fabs(x[j]));
        }
        squares_[b] = static_cast<float>(weighted_square(x, w, SIZE));
        for (int g = 0; g < TABLES * OUTPUTS; g++) groups_[b * TABLES * OUTPUTS + g].count = 0;
        if (!(largest > 1e-16f)) return;
        // Without the weights: a single column of great weight says nothing about the others' size.
        const float guess = std::max(std::sqrt(square / SIZE) / Format::ROOT_MEAN_SQUARE, largest / 124);
        for (int table = 0; table < TABLES; table++) {
            for (float start : Format::STARTS) {
                for (int negative = 0; negative < (SIGNED ? 2 : 1); negative++) {
                    float dl = negative ? -guess * start : guess * start;
                    for (int round = 0; round < Format::SEARCHES && dl != 0; round++)
                        dl = search(b, x, w, table, dl);
                }
            }
        }
    }

    // Adds what is found at the scale dl; returns the scale that fits it best, 0 if that has another sign.
    float search(int b, const float* x, const float* w, int table, float dl) {
        if (dl == 0) return 0;
        TrellisMatches found[OUTPUTS];
        for (int g = 0; g < OUTPUTS; g++) {
            const int at = g * Format::DIM;
            Format::index(table).template nearest<Format::PROBED>(x + at, w + at, dl, found[g]);
        }
        // In a loop of their own the long waits of these choices overlap.
        float p = 0, q = 0;
        for (int g = 0; g < OUTPUTS; g++) {
            const int best = add_best(found[g], dl, groups_[(b * TABLES + table) * OUTPUTS + g]);
            p += found[g].p[best];
            q += found[g].q[best];
        }
        return q > 0 && (p > 0) == (dl > 0) ? p / q : 0;
    }

    void scan(int b, const float*, const float*, int table, const float* dl, Scan& s) const {
        for (int k = 0; k < PARTS; k++) {
            const FloatVector scale = load(dl + k * VECTOR);
            FloatVector error = broadcast(squares_[b]), xt{}, tt{};
            for (int g = 0; g < OUTPUTS; g++) {
                const List& list = groups_[(b * TABLES + table) * OUTPUTS + g];
                FloatVector best{}, best_p{}, best_q{};
                for (int i = 0; i < list.count; i++) {
                    const FloatVector cost = scale * (scale * list.q[i] - 2.0f * list.p[i]);
                    const IntVector better = i ? cost < best : IntVector{} - 1;
                    best = select(better, cost, best);
                    best_p = select(better, broadcast(list.p[i]), best_p);
                    best_q = select(better, broadcast(list.q[i]), best_q);
                }
                error += best;
                xt += best_p;
                tt += best_q;
            }
            store(s.error + k * VECTOR, error);
            store(s.xt + k * VECTOR, xt);
            store(s.tt + k * VECTOR, tt);
        }
    }

    // Searches again, more thoroughly, at the scale dl.
    void assign(int b, const float* x, const float* w, int table, float dl, TrellisChoice* out) const {
        for (int g = 0; g < OUTPUTS; g++) {
            const int at = g * Format::DIM;
            const List& list = groups_[(b * TABLES + table) * OUTPUTS + g];
            out[g] = {};
            if (!list.count || dl == 0) continue;
            const int i = best_of(list, dl);
            out[g] = {list.index[i], list.p[i], list.q[i]};
            TrellisMatches found;
            Format::index(table).template nearest<Format::PROBED_LAST>(x + at, w + at, dl, found);
            const int l = found.best(dl);
            if (dl * (dl * found.q[l] - 2.0f * found.p[l]) < dl * (dl * list.q[i] - 2.0f * list.p[i]))
                out[g] = {found.index[l], found.p[l], found.q[l]};
        }
    }

  private:
    static constexpr int LISTED =
        Format::KEPT * (Format::SEARCHES * static_cast<int>(std::size(Format::STARTS)) * (SIGNED ? 2 : 1) +
                        (SIGNED ? 3 : 2));
    using List = Candidates<LISTED>;

    static int best_of(const List& list, float dl) {
        int winner = 0;
        float least = INFINITY;
        for (int i = 0; i < list.count; i++) {
            const float cost = dl * (dl * list.q[i] - 2.0f * list.p[i]);
            if (cost < least) {
                least = cost;
                winner = i;
            }
        }
        return winner;
    }

    // Adds the KEPT best matches to the list and returns the number of the best.
    static int add_best(const TrellisMatches& found, float dl, List& list) {
        alignas(64) float cost[LANES];
        found.costs(dl, cost);
        int best[Format::KEPT];
        indices_of_least<Format::KEPT>(cost, best);
        for (int l : best) list.add(found.index[l], found.p[l], found.q[l]);
        return best[0];
    }

    std::vector<List> groups_;
    std::vector<float> squares_;
};

}  // namespace ikpy::quantize
