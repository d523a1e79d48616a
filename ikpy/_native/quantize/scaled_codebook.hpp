// Search for types whose value is d * code * level: a common scale d (per block or per row), a small integer
// code per sub-block, and levels from a table (one of several per sub-block) or a codebook of vectors.
//
// 1. Per sub-block and table: the best free scale of each sign (grid of candidates, one Lloyd step on all of
// them).
// 2. d: a grid of scales, ranked by the quadratic model sum tt_b * (d * code_b - a_b)^2; the best few go on.
// 3. Per sub-block: exact errors of the codes around the free scales with all tables; the best is kept.
// 4. The best d is refitted to the chosen levels in closed form and step 3 repeated while the error falls.
#pragma once

#include <limits>

#include "level_table.hpp"

namespace ikpy::quantize {

struct Effort {
    float narrowest,
        widest;  // candidate scales as fractions of the one that maps the largest element to the last level
    int scale_candidates;  // values of d examined exactly
    int refits;            // rounds of step 4
};

enum class ScaleType { F16, F32 };

struct SubBlock {
    int code = 0;
    int table = 0;
};

// Codec: TABLES, SIZE (elements per sub-block), SIGNED (negative scales useful for the free fit);
//   prepare(b, x, w)             called once per sub-block before anything else
//   scan(b, x, w, table, dl, s)  fills s for LANES scales dl (0 allowed: all levels count as 0)
//   assign(b, x, w, table, dl, out)  OUTPUTS values of type Output: the levels or codebook indices at scale
//   dl extent(table, positive)   magnitude of the outermost level on that side
template <class Codec, class Codes>
class ScaledCodebookSearch {
  public:
    ScaledCodebookSearch(Codec& codec, const Codes& codes, ScaleType scale_type, Effort effort)
        : codec_(codec), codes_(codes), scale_type_(scale_type), effort_(effort) {}

    // Fits count sub-blocks that share one scale; returns it and leaves codes and tables in sub_blocks().
    float fit(const float* x, const float* w, int count) {
        x_ = x;
        w_ = w;
        options_.assign(static_cast<size_t>(count), {});
        best_.assign(static_cast<size_t>(count), {});
        trial_.resize(static_cast<size_t>(count));
        float largest = 0;
        for (int b = 0; b < count; b++) {
            codec_.prepare(b, x + b * Codec::SIZE, w + b * Codec::SIZE);
            largest = std::max(largest, free_fit(b));
        }
        if (!(largest > 0)) {
            best_product_ = 0;
            set_zero();
            return 0;
        }
        return fit_common_scale(count);
    }

    // The scale to store for the levels of the last fit's scale d (see unshrink).
    float stored_scale(float d) const {
        const int64_t n = static_cast<int64_t>(best_.size()) * Codec::SIZE;
        return rounded(d * unshrink(weighted_square(x_, w_, n), d * best_product_));
    }

    const std::vector<SubBlock>& sub_blocks() const { return best_; }

    // Levels of sub-block b at the common scale d.
    void levels(int b, float d, typename Codec::Output* out) const {
        const SubBlock& s = best_[b];
        codec_.assign(b, x_ + b * Codec::SIZE, w_ + b * Codec::SIZE, s.table, d * codes_.value(s.code), out);
    }

  private:
    struct Option {
        float scale = 0, score = 0, tt = 0;
    };
    struct Options {
        Option of[Codec::TABLES][2];
        int best_table = 0, best_sign = 0;
        const Option& best() const { return of[best_table][best_sign]; }
    };

    void set_zero() {
        const int zero = codes_.nearest(0.0f);
        for (SubBlock& s : best_) s = {zero, 0};
    }

    // Step 1. Returns the magnitude of the best free scale, 0 for an all-zero sub-block.
    float free_fit(int b) {
        const float* x = x_ + b * Codec::SIZE;
        const float* w = w_ + b * Codec::SIZE;
        float max = 0;
        for (int j = 0; j < Codec::SIZE; j++) {
            if (std::fabs(x[j]) > std::fabs(max)) max = x[j];
        }
        Options& o = options_[b];
        if (!(std::fabs(max) > 1e-16f)) return 0;
        for (int table = 0; table < Codec::TABLES; table++) {
            for (int negative = 0; negative < (Codec::SIGNED ? 2 : 1); negative++) {
                const float widest = std::fabs(max) / codec_.extent(table, (max > 0) != (negative != 0));
                o.of[table][negative] = free_fit(b, x, w, table, negative ? -widest : widest);
                if (o.of[table][negative].score > o.best().score) {
                    o.best_table = table;
                    o.best_sign = negative;
                }
            }
        }
        return std::fabs(o.best().scale);
    }

    Option free_fit(int b, const float* x, const float* w, int table, float unit) const {
        alignas(64) float dl[LANES];
        for (int l = 0; l < LANES; l++) {
            dl[l] = unit * (effort_.narrowest + (effort_.widest - effort_.narrowest) * l / (LANES - 1));
        }
        Option best;
        improve(b, x, w, table, unit, dl, best);
        if (one_outweighs(w, Codec::SIZE)) {
            start_below(unit * effort_.narrowest, dl);
            improve(b, x, w, table, unit, dl, best);
        }
        return best;
    }

    // Keeps the best of the scales dl and of those fitted to their levels; dl becomes the latter.
    void improve(int b, const float* x, const float* w, int table, float unit, float* dl,
                 Option& best) const {
        Scan s;
        alignas(64) float negative_score[LANES];
        for (int pass = 0; pass < 2; pass++) {
            codec_.scan(b, x, w, table, dl, s);
            for (int p = 0; p < LANES; p += VECTOR) {
                const FloatVector xt = load(s.xt + p), tt = load(s.tt + p);
                const IntVector usable = (tt > 0.0f) & (unit > 0 ? xt > 0.0f : xt < 0.0f);
                const FloatVector scale = xt / select(usable, tt, broadcast(1.0f));
                store(dl + p, select(usable, scale, load(dl + p)));
                store(negative_score + p, select(usable, -scale * xt, FloatVector{}));
            }
            const int l = index_of_least(negative_score);
            if (-negative_score[l] > best.score) best = {dl[l], -negative_score[l], s.tt[l]};
        }
    }

    float rounded(float d) const { return scale_type_ == ScaleType::F16 ? round_to_f16(d) : d; }

    // Step 2: scales worth an exact evaluation, best first.
    std::vector<float> scale_candidates(int count) const {
        constexpr int GRID = 32, FEW_CODES = 128;
        float a_max = 0;
        for (const Options& o : options_) {
            if (std::fabs(o.best().scale) > std::fabs(a_max)) a_max = o.best().scale;
        }
        std::vector<std::pair<float, float>> ranked;
        const float ends[2] = {codes_.highest(), codes_.lowest()};
        const float narrow = effort_.scale_candidates > 1 ? 0.75f : 0.9f;
        for (float end : ends) {
            if (end == 0 || (end < 0) == (codes_.lowest() >= 0)) continue;
            for (int i = 0; i < GRID; i++) {
                float multiple = end * (narrow + (1.1f - narrow) * i / (GRID - 1));
                // Whole codes of the largest scale meet values exactly that were encoded before.
                if (codes_.count > FEW_CODES) multiple = std::round(multiple);
                const float d = a_max / multiple;
                ranked.emplace_back(modelled_error(d, count), d);
            }
        }
        const int kept = std::min(static_cast<int>(ranked.size()), effort_.scale_candidates);
        std::partial_sort(ranked.begin(), ranked.begin() + kept, ranked.end());
        std::vector<float> best;
        for (int i = 0; i < kept; i++) best.push_back(ranked[i].second);
        return best;
    }

    float modelled_error(float d, int count) const {
        float error = 0;
        const float inverse = 1.0f / d;
        for (int b = 0; b < count; b++) {
            const Option& o = options_[b].best();
            const float off = d * codes_.value(codes_.nearest(o.scale * inverse)) - o.scale;
            error += o.tt * off * off;
        }
        return error;
    }

    float fit_common_scale(int count) {
        float best_error = std::numeric_limits<float>::infinity(), best_d = 0;
        const auto keep_if_better = [&](float error, float d) {
            if (!(error < best_error)) return false;
            best_error = error;
            best_d = d;
            best_product_ = trial_product_;
            best_.swap(trial_);
            return true;
        };
        float next = 0;  // the refitted scale of the best so far
        for (float candidate : scale_candidates(count)) {
            const float d = rounded(candidate);
            float refitted = candidate;
            if (d == 0 || !std::isfinite(d)) continue;
            if (keep_if_better(choose_codes(d, count, refitted), d)) next = refitted;
        }
        if constexpr (Codec::SEARCHES_AGAIN) {
            if (best_d != 0) {
                search_again(best_d, count);
                best_error = std::numeric_limits<float>::infinity();
                keep_if_better(choose_codes(best_d, count, next), best_d);
            }
        }
        for (int round = 0; round < effort_.refits; round++) {
            const float d = rounded(next);
            if (d == 0 || d == best_d || !std::isfinite(d)) break;
            if (!keep_if_better(choose_codes(d, count, next), d)) break;
        }
        if (best_d == 0) {
            best_product_ = 0;
            set_zero();
        }
        return best_d;
    }

    // Has the codec look for matches at the codes that are likely to be chosen.
    void search_again(float d, int count) {
        for (int b = 0; b < count; b++) {
            for (int table = 0; table < Codec::TABLES; table++) {
                const auto& option = options_[b].of[table];
                int codes[3] = {best_[b].code, codes_.nearest(option[0].scale / d),
                                codes_.nearest(option[1].scale / d)};
                for (int i = 0; i < (Codec::SIGNED ? 3 : 2); i++) {
                    if (std::find(codes, codes + i, codes[i]) != codes + i) continue;
                    codec_.search(b, x_ + b * Codec::SIZE, w_ + b * Codec::SIZE, table,
                                  d * codes_.value(codes[i]));
                }
            }
        }
    }

    // Step 3: fills trial_; returns the total error and the refitted scale.
    float choose_codes(float d, int count, float& refitted) {
        double total = 0, numerator = 0, denominator = 0;
        for (int b = 0; b < count; b++) {
            const float* x = x_ + b * Codec::SIZE;
            const float* w = w_ + b * Codec::SIZE;
            int codes[LANES];
            alignas(64) float dl[LANES];
            Scan s;
            float best = std::numeric_limits<float>::infinity(), best_num = 0, best_den = 0;
            for (int table = 0; table < Codec::TABLES; table++) {
                candidate_codes(b, table, d, codes);
                for (int l = 0; l < LANES; l++) dl[l] = d * codes_.value(codes[l]);
                codec_.scan(b, x, w, table, dl, s);
                const int l = index_of_least(s.error);
                if (!(s.error[l] < best)) continue;
                const float c = codes_.value(codes[l]);
                best = s.error[l];
                best_num = c * s.xt[l];
                best_den = c * c * s.tt[l];
                trial_[b] = {codes[l], table};
            }
            total += best;
            numerator += best_num;
            denominator += best_den;
        }
        trial_product_ = numerator;
        refitted = denominator > 0 ? static_cast<float>(numerator / denominator) : 0;
        return static_cast<float>(total);
    }

    // All codes if they fit the lanes, else those around the free scale of each sign.
    void candidate_codes(int b, int table, float d, int* codes) const {
        if (codes_.count <= LANES) {
            for (int l = 0; l < LANES; l++) codes[l] = std::min(l, codes_.count - 1);
            return;
        }
        const auto& option = options_[b].of[table];
        const int signs = Codec::SIGNED ? 2 : 1, lanes = LANES / signs;
        for (int sign = 0; sign < signs; sign++) {
            const int centre = codes_.nearest(option[sign].scale / d);
            for (int l = 0; l < lanes; l++) {
                codes[sign * lanes + l] = std::clamp(centre + l - lanes / 2, 0, codes_.count - 1);
            }
        }
    }

    Codec& codec_;
    const Codes codes_;
    const ScaleType scale_type_;
    const Effort effort_;
    const float* x_ = nullptr;
    const float* w_ = nullptr;
    std::vector<Options> options_;
    std::vector<SubBlock> best_, trial_;
    double best_product_ = 0, trial_product_ = 0;  // sum w*x*y at the scale 1
};

// Number of levels up to which the error is large enough to be found from the sums (see scan_levels).
constexpr int FEW_LEVELS = 16;

// Fills s for the LANES scales dl of SIZE elements, where nearest(v) is the level nearest to v in every lane.
// With FEW levels the error is sum w*x*x + dl*(dl*tt - 2*xt), which saves three operations per element; where
// the error is small that would be a difference of large numbers.
template <int SIZE, bool FEW, class Nearest>
inline void scan_levels(const float* x, const float* w, const float* dl, const Nearest& nearest, Scan& s) {
    float square = 0;
    if constexpr (FEW) square = static_cast<float>(weighted_square(x, w, SIZE));
    for (int p = 0; p < PARTS; p++) {
        const FloatVector scale = load(dl + p * VECTOR);
        const IntVector zero = scale == 0.0f;
        const FloatVector inverse = select(zero, FloatVector{}, 1.0f / select(zero, broadcast(1.0f), scale));
        FloatVector error{}, xt{}, tt{};
        for (int j = 0; j < SIZE; j++) {
            const FloatVector t = nearest(x[j] * inverse);
            const FloatVector wt = w[j] * t;
            if constexpr (!FEW) {
                const FloatVector off = x[j] - scale * t;
                error += w[j] * off * off;
            }
            xt += wt * x[j];
            tt += wt * t;
        }
        if constexpr (FEW) error = square + scale * (scale * tt - 2.0f * xt);
        store(s.error + p * VECTOR, error);
        store(s.xt + p * VECTOR, xt);
        store(s.tt + p * VECTOR, tt);
    }
}

// Codec of independent levels from LevelTables of COUNT levels (table 1, if any, is the shifted one).
template <int COUNT, int BLOCK, int TABLE_COUNT>
class LevelCodec {
  public:
    static constexpr int TABLES = TABLE_COUNT;
    static constexpr int SIZE = BLOCK;
    static constexpr bool SIGNED = true, SEARCHES_AGAIN = false;
    using Output = uint8_t;
    static constexpr int OUTPUTS = SIZE;

    explicit LevelCodec(const int8_t* values)
        : tables_{{values, COUNT}, {values + (TABLE_COUNT - 1) * COUNT, COUNT}} {}

    void prepare(int, const float*, const float*) {}

    float extent(int table, bool positive) const {
        return positive ? tables_[table].last() : -tables_[table].first();
    }

    void scan(int, const float* x, const float* w, int table, const float* dl, Scan& s) const {
        const LevelTable& levels = tables_[table];
        scan_levels<SIZE, COUNT <= FEW_LEVELS>(
            x, w, dl, [&](FloatVector v) { return levels.template nearest<COUNT>(v); }, s);
    }

    void assign(int, const float* x, const float*, int table, float dl, uint8_t* out) const {
        const float inverse = dl != 0 ? 1.0f / dl : 0.0f;
        for (int j = 0; j < SIZE; j++) out[j] = static_cast<uint8_t>(tables_[table].index(x[j] * inverse));
    }

  private:
    LevelTable tables_[2];
};

// Codec of the integer levels LOW..HIGH; level indices are value - LOW.
template <int LOW, int HIGH, int BLOCK>
class IntegerCodec {
  public:
    static constexpr int TABLES = 1;
    static constexpr int SIZE = BLOCK;
    static constexpr bool SIGNED = -LOW != HIGH;  // symmetric levels have no use for a negative scale
    static constexpr bool SEARCHES_AGAIN = false;
    using Output = uint8_t;
    static constexpr int OUTPUTS = SIZE;

    void prepare(int, const float*, const float*) {}

    float extent(int, bool positive) const { return positive ? HIGH : -LOW; }

    void scan(int, const float* x, const float* w, int, const float* dl, Scan& s) const {
        const auto nearest = [](FloatVector v) { return round_nearest(clamp(v, LOW, HIGH)); };
        scan_levels < SIZE, HIGH - LOW<FEW_LEVELS>(x, w, dl, nearest, s);
    }

    void assign(int, const float* x, const float*, int, float dl, uint8_t* out) const {
        const float inverse = dl != 0 ? 1.0f / dl : 0.0f;
        for (int j = 0; j < SIZE; j++) {
            const float t = std::clamp(x[j] * inverse, static_cast<float>(LOW), static_cast<float>(HIGH));
            out[j] = static_cast<uint8_t>(round_nearest(t) - LOW);
        }
    }
};

}  // namespace ikpy::quantize
