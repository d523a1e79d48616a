// Trellis types IQ1_KT, IQ2_KT, IQ3_KT, IQ4_KT: codebooks of generated vectors, one scale per row
// (quant-formats 7).
//
// A match costs far more than in the other types, so few scales are tried: per sub-block a first guess of
// both signs, rematched at the refitted scale; after the row scale is chosen, the codes next to the free
// scales; at last all groups once more at the final scale.
#include <limits>

#include "encoders.hpp"
#include "tables.hpp"
#include "trellis_index.hpp"

namespace ikpy::quantize {
namespace {

constexpr int SIZE = 32;

// Codes of IQ1_KT and IQ2_KT: the IQ4_NL levels.
struct NonlinearCodes {
    static constexpr int COUNT = 16;
    static float value(int code) { return tables::iq4k_values[code]; }
};

template <int LOW, int HIGH>
struct IntegerCodes {
    static constexpr int COUNT = HIGH - LOW + 1;
    static float value(int code) { return static_cast<float>(LOW + code); }
};

template <class Codes>
int nearest_code(float v) {
    if constexpr (Codes::COUNT > 16) {
        return std::clamp(round_nearest(v - Codes::value(0)), 0, Codes::COUNT - 1);
    } else {
        int best = 0;
        for (int c = 1; c < Codes::COUNT; c++) {
            if (std::fabs(v - Codes::value(c)) < std::fabs(v - Codes::value(best))) best = c;
        }
        return best;
    }
}

// Choice for a sub-block: code, seed table, vector numbers; p, q summed over the groups.
template <class Format>
struct TrellisChoice {
    int code = 0, table = 0;
    int index[Format::GROUPS] = {};
    float p = 0, q = 0, error = std::numeric_limits<float>::infinity();
};

template <class Format>
class TrellisSearch {
  public:
    using Choice = TrellisChoice<Format>;
    using Codes = typename Format::Codes;

    float fit(const float* x, const float* w, int count) {
        x_ = x;
        w_ = w;
        free_.assign(static_cast<size_t>(count), {});
        best_.assign(static_cast<size_t>(count), {});
        float row_max = 0;
        for (int j = 0; j < count * SIZE; j++) row_max = std::max(row_max, std::fabs(x[j]));
        if (!(row_max > 1e-16f)) {
            for (int b = 0; b < count; b++) best_[b].code = nearest_code<Codes>(0);
            return 0;
        }
        for (int b = 0; b < count; b++) free_fit(b, row_max);
        float d = choose_scale(count);
        for (int b = 0; b < count; b++) choose_code(b, d);
        for (int round = 0; round < 2; round++) {
            const float refitted = refit(count);
            if (refitted == 0 || !std::isfinite(refitted)) break;
            d = refitted;
            for (int b = 0; b < count; b++) rematch(b, d, round == 0);
        }
        return d;
    }

    const std::vector<Choice>& choices() const { return best_; }

  private:
    struct Free {
        float scale[2] = {0, 0};  // best positive and negative scale
        float score[2] = {0, 0};
        float q[2] = {0, 0};
        int best() const { return score[1] > score[0] ? 1 : 0; }
    };

    template <bool THOROUGH>
    Choice evaluate(int b, float dl, int table) const {
        const float* x = x_ + b * SIZE;
        const float* w = w_ + b * SIZE;
        Choice c;
        c.table = table;
        for (int g = 0; g < Format::GROUPS; g++) {
            const TrellisMatch m =
                Format::template nearest<THOROUGH>(table, x + g * Format::DIM, w + g * Format::DIM, dl);
            c.index[g] = m.index;
            c.p += m.p;
            c.q += m.q;
        }
        set_error(b, dl, c);
        return c;
    }

    void set_error(int b, float dl, Choice& c) const {
        float square = 0;
        for (int j = b * SIZE; j < (b + 1) * SIZE; j++) square += w_[j] * x_[j] * x_[j];
        c.error = square + dl * (dl * c.q - 2.0f * c.p);
    }

    void free_fit(int b, float row_max) {
        float max = 0;
        for (int j = b * SIZE; j < (b + 1) * SIZE; j++) max = std::max(max, std::fabs(x_[j]));
        if (!(max > 1e-16f)) return;
        const float full = std::max(Format::SMALLEST_EXTENT, Format::EXTENT * max / row_max);
        for (int negative = 0; negative < (Format::SIGNED ? 2 : 1); negative++) {
            for (int table = 0; table < Format::TABLES; table++) {
                for (float start : Format::STARTS)
                    improve(b, table, negative, (negative ? -max : max) / (full * start));
            }
        }
    }

    // Two matches from the scale dl; keeps the better result.
    void improve(int b, int table, int negative, float dl) {
        Free& f = free_[b];
        for (int round = 0; round < 2; round++) {
            const Choice c = evaluate<false>(b, dl, table);
            if (!(c.q > 0) || (c.p > 0) == (negative != 0)) break;
            dl = c.p / c.q;
            const float score = dl * c.p;
            if (score > f.score[negative]) {
                f.score[negative] = score;
                f.scale[negative] = dl;
                f.q[negative] = c.q;
            }
        }
    }

    // Row scale by the quadratic model of the free fits.
    float choose_scale(int count) const {
        float a_max = 0;
        for (const Free& f : free_) {
            if (std::fabs(f.scale[f.best()]) > std::fabs(a_max)) a_max = f.scale[f.best()];
        }
        float best_error = std::numeric_limits<float>::infinity(), best_d = 0;
        for (int end : {0, Codes::COUNT - 1}) {
            const float code = Codes::value(end);
            if (code == 0) continue;
            for (int t = 0; t < 25; t++) {
                const float d = a_max / (code * (0.82f + 0.0125f * t)), inverse = 1.0f / d;
                float error = 0;
                for (int b = 0; b < count; b++) {
                    const Free& f = free_[b];
                    const int s = f.best();
                    const float off =
                        d * Codes::value(nearest_code<Codes>(f.scale[s] * inverse)) - f.scale[s];
                    error += f.q[s] * off * off;
                }
                if (error < best_error) {
                    best_error = error;
                    best_d = d;
                }
            }
        }
        return best_d;
    }

    // The code nearest to each free scale, and the neighbours of the better one.
    void choose_code(int b, float d) {
        const Free& f = free_[b];
        const int s = f.best(), centre = nearest_code<Codes>(f.scale[s] / d);
        int codes[4] = {centre, std::max(0, centre - 1), std::min(Codes::COUNT - 1, centre + 1), centre};
        if (Format::SIGNED && f.score[1 - s] > 0) codes[3] = nearest_code<Codes>(f.scale[1 - s] / d);
        const int tried = Codes::COUNT > 16 ? 4 : (Format::SIGNED ? 4 : 3);
        for (int i = 0; i < tried; i++) {
            if (i && codes[i] == centre) continue;
            try_code(b, d, codes[i]);
        }
    }

    void try_code(int b, float d, int code) {
        const float dl = d * Codes::value(code);
        for (int table = 0; table < Format::TABLES; table++) {
            Choice c;
            if (dl != 0) {
                c = evaluate<false>(b, dl, table);
            } else {
                set_error(b, 0, c);
            }
            c.code = code;
            if (c.error < best_[b].error) best_[b] = c;
        }
    }

    float refit(int count) const {
        double numerator = 0, denominator = 0;
        for (int b = 0; b < count; b++) {
            const double code = Codes::value(best_[b].code);
            numerator += code * best_[b].p;
            denominator += code * code * best_[b].q;
        }
        return denominator > 0 ? static_cast<float>(numerator / denominator) : 0;
    }

    // The error of the present vectors at the new scale, and new vectors if they are better.
    void rematch(int b, float d, bool search) {
        Choice& c = best_[b];
        const float dl = d * Codes::value(c.code);
        set_error(b, dl, c);
        if (!search || dl == 0) return;
        Choice again = evaluate<true>(b, dl, c.table);
        again.code = c.code;
        if (again.error < c.error) c = again;
    }

    const float* x_ = nullptr;
    const float* w_ = nullptr;
    std::vector<Free> free_;
    std::vector<Choice> best_;
};

struct Iq1Kt {
    using Codes = NonlinearCodes;
    static constexpr int DIM = 8, GROUPS = 4, TABLES = 1, BLOCK_BYTES = 56;
    static constexpr bool SIGNED = true;
    static constexpr float SMALLEST_EXTENT = 90, EXTENT = 124;
    static constexpr float STARTS[] = {1.0f};
    template <bool THOROUGH>
    static TrellisMatch nearest(int, const float* x, const float* w, float dl) {
        static const TrellisIndex<8, 6, 2> index(8192, 4096, false);
        return index.nearest<THOROUGH ? 4 : 3>(x, w, dl);
    }
    static void pack(uint8_t* block, const TrellisChoice<Iq1Kt>* choices, const float*) {
        for (int b = 0; b < 8; b++) {
            block[b] |= static_cast<uint8_t>(choices[b].code);
            for (int t = 0; t < 4; t++) {
                const int index = choices[b].index[t], g = 4 * b + t;
                block[8 + g] = static_cast<uint8_t>(index);
                block[40 + (g & 15)] |= static_cast<uint8_t>(((index >> 8) & 15) << 4 * (g >> 4));
                block[b] |= static_cast<uint8_t>((index >> 12) << (4 + t));
            }
        }
    }
};

// Scale nibbles and 16-bit vector numbers of IQ2_KT and IQ3_KT.
template <class Choice>
void pack_indices(uint8_t* block, const Choice* choices) {
    for (int b = 0; b < 8; b++) {
        block[b & 3] |= static_cast<uint8_t>(choices[b].code << 4 * (b >> 2));
        for (int t = 0; t < 4; t++)
            put(block + 4 + 2 * (4 * b + t), static_cast<uint16_t>(choices[b].index[t]));
    }
}

struct Iq2Kt {
    using Codes = NonlinearCodes;
    static constexpr int DIM = 8, GROUPS = 4, TABLES = 1, BLOCK_BYTES = 68;
    static constexpr bool SIGNED = true;
    static constexpr float SMALLEST_EXTENT = 90, EXTENT = 124;
    static constexpr float STARTS[] = {1.0f};
    template <bool THOROUGH>
    static TrellisMatch nearest(int, const float* x, const float* w, float dl) {
        static const TrellisIndex<8, 8, 2> index(65536, 4096, false);
        return index.nearest<THOROUGH ? 4 : 2>(x, w, dl);
    }
    static void pack(uint8_t* block, const TrellisChoice<Iq2Kt>* choices, const float*) {
        pack_indices(block, choices);
    }
};

struct Iq3Kt {
    using Codes = IntegerCodes<0, 15>;
    static constexpr int DIM = 8, GROUPS = 4, TABLES = 1, BLOCK_BYTES = 100;
    static constexpr bool SIGNED = false;
    static constexpr float SMALLEST_EXTENT = 84, EXTENT = 123;
    static constexpr float STARTS[] = {0.8f, 0.95f, 1.1f};
    template <bool THOROUGH>
    static TrellisMatch nearest(int, const float* x, const float* w, float dl) {
        static const TrellisIndex<8, 8, 2> index(65536, 4096, true);
        return index.nearest<THOROUGH ? 5 : 3>(x, w, dl);
    }
    static void pack(uint8_t* block, const TrellisChoice<Iq3Kt>* choices, const float* x) {
        pack_indices(block, choices);
        for (int e = 0; e < 256; e++) block[68 + (e & 31)] |= static_cast<uint8_t>((x[e] < 0) << (e >> 5));
    }
};

struct Iq4Kt {
    using Codes = IntegerCodes<-64, 63>;
    static constexpr int DIM = 4, GROUPS = 8, TABLES = 2, BLOCK_BYTES = 128;
    static constexpr bool SIGNED = true;
    static constexpr float SMALLEST_EXTENT = 90, EXTENT = 124;
    static constexpr float STARTS[] = {0.88f, 1.0f, 1.12f};
    template <bool THOROUGH>
    static TrellisMatch nearest(int table, const float* x, const float* w, float dl) {
        static const TrellisIndex<4, 4, 4> first(32768, 4096, false), second(32768, 36864, false);
        return (table ? second : first).nearest<THOROUGH ? 4 : 3>(x, w, dl);
    }
    static void pack(uint8_t* block, const TrellisChoice<Iq4Kt>* choices, const float*) {
        for (int b = 0; b < 8; b++) {
            uint32_t word = static_cast<uint32_t>(2 * choices[b].code + choices[b].table);
            for (int t = 0; t < 8; t++) {
                const int index = choices[b].index[t], g = 8 * b + t;
                block[32 + g] = static_cast<uint8_t>(index);
                block[96 + (g & 31)] |= static_cast<uint8_t>(((index >> 8) & 15) << 4 * (g >> 5));
                word |= static_cast<uint32_t>(index >> 12) << (8 + 3 * t);
            }
            put(block + 4 * b, word);
        }
    }
};

template <class Format>
void encode_trellis(const Rows& r) {
    TrellisSearch<Format> search;
    const int total = static_cast<int>(r.ne0 / SIZE);
    for (int64_t row = 0; row < r.n_rows; row++) {
        const float* x = r.src + row * r.ne0;
        uint8_t* out = r.dst + row * r.row_bytes;
        std::memset(out, 0, static_cast<size_t>(r.row_bytes));
        put(out, search.fit(x, r.w, total));
        for (int b = 0; b < total; b += 8) {
            Format::pack(out + 4 + b / 8 * Format::BLOCK_BYTES, search.choices().data() + b, x + b * SIZE);
        }
    }
}

}  // namespace

Encoder trellis_encoder(int type) {
    switch (type) {
        case 153:
            return encode_trellis<Iq2Kt>;
        case 154:
            return encode_trellis<Iq3Kt>;
        case 155:
            return encode_trellis<Iq4Kt>;
        case 158:
            return encode_trellis<Iq1Kt>;
        default:
            return nullptr;
    }
}

}  // namespace ikpy::quantize
