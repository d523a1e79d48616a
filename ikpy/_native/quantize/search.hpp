// Building blocks of the parameter searches: lane vectors, importance weights, equally spaced codes.
//
// The searches are written with one candidate scale per vector lane (LANES at a time), so one pass over a
// sub-block scores all of them without horizontal sums and the code is the same for every vector width.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ikpy/half.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ikpy::quantize {

#if defined(__AVX512F__)
constexpr int VECTOR = 16;
#elif defined(__AVX__)
constexpr int VECTOR = 8;
#else
constexpr int VECTOR = 4;
#endif
constexpr int LANES = 16;              // candidates scored by one pass
constexpr int PARTS = LANES / VECTOR;  // vectors that make up one set of lanes

typedef float FloatVector __attribute__((vector_size(VECTOR * 4)));
typedef int32_t IntVector __attribute__((vector_size(VECTOR * 4)));

inline FloatVector load(const float* p) {
    FloatVector v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float* p, FloatVector v) { std::memcpy(p, &v, sizeof v); }

inline FloatVector broadcast(float s) { return FloatVector{} + s; }

inline FloatVector select(IntVector mask, FloatVector yes, FloatVector no) { return mask ? yes : no; }

inline FloatVector smaller(FloatVector a, FloatVector b) {
#if defined(__AVX512F__)
    return (FloatVector)_mm512_maskz_min_ps(0xFFFF, (__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (FloatVector)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return select(a < b, a, b);
#endif
}

inline FloatVector larger(FloatVector a, FloatVector b) {
#if defined(__AVX512F__)
    return (FloatVector)_mm512_maskz_max_ps(0xFFFF, (__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (FloatVector)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select(a > b, a, b);
#endif
}

inline FloatVector clamp(FloatVector v, float low, float high) {
    return larger(smaller(v, broadcast(high)), broadcast(low));
}

inline bool any(IntVector mask) {
    int32_t found = 0;
    for (int l = 0; l < VECTOR; l++) found |= mask[l];
    return found != 0;
}

// Lane numbers after each step of a reduction over all lanes.
struct LaneExchanges {
    static constexpr int STEPS = VECTOR == 16 ? 4 : (VECTOR == 8 ? 3 : 2);
    alignas(64) int32_t of[STEPS][VECTOR];
};
constexpr LaneExchanges make_lane_exchanges() {
    LaneExchanges e{};
    for (int step = 0; step < LaneExchanges::STEPS; step++) {
        for (int l = 0; l < VECTOR; l++) e.of[step][l] = l ^ (1 << step);
    }
    return e;
}
inline constexpr LaneExchanges LANE_EXCHANGES = make_lane_exchanges();

struct LaneNumbers {
    alignas(64) int32_t of[LANES];
};
constexpr LaneNumbers make_lane_numbers() {
    LaneNumbers numbers{};
    for (int l = 0; l < LANES; l++) numbers.of[l] = l;
    return numbers;
}
inline constexpr LaneNumbers LANE_NUMBERS = make_lane_numbers();

// Numbers of the lanes of part k of a set of lanes.
inline IntVector lane_numbers(int k = 0) {
    IntVector numbers;
    std::memcpy(&numbers, LANE_NUMBERS.of + k * VECTOR, sizeof numbers);
    return numbers;
}

// First lane whose mask is set, 0 if none is.
inline int first_lane(IntVector mask) {
#if defined(__AVX512F__)
    const int found = _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX__)
    const int found = _mm256_movemask_ps((__m256)mask);
#else
    int found = 0;
    for (int l = 0; l < VECTOR; l++) found |= (mask[l] & 1) << l;
#endif
    return found ? __builtin_ctz(static_cast<unsigned>(found)) : 0;
}

// Lane of the smallest value, the first of equal ones; 0 if there is a NaN.
inline int lane_of_least(FloatVector v) {
    FloatVector least = v;
    for (const auto& from : LANE_EXCHANGES.of) {
        IntVector lanes;
        std::memcpy(&lanes, from, sizeof lanes);
        least = smaller(least, __builtin_shuffle(least, lanes));
    }
    return first_lane(v == least);
}

// Index of the smallest of LANES values.
inline int index_of_least(const float* v) {
    int best = lane_of_least(load(v));
    for (int p = 1; p < PARTS; p++) {
        const int l = p * VECTOR + lane_of_least(load(v + p * VECTOR));
        if (v[l] < v[best]) best = l;
    }
    return best;
}

// Indices of the N smallest of LANES values, the smallest first, equal ones in their order.
template <int N>
void indices_of_least(const float* values, int* indices) {
    FloatVector v[PARTS];
    for (int k = 0; k < PARTS; k++) v[k] = load(values + k * VECTOR);
    for (int n = 0; n < N; n++) {
        int least = lane_of_least(v[0]);
        for (int k = 1; k < PARTS; k++) {
            const int l = lane_of_least(v[k]);
            if (v[k][l] < v[least / VECTOR][least % VECTOR]) least = k * VECTOR + l;
        }
        indices[n] = least;
        for (int k = 0; k < PARTS; k++) v[k] = select(lane_numbers(k) == least, broadcast(INFINITY), v[k]);
    }
}

// Nearest integer of |v| < 2^22, ties to even; adding 1.5 * 2^23 leaves the integer in the low mantissa bits.
inline FloatVector round_nearest(FloatVector v) {
    const FloatVector magic = broadcast(12582912.0f);
    return (v + magic) - magic;
}

inline int round_nearest(float v) { return static_cast<int>(std::lrintf(v)); }

// table[index] in every lane.
inline FloatVector gather(const float* table, IntVector index) {
#if defined(__AVX512F__)
    return (FloatVector)_mm512_mask_i32gather_ps(_mm512_setzero_ps(), 0xFFFF, (__m512i)index, table, 4);
#elif defined(__AVX2__)
    return (FloatVector)_mm256_i32gather_ps(table, (__m256i)index, 4);
#else
    FloatVector v;
    for (int l = 0; l < VECTOR; l++) v[l] = table[index[l]];
    return v;
#endif
}

inline IntVector gather(const int32_t* table, IntVector index) {
    return (IntVector)gather(reinterpret_cast<const float*>(table), index);
}

// Sums of one candidate per lane: weighted squared error at the given scale, sum w*x*t and sum w*t*t of its
// levels t.
struct Scan {
    alignas(64) float error[LANES];
    alignas(64) float xt[LANES];
    alignas(64) float tt[LANES];
};

// v^(13/16) for v >= 0, by square roots alone: these are vector instructions with the same bits everywhere.
inline float tempered(float v) {
    const float half = std::sqrt(v), quarter = std::sqrt(half);
    return half * quarter * std::sqrt(std::sqrt(quarter));
}

// Weights of one row. The error that is minimized is sum w*(x - y)^2 with w the tempered importance of the
// column, 1 without an importance matrix. Importances are those of one text; on other texts columns differ by
// factors, and a power below 1 lowers the error there (docs/quants.md). Columns of importance 0 keep a
// millionth of the mean so that they stay determined.
inline void importance_weights(const float* imatrix, int64_t n, std::vector<float>& w) {
    w.assign(static_cast<size_t>(n), 1.0f);
    if (!imatrix) return;
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += imatrix[i];
    const float scale = sum > 0 ? static_cast<float>(n / sum) : 0.0f;
    if (!(scale > 0) || !std::isfinite(scale)) return;
    for (int64_t i = 0; i < n; i++) w[i] = tempered(imatrix[i] * scale) + 1e-6f;
}

// What the common scale is multiplied by after the search. The scale of least error makes the result shorter
// than the row: sum w*x*y = sum w*y*y < sum w*x*x. Such shrinking adds up from layer to layer, unlike the
// random part of the error; taking most of it back lowers the divergence of 1- and 2-bit models by 5 to 30 %
// (docs/quants.md). It may add MOST_ADDED of the squared error. Where a column of overwhelming importance is
// lost, xx / xy says nothing of the others: MOST is beyond what blocks of 1 bit come to.
inline float unshrink(double xx, double xy) {
    constexpr double SHARE = 0.8, MOST_ADDED = 0.08, MOST = 1.5;
    if (!(xy > 0 && xx > xy)) return 1.0f;
    const double limit = std::min(MOST, 1 + std::sqrt(MOST_ADDED * (xx - xy) / xy));
    return static_cast<float>(std::min(std::pow(xx / xy, SHARE), limit));
}

// Whether one column counts more than all others together, so that its value may decide over the scale though
// it is small.
inline bool one_outweighs(const float* w, int n) {
    constexpr float MUCH = 4;
    float largest = 0, sum = 0;
    for (int j = 0; j < n; j++) {
        largest = std::max(largest, w[j]);
        sum += w[j];
    }
    return largest > MUCH * (sum - largest);
}

// Scales from just below one down to a thousandth of it: levels other than 0 for values that are small
// beside the largest.
inline void start_below(float scale, float* dl) {
    for (int l = 0; l < LANES; l++) {
        scale *= 0.65f;
        dl[l] = scale;
    }
}

// sum w*x*x
inline double weighted_square(const float* x, const float* w, int64_t n) {
    double sum = 0;
    for (int64_t j = 0; j < n; j++) sum += static_cast<double>(w[j] * x[j]) * x[j];
    return sum;
}

// Equally spaced multipliers: code c stands for first + step * c.
struct UniformCodes {
    float first, step;
    int count;

    float value(int code) const { return first + step * static_cast<float>(code); }
    int nearest(float s) const {
        const float c = (s - first) / step;
        return c > 0 ? (c < count - 1 ? round_nearest(c) : count - 1) : 0;
    }
    float lowest() const { return first; }
    float highest() const { return value(count - 1); }
};

inline float round_to_f16(float v) { return f16_to_f32(f32_to_f16(std::clamp(v, -65504.0f, 65504.0f))); }

template <class T>
inline void put(uint8_t* p, T v) {
    std::memcpy(p, &v, sizeof v);
}

}  // namespace ikpy::quantize
